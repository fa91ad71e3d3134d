"""The table as nccl-tests prints it, so that programs which read nccl-tests' output can read this.

Rows have nccl-tests' columns, and after these three of their own: the bandwidth of a plain copy, and busbw as a share
of it, out of place and in place. All else is in comment lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcomm.cli.bench.options import BenchOptions
from shardcomm.cli.bench.results import Figure, Results, Row, Section

HEADER = [
    "#                                                               out-of-place                       in-place"
    "                    copy  busbw of copy",
    "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw"
    "  #wrong    limit  out-of      in",
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"
    "           (GB/s)   place   place",
]


def preamble(options: BenchOptions, devices: Sequence[str]) -> list[str]:
    """The lines that say what is run, and on what."""
    sizes = options.sizes
    step = f"{sizes.factor}(factor)" if sizes.factor > 1 else f"{sizes.step}(bytes)"
    return [
        f"# nRanks {len(devices)} minBytes {sizes.first} maxBytes {sizes.last} step: {step} warmup iters: "
        f"{options.warmups} iters: {options.iterations} agg iters: {options.aggregate} validation: {options.checks} "
        f"graph: {options.graph_launches}",
        "#",
        "# Using devices",
        *devices,
    ]


def opening(section: Section) -> list[str]:
    """The lines before the rows."""
    return ["#", f"# {section.operation}: {section.transport}, {section.device}", *HEADER]


def lines(section: Section, row: Row) -> list[str]:
    """The lines of a row: the name of its layer, if it has one, and the row."""
    shares = [f"{figure.busbw / row.limit:7.1%}" for figure in row.figures()]
    cells = (
        f"{row.size_bytes:12d}  {row.count:12d}  {section.dtype:>8}  {section.redop:>6}  {section.root:6d}"
        f"{_columns(row.out_of_place)}{_columns(row.in_place)}"
        f"  {row.limit / 1e9:7.2f} {shares[0]} {shares[1] if row.in_place else '    N/A'}"
    )
    return [f"# {row.layer}", cells] if row.layer else [cells]


def closing(section: Section, options: BenchOptions) -> list[str]:
    """The lines after the rows: nccl-tests' sums, then the fit and, with -I, the spreads."""
    wrong = section.wrong
    found = [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {section.mean_busbw / 1e9:g} ",
    ]
    if fit := section.fit:
        bandwidth = f"size / {1e-9 / fit.beta_s:.3g} GB/s" if fit.beta_s else "0"
        found.append(
            f"# Fit, out of place: time = {fit.alpha_s * 1e6:.3g} us + {bandwidth}, "
            f"off by {fit.rms_error:.0%} (root mean square), {fit.worst_error:.0%} at worst"
        )
    if options.statistics:
        found += _spreads(section)
    return found


def ratios(sections: Sequence[Section]) -> list[str]:
    """For each operation, how many times as long as the first transport each other transport takes."""
    found: list[str] = []
    for first in sections:
        others = [s for s in sections if s.operation == first.operation and s is not first]
        if not others or first is not next(s for s in sections if s.operation == first.operation):
            continue
        names = "".join(f"  {other.transport:>21}" for other in others)
        found += [
            "#",
            f"# {first.operation}: times as long as over {first.transport}, out of place and in place",
            f"#       size{names}",
        ]
        for row in first.rows:
            cells = [_times_as_long(other, row) for other in others]
            found.append(f"# {row.size_bytes:10d}{''.join(cells)}")
    return found


def overhead(results: Results) -> str:
    """The line that compares the cost of the loop itself with the smallest time."""
    share = results.overhead_s / results.smallest_time_s
    return (
        f"# Harness: {results.overhead_s * 1e6:.3f} us an operation, {share:.1%} of the smallest time; "
        "taken off all times on a CPU"
    )


def _times_as_long(other: Section, row: Row) -> str:
    same = [r for r in other.rows if (r.layer, r.size_bytes) == (row.layer, row.size_bytes)]
    if not same:
        return f"  {'-':>10} {'-':>10}"
    pairs = zip(same[0].figures(), row.figures(), strict=True)
    cells = [f"{theirs.time_s / ours.time_s:.2f}" for theirs, ours in pairs]
    return f"  {cells[0]:>10} {cells[1] if len(cells) > 1 else 'N/A':>10}"


def _spreads(section: Section) -> list[str]:
    found = [
        "#",
        "# Single iterations, us:",
        "#       size       variant       min       p50       p99       max     cv%",
    ]
    for row in section.rows:
        for name, figure in zip(("out-of-place", "in-place"), row.figures(), strict=False):
            if (spread := figure.spread) is None:
                continue
            times = (spread.min_s, spread.p50_s, spread.p99_s, spread.max_s)
            cells = "".join(f"  {_microseconds(seconds):>8}" for seconds in times)
            found.append(f"# {row.size_bytes:10d}  {name:>12}{cells}  {spread.cv:6.1%}")
    return found


def _columns(figure: Figure | None) -> str:
    if figure is None:
        return "  {:>7}  {:>6}  {:>6}  {:>6}".format(*["N/A"] * 4)
    wrong = "N/A" if figure.wrong is None else f"{figure.wrong:g}"
    algbw, busbw = figure.algbw / 1e9, figure.busbw / 1e9
    return f"  {_microseconds(figure.time_s):>7}  {algbw:6.2f}  {busbw:6.2f}  {wrong:>6}"


def _microseconds(seconds: float) -> str:
    """A time in microseconds, with as many digits as nccl-tests prints."""
    us = seconds * 1e6
    digits = 0 if us >= 10000 else 1 if us >= 100 else 2
    return f"{us:.{digits}f}"
