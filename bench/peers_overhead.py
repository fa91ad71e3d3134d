"""What communication with peers costs the host, of one unit and one step: a part of overhead.py.

    fake  the CUDA runtime and the NCCL that tests/cpp/cuda plays, which execute nothing and return at once: our own
          time. This rank is alone and believes in a second one.
    cuda  two processes, on a GPU each or on one. Each collective is let end before the next is timed.

The unit is a GPT-2 block of width 768: 12 parameters, held in float32, gathered in bfloat16, reduced in bfloat16 and
float32. A gather is `Bucket.all_gather` and its wait; a reduce is what the engine calls: pack, reduce and wait. Then a
step of the engine on a chain of 64 Linear(16, 16), forward and backward, over the plain model's: all hooks and waits of
a unit, two gathers and a reduce. Times are medians with 10 and 90 percentiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Bound, Report, Times
from torch import nn

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
        samples = launch(measure_on_gpu, 2, (args.rounds * 20,), timeout_s=120)[0]
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
        if name.startswith(("gather", "reduce")):
            report.bounds.append(Bound(f"{name}, us", times.median * 1e6, at_most=AT_MOST_US))
    report.finish(args)


def measure_on_gpu(calls: int) -> Samples:
    """As one of two ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.nccl_ranks import connect

    with connect(deadline_s=60.0) as comm:
        return measure(comm, calls, torch.cuda.synchronize)


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
    samples["step of the engine, a unit"] = steps(comm, settle)
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


def steps(comm: Communicator, settle: Callable[[], object]) -> list[float]:
    """Seconds that the engine adds to forward and backward, a unit."""
    torch.manual_seed(0)
    plain, ours = (
        nn.Sequential(*(nn.Linear(16, 16, device=comm.device) for _ in range(UNITS)))
        for _ in range(2)
    )
    engine = shardcomm.fully_shard(ours, comm, units=nn.Linear)
    x = torch.randn(4, 16, device=comm.device)
    seconds: dict[nn.Module, list[float]] = {plain: [], ours: []}
    for _ in range(STEPS):
        for net, samples in seconds.items():
            net.zero_grad(set_to_none=True)
            settle()
            start = time.perf_counter()
            net(x).sum().backward()
            samples.append(time.perf_counter() - start)
            settle()
    engine.close()
    base = Times(tuple(seconds[plain])).median
    return [(sample - base) / UNITS for sample in seconds[ours][5:]]
