"""A sweep as a picture: tokens a second and rank over the number of ranks, a line for each strategy and prefetch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardcomm.cli.simulate.configurations import Outcome
from shardcomm.files.whole_file import written_whole

_COLORS = {
    "full_shard": "#4477aa",
    "shard_grad_op": "#228833",
    "hybrid_shard": "#aa3377",
    "no_shard": "#ee6677",
}
_DASHES = ("dotted", "dashed", "solid")  # by prefetch


def draw(path: str, found: Sequence[Outcome]) -> None:
    """Draws `found` into an image file; needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    lines: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for each in found:
        plan = each.simulation.plan
        lines[plan.strategy, each.prefetch].append((plan.ranks, each.tokens_per_s))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (strategy, prefetch), points in lines.items():
        axes.plot(
            *zip(*points, strict=True),
            color=_COLORS[strategy],
            linestyle=_DASHES[prefetch],
            marker=".",
            label=f"{strategy}, prefetch {prefetch}",
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({each.simulation.plan.ranks for each in found})
    axes.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("tokens/s/rank")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    with written_whole(path):
        figure.savefig(path, dpi=100)
