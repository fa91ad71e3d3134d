"""A schedule as a picture: what computes and travels when, and what each slot holds meanwhile.

Durations are not measured: a forward takes 2, a backward 4, and a gather, a reduce and an all-reduce 1.5 each. Gathers
go one after the other, beside the computation, and so do reduces and all-reduces. The picture shows the order, which
the schedule fixes: how far ahead units are gathered, which of them stay, and where computation would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardcomm.files.whole_file import written_whole
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.triggers import Phase, Trigger, Verb

FORWARD, BACKWARD, COLLECTIVE = 2.0, 4.0, 1.5
# How long a unit computes between two of the units that it contains.
BETWEEN = 0.3


class Box(NamedTuple):
    """A box of the picture.

    Attributes:
        lane: "compute", "reduce", "all-reduce", or the number of a slot.
        unit: The unit.
        what: "forward", "backward", "reduce", "all-reduce"; in a slot "gather", and "full" once the unit is there.
        start: When it begins.
        stop: When it ends.
    """

    lane: str
    unit: int
    what: str
    start: float
    stop: float


def boxes_of(schedule: Schedule) -> list[Box]:
    """The boxes of a step, in the order in which they end."""
    step = _PlottedStep(schedule)
    do: dict[Verb, Callable[[int, int], None]] = {
        Verb.GATHER: step.gather,
        Verb.WAIT_GATHER: step.wait_gather,
        Verb.RELEASE: lambda _, slot: step.release(slot),
        Verb.REDUCE: step.reduce,
        Verb.ALL_REDUCE: step.all_reduce,
        Verb.WAIT_REDUCE: step.wait_reduce,
    }
    following = [*schedule.triggers()[1:], None]
    for (trigger, actions, _), then in zip(schedule.replay(), following, strict=True):
        for verb, unit, slot in actions:
            do[verb](unit, slot)
        step.compute(trigger, then)
    for slot in range(schedule.num_slots):
        step.release(slot)
    return sorted(step.boxes, key=lambda box: box.stop)


class _PlottedStep:
    """A step while its boxes are made: the clock of each stream, and what each slot holds."""

    def __init__(self, schedule: Schedule) -> None:
        self.boxes: list[Box] = []
        self.now = 0.0
        self.ends = {Verb.GATHER: 0.0, Verb.REDUCE: 0.0, Verb.ALL_REDUCE: 0.0}  # a stream's last
        self.running: list[int] = []  # units, the innermost last
        self.reduced: dict[int, float] = {}  # when each unit's reduce ends
        self.arrival: dict[int, tuple[int, float]] = {}  # a slot's unit, and when that is there
        self.sharded = bool(schedule.gathers())
        if not self.sharded:
            self.arrival = {slot: (unit, 0.0) for unit, slot in enumerate(schedule.slot_of)}

    def gather(self, unit: int, slot: int) -> None:
        self.arrival[slot] = unit, self.collective(Verb.GATHER, str(slot), unit, self.now)

    def wait_gather(self, _: int, slot: int) -> None:
        self.now = max(self.now, self.arrival[slot][1])

    def reduce(self, unit: int, _: int) -> None:
        # If there is one shard, the reduce is a copy.
        end = self.collective(Verb.REDUCE, "reduce", unit, self.now) if self.sharded else self.now
        self.reduced[unit] = end

    def all_reduce(self, unit: int, _: int) -> None:
        self.reduced[unit] = self.collective(
            Verb.ALL_REDUCE, "all-reduce", unit, self.reduced[unit]
        )

    def wait_reduce(self, unit: int, _: int) -> None:
        self.now = max(self.now, self.reduced[unit])

    def collective(self, verb: Verb, lane: str, unit: int, earliest: float) -> float:
        """Queues a collective behind those of its stream; returns the time of its end."""
        start = max(earliest, self.ends[verb])
        self.ends[verb] = end = start + COLLECTIVE
        self.boxes.append(Box(lane, unit, verb.value.replace("_", "-"), start, end))
        return end

    def release(self, slot: int) -> None:
        if slot in self.arrival:
            unit, since = self.arrival.pop(slot)
            if self.now > since:
                self.boxes.append(Box(str(slot), unit, "full", since, self.now))

    def compute(self, trigger: Trigger, following: Trigger | None) -> None:
        """Computes until the next trigger: the innermost unit that has begun and not ended does so."""
        if following is None:
            return
        begins = trigger.phase in (Phase.PRE_FORWARD, Phase.PRE_BACKWARD)
        if begins:
            self.running.append(trigger.unit)
        else:
            self.running.pop()
        if not self.running:
            return
        forward = trigger.phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)
        whole = FORWARD if forward else BACKWARD
        lasts = whole if begins and following.unit == trigger.unit else BETWEEN
        what = "forward" if forward else "backward"
        self.boxes.append(Box("compute", self.running[-1], what, self.now, self.now + lasts))
        self.now += lasts


_ROOT, _WAITING = "#9e9e9e", "#f3d9d6"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44aa99")
_STYLES: Mapping[str, dict[str, Any]] = {
    "forward": {"alpha": 0.75},
    "backward": {"alpha": 1.0},
    "gather": {"alpha": 0.5, "hatch": "////", "edgecolor": "white"},
    "full": {"alpha": 0.35},
    "reduce": {"alpha": 0.75, "hatch": "....", "edgecolor": "white"},
    "all-reduce": {"alpha": 0.75, "hatch": "xxxx", "edgecolor": "white"},
    "waiting": {"alpha": 1.0},
}


def draw(path: str, schedules: Mapping[str, Schedule]) -> None:
    """Draws `schedules`, each under its name, into an image file; needs matplotlib.

    Args:
        path: The file, which ends in .png, .svg or .pdf.
        schedules: The schedules by their names.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)
    from matplotlib.patches import Patch  # noqa: PLC0415

    drawn = {name: boxes_of(schedule) for name, schedule in schedules.items()}
    lanes = [_lanes(boxes) for boxes in drawn.values()]
    heights = [len(each) for each in lanes]
    size = (10, 1.2 + 0.27 * sum(heights) + 0.25 * len(heights))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(drawn), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for ax, (name, boxes), rows in zip(axes, drawn.items(), lanes, strict=True):
        _draw_one(ax, name, boxes, rows)
    axes[-1].set_xlabel("time (a forward 2, a backward 4, a collective 1.5)")
    there = {box.what for boxes in drawn.values() for box in [*boxes, *_waits(boxes)]}
    shown = [
        Patch(label=what, **{"facecolor": _WAITING if what == "waiting" else _ROOT, **style})
        for what, style in _STYLES.items()
        if what in there
    ]
    figure.legend(
        handles=shown, loc="outside upper right", ncols=len(shown), fontsize=8, frameon=False
    )
    with written_whole(path):
        figure.savefig(path, dpi=100)


def _lanes(boxes: list[Box]) -> list[str]:
    there = {box.lane for box in boxes}
    slots = sorted(filter(str.isdigit, there), key=int)
    return ["compute", *slots, *(lane for lane in ("reduce", "all-reduce") if lane in there)]


def _draw_one(ax: Any, name: str, boxes: list[Box], lanes: list[str]) -> None:
    for lane, unit, what, start, stop in [*boxes, *_waits(boxes)]:
        colour = (
            _WAITING if what == "waiting" else _COLOURS[unit % len(_COLOURS)] if unit else _ROOT
        )
        row = lanes.index(lane)
        style = {"edgecolor": "none", "facecolor": colour, **_STYLES[what]}
        ax.broken_barh([(start, stop - start)], (row - 0.42, 0.84), **style)
        if what != "waiting" and stop - start > 2 * BETWEEN:
            ax.text((start + stop) / 2, row, str(unit), ha="center", va="center", fontsize=8)
    ax.set_yticks(range(len(lanes)), [f"slot {s}" if s.isdigit() else s for s in lanes], fontsize=8)
    ax.margins(x=0.005)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_title(name, loc="left", fontsize=10, fontfamily="monospace")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8, length=0)


def _waits(boxes: list[Box]) -> list[Box]:
    """The times in which computation stands still, before the last box ends."""
    computed = [box for box in boxes if box.lane == "compute"]
    ends = [0.0, *(box.stop for box in computed)]
    starts = [*(box.start for box in computed), max(box.stop for box in boxes)]
    gaps = zip(ends, starts, strict=True)
    return [Box("compute", 0, "waiting", start, stop) for start, stop in gaps if stop > start]
