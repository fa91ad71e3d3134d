"""The training loop that every rank runs."""

from __future__ import annotations

import math
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.cli.train import progress
from shardcomm.cli.train.progress import Progress
from shardcomm.cli.train.text import Corpus, read_text
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Mesh
from shardcomm.engine.engine import Engine
from shardcomm.engine.sharding import fully_shard
from shardcomm.interop.backend import NAME
from shardcomm.meeting.store import env_store
from shardcomm.models.gpt import GPT
from shardcomm.optim.adamw import AdamW
from shardcomm.trace.timeline import Timeline
from shardcomm.trace.traffic import Traffic
from shardcomm.unit.mixed_precision import MixedPrecision

SAMPLE_BYTES = 160
SAMPLE_PROMPT = b"def "
# The first steps allocate and learn the order of the units.
WARM_UP_STEPS = 2
# A trace has at most so many steps, the last ones: about 5 kB each for every rank.
MAX_TRACED_STEPS = 200


@dataclass(frozen=True)
class TrainOptions:
    """The options of the command line; the same on every rank."""

    steps: int
    seed: int
    width: int
    layers: int
    batch: int
    context: int
    strategy: str
    replicas: int | None
    cpu_offload: bool
    precision: str
    lr: float
    text: str | None
    device: str
    deadline_s: float
    checkpoint: str | None
    save_every: int
    trace: str | None

    def identity(self, text: bytes) -> dict[str, object]:
        """The options that must be the same for a checkpoint's run to go on. The ranks and the strategy may change."""
        names = ("seed", "width", "layers", "batch", "context", "precision", "lr")
        of_text = f"{len(text)} bytes (checksum {zlib.crc32(text):08x})"
        return {**{name: getattr(self, name) for name in names}, "text": of_text}


@dataclass(frozen=True)
class Result:
    """The result of a run, on one rank. Times and bytes are means over the last `measured_steps` steps.

    These are all but the first few steps; in a run with a trace, the steps that are in it.
    """

    ranks: int
    shard_ranks: int
    """How many ranks share out one copy of the model."""
    transport: str
    device: str
    cpu_offload: bool
    losses: list[float]
    measured_steps: int
    tokens_per_s: float
    step_s: float
    exposed_s: float
    gathered_bytes: int
    reduced_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    padding_bytes: int
    total_parameter_bytes: int
    sample: str


def train(options: TrainOptions) -> tuple[Result, Timeline | None]:
    """Trains, as this rank of the group that the environment describes; rank 0 gets the timeline, if there is one."""
    device = None if options.device == "auto" else options.device
    with Communicator.from_env(deadline_s=options.deadline_s, device=device) as comm:
        if options.checkpoint is None and options.replicas is None:
            return _Job(options, comm, comm).run()
        timeout = timedelta(seconds=options.deadline_s)
        store, rank, size = env_store(timeout)
        # Checkpoints use this group from another thread, while a mesh has groups of its own. The backend is shardcomm's
        # own, which notices a rank that dies.
        dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            if options.replicas is None:
                return _Job(options, comm, comm).run()
            with closing(_mesh(options, comm, options.replicas)) as mesh:
                return _Job(options, comm, mesh).run()
        finally:
            dist.destroy_process_group()


def _mesh(options: TrainOptions, comm: Communicator, replicas: int) -> Mesh:
    """The ranks of `comm` in `replicas` rows; collective."""
    groups = init_device_mesh("cpu", (replicas, comm.size // replicas))
    replicate, shard = (
        Communicator.from_process_group(
            groups.get_group(dim), deadline_s=options.deadline_s, device=comm.device
        )
        for dim in (0, 1)
    )
    return Mesh(shard, replicate)


class Measured:
    """Means of the time and traffic of the steps that are done in `step()`; 0 if there are none."""

    def __init__(self, traffic: Traffic) -> None:
        traffic.time_waits()
        self.steps = 0
        self._seconds = 0.0
        self._traffic = traffic
        self._exposed_s = traffic.exposed_s  # to read it waits for all work that was queued before
        self._gathered_bytes = traffic.gathered_bytes
        self._reduced_bytes = traffic.reduced_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around a step."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
        self.steps += 1

    @property
    def step_s(self) -> float:
        """The time of a step in seconds, without the time between steps."""
        return self._seconds / max(1, self.steps)

    @property
    def exposed_s(self) -> float:
        """How long computation waited for communication in a step, in seconds."""
        return (self._traffic.exposed_s - self._exposed_s) / max(1, self.steps)

    @property
    def gathered_bytes(self) -> int:
        """The bytes that gathers received in a step."""
        return (self._traffic.gathered_bytes - self._gathered_bytes) // max(1, self.steps)

    @property
    def reduced_bytes(self) -> int:
        """The bytes that reduces sent in a step."""
        return (self._traffic.reduced_bytes - self._reduced_bytes) // max(1, self.steps)


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar that is not shown any more once stderr cannot be written, since training goes on without."""

    def display(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().display(*args, **kwargs)
        except OSError:
            self.disable = True

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Job:
    def __init__(
        self, options: TrainOptions, comm: Communicator, ranks: Communicator | Mesh
    ) -> None:
        self.options = options
        self.comm = comm
        text = read_text(options.text)
        self.corpus = Corpus(text, options.context)
        torch.manual_seed(options.seed)
        self.model = GPT(options.width, options.layers, options.context)
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        self.engine: Engine = fully_shard(
            self.model,
            ranks,
            units=list(self.model.blocks),
            strategy=options.strategy,
            mixed_precision=half if options.precision == "bf16" else None,
            cpu_offload=options.cpu_offload,
        )
        self.optimizer = AdamW(self.model.parameters(), lr=options.lr)
        self.checkpoints = None
        if options.checkpoint is not None:
            self.checkpoints = Checkpoints(options.checkpoint, comm)
        self.identity = options.identity(text)

    def run(self) -> tuple[Result, Timeline | None]:
        options = self.options
        losses = self.resume()
        first = len(losses)
        # The first step that is measured.
        begin = max(first, min(first + WARM_UP_STEPS, options.steps - 1))
        if options.trace is not None:
            begin = max(begin, options.steps - MAX_TRACED_STEPS)
        with self.progress(first) as bar:
            for step in range(first, begin):
                losses.append(self.step(step))
                bar.update()
                self.save(losses)
            measured = Measured(self.engine.traffic)
            with self.engine.trace() if options.trace else nullcontext() as trace:
                for step in range(begin, options.steps):
                    with measured.step(), trace.step(step) if trace else nullcontext():
                        losses.append(self.step(step))
                    bar.set_postfix_str(
                        f"loss {losses[-1]:.3f}, {self.tokens_per_step / measured.step_s:,.0f} tokens/s, "
                        f"exposed {measured.exposed_s / measured.step_s:.1%}",
                        refresh=False,
                    )
                    bar.update()
                    self.save(losses)
        result = self.result(losses, measured)
        timeline = None if trace is None else trace.timeline()
        self.engine.close()
        return result, timeline if self.comm.rank == 0 else None

    def result(self, losses: list[float], measured: Measured) -> Result:
        footprint = self.engine.footprint()
        step_s = measured.step_s
        return Result(
            ranks=self.comm.size,
            shard_ranks=self.engine.mesh.shard.size,
            transport=self.comm.transport,
            device=str(self.comm.device),
            cpu_offload=self.options.cpu_offload,
            losses=losses,
            measured_steps=measured.steps,
            tokens_per_s=self.tokens_per_step / step_s if step_s else 0.0,
            step_s=step_s,
            exposed_s=measured.exposed_s,
            gathered_bytes=measured.gathered_bytes,
            reduced_bytes=measured.reduced_bytes,
            parameter_bytes=footprint.parameter_bytes,
            gradient_bytes=footprint.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes(),
            padding_bytes=footprint.padding_bytes,
            total_parameter_bytes=footprint.total_parameter_bytes,
            sample=self.sample(losses[-1]),
        )

    @property
    def tokens_per_step(self) -> int:
        return self.options.batch * self.options.context * self.comm.size

    def progress(self, first: int) -> _Bar:
        """The progress bar, at step `first`."""
        # tqdm's default is a lock between processes, a semaphore that a killed rank would leave behind.
        tqdm.set_lock(threading.RLock())
        return _Bar(
            total=self.options.steps,
            initial=first,
            unit="step",
            mininterval=0.1 if sys.stderr.isatty() else 2.0,  # seconds; a log needs fewer lines
            disable=self.comm.rank != 0,
        )

    def step(self, step: int) -> float:
        """Does one step on this rank's part of the batch; returns the mean loss of all ranks."""
        options = self.options
        inputs, targets = self.corpus.batch(options.seed, step, self.comm.rank, options.batch)
        device = self.comm.device
        logits = self.model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach()
        self.comm.all_reduce(mean, "avg")
        return float(mean)

    def resume(self) -> list[float]:
        """Loads a checkpoint, if there is one; returns the losses of the steps that it has done."""
        if self.checkpoints is None:
            return []
        saved = progress.load(self.checkpoints, self.engine, self.optimizer)
        return [] if saved is None else saved.losses

    def save(self, losses: list[float]) -> None:
        """Saves a checkpoint, if it is time for one."""
        every, step = self.options.save_every, len(losses)
        if self.checkpoints is None or (step % every and step < self.options.steps):
            return
        done = Progress(self.comm.size, losses, self.identity)
        progress.save(self.checkpoints, done, self.engine, self.optimizer)
        if step == self.options.steps:
            self.checkpoints.wait()

    def optimizer_bytes(self) -> int:
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.dim() > 0  # which leaves out step counters
        )

    @torch.no_grad()
    def sample(self, last_loss: float) -> str:
        """Text with which the model continues `SAMPLE_PROMPT`; all ranks generate it together."""
        if not math.isfinite(last_loss):
            return "(none: the loss is not a finite number)"
        generator = torch.Generator().manual_seed(self.options.seed)
        tokens = list(SAMPLE_PROMPT)
        for _ in range(SAMPLE_BYTES):
            window = torch.tensor([tokens[-self.options.context :]], device=self.comm.device)
            logits = self.model(window)[0, -1].float().cpu()
            likely = torch.topk(logits, 40)
            weights = torch.softmax(likely.values / 0.8, dim=0)
            choice = torch.multinomial(weights, 1, generator=generator)
            tokens.append(int(likely.indices[choice]))
        return bytes(tokens).decode("utf-8", errors="replace")
