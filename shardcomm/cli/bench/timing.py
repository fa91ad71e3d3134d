"""The timed loop, as nccl-tests has it: a wall clock around many operations and one synchronise, divided.

On a CPU the clock is also read after every iteration, and on a GPU, if spreads are asked for, an event is recorded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from shardcomm.cli.bench.options import BenchOptions
from shardcomm.comm.communicator import Communicator

_OVERHEAD_LOOPS = 25


@dataclass(frozen=True)
class Spread:
    """How long an operation took in single iterations, in seconds; `cv` is the standard deviation over the mean."""

    min_s: float
    p10_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    cv: float


@dataclass(frozen=True)
class Timing:
    """How long an operation took, in seconds. `spread` is None if only the whole loop was timed."""

    time_s: float
    spread: Spread | None


def timing(
    run: Callable[[], object],
    control: Communicator,
    device: torch.device,
    options: BenchOptions,
    overhead_s: float,
) -> Timing:
    """Times `run` on all ranks at once, and combines the ranks' times as -a says; collective.

    `overhead_s` is the time of the loop itself for each operation, and is taken off on a CPU. On a GPU the loop runs
    ahead of the device, so that it costs nothing, or it is part of the cost of a launch.
    """
    for _ in range(options.warmups):
        run()
    if options.graph_launches and device.type != "cpu":
        run = _graph(run, options)  # before ranks meet, since ranks take differently long for it
    synchronise(device)
    control.barrier()
    times = loop(run, device, options)
    everybody = torch.empty(control.size, len(times), dtype=torch.float64)
    control.all_gather(everybody, torch.tensor(times, dtype=torch.float64))
    if device.type == "cpu":
        everybody = (everybody - overhead_s).clamp_min(1e-9)  # a clock has no finer ticks
    means = everybody.mean(1)
    of_ranks = _combined(everybody, options.average).tolist()
    return Timing(
        time_s=float(_combined(means, options.average)),
        spread=_spread(of_ranks) if len(of_ranks) > 1 else None,
    )


def overhead(options: BenchOptions) -> float:
    """The seconds that the loop takes for an operation which does nothing: the median of several loops."""
    nothing = partial(_nothing, None, None, None, None)  # it is called as operations are
    cpu = torch.device("cpu")
    loops = [statistics.mean(loop(nothing, cpu, options)) for _ in range(_OVERHEAD_LOOPS)]
    return statistics.median(loops)


def _nothing(on: None, recv: None, send: None, op: None) -> None:
    return None


def loop(run: Callable[[], object], device: torch.device, options: BenchOptions) -> list[float]:
    """The seconds that an operation takes on this rank: for each iteration, or one number for all iterations.

    On a GPU with -G, `run` launches a graph of all iterations.
    """
    if device.type == "cpu":
        return _loop_on_cpu(run, options)
    if options.graph_launches:
        return _loop_of_graphs(run, device, options)
    if options.statistics:
        return _loop_with_events(run, device, options)
    start = time.perf_counter()
    for _ in range(options.iterations * options.aggregate):
        run()
    if not options.cpu_time:
        synchronise(device)
    seconds = time.perf_counter() - start
    synchronise(device)
    return [seconds / (options.iterations * options.aggregate)]


def _loop_on_cpu(run: Callable[[], object], options: BenchOptions) -> list[float]:
    clock = time.perf_counter
    stamps = [clock()]
    for _ in range(options.iterations):
        for _ in range(options.aggregate):
            run()
        stamps.append(clock())
    return _per_operation([b - a for a, b in pairwise(stamps)], options)


def _loop_with_events(
    run: Callable[[], object], device: torch.device, options: BenchOptions
) -> list[float]:
    events = [torch.Event(device, enable_timing=True) for _ in range(options.iterations + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(options.aggregate):
            run()
        event.record()
    events[-1].synchronize()
    times = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]
    return _per_operation(times, options)


def _graph(run: Callable[[], object], options: BenchOptions) -> Callable[[], object]:
    """Captures all iterations in a CUDA graph; returns the function that launches it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(options.iterations * options.aggregate):
            run()
    return graph.replay


def _loop_of_graphs(
    launch: Callable[[], object], device: torch.device, options: BenchOptions
) -> list[float]:
    start = time.perf_counter()
    for _ in range(options.graph_launches):
        launch()
    synchronise(device)
    operations = options.graph_launches * options.iterations * options.aggregate
    return [(time.perf_counter() - start) / operations]


def synchronise(device: torch.device) -> None:
    """Waits for all work that was queued on `device`."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _per_operation(times: list[float], options: BenchOptions) -> list[float]:
    return [seconds / options.aggregate for seconds in times]


def _combined(of_ranks: torch.Tensor, average: int) -> torch.Tensor:
    """Combines the ranks' times, along the first dim, as -a says."""
    if average == 0:
        return of_ranks[0]
    if average == 1:
        return of_ranks.mean(0)
    return of_ranks.amin(0) if average == 2 else of_ranks.amax(0)


def _spread(times: list[float]) -> Spread:
    ordered = sorted(times)

    def quantile(fraction: float) -> float:
        return ordered[round(fraction * (len(ordered) - 1))]

    mean = statistics.mean(times)
    return Spread(
        min_s=ordered[0],
        p10_s=quantile(0.1),
        p50_s=quantile(0.5),
        p90_s=quantile(0.9),
        p99_s=quantile(0.99),
        max_s=ordered[-1],
        cv=statistics.pstdev(times) / mean if mean else 0.0,
    )
