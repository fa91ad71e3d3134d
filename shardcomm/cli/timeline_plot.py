"""A timeline as a picture: a lane for each row of a rank, with exposed communication marked and summed.

rank 0   compute   [ forward blocks.0 ]#####[ forward blocks.1 ]      ####: computation waits
         gather    [ blocks.1             ]
         reduce
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardcomm.files.whole_file import written_whole
from shardcomm.trace.timeline import COMMUNICATION, RankTimeline, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "compute": "#9db7d5",
    "gather": "#8fc49b",
    "reduce": "#e8b46c",
    "all_reduce": "#c9a0dc",
    "waiting": "#d1495b",
}
WIDTH_INCHES = 12.0
LANE_INCHES = 0.32
CHAR_FRACTION = 0.0062  # a letter of a label, as a fraction of the picture's width


def draw(timeline: Timeline, path: str) -> None:
    """Draws all of `timeline` into an image file, of the kind that `path` ends in; needs matplotlib.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    lanes = _lanes(timeline)
    figure = Figure(
        figsize=(WIDTH_INCHES, 1.1 + LANE_INCHES * (len(lanes) + 1) * len(timeline.ranks)),
        layout="constrained",
    )
    axes = figure.add_subplot()
    everything = [span for each in timeline.ranks for span in each.spans]
    begin_s = min(span.begin_s for span in everything)
    duration_s = max(span.end_s for span in everything) - begin_s
    ticks: dict[float, str] = {}
    for place, each in enumerate(timeline.ranks):
        top = place * (len(lanes) + 1)
        lane_of = {row: top + lane for lane, row in enumerate(lanes)}
        ticks |= {lane: f"rank {each.rank}  {row}" for row, lane in lane_of.items()}
        _draw_rank(axes, each, lane_of, begin_s, duration_s)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(len(timeline.ranks) * (len(lanes) + 1) - 0.9, -0.6)
    axes.set_xlim(0, duration_s * 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    steps = timeline.steps()
    axes.set_title(
        f"{steps[0] if steps else 'whole trace'}: computation waits for communication (red): "
        + _exposed(timeline),
        fontsize="medium",
        loc="left",
    )
    with written_whole(path):
        figure.savefig(path, dpi=110)


def _lanes(timeline: Timeline) -> list[str]:
    """The rows that are not empty. Waiting is drawn in computation's row."""
    there = {span.row for each in timeline.ranks for span in each.spans}
    return [row for row in ("compute", *COMMUNICATION) if row in there | {"compute"}]


def _exposed(timeline: Timeline) -> str:
    figures = timeline.figures()
    most = max(figures, key=lambda of: of.exposed_s)
    rank = f", most on rank {most.rank}" if len(figures) > 1 else ""
    share = most.exposed_s / most.total_s if most.total_s else 0.0
    return f"{most.exposed_s * 1e3:.1f} of {most.total_s * 1e3:.1f} ms ({share:.1%}){rank}"


def _draw_rank(
    axes: Axes, each: RankTimeline, lane_of: dict[str, int], begin_s: float, duration_s: float
) -> None:
    def box(span: Span, lane: int, **look: Any) -> float:
        """Draws a box; returns its width as a fraction of the picture's."""
        left, width = (span.begin_s - begin_s) * 1e3, (span.end_s - span.begin_s) * 1e3
        axes.broken_barh([(left, width)], (lane - 0.4, 0.8), **look)
        return width / (duration_s * 1e3)

    # The root's computation contains that of the other units. Boxes that come later lie on top.
    spans = sorted(each.spans, key=lambda span: span.begin_s)
    for span in spans:
        if span.row in lane_of:
            lane = lane_of[span.row]
            width = box(span, lane, color=COLORS[span.row], edgecolor="white", linewidth=0.5)
            name = _short(span.name)
            if width > len(name) * CHAR_FRACTION and not name.endswith("(root)"):
                center = ((span.begin_s + span.end_s) / 2 - begin_s) * 1e3
                axes.text(center, lane, name, ha="center", va="center", fontsize=7)
    for span in spans:
        if span.row == "waiting":
            box(span, lane_of["compute"], color=COLORS["waiting"], linewidth=0.8)


def _short(name: str) -> str:
    """A short form of a box's name that still tells units apart: "forward blocks.3" becomes "fwd 3"."""
    what, _, unit = name.rpartition(" ")
    last = unit.rpartition(".")[2]
    return f"{ {'forward': 'fwd', 'backward': 'bwd'}.get(what, what) } {last}".strip()
