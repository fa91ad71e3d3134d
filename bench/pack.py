"""What packing and reducing cost, against the limit: a plain memcpy, and against PyTorch's copies.

- pack a transformer block's tensors (24.9 M elements) into one buffer, float32 to bfloat16: against
  a memcpy of the same traffic, bytes read plus bytes written. Target: 0.8 of its bandwidth.
- pack 1,000 tensors of 1 KiB, bound once and run many times, as the engine does it: against a loop
  of `copy_` (target: 5 times faster) and `torch._foreach_copy_` (target: faster); both get prepared
  views. The same with every tensor checked again in each call (`CopyPlan.run`) is shown beside it.
- reduce 2 and 4 float32 sources of 8 M elements: against a memcpy of the same traffic.

One thread. Random inputs; results are compared with PyTorch's. A round times all contenders once,
in turn; the ratio is the median over rounds of reference time / our time, the spread its quartiles.

    python bench/pack.py [--rounds N] [--json FILE] [--check]
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from harness import Bound, Report, Times, arguments
from torch import Tensor

from shardcomm import _C
from shardcomm.copy_plan import CopyPlan

SEED = 0
ALIGN = 64  # elements between the starts of packed tensors, 128 bytes of bfloat16

Operation = Callable[[], object]


@dataclass(frozen=True)
class Contest:
    """One operation of ours and what it is measured against."""

    name: str
    nbytes: int  # read plus written by ours
    ours: Operation
    references: dict[str, tuple[Operation, float | None]]  # name -> operation, target ratio


def memcpy(traffic_bytes: int) -> Operation:
    """A memcpy that reads and writes `traffic_bytes` in total."""
    nbytes = traffic_bytes // 2
    source, destination = torch.ones(2, nbytes, dtype=torch.uint8)
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def copy() -> None:
        libc.memcpy(destination.data_ptr(), source.data_ptr(), nbytes)

    return copy


def require_equal(name: str, result: Tensor, expected: Tensor) -> None:
    if not torch.equal(result, expected):
        raise SystemExit(f"{name}: the result differs from PyTorch's")


def pack_block(generator: torch.Generator) -> Contest:
    w = 1440
    sizes = [w, w, 3 * w * w, 3 * w, w * w, w, w, w, 4 * w * w, 4 * w, 4 * w * w, w]
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN) * ALIGN
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    flat = torch.zeros(end, dtype=torch.bfloat16)
    bound = CopyPlan.pack(sizes, offsets, torch.float32, torch.bfloat16).bind(tensors, [flat])
    bound.run()
    for tensor, offset in zip(tensors, offsets, strict=True):
        part = flat[offset : offset + tensor.numel()]
        require_equal("pack block", part, tensor.bfloat16())
    nbytes = sum(sizes) * (4 + 2)
    return Contest(
        f"pack {sum(sizes) / 1e6:.1f} M elements of {len(sizes)} tensors, f32 to bf16",
        nbytes,
        bound.run,
        {"memcpy of the same traffic": (memcpy(nbytes), 0.8)},
    )


def pack_small(generator: torch.Generator) -> list[Contest]:
    count, size = 1000, 256
    tensors = [torch.randn(size, generator=generator) for _ in range(count)]
    flat = torch.zeros(count * size)
    views = list(flat.view(count, size).unbind())
    plan = CopyPlan.pack([size] * count, range(0, count * size, size), torch.float32, torch.float32)
    bound = plan.bind(tensors, [flat])
    bound.run()
    require_equal("pack small", flat, torch.cat(tensors))

    def loop() -> None:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)

    def foreach() -> None:
        torch._foreach_copy_(views, tensors)

    nbytes = 2 * 4 * size * count
    return [
        Contest(
            "pack 1,000 tensors of 1 KiB",
            nbytes,
            bound.run,
            {"loop of copy_": (loop, 5.0), "torch._foreach_copy_": (foreach, 1.0)},
        ),
        Contest(
            "the same, tensors checked in each call",
            nbytes,
            lambda: plan.run(tensors, [flat]),
            {"loop of copy_": (loop, None), "torch._foreach_copy_": (foreach, None)},
        ),
    ]


def reduce_sources(num_sources: int, generator: torch.Generator) -> Contest:
    count = 8_000_000
    sources = [torch.randn(count, generator=generator) for _ in range(num_sources)]
    result = torch.empty(count)
    addresses = [source.data_ptr() for source in sources]
    f32 = _C.DType.f32

    def reduce() -> None:
        _C.reduce(result.data_ptr(), f32, 1.0, False, addresses, f32, _C.RedOp.sum, count)
        assert sources  # kept alive as long as their addresses are used

    reduce()
    expected = sources[0].clone()
    for source in sources[1:]:
        expected += source
    require_equal("reduce", result, expected)
    nbytes = (num_sources + 1) * count * 4
    return Contest(
        f"reduce {num_sources} sources of 8 M float32",
        nbytes,
        reduce,
        {"memcpy of the same traffic": (memcpy(nbytes), None)},
    )


def seconds(operation: Operation) -> float:
    start = perf_counter()
    operation()
    return perf_counter() - start


def measure(contest: Contest, rounds: int, report: Report) -> None:
    contenders = [contest.ours, *(operation for operation, _ in contest.references.values())]
    for operation in contenders:
        operation()
    times = [[seconds(operation) for operation in contenders] for _ in range(rounds)]
    ours, *others = (Times(tuple(row[i] for row in times)) for i in range(len(contenders)))
    for (reference, (_, target)), theirs in zip(contest.references.items(), others, strict=True):
        ratios = [r / own for r, own in zip(theirs.samples, ours.samples, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        gb_per_s = contest.nbytes / ours.median / 1e9
        report.row(
            contest.name,
            ours,
            f"{gb_per_s:.1f}",
            reference,
            theirs,
            f"{ratio:.2f} ({low:.2f}-{high:.2f})",
        )
        name = f"{contest.name}, x {reference}"
        report.figures[name] = {
            "median_s": ours.median,
            "reference_median_s": theirs.median,
            "ratio": ratio,
            "quartiles": (low, high),
        }
        if target is not None:
            report.bounds.append(Bound(name, ratio, at_least=target))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="times each contender runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    contests = [pack_block(generator), *pack_small(generator)]
    contests += [reduce_sources(n, generator) for n in (2, 4)]
    report = Report(
        [
            "operation",
            "median (p10-p90)",
            "GB/s",
            "against",
            "median (p10-p90)",
            "ratio (quartiles)",
        ]
    )
    for contest in contests:
        measure(contest, args.rounds, report)
    report.finish(args)


if __name__ == "__main__":
    main()
