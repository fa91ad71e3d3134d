"""Reads what nccl-tests prints, written from its documentation and sample outputs, not from shardcomm's code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ROW = re.compile(
    r"^ +(?P<size>\d+) +(?P<count>\d+) +(?P<type>\w+) +(?P<redop>\w+) +(?P<root>-?\d+)"
    r" +(?P<out>\S+ +\S+ +\S+ +\S+) +(?P<in>\S+ +\S+ +\S+ +\S+)"
)


@dataclass
class Measured:
    """Four columns of one placement: microseconds, GB/s, GB/s, and wrong elements."""

    time: float
    algbw: float
    busbw: float
    wrong: float

    @classmethod
    def read(cls, text: str) -> Measured | None:
        cells = text.split()
        return None if cells[0] == "N/A" else cls(*map(float, cells))


@dataclass
class Line:
    size: int
    count: int
    type: str
    redop: str
    root: int
    out_of_place: Measured | None
    in_place: Measured | None


@dataclass
class Table:
    rows: list[Line] = field(default_factory=list)
    out_of_bounds: int = -1
    verdict: str = ""
    mean_busbw: float = -1.0


def tables(output: str) -> list[Table]:
    """One table for each header, up to its average."""
    found: list[Table] = []
    for line in output.splitlines():
        if re.match(
            r"#\s+size\s+count\s+type\s+redop\s+root(\s+time\s+algbw\s+busbw\s+#wrong){2}", line
        ):
            found.append(Table())
        elif match := ROW.match(line):
            found[-1].rows.append(
                Line(
                    int(match["size"]),
                    int(match["count"]),
                    match["type"],
                    match["redop"],
                    int(match["root"]),
                    Measured.read(match["out"]),
                    Measured.read(match["in"]),
                )
            )
        elif match := re.match(r"# Out of bounds values : (\d+) (OK|FAILED)$", line):
            found[-1].out_of_bounds, found[-1].verdict = int(match[1]), match[2]
        elif match := re.match(r"# Avg bus bandwidth +: ([\d.e+-]+)", line):
            found[-1].mean_busbw = float(match[1])
        else:
            assert line.startswith("#"), f"neither a row nor a comment: {line}"
    return found
