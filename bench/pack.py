"""What packing, unpacking, casting and reducing cost, against the limit, a plain memcpy, and PyTorch's copies.

- pack a transformer block's tensors (24.9 M elements) into one buffer, float32 to bfloat16, and unpack them back:
  against a memcpy of the same traffic, bytes read plus bytes written. Target of packing: 0.8 of its bandwidth.
- pack 1,000 tensors of 1 KiB, bound once and run many times, as the engine does it: against a loop of `copy_` (target:
  5 times faster) and `torch._foreach_copy_` (target: faster); both get prepared views. The same with every tensor
  checked again in each call (`CopyPlan.run`) is shown beside it.
- cast 8 M elements of one tensor.
- reduce 2 and 4 float32 sources of 8 M elements: against a memcpy of the same traffic, and `copy_` with `add_`.

One thread. Random inputs; results are compared with PyTorch's. A round times all contenders once, in turn; the ratio is
the median over rounds of reference time / our time, the spread its quartiles. bench_kernels.py runs the same contests.

    python bench/pack.py [--rounds N] [--json FILE] [--check]
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from harness import Bound, Report, Times, arguments
from torch import Tensor

from shardcomm import _C
from shardcomm.copy.plan import CopyPlan

SEED = 0
COUNT = 8_000_000
ALIGN = 64  # elements between the starts of packed tensors, 128 bytes of bfloat16

Operation = Callable[[], object]

COLUMNS = (
    "operation",
    "median (p10-p90)",
    "GB/s",
    "against",
    "median (p10-p90)",
    "ratio (quartiles)",
)


@dataclass(frozen=True)
class Contest:
    """One operation, by ours and by what it is measured against."""

    name: str
    nbytes: int  # read plus written by ours
    ours: Operation
    references: dict[str, Operation]
    wanted: dict[str, float] = field(default_factory=dict)  # reference -> least ratio


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


def copies(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> dict[str, Operation]:
    """PyTorch's two ways."""

    def loop() -> None:
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source)

    def foreach() -> None:
        torch._foreach_copy_(destinations, sources)

    return {"loop of copy_": loop, "_foreach_copy_": foreach}


def block() -> tuple[list[int], list[int], int]:
    """Sizes and offsets of a transformer block's tensors in a flat buffer, and its length."""
    w = 1440
    sizes = [w, w, 3 * w * w, 3 * w, w * w, w, w, w, 4 * w * w, 4 * w, 4 * w * w, w]
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN) * ALIGN
    return sizes, offsets, end


def pack_block(generator: torch.Generator) -> Contest:
    sizes, offsets, end = block()
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    flat = torch.zeros(end, dtype=torch.bfloat16)
    bound = CopyPlan.pack(sizes, offsets, torch.float32, torch.bfloat16).bind(tensors, [flat])
    bound.run()
    parts = [flat[offset : offset + size] for size, offset in zip(sizes, offsets, strict=True)]
    for part, tensor in zip(parts, tensors, strict=True):
        require_equal("pack block", part, tensor.bfloat16())
    nbytes = sum(sizes) * (4 + 2)
    return Contest(
        f"pack {sum(sizes) / 1e6:.1f} M elements of {len(sizes)} tensors, f32 to bf16",
        nbytes,
        bound.run,
        {"memcpy": memcpy(nbytes), **copies(parts, tensors)},
        {"memcpy": 0.8},
    )


def unpack_block(generator: torch.Generator) -> Contest:
    sizes, offsets, end = block()
    flat = torch.randn(end, generator=generator).bfloat16()
    tensors = [torch.zeros(size) for size in sizes]
    bound = CopyPlan.unpack(sizes, offsets, torch.bfloat16, torch.float32).bind([flat], tensors)
    bound.run()
    parts = [flat[offset : offset + size] for size, offset in zip(sizes, offsets, strict=True)]
    for part, tensor in zip(parts, tensors, strict=True):
        require_equal("unpack block", tensor, part.float())
    nbytes = sum(sizes) * (2 + 4)
    return Contest(
        f"unpack {sum(sizes) / 1e6:.1f} M elements into {len(sizes)} tensors, bf16 to f32",
        nbytes,
        bound.run,
        {"memcpy": memcpy(nbytes), **copies(tensors, parts)},
    )


def small(generator: torch.Generator) -> tuple[CopyPlan, list[Tensor], Tensor, list[Tensor]]:
    """The plan that packs 1,000 tensors, these, the flat buffer, and its views."""
    count, size = 1000, 256
    tensors = [torch.randn(size, generator=generator) for _ in range(count)]
    flat = torch.zeros(count * size)
    plan = CopyPlan.pack([size] * count, range(0, count * size, size), torch.float32, torch.float32)
    plan.run(tensors, [flat])
    require_equal("pack small", flat, torch.cat(tensors))
    return plan, tensors, flat, list(flat.view(count, size).unbind())


def pack_small(generator: torch.Generator) -> Contest:
    plan, tensors, flat, views = small(generator)
    return Contest(
        "pack 1,000 tensors of 1 KiB",
        2 * flat.nbytes,
        plan.bind(tensors, [flat]).run,
        copies(views, tensors),
        {"loop of copy_": 5.0, "_foreach_copy_": 1.0},
    )


def pack_small_checked(generator: torch.Generator) -> Contest:
    plan, tensors, flat, views = small(generator)
    return Contest(
        "the same, tensors checked in each call",
        2 * flat.nbytes,
        lambda: plan.run(tensors, [flat]),
        copies(views, tensors),
    )


def cast(generator: torch.Generator) -> Contest:
    source = torch.randn(COUNT, generator=generator)
    target = torch.zeros(COUNT, dtype=torch.bfloat16)
    bound = CopyPlan.pack([COUNT], [0], torch.float32, torch.bfloat16).bind([source], [target])
    bound.run()
    require_equal("cast", target, source.bfloat16())
    nbytes = source.nbytes + target.nbytes
    return Contest(
        "cast 8 M elements of one tensor, f32 to bf16",
        nbytes,
        bound.run,
        {"memcpy": memcpy(nbytes), "copy_": lambda: target.copy_(source)},
    )


def reduce_sources(num_sources: int, generator: torch.Generator) -> Contest:
    sources = [torch.randn(COUNT, generator=generator) for _ in range(num_sources)]
    result, expected = torch.empty(2, COUNT).unbind()
    addresses = [source.data_ptr() for source in sources]
    f32 = _C.DType.f32

    def reduce() -> None:
        _C.reduce(result.data_ptr(), f32, 1.0, False, addresses, f32, _C.RedOp.sum, COUNT)
        assert sources  # kept alive as long as their addresses are used

    def by_torch() -> None:
        expected.copy_(sources[0])
        for source in sources[1:]:
            expected.add_(source)

    sums = sources
    while len(sums) > 1:  # in pairs, which is the order of our sums
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    reduce()
    require_equal("reduce", result, sums[0])
    nbytes = (num_sources + 1) * result.nbytes
    return Contest(
        f"reduce {num_sources} sources of 8 M float32",
        nbytes,
        reduce,
        {"memcpy": memcpy(nbytes), "copy_ and add_": by_torch},
    )


def reduce_2(generator: torch.Generator) -> Contest:
    return reduce_sources(2, generator)


def reduce_4(generator: torch.Generator) -> Contest:
    return reduce_sources(4, generator)


CONTESTS = (pack_block, unpack_block, pack_small, pack_small_checked, cast, reduce_2, reduce_4)


def seconds(operation: Operation) -> float:
    start = perf_counter()
    operation()
    return perf_counter() - start


def measure(contest: Contest, rounds: int, report: Report) -> None:
    contenders = [contest.ours, *contest.references.values()]
    for operation in contenders:
        operation()
    times = [[seconds(operation) for operation in contenders] for _ in range(rounds)]
    ours, *others = (Times(tuple(row[i] for row in times)) for i in range(len(contenders)))
    for reference, theirs in zip(contest.references, others, strict=True):
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
        if reference in contest.wanted:
            report.bounds.append(Bound(name, ratio, at_least=contest.wanted[reference]))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="times each contender runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    report = Report(COLUMNS)
    for contest in CONTESTS:
        measure(contest(generator), args.rounds, report)
    report.finish(args)


if __name__ == "__main__":
    main()
