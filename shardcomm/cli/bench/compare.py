"""`shardcomm bench --compare A B`: what has changed from one run to another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from shardcomm.cli.bench.files import VARIANTS
from shardcomm.files.json_file import Value, read_json

_NAMES = ("operation", "transport", "device", "dtype", "redop")


class Timing(NamedTuple):
    """A time in seconds. `spread` are the 10 % and 90 % quantiles of single iterations; None if there are none."""

    time_s: float
    spread: tuple[float, float] | None


Figures: TypeAlias = dict[tuple[Any, ...], Timing]
"""The timing of each variant of each operation, by everything that tells it from others."""


class Run(NamedTuple):
    """A run: how many ranks it had, and its figures."""

    ranks: int
    figures: Figures


class Change(NamedTuple):
    """A figure that both runs have.

    Attributes:
        name: The operation, transport, dtype and layer.
        size_bytes: The size.
        variant: "out_of_place" or "in_place".
        time_a: A's time in seconds.
        time_b: B's time in seconds.
        ratio: B's time over A's.
        low: B's 10 % quantile over A's 90 % quantile; nan if a run has no single iterations.
        high: B's 90 % quantile over A's 10 % quantile; nan if a run has no single iterations.
    """

    name: str
    size_bytes: int
    variant: str
    time_a: float
    time_b: float
    ratio: float
    low: float
    high: float


def read(path: str) -> Run:
    """Reads a file that --json wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is something else.
    """
    found = read_json(path, "a result of shardcomm bench --json")
    return Run(found["ranks"].whole(1, 1 << 30), _figures(found))


def compare(a: Run, b: Run) -> list[Change]:
    """Every figure that both runs have, in A's order.

    Raises:
        ValueError: The runs have no figure in common, or different numbers of ranks.
    """
    if a.ranks != b.ranks:
        raise ValueError(
            f"A is of {a.ranks} ranks and B of {b.ranks}; only runs of as many ranks can be compared"
        )
    changes = []
    for key, old in a.figures.items():
        new = b.figures.get(key)
        if new is None:
            continue
        operation, transport, _device, dtype, *_, layer, size_bytes, variant = key
        low = high = math.nan
        if old.spread and new.spread:
            low, high = new.spread[0] / old.spread[1], new.spread[1] / old.spread[0]
        times = old.time_s, new.time_s
        name = f"{operation}: {transport}, {dtype}" + (f", {layer}" if layer else "")
        changes.append(Change(name, size_bytes, variant, *times, times[1] / times[0], low, high))
    if not changes:
        raise ValueError("the two files have no figure in common")
    return changes


def screen(changes: list[Change], tolerance: float) -> str:
    """The changes for people, one block for each operation and transport."""
    lines = []
    name = None
    for change in changes:
        if change.name != name:
            name = change.name
            lines += [
                name,
                "        size       variant      A (us)      B (us)   B / A  (10 % - 90 %)",
            ]
        spread = "" if math.isnan(change.low) else f"  ({change.low:.2f} - {change.high:.2f})"
        verdict = "  SLOWER" if change.ratio > 1 + tolerance else ""
        lines.append(
            f"{change.size_bytes:12d}  {change.variant:>12}  {change.time_a * 1e6:10.2f}  "
            f"{change.time_b * 1e6:10.2f}  {change.ratio:6.3f}{spread}{verdict}"
        )
    slower = sum(change.ratio > 1 + tolerance for change in changes)
    lines.append(f"{slower} of {len(changes)} figures are slower by more than {tolerance:.0%}")
    return "\n".join(lines)


def _figures(run: Value) -> Figures:
    return {
        (*key, variant): _figure(row[variant])
        for section in run["sections"]
        for row, key in _keyed(section)
        for variant in VARIANTS
        if row[variant].raw is not None
    }


def _keyed(section: Value) -> Iterator[tuple[Value, tuple[Any, ...]]]:
    """The rows of a section, each with the key that tells it from others."""
    operation = tuple(section[name].text() for name in _NAMES)
    root = section["root"].whole(-1, 1 << 30)
    for row in section["rows"]:
        layer = None if row["layer"].raw is None else row["layer"].text()
        yield row, (*operation, root, layer, row["size_bytes"].whole(0, 1 << 60))


def _figure(figure: Value) -> Timing:
    spread = figure["spread"]
    return Timing(
        _seconds(figure["time_s"]),
        None if spread.raw is None else (_seconds(spread["p10_s"]), _seconds(spread["p90_s"])),
    )


def _seconds(value: Value) -> float:
    return value.number(1e-12, 1e9)
