"""A clock instead of a machine: a rank that computes and waits, and channels on which its collectives go on meanwhile.

    compute     | forward 1 |w| forward 2 | forward 3 |        what `run` is given, one thing after the other
    gather        | 2         | 3       |                      a channel: its collectives queue
    reduce

Threads that wait for their turns on a core have them when the rank waits; see `TURN`.

Between two ends of anything, all that goes on does so at a steady speed, 1 if nothing is in its way. What is left of
each is divided by its speed, and the clock goes on to the first end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardcomm.simulate.cost import NETWORK, NO_LINKS, TURN, Cost
from shardcomm.trace.timeline import Span

_ROUNDING = 1e-12  # of a second that is left


@dataclass(eq=False)
class Collective:
    """A collective of one run.

    Attributes:
        channel: The channel on which it queues, a row of the timeline.
        name: Its unit's name.
        cost: What it costs.
        after: Another collective that must have ended before.
        begin_s: When it began.
        end_s: When it ended; None: it has not.
    """

    channel: str
    name: str
    cost: Cost
    after: Collective | None = None
    begin_s: float | None = field(default=None, init=False)
    end_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._stages = deque(
            {move.link: move.seconds for move in stage} for stage in self.cost.stages
        )

    @property
    def may_begin(self) -> bool:
        """Whether nothing that it waits for still goes on."""
        return self.after is None or self.after.end_s is not None

    @property
    def left_s(self) -> Mapping[str, float]:
        """For each link that is at work on it, the seconds that are left at full speed."""
        return self._stages[0]

    def go_on(self, link: str, seconds: float) -> None:
        """Takes `seconds` from what is left for a link."""
        left_s = self._stages[0][link] - seconds
        if left_s >= _ROUNDING:
            self._stages[0][link] = left_s
        else:
            del self._stages[0][link]

    def next_stage(self) -> bool:
        """Goes on to the next stage, if nothing is left of this one. Returns whether nothing is left at all."""
        if not self._stages[0]:
            self._stages.popleft()
        return not self._stages


@dataclass(frozen=True)
class Compute:
    """The rank computes for `seconds`, if nothing slows it."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Issue:
    """The rank puts a collective on its channel, and goes on."""

    collective: Collective


@dataclass(frozen=True)
class Wait:
    """The rank waits for a collective's end."""

    collective: Collective


Instruction = Compute | Issue | Wait


class Speeds(Protocol):
    """How fast all goes on that does so at once."""

    def __call__(self, computing: bool, links: Sequence[str]) -> tuple[float, Sequence[float]]:
        """The speed of computation, and that of each of `links`, which are at work at once; at most 1."""


def run(instructions: Iterable[Instruction], speeds: Speeds, *, burst_s: float = 0.0) -> list[Span]:
    """Runs `instructions` until they and their collectives have ended; returns what was done when.

    Args:
        instructions: What the rank does.
        speeds: How fast that goes on.
        burst_s: The seconds of its work that a link between hosts does at once, after a pause of as many.
    """
    return _Run(speeds, burst_s).spans_of(instructions)


class _Run:
    def __init__(self, speeds: Speeds, burst_s: float) -> None:
        self._speeds = speeds
        self._burst_s = self._saved_s = burst_s
        self._now_s = 0.0
        self._channels: dict[str, deque[Collective]] = defaultdict(deque)
        self._spans: list[Span] = []

    def spans_of(self, instructions: Iterable[Instruction]) -> list[Span]:
        for instruction in instructions:
            begin_s = self._now_s
            match instruction:
                case Issue(collective):
                    self._channels[collective.channel].append(collective)
                    self._start()
                case Compute(name, seconds):
                    self._compute(seconds)
                    self._spans.append(Span("compute", name, begin_s, self._now_s, 0))
                case Wait(collective):
                    while collective.end_s is None:
                        self._go_on()
                    if self._now_s > begin_s:
                        name = f"{collective.channel} {collective.name}"
                        self._spans.append(Span("waiting", name, begin_s, self._now_s, 0))
        while any(self._channels.values()):
            self._go_on()
        return self._spans

    def _compute(self, seconds: float) -> None:
        while seconds > 0:
            seconds = self._go_on(seconds)

    def _active(self) -> list[Collective]:
        return [queue[0] for queue in self._channels.values() if queue and queue[0].may_begin]

    def _start(self) -> None:
        for each in self._active():
            if each.begin_s is None:
                each.begin_s = self._now_s

    def _go_on(self, computing_s: float = 0.0) -> float:
        """Goes on to the first end; returns what is left of `computing_s` of computation."""
        active = self._active()
        if self._spent(active) or (not computing_s and self._had_turns(active)):
            return computing_s
        at_work = [(each, link) for each in active for link in each.left_s]
        moving = [(each, link) for each, link in at_work if link not in NO_LINKS]
        speed, of_moving = self._speeds(computing_s > 0, [link for _, link in moving])
        speeds = dict.fromkeys(at_work, 1.0) | dict(zip(moving, of_moving, strict=True))
        ends = [each.left_s[link] / its_speed for (each, link), its_speed in speeds.items()]
        if computing_s > 0:
            ends.append(computing_s / speed)
        step_s = min(ends)
        self._now_s += step_s
        if all(link != NETWORK for _, link in moving):
            self._saved_s = min(self._burst_s, self._saved_s + step_s)
        for (each, link), its_speed in speeds.items():
            each.go_on(link, step_s * its_speed)
        self._end_stages(active)
        left_s = computing_s - step_s * speed
        return left_s if left_s > _ROUNDING else 0.0

    def _spent(self, active: list[Collective]) -> bool:
        """Whether links between hosts have now done at once what they saved in a pause."""
        spent = False
        for each in active:
            burst_s = min(self._saved_s, each.left_s.get(NETWORK, 0.0))
            if burst_s > 0:
                each.go_on(NETWORK, burst_s)
                self._saved_s -= burst_s
                spent = True
        self._end_stages(active)
        return spent

    def _had_turns(self, active: list[Collective]) -> bool:
        """Whether threads have got their turns, for which they waited; called where the rank does not compute."""
        waited = [each for each in active if TURN in each.left_s]
        for each in waited:
            each.go_on(TURN, each.left_s[TURN])
        self._end_stages(waited)
        return bool(waited)

    def _end_stages(self, active: list[Collective]) -> None:
        for each in active:
            if each.next_stage():
                self._end(each)
        self._start()

    def _end(self, collective: Collective) -> None:
        collective.end_s = self._now_s
        self._channels[collective.channel].popleft()
        begin_s = collective.begin_s
        assert begin_s is not None
        if self._now_s > begin_s:
            span = Span(
                collective.channel, collective.name, begin_s, self._now_s, collective.cost.nbytes
            )
            self._spans.append(span)
