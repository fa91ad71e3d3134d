"""What happens when, as data: for every trigger of a step, a list of actions.

A model of a root (unit 0) and three blocks (units 1, 2, 3), full_shard, prefetch 1, so 2 slots for the blocks::

    trigger            actions                                       slot 0    slot 1   root's slot
    pre_forward 0      gather 0, wait 0, gather 1                    .         1..      0
    pre_forward 1      wait 1, gather 2                              2..       1        0
    post_forward 1     release 1                                     2         .        0
    pre_forward 2      wait 2, gather 3                              2         3..      0
    pre_forward 3      wait 3                                        2         3        0
    pre_backward 3     (2 and 3 are still there)                     2         3        0
    post_backward 3    release 3, reduce 3                           2         .        0
    pre_backward 2     gather 1                                      2         1..      0
    post_backward 2    release 2, reduce 2                           .         1        0
    ...
    end_of_backward    release 0, reduce 0, wait for the reduces     .         .        .

The last units of the forward stay in their slots, since nobody needs these before their backward: a step gathers
n + (n - slots) blocks and not 2 n. Strategies differ in these lists alone. The engine executes them; whatever costs,
plans or draws a step reads the same lists.

Executing is idempotent: gathering a gathered unit, waiting twice, or releasing a released one does nothing. So a unit
that runs several times in a step has one list for each kind of trigger, which is right each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Phase(Enum):
    """When a trigger fires, relative to a unit."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    END_OF_BACKWARD = "end_of_backward"


class Trigger(NamedTuple):
    """A moment in a step. `unit` is -1 at the end of backward."""

    phase: Phase
    unit: int


class Verb(Enum):
    """What an action does to its unit."""

    GATHER = "gather"
    WAIT_GATHER = "wait_gather"
    RELEASE = "release"
    REDUCE = "reduce"
    WAIT_REDUCE = "wait_reduce"


class Action(NamedTuple):
    """One entry of a schedule. `slot` is where the full parameters are; -1 for reduces."""

    verb: Verb
    unit: int
    slot: int


@dataclass(frozen=True)
class Strategy:
    """What is sharded.

    Attributes:
        shard_params: parameters are sharded between steps, so gathered in each.
        reshard_after_forward: a unit's full parameters give way to the next unit's after its forward, so units share
            slots; otherwise each has its own, and is gathered once a step.
    """

    name: str
    shard_params: bool
    reshard_after_forward: bool


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Strategy("full_shard", shard_params=True, reshard_after_forward=True),  # ZeRO-3
            Strategy("shard_grad_op", shard_params=True, reshard_after_forward=False),  # ZeRO-2
            Strategy("no_shard", shard_params=False, reshard_after_forward=False),  # data parallel
        )
    }
)

END = Trigger(Phase.END_OF_BACKWARD, -1)

_MIRROR = {Phase.PRE_FORWARD: Phase.POST_BACKWARD, Phase.POST_FORWARD: Phase.PRE_BACKWARD}
_USES = (Phase.PRE_FORWARD, Phase.PRE_BACKWARD)


@dataclass(frozen=True)
class Schedule:
    """The actions of a step; made by `Schedule.plan`.

    Attributes:
        order: the forward's triggers it was planned for.
        slot_of: unit -> slot, the same for the whole run, so that a unit's full parameters are the same memory.
        actions: trigger -> what to do then, in order.
    """

    order: tuple[Trigger, ...]
    slot_of: tuple[int, ...]
    num_slots: int
    actions: Mapping[Trigger, tuple[Action, ...]]

    @classmethod
    def plan(
        cls,
        order: Sequence[Trigger],
        strategy: Strategy | str = "full_shard",
        *,
        prefetch: int = 1,
        slots: int | Sequence[int] | None = None,
        trainable: Collection[int] | None = None,
        backward: bool = True,
        reduces_in_flight: int = 2,
    ) -> Schedule:
        """Plans a step whose forward fires `order`; the backward is taken to be its mirror image.

        Args:
            prefetch: how many units ahead are gathered.
            slots: how many slots the units that contain no other share (default: prefetch + 1; a unit around
                others has its own), or the slot of every unit, to keep those of an earlier plan.
            trainable: units whose gradients are reduced (default: all).
            backward: False plans a forward alone, after which everything is released.
            reduces_in_flight: a reduce waits for the one that many before it, which bounds the gradients held.

        Raises:
            ValueError: an argument is out of its range.
        """
        if isinstance(strategy, str):
            if strategy not in STRATEGIES:
                raise ValueError(
                    f"strategy is {strategy!r}; accepted: {', '.join(map(repr, STRATEGIES))}"
                )
            strategy = STRATEGIES[strategy]
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}; it must be at least 0")
        if reduces_in_flight < 1:
            raise ValueError(f"reduces_in_flight is {reduces_in_flight}; it must be at least 1")
        units = {trigger.unit for trigger in order}
        count = max(units, default=-1) + 1
        slot_of = _assign_slots(order, count, strategy, prefetch, slots)
        reduced = units if trainable is None else units & set(trainable)
        planner = _Planner(tuple(order), slot_of, prefetch, reduced, backward, reduces_in_flight)
        return cls(
            order=tuple(order),
            slot_of=slot_of,
            num_slots=max(slot_of, default=-1) + 1,
            actions=MappingProxyType(planner.plan(strategy)),
        )

    def gathers(self) -> int:
        """How many units a step gathers."""
        return sum(action.verb is Verb.GATHER for acts in self.actions.values() for action in acts)

    def __repr__(self) -> str:
        lines = [f"Schedule({self.num_slots} slots, {self.gathers()} gathers a step)"]
        for trigger, actions in self.actions.items():
            moment = trigger.phase.value + ("" if trigger.unit < 0 else f" {trigger.unit}")
            what = ", ".join(
                f"{a.verb.value} {a.unit}" + (f" in slot {a.slot}" if a.verb is Verb.GATHER else "")
                for a in actions
            )
            lines.append(f"  {moment:<18} {what}")
        return "\n".join(lines)


def _assign_slots(
    order: Sequence[Trigger],
    count: int,
    strategy: Strategy,
    prefetch: int,
    slots: int | Sequence[int] | None,
) -> tuple[int, ...]:
    """Units open around others get slots of their own; the others rotate, in order of first use."""
    if slots is not None and not isinstance(slots, int):
        if len(slots) < count or any(slot < 0 for slot in slots):
            raise ValueError(f"slots is {list(slots)}; it must name a slot >= 0 for each of {count} units")
        return tuple(slots)
    if slots is not None and slots < 1:
        raise ValueError(f"slots is {slots}; it must be at least 1")
    outer = _units_around_others(order)
    inner = list(dict.fromkeys(t.unit for t in order if t.unit not in outer))
    inner += [u for u in range(count) if u not in outer and u not in inner]
    shared = min(prefetch + 1 if slots is None else slots, len(inner))
    if not strategy.reshard_after_forward:
        shared = len(inner)
    slot_of = {unit: i % shared for i, unit in enumerate(inner)}
    slot_of.update({unit: shared + i for i, unit in enumerate(sorted(outer))})
    return tuple(slot_of[unit] for unit in range(count))


def _units_around_others(order: Sequence[Trigger]) -> set[int]:
    outer: set[int] = set()
    opened: list[int] = []
    for phase, unit in order:
        if phase is Phase.PRE_FORWARD:
            outer.update(opened)
            opened.append(unit)
        elif not opened or opened.pop() != unit:
            raise ValueError(
                f"order: post_forward of unit {unit} does not close the unit opened last; triggers must nest"
            )
    if opened:
        raise ValueError(f"order: units {opened} are opened and never closed")
    return outer


class _Planner:
    """Walks through a step, knowing the whole of it, and notes what each trigger must do."""

    def __init__(
        self,
        order: tuple[Trigger, ...],
        slot_of: Sequence[int],
        prefetch: int,
        reduced: set[int],
        backward: bool,
        reduces_in_flight: int,
    ) -> None:
        mirrored = tuple(Trigger(_MIRROR[phase], unit) for phase, unit in reversed(order))
        self.step = (*order, *mirrored, END) if backward else order
        self.slot_of = slot_of
        self.prefetch = prefetch
        self.reduced = reduced
        self.reduces_in_flight = reduces_in_flight
        self.actions: dict[Trigger, list[Action]] = {trigger: [] for trigger in self.step}
        self.occupant: dict[int, int] = {}  # slot -> unit whose full parameters are in it
        self.unfinished: list[int] = []  # reduced units not waited for
        self.closes = {  # the last moment of each unit in a step, where its gradients are complete
            trigger.unit: i
            for i, trigger in enumerate(self.step)
            if trigger.phase is (Phase.POST_BACKWARD if backward else Phase.POST_FORWARD)
        }

    def plan(self, strategy: Strategy) -> dict[Trigger, tuple[Action, ...]]:
        for now, trigger in enumerate(self.step):
            if strategy.shard_params:
                self.place_params(now, trigger)
            self.place_reduces(now, trigger)
        return {trigger: tuple(actions) for trigger, actions in self.actions.items()}

    def place_params(self, now: int, trigger: Trigger) -> None:
        phase, unit = trigger
        if phase in _USES:
            if not self.is_gathered(unit):
                self.gather(trigger, unit)
            self.note(trigger, Verb.WAIT_GATHER, unit)
            self.prefetch_after(now, trigger)
        elif phase is Phase.END_OF_BACKWARD:
            for left in sorted(self.occupant.values()):
                self.note(trigger, Verb.RELEASE, left)
            self.occupant.clear()
        elif self.is_gathered(unit) and self.is_done_with(now, unit):
            self.note(trigger, Verb.RELEASE, unit)
            del self.occupant[self.slot_of[unit]]
            if phase is Phase.POST_BACKWARD:
                self.prefetch_after(now, trigger)

    def place_reduces(self, now: int, trigger: Trigger) -> None:
        phase, unit = trigger
        if phase is Phase.END_OF_BACKWARD:
            for left in self.unfinished:
                self.note(trigger, Verb.WAIT_REDUCE, left)
        elif phase is Phase.POST_BACKWARD and self.closes[unit] == now and unit in self.reduced:
            if len(self.unfinished) == self.reduces_in_flight:
                self.note(trigger, Verb.WAIT_REDUCE, self.unfinished.pop(0))
            self.note(trigger, Verb.REDUCE, unit)
            self.unfinished.append(unit)

    def prefetch_after(self, now: int, trigger: Trigger) -> None:
        """Gathers, of the units that are used next, as many as wanted, as far as their slots are free."""
        wanted = self.prefetch
        for unit in self.next_uses(now):
            if wanted == 0:
                return
            if self.is_gathered(unit):
                continue
            if self.slot_of[unit] in self.occupant:
                return  # in order: a later unit must not take the slot that an earlier one waits for
            self.gather(trigger, unit)
            wanted -= 1

    def next_uses(self, now: int) -> Iterator[int]:
        """Units in the order of their next uses after `now`, each once, up to `prefetch` of them that are not there."""
        seen: set[int] = set()
        ahead = 0
        for phase, unit in self.step[now + 1 :]:
            if phase in _USES and unit not in seen:
                seen.add(unit)
                ahead += 1
                yield unit
                if ahead >= self.prefetch:
                    return

    def is_done_with(self, now: int, unit: int) -> bool:
        """Nobody loses: the unit is used no more, or another needs the slot before it is."""
        for phase, other in self.step[now + 1 :]:
            if phase in _USES and self.slot_of[other] == self.slot_of[unit]:
                return other != unit
        return True

    def is_gathered(self, unit: int) -> bool:
        return self.occupant.get(self.slot_of[unit]) == unit

    def gather(self, trigger: Trigger, unit: int) -> None:
        self.occupant[self.slot_of[unit]] = unit
        self.note(trigger, Verb.GATHER, unit)

    def note(self, trigger: Trigger, verb: Verb, unit: int) -> None:
        in_slot = verb in (Verb.GATHER, Verb.WAIT_GATHER, Verb.RELEASE)
        action = Action(verb, unit, self.slot_of[unit] if in_slot else -1)
        if action not in self.actions[trigger]:
            self.actions[trigger].append(action)
