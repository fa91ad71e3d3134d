"""Training on one GPU: shardcomm's engine and drop-in against PyTorch FSDP2, alone and as 4 ranks that are threads.

GPT of 24 blocks, width 1024, 512 tokens x batch 4, parameters gathered in bfloat16, gradients reduced in float32, fused
AdamW; initialised on the device, by one seed for all contenders. Three parts, which can be named (default: all):

- alone: world size 1, where FSDP2 skips its collectives, and so does the engine. Then also 6 blocks of width 4096,
  2048 tokens x batch 2, which keep the GPU busy for longer than the host.
- offloaded: the same with shards, gradients and optimizer state in host memory (`cpu_offload=True` against FSDP2's
  `CPUOffloadPolicy()`): what the device holds, and how long a step takes with the copies, and AdamW on the CPU.
- threads: 4 ranks, the `local` transport against torch's threaded process group, all on one device; there FSDP2 also
  runs attached, with its copies or its whole gather ours (shardcomm.fsdp2).

Step time, peak memory as ratios (targets: at most 1 alone and offloaded, below 1 as threads); memory is what torch's
allocator held at most plus what the transport allocated. The losses of the first steps are compared in the same run.
`--device cpu` runs a small model, to try the script.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Bound, Report, Times, arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.testing._internal.distributed import multi_threaded_pg

import shardcomm.fsdp2
from shardcomm.models.gpt import GPT, VOCAB

WARM_UP_STEPS = 3
PATIENCE_S = 90.0
DROP_IN: dict[str, shardcomm.fsdp2.Level | None] = {
    "FSDP2": None,
    "FSDP2, attached: copies": "copies",
    "FSDP2, attached: full": "full",
}


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    context: int
    batch: int


class Trainer:
    """One rank of one contender: a model, its optimizer and its data."""

    def __init__(self, size: Size, device: torch.device, rank: int) -> None:
        self.device = device
        self.attached: shardcomm.fsdp2.Attached | None = None
        generator = torch.Generator().manual_seed(rank)
        shape = (size.batch, size.context + 1)
        self.tokens = torch.randint(0, VOCAB, shape, generator=generator).to(device)
        with _building, torch.random.fork_rng(), device:
            torch.manual_seed(0)
            self.model = GPT(size.width, size.layers, size.context)

    def optimize(self) -> None:
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

    def step(self) -> torch.Tensor:
        logits = self.model(self.tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def ours(size: Size, comm: shardcomm.Communicator, *, cpu_offload: bool = False) -> Trainer:
    trainer = Trainer(size, comm.device, comm.rank)
    precision = shardcomm.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = list(trainer.model.blocks)
    shardcomm.fully_shard(
        trainer.model, comm, units=units, mixed_precision=precision, cpu_offload=cpu_offload
    )
    trainer.optimize()
    return trainer


def fsdp2(
    size: Size,
    device: torch.device,
    ranks: int,
    level: shardcomm.fsdp2.Level | None = None,
    *,
    cpu_offload: bool = False,
) -> Trainer:
    trainer = Trainer(size, device, dist.get_rank())
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pinned = device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    for module in (*trainer.model.blocks, trainer.model):
        fsdp2_fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if level is not None:
        trainer.attached = shardcomm.fsdp2.attach(trainer.model, level=level)
    trainer.optimize()
    return trainer


_building = threading.Lock()  # torch's generator belongs to all threads


class Ranks:
    """A contender: `ranks` threads, each for itself through the whole run, that step together."""

    def __init__(
        self,
        ranks: int,
        make: Callable[[int], Trainer],
        join: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.make = make
        self.join = join
        self.threads = [ThreadPoolExecutor(1) for _ in range(ranks)]
        self.streams = [
            torch.cuda.stream(torch.cuda.Stream())
            if torch.cuda.is_available()
            else contextlib.nullcontext()
            for _ in range(ranks)
        ]
        self.trainers: list[Trainer | None] = [None] * ranks
        self.losses: list[list[float]] = [[] for _ in range(ranks)]

    def together(self, body: Callable[[int], None]) -> None:
        def alone(rank: int) -> None:
            # Autograd's own thread of the device would run the ranks' backwards one after the other.
            with self.streams[rank], torch.autograd.set_multithreading_enabled(False):
                body(rank)

        running = [thread.submit(alone, rank) for rank, thread in enumerate(self.threads)]
        done, late = wait(running, PATIENCE_S, FIRST_EXCEPTION)
        for future in done:
            future.result()  # the first cause: the others may wait for that rank for ever
        if late:
            faulthandler.dump_traceback()
            raise TimeoutError(
                f"{len(late)} of {len(running)} ranks still ran after {PATIENCE_S:g} s"
            )

    def build(self) -> None:
        def body(rank: int) -> None:
            self.join(rank)
            self.trainers[rank] = self.make(rank)

        self.together(body)

    def steps(self, count: int) -> None:
        def body(rank: int) -> None:
            trainer = self.trainers[rank]
            assert trainer is not None
            for _ in range(count):
                self.losses[rank].append(float(trainer.step()))

        self.together(body)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def held_outside_torch(device: torch.device) -> int:
    """Bytes of the device in use that are not torch's allocator's."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measure(
    contenders: dict[str, Ranks], device: torch.device, rounds: int, report: Report, label: str
) -> None:
    peak_bytes: dict[str, int] = {}
    for name, ranks in contenders.items():
        print(f"{label}: {name}: builds, and warms up", flush=True)
        gc.collect()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        outside = held_outside_torch(device)
        inside = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        ranks.build()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ranks.steps(WARM_UP_STEPS)
        synchronize(device)
        # Here, and not before the steps: what is attached allocates in the first ones.
        outside = held_outside_torch(device) - outside
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 1
        peak_bytes[name] = peak - inside + outside

    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, ranks in contenders.items():
            synchronize(device)
            start = time.perf_counter()
            ranks.steps(2)
            synchronize(device)
            samples[name].append((time.perf_counter() - start) / 2)

    losses = {
        name: torch.tensor(ranks.losses)[:, :WARM_UP_STEPS] for name, ranks in contenders.items()
    }
    times = {name: Times(tuple(values)) for name, values in samples.items()}
    peer = times["FSDP2"]
    for name, measured in times.items():
        of_time = measured.median / peer.median
        of_memory = peak_bytes[name] / max(1, peak_bytes["FSDP2"])
        report.row(
            f"{label}: {name}",
            measured,
            f"{of_time:.3f}",
            f"{peak_bytes[name] / 2**30:.2f} GiB",
            f"{of_memory:.3f}",
        )
        report.figures[f"{label}: {name}"] = {
            "median_s": measured.median,
            "samples_s": measured.samples,
            "peak_bytes": peak_bytes[name],
        }
        if name == "FSDP2":
            continue
        theirs = losses["FSDP2"]
        difference = float(((losses[name] - theirs).abs() / theirs.abs()).max())
        report.bounds += [
            Bound(f"{label}: {name}: losses differ by", difference, at_most=0.02),
            Bound(f"{label}: {name}: time / FSDP2", of_time, at_most=1.0),
            Bound(f"{label}: {name}: peak memory / FSDP2", of_memory, at_most=1.0),
        ]


@contextlib.contextmanager
def one_rank_group(device: torch.device) -> Iterator[None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def one_rank(size: Size, device: torch.device, *, cpu_offload: bool) -> dict[str, Ranks]:
    comm = shardcomm.Communicator.local_group(1, device=device)[0]
    # What CUDA loads when it is first used must not count as the first contender's memory.
    tiny = Size(width=64, layers=1, context=8, batch=1)
    for make in (lambda rank: ours(tiny, comm), lambda rank: fsdp2(tiny, device, 1)):
        ranks = Ranks(1, make)
        ranks.build()
        ranks.steps(1)
    return {
        "shardcomm": Ranks(1, lambda rank: ours(size, comm, cpu_offload=cpu_offload)),
        "FSDP2": Ranks(1, lambda rank: fsdp2(size, device, 1, cpu_offload=cpu_offload)),
    }


def alone(size: Size, device: torch.device, rounds: int, report: Report) -> None:
    sizes = {"alone": size}
    if device.type == "cuda":
        sizes["alone, wide"] = Size(width=4096, layers=6, context=2048, batch=2)
    with one_rank_group(device):
        for label, its in sizes.items():
            measure(one_rank(its, device, cpu_offload=False), device, rounds, report, label)


def offloaded(size: Size, device: torch.device, rounds: int, report: Report) -> None:
    with one_rank_group(device):
        contenders = one_rank(size, device, cpu_offload=True)
        measure(contenders, device, max(1, rounds // 3), report, "alone, offloaded")


def order_on_streams() -> None:
    """torch's threaded group copies all ranks' tensors in one thread, and takes no notice of streams: here it does."""
    join = multi_threaded_pg.Collective.join
    lock = threading.Lock()
    before: dict[int, list[torch.cuda.Event]] = {}

    def ordered(self: Any, rank: int, data: object) -> Any:
        event = torch.cuda.Event()
        event.record()
        with lock:
            before.setdefault(id(self), []).append(event)
        work = self._collective.work

        def after_all(tensors: object) -> None:
            with lock:
                arrived = before.pop(id(self))
            for each in arrived:
                each.wait()
            work(tensors)
            self.done = torch.cuda.Event()
            self.done.record()

        if rank == 0:
            self._collective.work = after_all
        result = join(self, rank, data)
        self.done.wait()
        return result

    multi_threaded_pg.Collective.join = ordered


def as_threads(size: Size, device: torch.device, rounds: int, report: Report) -> None:
    ranks = 4
    comms = shardcomm.Communicator.local_group(ranks, device=device)
    if device.type == "cuda":
        order_on_streams()
    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    contenders = {"shardcomm": Ranks(ranks, lambda rank: ours(size, comms[rank]))}
    for name, level in DROP_IN.items():
        store = dist.HashStore()
        contenders[name] = Ranks(
            ranks,
            lambda rank, level=level: fsdp2(size, device, ranks, level),
            lambda rank, store=store: dist.init_process_group(
                "threaded", rank=rank, world_size=ranks, store=store
            ),
        )
    try:
        measure(contenders, device, rounds, report, f"{ranks} thread ranks")
        for name, level in DROP_IN.items():
            trainer = contenders[name].trainers[0]
            assert trainer is not None
            if trainer.attached is not None:
                taken = {receipt.taken for receipt in trainer.attached.receipts}
                assert taken == {level}, str(trainer.attached)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()  # type: ignore[no-untyped-call]


PARTS = {"alone": alone, "offloaded": offloaded, "threads": as_threads}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"PART is {min(unknown)!r}; accepted: {', '.join(PARTS)}")
    if args.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        size = Size(width=1024, layers=24, context=512, batch=4)
    else:
        device, size = torch.device(args.device), Size(width=64, layers=3, context=16, batch=2)
    report = Report(["step", "median (p10-p90)", "/ FSDP2", "peak", "/ FSDP2"])
    try:
        for part in args.parts or PARTS:
            PARTS[part](size, device, args.rounds, report)
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # ranks that wait for one that failed would keep the process
    report.finish(args)


if __name__ == "__main__":
    main()
