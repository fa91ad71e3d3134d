"""What a run finds: plain data, from which table, files, plot and comparison are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardcomm.cli.bench.fit import Fit, fit
from shardcomm.cli.bench.timing import Spread


@dataclass(frozen=True)
class Figure:
    """One operation in one placement. Bandwidths are in bytes a second; `wrong` is None where nothing was checked."""

    time_s: float
    algbw: float
    busbw: float
    wrong: int | None
    spread: Spread | None


@dataclass(frozen=True)
class Row:
    """A size, or a layer. `limit` is the bandwidth of a plain copy of as many bytes, on all ranks at once."""

    layer: str | None
    size_bytes: int
    count: int
    limit: float
    out_of_place: Figure
    in_place: Figure | None

    def figures(self) -> list[Figure]:
        """Out of place, then in place if there is."""
        return [self.out_of_place] + ([self.in_place] if self.in_place else [])


@dataclass
class Section:
    """A table: an operation over a transport."""

    operation: str
    transport: str
    device: str
    dtype: str
    redop: str
    root: int
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Elements that were not as they should be."""
        return sum(figure.wrong or 0 for row in self.rows for figure in row.figures())

    @property
    def mean_busbw(self) -> float:
        """Of all figures, as nccl-tests has it."""
        busbws = [figure.busbw for row in self.rows for figure in row.figures()]
        return sum(busbws) / len(busbws) if busbws else 0.0

    @property
    def fit(self) -> Fit | None:
        """Latency and bandwidth out of place; None for less than three sizes."""
        return fit([(row.size_bytes, row.out_of_place.time_s) for row in self.rows])

    @property
    def fit_in_place(self) -> Fit | None:
        """The same in place, where an all-reduce or a broadcast has no copy of its input in it."""
        return fit([(row.size_bytes, row.in_place.time_s) for row in self.rows if row.in_place])


@dataclass
class Results:
    """A run.

    Attributes:
        overhead_s: what the timed loop itself takes for each operation; was taken off every time on a CPU.
        link: between several GPUs, as stated by its maker.
        skipped: transports and operations, with the reason.
    """

    ranks: int
    overhead_s: float
    link: str | None
    sections: list[Section] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Over all sections."""
        return sum(section.wrong for section in self.sections)

    @property
    def smallest_time_s(self) -> float:
        """Of all figures; infinite if there is none."""
        rows = (row for section in self.sections for row in section.rows)
        return min((figure.time_s for row in rows for figure in row.figures()), default=math.inf)
