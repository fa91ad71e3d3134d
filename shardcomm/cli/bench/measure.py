"""One row: the bandwidth of a plain copy, the time of each variant of the operation, and whether it was right.

Results are checked apart from the timed runs, on other inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from shardcomm.cli.bench.case import Collectives, Variant
from shardcomm.cli.bench.layers import LayerOperation
from shardcomm.cli.bench.operations import Operation
from shardcomm.cli.bench.options import BenchOptions, Layer
from shardcomm.cli.bench.results import Figure, Row
from shardcomm.cli.bench.timing import synchronise, timing
from shardcomm.comm.communicator import Communicator

AnyOperation: TypeAlias = Operation | LayerOperation
Workload: TypeAlias = int | Layer
"""A size in bytes, or a layer."""


def measure(
    operation: AnyOperation,
    workload: Workload,
    options: BenchOptions,
    overhead_s: float,
    on: Collectives,
    control: Communicator,
) -> Row | None:
    """Measures the row of one workload; collective. None if the workload is too small to be shared out."""
    case = operation.case(on, options, workload)  # type: ignore[arg-type]
    if case is None:
        return None
    time = partial(
        timing, control=control, device=on.device, options=options, overhead_s=overhead_s
    )
    copied = time(_copy(case.size_bytes, on.device))
    # The fastest copy counts, since a limit is what is possible.
    limit = case.size_bytes / (copied.spread.min_s if copied.spread else copied.time_s)
    figures = []
    for i, variant in enumerate(case.variants()):
        seeds = range(i * (options.checks + 1), (i + 1) * (options.checks + 1))
        variant.fill(seeds[0])
        control.barrier()
        timed = time(variant.run)
        algbw = case.size_bytes / timed.time_s
        figures.append(
            Figure(
                time_s=timed.time_s,
                algbw=algbw,
                busbw=algbw * case.bus_factor,
                wrong=_wrong(variant, seeds[1:], on, control) if options.checks else None,
                spread=timed.spread,
            )
        )
    layer = workload.name if isinstance(workload, Layer) else None
    in_place = figures[1] if case.in_place else None
    return Row(layer, case.size_bytes, case.count, limit, figures[0], in_place)


def _wrong(variant: Variant, seeds: range, on: Collectives, control: Communicator) -> int:
    """How many elements are wrong on all ranks, over one run for each seed."""
    wrong = torch.zeros(1, dtype=torch.int64)
    for seed in seeds:
        variant.fill(seed)
        control.barrier()  # a rank that runs may write memory that others fill
        variant.run()
        synchronise(on.device)
        wrong += variant.wrong(seed)
        control.barrier()
    control.all_reduce(wrong)
    return int(wrong)


def _copy(nbytes: int, device: torch.device) -> Callable[[], object]:
    """A plain copy, in the device's fastest way."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    if device.type != "cpu":
        return partial(target.copy_, source)
    return partial(_memmove, target, source)


def _memmove(target: torch.Tensor, source: torch.Tensor) -> object:
    return ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
