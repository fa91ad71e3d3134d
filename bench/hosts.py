"""Collectives and a GPT's step across 2 and 3 hosts of 2 ranks each: shardcomm against plain Gloo.

Hosts are namespaces of this machine (`shardcomm.cluster`), whose links `tc` holds to 1 and 10 Gbit/s in each direction.
float32; sizes are the bytes of all ranks' parts. Plain Gloo is one group of all ranks. The GPT's step is forward and
backward of compare_fsdp2's model, with shardcomm's engine against PyTorch FSDP2 on Gloo. Times are medians of the
slowest rank, and results are checked in the same run. All hosts share this machine's cores, so at 10 Gbit/s it is the
cores that are measured as much as the links.

Theory: of N ranks with P bytes each, L on a host, an all-gather brings N - L parts of P into each host, and a
reduce-scatter as many partial sums; an all-reduce is both. Gloo's rings bring N - 1 parts for an all-gather, and twice
as many for the others. That is payload, which headers and acknowledgements may exceed by 5 %, from 1 MiB on. The kernel
hands packets of up to 64 KiB from host to host, and counts the headers of these; a wire would carry 1,500 bytes at a
time, and 4 % of headers.

Where hosts cannot be made, it says why, and measures nothing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import Bound, Report, Times, arguments
from hosts_rank import GLOO, OPS, OURS, RANKS_A_HOST, SIZES, STEP, part_of

from shardcomm.cluster import Cluster, refusal

HOSTS = (2, 3)
RATES = {"1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
TIME, TIME_FROM = 0.6, 16 << 20  # at most, of Gloo's, and from which size on
BYTES, BYTES_FROM = 1.05, 1 << 20  # at most, of theory's
TIMEOUT_S = 300.0
RANK_PROGRAM = Path(__file__).with_name("hosts_rank.py")

Taken = dict[str, dict[str, Any]]  # what is in a hosts_rank.Measured, by "op/size/peer"


def theory(op: str, size: int, count: int) -> int:
    """The bytes that must come into each host."""
    ranks = count * RANKS_A_HOST
    parts = (ranks - RANKS_A_HOST) * 4 * part_of(size, ranks)
    return 2 * parts if op == "all_reduce" else parts


def taken_on(cluster: Cluster) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "taken.json")
        cluster.run([str(RANK_PROGRAM), str(file)], timeout_s=TIMEOUT_S)
        taken: Taken = json.loads(file.read_text())
        return taken


def add_row(report: Report, count: int, rate: str, op: str, size: int, taken: Taken) -> None:
    name = (
        f"{op} {text_of(size)}, {count} hosts, {rate}" if size else f"{op}, {count} hosts, {rate}"
    )
    times, received = {}, {}
    for peer in (OURS, GLOO):
        measured = taken[f"{op}/{size}/{peer}"]
        times[peer] = Times(tuple(measured["seconds"]))
        # Of the host into which most came.
        received[peer] = max(map(statistics.median, zip(*measured["received"], strict=True)))
    ratio = times[OURS].median / times[GLOO].median
    least = theory(op, size, count)
    if size >= TIME_FROM:
        report.bounds.append(Bound(f"{name}: time / Gloo", ratio, at_most=TIME))
    if size >= BYTES_FROM:
        of_theory = received[OURS] / least
        report.bounds.append(Bound(f"{name}: bytes / theory", of_theory, at_most=BYTES))
    report.figures[name] = {
        peer: {"median_s": times[peer].median, "received_bytes": received[peer], **taken[f"{op}/{size}/{peer}"]}
        for peer in times
    } | {"theory_bytes": least}  # fmt: skip
    report.row(
        count,
        rate,
        op,
        text_of(size) if size else "-",
        times[OURS],
        times[GLOO],
        f"{ratio:.2f}",
        megabytes(least) if size else "-",
        megabytes(received[OURS]),
        megabytes(received[GLOO]),
    )


def megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}" if count < 1e6 else f"{count / 1e6:.1f}"


def text_of(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def main() -> None:
    args = arguments(__doc__).parse_args()
    if why_not := refusal():
        print(why_not)
        return
    report = Report(
        [
            *("hosts", "link", "operation", "size", "shardcomm", "Gloo", "shardcomm / Gloo"),
            *("into a host: theory, MB", "shardcomm, MB", "Gloo, MB"),
        ]
    )
    for count in HOSTS:
        for name, rate in RATES.items():
            taken = taken_on(Cluster(count, RANKS_A_HOST, rate))
            for op in OPS:
                for size in SIZES:
                    add_row(report, count, name, op, size, taken)
            add_row(report, count, name, STEP, 0, taken)
    report.finish(args)


if __name__ == "__main__":
    main()
