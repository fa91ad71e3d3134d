"""`shardcomm bench --compare A B`: what changed from one run to another."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, TypeAlias

from shardcomm.bench.files import PLACEMENTS

_KEY = ("operation", "transport", "device", "dtype", "redop", "root")


Figures: TypeAlias = dict[tuple[Any, ...], dict[str, Any]]
"""What --json has of an operation in a placement, by all that tells it from others."""


class Run(NamedTuple):
    """A run of so many ranks."""

    ranks: int
    figures: Figures


class Change(NamedTuple):
    """A figure in both runs: `ratio` is B's time over A's, `low` and `high` what it is between their 10 % and 90 %
    quantiles (nan where a run has no single iterations)."""

    name: str
    size_bytes: int
    placement: str
    time_a: float
    time_b: float
    ratio: float
    low: float
    high: float


def read(path: str) -> Run:
    """What --json wrote. Raises OSError, or ValueError if it is something else."""
    with open(path) as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        return Run(found["ranks"], _figures(found))
    except (LookupError, TypeError):
        raise ValueError(f"{path} is no result of shardcomm bench --json") from None


def compare(a: Run, b: Run) -> list[Change]:
    """Every figure that both runs have, in A's order. Raises ValueError if there is none, or they differ in ranks."""
    if a.ranks != b.ranks:
        raise ValueError(
            f"A is of {a.ranks} ranks and B of {b.ranks}; only runs of as many ranks can be compared"
        )
    changes = []
    for key, old in a.figures.items():
        new = b.figures.get(key)
        if new is None:
            continue
        operation, transport, _device, dtype, *_, layer, size_bytes, placement = key
        low = high = math.nan
        if old["spread"] and new["spread"]:
            low = new["spread"]["p10_s"] / old["spread"]["p90_s"]
            high = new["spread"]["p90_s"] / old["spread"]["p10_s"]
        times = old["time_s"], new["time_s"]
        name = f"{operation}: {transport}, {dtype}" + (f", {layer}" if layer else "")
        changes.append(Change(name, size_bytes, placement, *times, times[1] / times[0], low, high))
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
                "        size     placement      A (us)      B (us)   B / A  (10 % - 90 %)",
            ]
        spread = "" if math.isnan(change.low) else f"  ({change.low:.2f} - {change.high:.2f})"
        verdict = "  SLOWER" if change.ratio > 1 + tolerance else ""
        lines.append(
            f"{change.size_bytes:12d}  {change.placement:>12}  {change.time_a * 1e6:10.2f}  "
            f"{change.time_b * 1e6:10.2f}  {change.ratio:6.3f}{spread}{verdict}"
        )
    slower = sum(change.ratio > 1 + tolerance for change in changes)
    lines.append(f"{slower} of {len(changes)} figures are slower by more than {tolerance:.0%}")
    return "\n".join(lines)


def _figures(run: dict[str, Any]) -> Figures:
    return {
        (*(section[name] for name in _KEY), row["layer"], row["size_bytes"], placement): row[
            placement
        ]
        for section in run["sections"]
        for row in section["rows"]
        for placement in PLACEMENTS
        if row[placement] is not None
    }
