"""A memory plan as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcomm.planner.planner import MemoryPlan
    from shardcomm.planner.unit_plan import UnitPlan

_MOST_RANKS = 16
_BAR = 40  # characters of the longest bar


def drawn(plan: MemoryPlan) -> str:
    """`plan` as a table: what a rank holds, and a line for each unit."""
    held = plan.footprint
    of_device = "of the device, " if plan.host_bytes else ""
    in_host = "of the first three" if plan.host_bytes else ""
    rows = [
        ("parameters", held.parameter_bytes, f"of {size(plan.total_parameter_bytes)}"),
        ("gradients", held.gradient_bytes, ""),
        ("optimizer state", plan.optimizer_bytes, plan.optimizer),
        ("slots", held.slot_bytes, _counted(plan.slot_bytes)),
        ("secondary shards", held.secondary_bytes, ""),
        *([("wire", held.wire_bytes, "of gathers in a block format")] if held.wire_bytes else []),
        ("reduce buffer", held.reduce_buffer_bytes, ""),
        ("staging buffers", held.staging_bytes, _counted(plan.staging_bytes)),
        ("offload's staging", held.offload_bytes, ""),
        ("full gradients", plan.full_gradient_bytes, "during backward"),
        ("in host memory", plan.host_bytes, in_host),
        ("peak", plan.peak_bytes, f"{of_device}activations not counted"),
        ("padding, all ranks", held.padding_bytes, ""),
        ("gathered / step", plan.gathered_bytes, ""),
        ("reduced / step", plan.reduced_bytes, ""),
    ]
    copies = f", {plan.replicas} replicas" if plan.strategy == "hybrid_shard" else ""
    alike = len(set(plan.shard_bytes)) == 1
    whose = "each rank" if alike else f"rank {plan.rank}, which holds the most"
    lines = [f"MemoryPlan: {plan.strategy} over {plan.ranks} ranks{copies}; of {whose}:"]
    lines += [f"  {name:<18}{size(n):>11}  {note}".rstrip() for name, n, note in rows]
    if not alike:
        lines += ["", *_rank_lines(plan)]
    return "\n".join([*lines, "", *_unit_lines(plan.units)])


def _rank_lines(plan: MemoryPlan) -> list[str]:
    """How many bytes of parameters each rank holds, as bars. If there are many, the ranks that hold the most."""
    held = sorted(enumerate(plan.shard_bytes), key=lambda entry: -entry[1])
    shown = sorted(held[:_MOST_RANKS])
    most = held[0][1]
    lines = [f"  parameters of the ranks; the most by the mean: {plan.imbalance:.3f}"]
    for rank, nbytes in shown:
        bar = "#" * round(_BAR * nbytes / most)
        lines.append(f"  rank {rank:<4}{size(nbytes):>11}  {bar}".rstrip())
    if len(held) > len(shown):
        lines.append(f"  ... {len(held) - len(shown)} ranks that hold less")
    return lines


def _unit_lines(units: Sequence[UnitPlan]) -> list[str]:
    """A line for each unit, and one line for a run of equal units."""
    table: list[tuple[str, ...]] = [
        ("unit", "parameters", "shard", "full", "padding", "gathers", "gathered", "reduced")
    ]
    for figures, run in groupby(units, key=_figures):
        first, *more = run
        name = f"{first.name} ... {more[-1].name}" if more else first.name
        table.append((name, *figures))
    return aligned(table)


def _figures(unit: UnitPlan) -> tuple[str, ...]:
    return (
        f"{unit.numel:,}",
        size(unit.parameter_bytes),
        size(unit.full_bytes),
        size(unit.padding_bytes),
        str(unit.gathers),
        size(unit.gathered_bytes),
        size(unit.reduce_bytes + unit.all_reduce_bytes),
    )


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1,000: "3.15 MB"."""
    if count < 1000:
        return f"{count:.0f} B"
    power = next((p for p in range(1, 4) if count < 999.995 * 1000**p), 4)
    return f"{count / 1000**power:.2f} {'kMGT'[power - 1]}B"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of `table` as indented lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in table
    ]


def _counted(sizes: Sequence[int]) -> str:
    """Sizes with equal ones counted, as "2 x 3.15 MB + 1.19 MB"."""
    counts = Counter(filter(None, sizes)).items()
    return " + ".join(f"{n} x {size(each)}" if n > 1 else size(each) for each, n in counts)
