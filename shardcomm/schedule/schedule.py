"""The schedule: what is gathered, awaited, released and reduced in a step, and when, as data.

A model's hooks fire *triggers*; the schedule says which *actions* each of them sets off.
Strategies, prefetch depths and the number of slots are different tables, not different code.
A root (unit 0) around three blocks (1, 2, 3), ``full_shard``, ``prefetch=1``: the blocks rotate
over slots 0 and 1, the root has slot 2::

    trigger         slot:    0   1   2  actions
    pre_forward(0)          >1   .   0  gather 0, wait_gather 0, gather 1
    pre_forward(1)           1  >2   0  wait_gather 1, gather 2
    post_forward(1)          .  >2   0  release 1
    pre_forward(2)          >3   2   0  wait_gather 2, gather 3
    post_forward(2)         >3   2   0
    pre_forward(3)           3   2   0  wait_gather 3
    post_forward(3)          3   2   0
    post_forward(0)          3   2   0
    pre_backward(0)          3   2   0  wait_gather 0
    pre_backward(3)          3   2   0  wait_gather 3
    post_backward(3)         .   2   0  release 3, reduce 3
    pre_backward(2)         >1   2   0  wait_gather 2, gather 1
    post_backward(2)        >1   .   0  release 2, reduce 2
    pre_backward(1)          1   .   0  wait_gather 1
    post_backward(1)         .   .   0  release 1, wait_reduce 3, reduce 1
    post_backward(0)         .   .   .  release 0, wait_reduce 2, reduce 0
    end_of_backward          .   .   .  wait_reduce 1, wait_reduce 0

The middle columns show what each slot holds once the actions are issued: ``>2`` is unit 2 on its
way, ``2`` the unit ready to use, ``.`` a free slot. Unit 2 travels while 1 computes, and so on.
Blocks 2 and 3 are the last of the forward: no other unit wants their slots before the backward
wants them, so they stay, and only block 1 is gathered twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from shardcomm.schedule.strategy import Strategy

_T = TypeVar("_T")


class Phase(Enum):
    """Where in a step a trigger fires."""

    __hash__ = object.__hash__  # Enum's own is written in Python; a step looks up many triggers

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    END_OF_BACKWARD = "end_of_backward"


class Trigger(NamedTuple):
    """A point of a step that a hook reports; ``unit`` is -1 for END_OF_BACKWARD."""

    phase: Phase
    unit: int

    def __str__(self) -> str:
        return self.phase.value if self.unit < 0 else f"{self.phase.value}({self.unit})"


END = Trigger(Phase.END_OF_BACKWARD, -1)


class Verb(Enum):
    """What an action does to its unit. Gathers and reduces are issued and waited for apart."""

    GATHER = "gather"
    WAIT_GATHER = "wait_gather"
    RELEASE = "release"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    WAIT_REDUCE = "wait_reduce"


class Action(NamedTuple):
    """A verb on a unit; ``slot`` holds the full parameters (-1 where they are not concerned)."""

    verb: Verb
    unit: int
    slot: int

    def __str__(self) -> str:
        return f"{self.verb.value} {self.unit}"


REDUCES_IN_FLIGHT = 2
"""How many reduces may be unfinished at once: one shard is all-reduced while the next is reduce-scattered."""


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of every trigger of a step, in the order in which they are to be issued.

    ``order``: the forward's triggers it was planned for. ``slot_of[unit]``: the slot of the unit's
    full parameters, fixed for the whole run. ``actions``: for each of `triggers`, its actions.

    The contract between a schedule and what executes it:

    - A step starts with every unit released and no reduce unfinished, and ends so.
    - The backward is the forward mirrored, then END_OF_BACKWARD.
    - A unit called twice in a step fires its triggers twice, and the same actions run each time.
      So GATHER of a gathered unit, WAIT_GATHER of one that has arrived and RELEASE of a released
      one do nothing. What reduces is only at triggers that fire once a step.
    - Every PRE trigger waits for its unit. That is where a step which deviates from ``order`` is
      put right: an executor gathers there what is not gathered, into its slot once the unit in it
      is not in use. Elsewhere it skips a GATHER whose slot holds another unit.
    - Where parameters are not sharded, nothing is gathered or released.
    - REDUCE packs the unit's gradients, once the reduce-scatter before has left the reduce buffer,
      and lets go of them; then it reduces. It leaves each rank its shard's gradient, the mean over
      the ranks that shard the model.
      Where several hold the same shard ALL_REDUCE comes right after it: their mean, on a stream of
      its own, beside the next unit's REDUCE. WAIT_REDUCE waits for both.
    """

    order: tuple[Trigger, ...]
    slot_of: tuple[int, ...]
    num_slots: int
    actions: Mapping[Trigger, tuple[Action, ...]]

    @classmethod
    def plan(
        cls,
        order: Sequence[Trigger],
        strategy: Strategy | str | Sequence[Strategy] = "full_shard",
        *,
        prefetch: int | Sequence[int] = 1,
        backward_prefetch: int | Sequence[int] | None = None,
        slots: int | Sequence[int] | None = None,
        pools: Sequence[int] | None = None,
        backward: bool = True,
    ) -> Schedule:
        """Plans a step.

        Args:
            order: the forward's triggers, PRE and POST properly nested. A unit may be called
                several times, not inside itself; one that is missing gets a slot and no actions.
            strategy: one of `shardcomm.STRATEGIES`, or its name; or one for each unit.
            prefetch: how many units are gathered ahead in forward: at each PRE_FORWARD, of so many
                that are needed next, those that are not there and whose slots are free. >= 0, or
                such a number for each unit, at whose triggers it counts.
            backward_prefetch: the same at each PRE_BACKWARD; None: as ``prefetch``.
            slots: how many slots the units rotate over, in first-use order, that are equally deep
                inside others and are resharded after forward (>= 1, default: one more than the
                deepest prefetch); other units have a slot each. Or the slot of every unit: plans
                another order for a run whose slots are given.
            pools: which units have memory of the same kind, by a number for each: slots are
                shared within a pool. None: all.
            backward: False plans evaluation: the forward alone; units are released after their last
                use.

        Raises:
            ValueError: an argument is not as described (the message names it), or ``slots`` gives
                the same slot to two units that are in use at the same time.
        """
        order = tuple(order)
        calls = _calls(order)
        num_units = 1 + max((call.unit for call in calls), default=0)
        strategies = _each(strategy, num_units, Strategy.named)
        depths = {
            Phase.PRE_FORWARD: _each(prefetch, num_units, partial(_at_least, "prefetch", 0)),
            Phase.PRE_BACKWARD: _each(
                prefetch if backward_prefetch is None else backward_prefetch,
                num_units,
                partial(_at_least, "backward_prefetch", 0),
            ),
        }
        if slots is None:
            slots = max(map(max, depths.values())) + 1
        if isinstance(slots, int | float | str):
            _at_least("slots", 1, slots)
            slots = _rotate_slots(calls, num_units, slots, strategies, pools)
        slot_of = tuple(slots)
        _check_slots(slot_of, calls, num_units, strategies)

        step = _Step(order, calls, backward)
        table: dict[Trigger, list[Action]] = {trigger: [] for trigger in step.triggers}
        sharded = {unit for unit in range(num_units) if strategies[unit].shard_params}
        if sharded:
            _plan_gathers(table, step, slot_of, depths, sharded)
        if backward:
            _plan_reduces(table, step, strategies)
        actions = {trigger: tuple(listed) for trigger, listed in table.items()}
        return cls(order, slot_of, 1 + max(slot_of), actions)

    def triggers(self) -> tuple[Trigger, ...]:
        """Returns the triggers of a step in order: forward and, if planned, backward and END."""
        return (*self.order, *_mirrored(self.order), END) if END in self.actions else self.order

    def gathers(self) -> Counter[int]:
        """Returns how often each unit is gathered in a step."""
        return Counter(unit for _, gathered, _ in self._replay() for unit in gathered)

    def _replay(self) -> Iterator[tuple[Trigger, list[int], dict[int, str]]]:
        """Yields each trigger, the units it really gathers, and what each slot then holds."""
        verbs = {action.verb for actions in self.actions.values() for action in actions}
        held: dict[int, str] = {}
        if Verb.GATHER not in verbs:  # full parameters never leave
            held = {slot: str(unit) for unit, slot in enumerate(self.slot_of)}
        for trigger in self.triggers():
            gathered = []
            for verb, unit, slot in self.actions[trigger]:
                if verb is Verb.GATHER and slot not in held:
                    gathered.append(unit)
                    held[slot] = f">{unit}"
                elif verb is Verb.WAIT_GATHER:
                    held[slot] = str(unit)
                elif verb is Verb.RELEASE:
                    held.pop(slot, None)
            yield trigger, gathered, held

    def __repr__(self) -> str:
        """Draws the step, a line per trigger, as at the top of this file."""

        def line(trigger: str, cells: Sequence[object], actions: str) -> str:
            return f"{trigger:<22}{''.join(f'{cell:>4}' for cell in cells)}  {actions}".rstrip()

        slots = range(self.num_slots)
        lines = [line("trigger         slot:", slots, "actions")]
        for trigger, _, held in self._replay():
            actions = ", ".join(map(str, self.actions[trigger]))
            lines.append(line(str(trigger), [held.get(slot, ".") for slot in slots], actions))
        return "\n".join(lines)


class _Use(NamedTuple):
    """A call of a unit, forward or backward: the positions of its PRE and POST in the step."""

    start: int
    end: int
    unit: int


class _Step:
    """The triggers of one step and the uses of units in it."""

    def __init__(self, order: tuple[Trigger, ...], calls: list[_Use], backward: bool) -> None:
        self.triggers = order
        self.uses = calls  # by start
        if backward:
            last = 2 * len(order) - 1
            mirrored = [_Use(last - end, last - start, unit) for start, end, unit in calls]
            self.triggers = (*order, *_mirrored(order), END)
            self.uses = [*calls, *sorted(mirrored)]
        self.positions: dict[Trigger, list[int]] = defaultdict(list)
        for position, trigger in enumerate(self.triggers):
            self.positions[trigger].append(position)

    def once_from(self, position: int, until: int) -> int:
        """Returns the first position in [position, until] whose trigger fires once a step.

        Actions that are right at one occurrence of a trigger and wrong at another move there.
        Without such a position, returns `position`.
        """
        for p in range(position, until + 1):
            if len(self.positions[self.triggers[p]]) == 1:
                return p
        return position


_Table = dict[Trigger, list[Action]]


def _plan_releases(
    step: _Step, slot_of: tuple[int, ...]
) -> tuple[dict[Trigger, set[int]], dict[int, list[range]]]:
    """Says which units each trigger releases, and in which stretches of the step each may come in.

    A unit goes after a use when the next use of its slot is another unit's, or there is none.
    """
    releases: dict[Trigger, set[int]] = defaultdict(set)
    windows: dict[int, list[range]] = defaultdict(list)
    uses_of: dict[int, list[_Use]] = defaultdict(list)
    for use in step.uses:
        uses_of[slot_of[use.unit]].append(use)
    for uses in uses_of.values():
        free_from = 0
        for use, following in zip(uses, [*uses[1:], None], strict=True):
            windows[use.unit].append(range(free_from, use.start))
            free_from = use.start
            if following and following.start < use.end:
                raise ValueError(
                    f"slots gives unit {use.unit} and unit {following.unit} inside it one slot; "
                    "they are in use at once and need two"
                )
            if following is None or following.unit != use.unit:
                # Should this trigger fire several times a step and no later one be fit, the release
                # runs each time. A use has just ended then, so that costs one more gather at most.
                until = following.start if following else len(step.triggers) - 1
                free_from = step.once_from(use.end, until)
                releases[step.triggers[free_from]].add(use.unit)
    return releases, windows


def _plan_gathers(
    table: _Table,
    step: _Step,
    slot_of: tuple[int, ...],
    depths: Mapping[Phase, Sequence[int]],
    sharded: set[int],
) -> None:
    """Adds the releases, and at PRE triggers: gather the unit if it is missing, wait, prefetch."""
    releases, windows = _plan_releases(step, slot_of)
    kept = {unit for unit in range(len(slot_of)) if unit not in sharded}
    for released in releases.values():
        released.difference_update(kept)
    gathered = set(kept)
    missing: set[Trigger] = set()  # PRE triggers that find their unit not gathered
    ahead: dict[Trigger, dict[int, None]] = {}  # ordered sets of units
    index = 0
    for trigger in step.triggers:
        gathered -= releases[trigger]
        if trigger.phase not in depths:
            continue
        if trigger.unit not in gathered:
            missing.add(trigger)
        prefetched = ahead.setdefault(trigger, {})
        gathered |= {trigger.unit, *prefetched}
        index += 1
        needed = dict.fromkeys(use.unit for use in step.uses[index:] if use.unit in sharded)
        for unit in islice(needed, depths[trigger.phase][trigger.unit]):
            # What is added here runs each time the trigger fires, so it has to fit each time.
            if unit not in gathered and all(
                any(p in window for window in windows[unit]) for p in step.positions[trigger]
            ):
                prefetched[unit] = None
        gathered |= prefetched.keys()

    def add(trigger: Trigger, verb: Verb, *units: int) -> None:
        table[trigger] += [Action(verb, unit, slot_of[unit]) for unit in units]

    for trigger in table:
        add(trigger, Verb.RELEASE, *sorted(releases[trigger]))
        if trigger in missing:
            add(trigger, Verb.GATHER, trigger.unit)
        if trigger in ahead:
            if trigger.unit in sharded:
                add(trigger, Verb.WAIT_GATHER, trigger.unit)
            add(trigger, Verb.GATHER, *ahead[trigger])


def _plan_reduces(table: _Table, step: _Step, strategies: Sequence[Strategy]) -> None:
    """Adds each unit's reduce after its last use, when its gradient is complete."""
    last_use = {use.unit: use for use in step.uses}
    reduced: list[int] = []
    for _, end, unit in sorted(last_use.values(), key=lambda use: use.end):
        actions = table[step.triggers[step.once_from(end, len(step.triggers) - 1)]]
        if len(reduced) >= REDUCES_IN_FLIGHT:
            actions.append(Action(Verb.WAIT_REDUCE, reduced[-REDUCES_IN_FLIGHT], -1))
        actions.append(Action(Verb.REDUCE, unit, -1))
        if strategies[unit].replicate:
            actions.append(Action(Verb.ALL_REDUCE, unit, -1))
        reduced.append(unit)
    table[END] += [Action(Verb.WAIT_REDUCE, unit, -1) for unit in reduced[-REDUCES_IN_FLIGHT:]]


_MIRROR = {Phase.PRE_FORWARD: Phase.POST_BACKWARD, Phase.POST_FORWARD: Phase.PRE_BACKWARD}


def _mirrored(order: tuple[Trigger, ...]) -> tuple[Trigger, ...]:
    return tuple(Trigger(_MIRROR[phase], unit) for phase, unit in reversed(order))


def _calls(order: tuple[Trigger, ...]) -> list[_Use]:
    """Checks that `order` is properly nested and returns its calls, by start."""
    calls = []
    open_at: dict[int, int] = {}  # unit -> position, innermost last
    for position, (phase, unit) in enumerate(order):
        here = f"order[{position}] is {Trigger(phase, unit)}"
        if phase not in _MIRROR or unit < 0:
            raise ValueError(f"{here}; only pre_forward and post_forward of units >= 0 belong here")
        if phase is Phase.PRE_FORWARD:
            if unit in open_at:
                raise ValueError(f"{here} inside unit {unit}; a unit cannot run inside itself")
            open_at[unit] = position
            continue
        innermost = next(reversed(open_at), None)
        if unit != innermost:
            raise ValueError(f"{here}, but the innermost open unit is {innermost}; nest the calls")
        calls.append(_Use(open_at.pop(unit), position, unit))
    if open_at or not calls:
        raise ValueError(f"order must open and close one unit or more; still open: {[*open_at]}")
    return sorted(calls)


def _rotate_slots(
    calls: list[_Use],
    num_units: int,
    slots: int,
    strategies: Sequence[Strategy],
    pools: Sequence[int] | None,
) -> tuple[int, ...]:
    """Units of one pool that are equally deep inside others are never in use at once, and rotate over its slots."""
    depths = _depths(calls)
    by_use = dict.fromkeys([*(call.unit for call in calls), *range(num_units)])
    rotations: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for unit in by_use:
        pool = 0 if pools is None else pools[unit]
        rotates = unit in depths and strategies[unit].reshard_after_forward
        rotations[-depths.get(unit, 0), pool, -1 if rotates else unit].append(unit)
    slot_of: dict[int, int] = {}
    first = 0
    for _, units in sorted(rotations.items(), key=lambda entry: entry[0][0]):  # the innermost first
        rotating = min(slots, len(units))
        slot_of |= {unit: first + turn % rotating for turn, unit in enumerate(units)}
        first += rotating
    return tuple(slot_of[unit] for unit in range(num_units))


def _depths(calls: list[_Use]) -> dict[int, int]:
    """How deep each unit is inside others: deeper than all that it is ever called in."""
    inside: dict[int, set[int]] = {call.unit: set() for call in calls}
    around: list[_Use] = []
    for call in calls:
        while around and around[-1].end < call.start:
            around.pop()
        inside[call.unit] |= {each.unit for each in around[-1:]}
        around.append(call)
    depths: dict[int, int] = {}
    try:
        for unit in TopologicalSorter(inside).static_order():
            depths[unit] = 1 + max((depths[outer] for outer in inside[unit]), default=-1)
    except CycleError:  # each in the other, in different calls: none can share a slot
        return {unit: number for number, unit in enumerate(inside)}
    return depths


def _check_slots(
    slot_of: tuple[int, ...], calls: list[_Use], num_units: int, strategies: Sequence[Strategy]
) -> None:
    if len(slot_of) < num_units or min(slot_of) < 0:
        raise ValueError(f"slots is {slot_of}; it must give {num_units} units a slot >= 0 each")
    users = Counter(slot_of)
    for unit, strategy in enumerate(strategies[:num_units]):
        if not strategy.shard_params and users[slot_of[unit]] > 1:
            raise ValueError(f"slots is {slot_of}; with {strategy.name} each unit needs its own")


def _each(given: Any, count: int, checked: Callable[[Any], _T]) -> list[_T]:
    """`given` for each of `count` units, or what there is for each of them."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) < count:
            raise ValueError(f"there are {len(given)} entries for {count} units: {given!r}")
        return [checked(each) for each in given]
    return [checked(given)] * count


def _at_least(name: str, least: int, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value
