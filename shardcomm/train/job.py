"""The training loop that every rank runs."""

from __future__ import annotations

import math
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from shardcomm.checkpoints import Checkpoints
from shardcomm.communicator import Communicator
from shardcomm.engine import Engine
from shardcomm.mixed_precision import MixedPrecision
from shardcomm.rendezvous import env_store
from shardcomm.sharding import fully_shard
from shardcomm.train import progress
from shardcomm.train.gpt import GPT
from shardcomm.train.progress import Progress
from shardcomm.train.text import Corpus, read_text

SAMPLE_BYTES = 160
SAMPLE_PROMPT = b"def "
# The first steps allocate and learn the order of the units.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Options:
    """What the command line says; the same on every rank."""

    steps: int
    seed: int
    width: int
    layers: int
    batch: int
    context: int
    strategy: str
    precision: str
    lr: float
    text: str | None
    device: str
    deadline_s: float
    checkpoint: str | None
    save_every: int

    def identity(self, text: bytes) -> dict[str, object]:
        """What must be the same for a checkpoint's run to go on; how it is spread over ranks may change."""
        names = ("seed", "width", "layers", "batch", "context", "precision", "lr")
        of_text = f"{len(text)} bytes (checksum {zlib.crc32(text):08x})"
        return {**{name: getattr(self, name) for name in names}, "text": of_text}


@dataclass(frozen=True)
class Result:
    """What a run amounts to, on one rank. Times and bytes are per step, over all steps but the first few."""

    ranks: int
    transport: str
    device: str
    losses: list[float]
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


def train(options: Options) -> Result:
    """Trains on this rank of the group that the environment describes."""
    device = None if options.device == "auto" else options.device
    with Communicator.from_env(deadline_s=options.deadline_s, device=device) as comm:
        if comm.device.type == "cuda":
            torch.cuda.set_device(comm.device)
        if options.checkpoint is None:
            return _Job(options, comm).run()
        timeout = timedelta(seconds=options.deadline_s)
        store, rank, size = env_store(timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            return _Job(options, comm).run()
        finally:
            dist.destroy_process_group()


class _Job:
    def __init__(self, options: Options, comm: Communicator) -> None:
        self.options = options
        self.comm = comm
        text = read_text(options.text)
        self.corpus = Corpus(text, options.context)
        torch.manual_seed(options.seed)
        self.model = GPT(options.width, options.layers, options.context)
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        self.engine: Engine = fully_shard(
            self.model,
            comm,
            units=list(self.model.blocks),
            strategy=options.strategy,
            mixed_precision=half if options.precision == "bf16" else None,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.checkpoints = None
        if options.checkpoint is not None:
            self.checkpoints = Checkpoints(options.checkpoint, comm)
        self.identity = options.identity(text)

    def run(self) -> Result:
        tokens_per_step = self.options.batch * self.options.context * self.comm.size
        traffic = self.engine.traffic
        losses = self.resume()
        first = len(losses)
        start = time.perf_counter()
        exposed_start, gathered_start, reduced_start = 0.0, 0, 0
        measured = 0
        # The default is a lock between processes, a semaphore that a killed rank would leave behind.
        tqdm.set_lock(threading.RLock())
        with tqdm(
            total=self.options.steps,
            initial=first,
            unit="step",
            mininterval=0.1 if sys.stderr.isatty() else 2.0,  # seconds; a log needs fewer lines
            disable=self.comm.rank != 0,
        ) as bar:
            for step in range(first, self.options.steps):
                if step == min(first + WARM_UP_STEPS, self.options.steps - 1):
                    start = time.perf_counter()
                    exposed_start = traffic.exposed_s
                    gathered_start, reduced_start = traffic.gathered_bytes, traffic.reduced_bytes
                    measured = self.options.steps - step
                losses.append(self.step(step))
                if measured:
                    seconds = time.perf_counter() - start
                    done = step + 1 - (self.options.steps - measured)
                    bar.set_postfix_str(
                        f"loss {losses[-1]:.3f}, {tokens_per_step * done / seconds:,.0f} tokens/s, "
                        f"exposed {(traffic.exposed_s - exposed_start) / seconds:.1%}",
                        refresh=False,
                    )
                bar.update()
                start += self.save(losses)
        seconds = time.perf_counter() - start
        footprint = self.engine.footprint()
        result = Result(
            ranks=self.comm.size,
            transport=self.comm.transport,
            device=str(self.comm.device),
            losses=losses,
            tokens_per_s=tokens_per_step * measured / seconds,
            step_s=seconds / max(measured, 1),  # a run resumed at its end has none
            exposed_s=(traffic.exposed_s - exposed_start) / max(measured, 1),
            gathered_bytes=(traffic.gathered_bytes - gathered_start) // max(measured, 1),
            reduced_bytes=(traffic.reduced_bytes - reduced_start) // max(measured, 1),
            parameter_bytes=footprint.parameter_bytes,
            gradient_bytes=footprint.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes(),
            padding_bytes=footprint.padding_bytes,
            total_parameter_bytes=footprint.total_parameter_bytes,
            sample=self.sample(losses[-1]),
        )
        self.engine.close()
        return result

    def step(self, step: int) -> float:
        """One step on this rank's part of the batch; the loss over all ranks."""
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
        """The losses of the steps that a checkpoint has done already."""
        if self.checkpoints is None:
            return []
        saved = progress.load(self.checkpoints, self.engine, self.optimizer)
        return [] if saved is None else saved.losses

    def save(self, losses: list[float]) -> float:
        """A checkpoint, if it is time for one; how many seconds it took."""
        every, step = self.options.save_every, len(losses)
        if self.checkpoints is None or (step % every and step < self.options.steps):
            return 0.0
        start = time.perf_counter()
        done = Progress(self.comm.size, losses, self.identity)
        progress.save(self.checkpoints, done, self.engine, self.optimizer)
        return time.perf_counter() - start

    def optimizer_bytes(self) -> int:
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.dim() > 0  # not the step counters
        )

    @torch.no_grad()
    def sample(self, last_loss: float) -> str:
        """Text that the model continues `SAMPLE_PROMPT` with; all ranks generate it together."""
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
