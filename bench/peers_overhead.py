"""What communication with peers costs the host, of one unit and one step: a part of overhead.py.

    fake  the CUDA runtime and the NCCL that tests/cpp/cuda plays, which execute nothing and return at once: our own
          time. This rank is alone and believes in a second one.
    cuda  two processes, on a GPU each or on one. Each collective is let end before the next is timed. In the same
          rounds the same unit by torch's own process group, with the copies that PyTorch FSDP2 makes before and after
          its collectives, and FSDP2's step.

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
from functools import partial
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
Sharding = Callable[[nn.Module], Callable[[], None]]  # shards a model, and returns what ends that


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
        samples = measure(comm, calls, settle, beside_torch=True)
    dist.destroy_process_group()
    return samples


def measure(
    comm: Communicator, calls: int, settle: Callable[[], object], *, beside_torch: bool = False
) -> Samples:
    """Seconds a call, by what was called; `settle` is called after each."""
    torch.set_num_threads(1)
    samples: Samples = {}
    for wire, dtype in WIRE.items():
        units: dict[str, Ours | Torchs] = {"": Ours(comm, dtype)}
        if beside_torch:
            units[TORCHS] = Torchs(comm.device, dtype)
        warm_up = min(calls, MOST_WARM_UP)
        timed = {prefix: Timed(settle, warm_up) for prefix in units}
        for _ in range(calls + warm_up):
            for prefix, unit in units.items():
                unit.gather(timed[prefix])
                unit.reduce(timed[prefix])
        for name in ("gather", "reduce") if wire == "bf16" else ("reduce",):
            for prefix in units:
                samples[f"{prefix}{name}, {wire}"] = timed[prefix].total(f"{name}: ")
            for part, values in timed[""].of(f"{name}: ").items():
                samples[f"  {part}, {wire}"] = values
    shardings: dict[str, Sharding] = {"": partial(shard_by_ours, comm=comm)}
    if beside_torch:
        shardings[TORCHS] = shard_by_torch
    for prefix, values in steps(comm.device, settle, shardings).items():
        samples[f"{prefix}step, a unit"] = values
    return samples


class Ours:
    """A unit, gathered and reduced as the engine does it."""

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype) -> None:
        tensors = {name: torch.zeros(shape, device=comm.device) for name, shape in BLOCK.items()}
        self._bucket = Bucket.from_tensors(
            tensors, comm, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype
        )
        self._grads = [tensor.bfloat16() for tensor in tensors.values()]

    def gather(self, timed: Timed) -> None:
        work = timed("gather: queue", lambda: self._bucket.all_gather(async_op=True))
        timed("gather: wait", work.wait)
        timed.settle()

    def reduce(self, timed: Timed) -> None:
        reduction = self._bucket.reduction
        timed("reduce: pack", lambda: reduction.pack(self._grads, async_op=True))
        work = timed("reduce: queue", lambda: reduction.reduce(async_op=True))
        timed("reduce: wait", work.wait)
        timed.settle()
        self._bucket.gradients.forget(shown=False)  # the next does not add to it


class Torchs:
    """The same by torch's process group, with FSDP2's copies around its collectives."""

    def __init__(self, device: torch.device, reduce_dtype: torch.dtype) -> None:
        self._world = dist.get_world_size()
        self._device = device
        self._dtype = reduce_dtype
        self._parts = [math.prod(shape) // self._world for shape in BLOCK.values()]
        self._grads = [
            torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in BLOCK.values()
        ]
        shards = [torch.zeros(part, device=device) for part in self._parts]
        self._copies = GatherCopies(shards, self._world, torch.bfloat16)

    def gather(self, timed: Timed) -> None:
        work = timed("gather: queue", self._queue_gather)
        timed("gather: wait", lambda: self._end_gather(work))
        timed.settle()

    def reduce(self, timed: Timed) -> None:
        work, mean = timed("reduce: queue", self._queue_reduce)
        timed("reduce: wait", lambda: self._end_reduce(work, mean))
        timed.settle()

    def _queue_gather(self) -> Any:
        self._copies.copy_in()
        return dist.all_gather_into_tensor(self._copies.gathered, self._copies.sent, async_op=True)

    def _end_gather(self, work: Any) -> None:
        work.wait()
        self._copies.copy_out()

    def _queue_reduce(self) -> tuple[Any, torch.Tensor]:
        numel = sum(self._parts)
        chunks = torch.empty(self._world, numel, dtype=self._dtype, device=self._device)
        torch._chunk_cat(self._grads, 0, self._world, out=chunks)
        mean = torch.empty(numel, dtype=self._dtype, device=self._device)
        op = dist.ReduceOp.AVG if self._device.type == "cuda" else dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(mean, chunks.view(-1), op, async_op=True), mean

    def _end_reduce(self, work: Any, mean: torch.Tensor) -> None:
        work.wait()
        mean.float().split(self._parts)


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


def shard_by_ours(net: nn.Module, comm: Communicator) -> Callable[[], None]:
    return shardcomm.fully_shard(net, comm, units=nn.Linear).close


def shard_by_torch(net: nn.Module) -> Callable[[], None]:
    """By FSDP2, where nothing is to be ended."""
    device = next(net.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (*net.children(), net):
        fsdp2_fully_shard(layer, mesh=mesh)
    return lambda: None


def steps(
    device: torch.device,
    settle: Callable[[], object],
    shardings: dict[str, Sharding],
) -> Samples:
    """Seconds that each of `shardings` adds to forward and backward, a unit."""

    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16, device=device) for _ in range(UNITS)))

    plain, nets = chain(), {name: chain() for name in shardings}
    ends = [shard(nets[name]) for name, shard in shardings.items()]
    x = torch.randn(4, 16, device=device)
    seconds: dict[nn.Module, list[float]] = {net: [] for net in (plain, *nets.values())}
    for _ in range(STEPS):
        for net, samples in seconds.items():
            net.zero_grad(set_to_none=True)
            settle()
            start = time.perf_counter()
            net(x).sum().backward()
            samples.append(time.perf_counter() - start)
            settle()
    for end in ends:
        end()
    base = Times(tuple(seconds[plain])).median
    return {
        name: [(sample - base) / UNITS for sample in seconds[net][5:]] for name, net in nets.items()
    }
