"""The results of a run: plain data, from which table, files, plot and comparison are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardcomm.cli.bench.fit import Fit, fit
from shardcomm.cli.bench.timing import Spread


@dataclass(frozen=True)
class Figure:
    """One variant of one operation.

    Attributes:
        time_s: The time of an operation, in seconds.
        algbw: The size over the time, in bytes a second.
        busbw: algbw times the bus factor, in bytes a second.
        wrong: How many elements were wrong; None if nothing was checked.
        spread: The spread over single iterations; None if these were not timed.
    """

    time_s: float
    algbw: float
    busbw: float
    wrong: int | None
    spread: Spread | None


@dataclass(frozen=True)
class Row:
    """A row: a size, or a layer. `limit` is the bandwidth of a plain copy of as many bytes, on all ranks at once."""

    layer: str | None
    size_bytes: int
    count: int
    limit: float
    out_of_place: Figure
    in_place: Figure | None

    def figures(self) -> list[Figure]:
        """The figure out of place and, if there is one, the figure in place."""
        return [self.out_of_place] + ([self.in_place] if self.in_place else [])


@dataclass
class Section:
    """A table: one operation over one transport."""

    operation: str
    transport: str
    device: str
    dtype: str
    redop: str
    root: int
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """How many elements were wrong."""
        return sum(figure.wrong or 0 for row in self.rows for figure in row.figures())

    @property
    def mean_busbw(self) -> float:
        """The mean busbw of all figures, as nccl-tests has it."""
        busbws = [figure.busbw for row in self.rows for figure in row.figures()]
        return sum(busbws) / len(busbws) if busbws else 0.0

    @property
    def fit(self) -> Fit | None:
        """The fit of latency and bandwidth out of place; None for less than three sizes."""
        return fit([(row.size_bytes, row.out_of_place.time_s) for row in self.rows])

    @property
    def fit_in_place(self) -> Fit | None:
        """The same in place, where an all-reduce or a broadcast includes no copy of its input."""
        return fit([(row.size_bytes, row.in_place.time_s) for row in self.rows if row.in_place])


@dataclass
class Results:
    """The results of a run.

    Attributes:
        ranks: How many ranks it had.
        overhead_s: The seconds that the timed loop itself takes for each operation. They were taken off every time on
            a CPU.
        link: The rate of the link between several GPUs, as its maker states it.
        sections: The tables.
        skipped: Transports and operations that were skipped, with the reason.
    """

    ranks: int
    overhead_s: float
    link: str | None
    sections: list[Section] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """How many elements were wrong in all sections."""
        return sum(section.wrong for section in self.sections)

    @property
    def smallest_time_s(self) -> float:
        """The smallest time of all figures; infinite if there is none."""
        rows = (row for section in self.sections for row in section.rows)
        return min((figure.time_s for row in rows for figure in row.figures()), default=math.inf)
