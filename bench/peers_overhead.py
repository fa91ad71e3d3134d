"""What communication with peers costs the host, of one unit and one step: a part of overhead.py.

    fake  the CUDA runtime and the NCCL that tests/cpp/cuda plays, which execute nothing and return at once: our own
          time. This rank is alone and believes in a second one.
    cuda  two processes, on a GPU each or on one. Each collective is let end before the next is timed. Beside it the
          same unit by torch's own process group, with the copies that PyTorch FSDP2 makes before and after its
          collectives, and FSDP2's step; after ours, in the same processes.

The unit is a GPT-2 block of width 768: 12 parameters, held in float32, gathered in bfloat16, reduced in bfloat16 and
float32. A gather is `Bucket.all_gather` and its wait; a reduce is what the engine calls: pack, reduce and wait. Then a
step of the engine on a chain of 64 Linear(16, 16), forward and backward, over the plain model's: all hooks and waits of
a unit, two gathers and a reduce. Times are medians with 10 and 90 percentiles. Targets: of our own time at most 15 us
each; with NCCL, whose own calls take longer than that, at most the peer's.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_copies import GatherCopies
from harness import Bound, Report, Times
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import shardcomm
from shardcomm import Bucket, Communicator
from shardcomm.bucket import bucket
from shardcomm.comm import nccl
from shardcomm.comm.core import CoreCommunicator
from shardcomm.engine import call
from shardcomm.process.launch import launch

WIDTH = 768
BLOCK = {
    "norm1.weight": (WIDTH,),
    "norm1.bias": (WIDTH,),
    "qkv.weight": (3 * WIDTH, WIDTH),
    "qkv.bias": (3 * WIDTH,),
    "out.weight": (WIDTH, WIDTH),
    "out.bias": (WIDTH,),
    "norm2.weight": (WIDTH,),
    "norm2.bias": (WIDTH,),
    "mlp_in.weight": (4 * WIDTH, WIDTH),
    "mlp_in.bias": (4 * WIDTH,),
    "mlp_out.weight": (WIDTH, 4 * WIDTH),
    "mlp_out.bias": (WIDTH,),
}
WIRE = {"bf16": torch.bfloat16, "f32": torch.float32}
MOST_WARM_UP, STEPS, UNITS = 200, 30, 64
AT_MOST_US = 15
TORCHS = "torch and FSDP2's copies: "
Samples = dict[str, list[float]]


def main(args: argparse.Namespace) -> None:
    """Of `args.device`, reported on rank 0."""
    if args.device == "fake":
        import played_cuda

        comm = CoreCommunicator(nccl.connect(lambda own: [own], 0, 2, 0))
        # The second rank has nothing to compare at set-up.
        bucket.difference = call.difference = lambda _groups, _items: ""
        with played_cuda.Stream():
            samples = measure(comm, args.rounds * 20, lambda: None)
    else:
        if not torch.cuda.is_available():
            raise SystemExit("overhead: --device is cuda, and torch sees no GPU here")
        samples = launch(measure_on_gpu, 2, (args.rounds * 2,), timeout_s=120)[0]
    report = Report(
        ["host time", "us (p10-p90)"],
        title=f"What a unit's gather and reduce cost the host with peers ({args.device})",
    )
    for name, values in samples.items():
        times = Times(tuple(values))
        report.row(name, times)
        report.figures[name] = {
            "median_s": times.median,
            "p10_s": times.quantile(0.1),
            "p90_s": times.quantile(0.9),
        }
    for name, peer in peers_of(samples).items():
        ratio = Times(tuple(samples[name])).median / Times(tuple(samples[peer])).median
        report.bounds.append(Bound(f"{name} / {peer}", ratio, at_most=1))
    if args.device == "fake":
        for name in samples:
            if name.startswith(("gather", "reduce")):
                median = Times(tuple(samples[name])).median
                report.bounds.append(Bound(f"{name}, us", median * 1e6, at_most=AT_MOST_US))
    report.finish(args)


def peers_of(samples: Samples) -> dict[str, str]:
    """What was measured beside what."""
    return {name: TORCHS + name for name in samples if TORCHS + name in samples}


def measure_on_gpu(calls: int) -> Samples:
    """As one of two ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.nccl_ranks import take_gpu

    device = take_gpu()
    dist.init_process_group("nccl", device_id=device)
    return measure_beside_torch(calls, torch.cuda.synchronize)


def measure_beside_torch(calls: int, settle: Callable[[], object]) -> Samples:
    """Of the ranks of the default process group, which it destroys."""
    with Communicator.from_process_group(deadline_s=60.0) as comm:
        samples = measure(comm, calls, settle) | torchs(comm.device, calls, settle)
    dist.destroy_process_group()
    return samples


def measure(comm: Communicator, calls: int, settle: Callable[[], object]) -> Samples:
    """Seconds a call, by what was called; `settle` is called after each."""
    torch.set_num_threads(1)
    samples: Samples = {}
    for wire, dtype in WIRE.items():
        tensors = {name: torch.zeros(shape, device=comm.device) for name, shape in BLOCK.items()}
        held = Bucket.from_tensors(tensors, comm, param_dtype=torch.bfloat16, reduce_dtype=dtype)
        grads = [tensor.bfloat16() for tensor in tensors.values()]
        timed = Timed(settle, warm_up=min(calls, MOST_WARM_UP))
        for _ in range(calls + timed.warm_up):
            unit(held, grads, timed)
        if wire == "bf16":
            samples["gather, bf16"] = timed.total("gather: ")
            samples |= {f"  {name}": values for name, values in timed.of("gather: ").items()}
        samples[f"reduce, {wire}"] = timed.total("reduce: ")
        samples |= {f"  {name}, {wire}": values for name, values in timed.of("reduce: ").items()}

    def sharded(net: nn.Module) -> Callable[[], None]:
        return shardcomm.fully_shard(net, comm, units=nn.Linear).close

    samples["step, a unit"] = steps(comm.device, settle, sharded)
    return samples


def torchs(device: torch.device, calls: int, settle: Callable[[], object]) -> Samples:
    """The same of torch's process group, with FSDP2's copies around its collectives, and of FSDP2."""
    world = dist.get_world_size()
    parts = [math.prod(shape) // world for shape in BLOCK.values()]
    shards = [torch.zeros(part, device=device) for part in parts]
    grads = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in BLOCK.values()]
    copies = GatherCopies(shards, world, torch.bfloat16)
    timed = Timed(settle, warm_up=min(calls, MOST_WARM_UP))

    def queue_gather() -> Any:
        copies.copy_in()
        return dist.all_gather_into_tensor(copies.gathered, copies.sent, async_op=True)

    def end_gather(work: Any) -> None:
        work.wait()
        copies.copy_out()

    def queue_reduce(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        chunks = torch.empty(world, sum(parts), dtype=dtype, device=device)
        torch._chunk_cat(grads, 0, world, out=chunks)
        mean = torch.empty(sum(parts), dtype=dtype, device=device)
        op = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(mean, chunks.view(-1), op, async_op=True), mean

    def end_reduce(work: Any, mean: torch.Tensor) -> None:
        work.wait()
        mean.float().split(parts)

    samples: Samples = {}
    for wire, dtype in WIRE.items():
        for _ in range(calls + timed.warm_up):
            if wire == "bf16":
                work = timed("gather, bf16: queue", queue_gather)
                timed("gather, bf16: wait", lambda work=work: end_gather(work))
                timed.settle()
            queued = timed(f"reduce, {wire}: queue", lambda dtype=dtype: queue_reduce(dtype))
            timed(f"reduce, {wire}: wait", lambda queued=queued: end_reduce(*queued))
            timed.settle()
    for name in ("gather, bf16", *(f"reduce, {wire}" for wire in WIRE)):
        samples[TORCHS + name] = timed.total(f"{name}: ")

    def sharded(net: nn.Module) -> Callable[[], None]:
        mesh = init_device_mesh(device.type, (world,))
        for layer in net:  # type: ignore[attr-defined]
            fsdp2_fully_shard(layer, mesh=mesh)
        fsdp2_fully_shard(net, mesh=mesh)
        return lambda: None

    samples[f"{TORCHS}step, a unit"] = steps(device, settle, sharded)
    return samples


class Timed:
    """Seconds of each call, by its name; the first `warm_up` of each do not count."""

    def __init__(self, settle: Callable[[], object], warm_up: int) -> None:
        self.warm_up = warm_up
        self._settle = settle
        self._seconds: Samples = {}

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        self._seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def settle(self) -> None:
        """What was called ends."""
        self._settle()

    def of(self, prefix: str) -> Samples:
        """Those whose names begin so."""
        return {
            name: values[self.warm_up :]
            for name, values in self._seconds.items()
            if name.startswith(prefix)
        }

    def total(self, prefix: str) -> list[float]:
        """Their sums, call by call."""
        return [sum(parts) for parts in zip(*self.of(prefix).values(), strict=True)]


def unit(bucket: Bucket, grads: list[torch.Tensor], timed: Timed) -> None:
    """A gather and a reduce, as the engine calls them."""
    work = timed("gather: queue", lambda: bucket.all_gather(async_op=True))
    timed("gather: wait", work.wait)
    timed.settle()
    timed("reduce: pack", lambda: bucket.reduction.pack(grads, async_op=True))
    work = timed("reduce: queue", lambda: bucket.reduction.reduce(async_op=True))
    timed("reduce: wait", work.wait)
    timed.settle()
    bucket.gradients.forget(shown=False)  # the next does not add to it


def steps(
    device: torch.device,
    settle: Callable[[], object],
    sharded: Callable[[nn.Module], Callable[[], None]],
) -> list[float]:
    """Seconds that sharding adds to forward and backward, a unit.

    `sharded` shards a model, and returns a function that ends that.
    """
    torch.manual_seed(0)
    plain, ours = (
        nn.Sequential(*(nn.Linear(16, 16, device=device) for _ in range(UNITS))) for _ in range(2)
    )
    close = sharded(ours)
    x = torch.randn(4, 16, device=device)
    seconds: dict[nn.Module, list[float]] = {plain: [], ours: []}
    for _ in range(STEPS):
        for net, samples in seconds.items():
            net.zero_grad(set_to_none=True)
            settle()
            start = time.perf_counter()
            net(x).sum().backward()
            samples.append(time.perf_counter() - start)
            settle()
    close()
    base = Times(tuple(seconds[plain])).median
    return [(sample - base) / UNITS for sample in seconds[ours][5:]]
