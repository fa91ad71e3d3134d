"""What encoding and decoding block formats cost, against the limit, a memcpy of as many bytes.

- encode 16 Mi elements, which are 64 MiB of float32, from float32 and bfloat16 to mxint8 and mxfp8;
- the same with what it has cost (`stats=`), and with stochastic rounding: for these, no target;
- decode them to float32 and bfloat16;
- sum 2 and 4 encoded parts of 16 Mi elements into float32.

Blocks of 32. Each by one thread, and by two, against a memcpy by as many threads that reads and writes as many bytes in
total. Target: 0.9 of its bandwidth. Results are compared with the wire's definition: the decoded elements with the
source, within the bound of their block, and sums with the sums of decoded parts, bit for bit. A round times all
contenders once, in turn; the ratio is the median over rounds of memcpy's time / ours, the spread its quartiles.

"In cache" is the rate of the same loop on operands that stay in the core's caches: what its instructions allow. Where
that is below memcpy's rate, no memory would make one thread reach it.

    python bench/wire.py [--rounds N] [--only TEXT] [--json FILE] [--check]
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from harness import Report, arguments
from pack import COLUMNS, Contest, Operation, measure, require_equal, seconds
from torch import Tensor

from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, decode_sum, encode
from shardcomm.copy.wire_stats import WireStats

SEED = 0
COUNT = 16 << 20
NAMES = ("mxint8", "mxfp8")
WANTED = 0.9
FEW, MORE = 32 << 10, 96 << 10  # elements, which stay in a core's second cache


def aligned(nbytes: int) -> Tensor:
    room = torch.zeros(nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 128
    return room[start : start + nbytes]


def memcpy(traffic_bytes: int, threads: int) -> Operation:
    """A memcpy by `threads` threads that reads and writes `traffic_bytes` in total."""
    each = traffic_bytes // 2 // threads
    source, destination = torch.ones(2, each * threads, dtype=torch.uint8)
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def part(i: int) -> None:
        libc.memcpy(destination.data_ptr() + i * each, source.data_ptr() + i * each, each)

    def copy() -> None:
        others = [pool.submit(part, i) for i in range(1, threads)] if pool else []
        part(0)
        for other in others:
            other.result()

    return copy


def against_memcpy(
    name: str, nbytes: int, threads: int, ours: Operation, wanted: float | None = WANTED
) -> Contest:
    return Contest(
        f"{name}, {threads} thread{'s' if threads > 1 else ''}",
        nbytes,
        ours,
        {"memcpy": memcpy(nbytes, threads)},
        {} if wanted is None else {"memcpy": wanted},
    )


def require_within_bounds(format: BlockFormat, decoded: Tensor, source: Tensor) -> None:
    """Each element within the bound that follows from its block's largest one."""
    largest = source.view(-1, format.block).abs().amax(1, keepdim=True)
    # Half a step is at most half of 2 / 127 of the largest element, and a sixteenth of it for mxfp8.
    relative = {"mxint8": 1 / 127, "mxfp8": 1 / 16}[format.name]
    relative *= 2 if format.rounding == "stochastic" else 1
    errors = (decoded - source).view(-1, format.block).abs()
    if not (errors <= relative * largest).all():
        raise SystemExit(f"{format}: an element differs by more than its block's bound")


def seconds_in_cache(run: Callable[[int], Operation]) -> float:
    """What an element more costs: the seconds of a call aside."""
    few, more = (min(seconds(each) for _ in range(200)) for each in (run(FEW), run(MORE)))
    return (more - few) / (MORE - FEW)


def encoded_parts(format: BlockFormat, source: Tensor, parts: int) -> Tensor:
    """Wire parts one after another, each of `source`."""
    nbytes = format.nbytes(source.numel())
    wires = aligned(parts * nbytes)
    for part in range(parts):
        encode(format, [BlockSegment(source, 0)], wires[part * nbytes :][:nbytes])
    return wires


def encodes(format: BlockFormat, source: Tensor, stats: WireStats | None, count: int) -> Operation:
    wire = aligned(format.nbytes(count))
    return partial(encode, format, [BlockSegment(source[:count], 0)], wire, stats=stats)


def decodes(format: BlockFormat, source: Tensor, target: Tensor, count: int) -> Operation:
    wire = encoded_parts(format, source[:count], 1)
    return partial(decode, format, wire, [BlockSegment(target[:count], 0)])


def sums(format: BlockFormat, source: Tensor, parts: int, target: Tensor, count: int) -> Operation:
    wires = encoded_parts(format, source[:count], parts)
    return partial(decode_sum, format, wires, parts, target[:count])


def contests(
    generator: torch.Generator,
) -> Iterator[tuple[partial[Contest], Callable[[int], Operation]]]:
    """Each contest, and how its operation is made for another number of elements."""
    sources = {torch.float32: torch.randn(COUNT, generator=generator)}
    sources[torch.bfloat16] = sources[torch.float32].bfloat16()
    targets = {dtype: torch.empty_like(source) for dtype, source in sources.items()}
    for name in NAMES:
        nearest = BlockFormat(name)  # type: ignore[arg-type]
        nbytes = nearest.nbytes(COUNT)
        wire = aligned(nbytes)
        stochastic = BlockFormat(name, rounding="stochastic")  # type: ignore[arg-type]
        for dtype, source in sources.items():
            short = str(dtype).removeprefix("torch.")
            for format, stats, what, wanted in (
                (nearest, None, "", WANTED),
                (nearest, WireStats(), " with stats", None),
                (stochastic, None, ", stochastic", None),
            ):
                for threads in (1, 2):
                    run = partial(
                        encode,
                        format,
                        [BlockSegment(source, 0)],
                        wire,
                        stats=stats,
                        threads=threads,
                    )
                    run()
                    back = torch.empty(COUNT)
                    decode(format, wire, [BlockSegment(back, 0)])
                    require_within_bounds(format, back, source.float())
                    contest = partial(
                        against_memcpy,
                        f"encode {short} to {name}{what}",
                        source.nbytes + nbytes,
                        threads,
                        run,
                        wanted,
                    )
                    yield contest, partial(encodes, format, source, stats)
        wires = encoded_parts(nearest, sources[torch.float32], 4)
        wire = wires[:nbytes]
        for dtype, target in targets.items():
            short = str(dtype).removeprefix("torch.")
            for threads in (1, 2):
                run = partial(decode, nearest, wire, [BlockSegment(target, 0)], threads=threads)
                run()
                require_within_bounds(nearest, target.float(), sources[torch.float32])
                contest = partial(
                    against_memcpy,
                    f"decode {name} to {short}",
                    target.nbytes + nbytes,
                    threads,
                    run,
                )
                yield contest, partial(decodes, nearest, sources[torch.float32], target)
        target = targets[torch.float32]
        for parts in (2, 4):
            some = wires[: parts * nbytes]
            decoded = torch.empty(COUNT)
            decode(nearest, wire, [BlockSegment(decoded, 0)])
            total = decoded.clone()
            for _ in range(parts - 1):
                total += decoded
            for threads in (1, 2):
                run = partial(decode_sum, nearest, some, parts, target, threads=threads)
                run()
                require_equal(f"sum of {parts} {name}", target, total)
                contest = partial(
                    against_memcpy,
                    f"sum {parts} parts of {name} to float32",
                    target.nbytes + parts * nbytes,
                    threads,
                    run,
                )
                yield contest, partial(sums, nearest, sources[torch.float32], parts, target)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="times each contender runs")
    parser.add_argument("--only", default="", help="run the operations whose names have this text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report((*COLUMNS, "in cache, GB/s"))
    for contest, run in contests(torch.Generator().manual_seed(SEED)):
        name, nbytes, threads, *_ = contest.args
        if args.only not in f"{name}, {threads} thread":
            continue
        measure(contest(), args.rounds, report)
        in_cache = "-"
        if threads == 1:
            rate = nbytes / COUNT / seconds_in_cache(run)
            report.figures[f"{name}, bytes a second in cache"] = rate
            in_cache = f"{rate / 1e9:.1f}"
        report.rows[-1].append(in_cache)
    report.finish(args)


if __name__ == "__main__":
    main()
