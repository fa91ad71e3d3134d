"""Makes a schedule: from the order of a forward, who shares which slot, and which actions each trigger sets off.

A use of a unit is the stretch of a step between its PRE and its POST trigger. A slot goes from unit to unit between
uses, so the gather of a unit may be issued in any of the *windows* in which its slot is free for it; prefetching
issues it as early as the depth allows. `Schedule.plan` says what the arguments mean, and draws what comes out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from shardcomm.schedule.strategy import Strategy
from shardcomm.schedule.triggers import END, Action, Phase, Trigger, Verb

_T = TypeVar("_T")

REDUCES_IN_FLIGHT = 2
"""How many reduces may be unfinished at once: one shard is all-reduced while the next is reduce-scattered."""


def plan_step(
    order: Sequence[Trigger],
    strategy: Strategy | str | Sequence[Strategy],
    *,
    prefetch: int | Sequence[int],
    backward_prefetch: int | Sequence[int],
    slots: int | Sequence[int] | None,
    pools: Sequence[int] | None,
    at_end: Collection[int],
    backward: bool,
) -> tuple[tuple[int, ...], Mapping[Trigger, tuple[Action, ...]]]:
    """Returns the slot of each unit, and the actions of each trigger; see `Schedule.plan`."""
    order = tuple(order)
    calls = _calls(order)
    num_units = 1 + max((call.unit for call in calls), default=0)
    strategies = _each(strategy, num_units, Strategy.named)
    depths = {
        Phase.PRE_FORWARD: _each(prefetch, num_units, partial(_at_least, "prefetch", 0)),
        Phase.PRE_BACKWARD: _each(
            backward_prefetch, num_units, partial(_at_least, "backward_prefetch", 0)
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
        _plan_reduces(table, step, strategies, at_end)
    actions = {trigger: tuple(listed) for trigger, listed in table.items()}
    return slot_of, actions


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
            back = [_Use(last - end, last - start, unit) for start, end, unit in calls]
            self.triggers = (*order, *mirrored(order), END)
            self.uses = [*calls, *sorted(back)]
        self.positions: dict[Trigger, list[int]] = defaultdict(list)
        for position, trigger in enumerate(self.triggers):
            self.positions[trigger].append(position)

    def once_from(self, position: int, until: int) -> int:
        """The first position in [position, until] whose trigger fires once a step; `position` if there is none.

        Actions belong to a trigger, and run whenever it fires: those of a unit that is called twice run twice. What is
        right after its last call and wrong after its first therefore moves on, to a trigger that fires once.
        """
        for p in range(position, until + 1):
            if len(self.positions[self.triggers[p]]) == 1:
                return p
        return position


_Table = dict[Trigger, list[Action]]


def _plan_releases(
    step: _Step, slot_of: tuple[int, ...]
) -> tuple[dict[Trigger, set[int]], dict[int, list[range]]]:
    """The units that each trigger releases, and the stretches of the step in which each unit may be gathered.

    A unit is released after a use if the next use of its slot is another unit's, or if there is none.
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
                # If this trigger fires several times a step, and no later one will do, the release runs each time. That
                # costs at most one more gather, since a use has just ended whenever it runs.
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
    """Adds the releases, and at PRE triggers: gather the unit if it is missing, prefetch, wait.

    The wait comes last. On a CPU it holds up the thread that issues, and the link would be idle until the next gather.
    """
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
        needed = _distinct(
            use.unit for use in islice(step.uses, index, None) if use.unit in sharded
        )
        for unit in islice(needed, depths[trigger.phase][trigger.unit]):
            # An action that is added here runs each time the trigger fires, so that it has to fit each time.
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
        add(trigger, Verb.GATHER, *ahead.get(trigger, ()))
        if trigger in ahead and trigger.unit in sharded:
            add(trigger, Verb.WAIT_GATHER, trigger.unit)


def _distinct(units: Iterable[int]) -> Iterator[int]:
    """Each of `units` where it comes first; reads no further than it is asked."""
    seen: set[int] = set()
    for unit in units:
        if unit not in seen:
            seen.add(unit)
            yield unit


def _plan_reduces(
    table: _Table, step: _Step, strategies: Sequence[Strategy], at_end: Collection[int]
) -> None:
    """Adds each unit's reduce after its last use, when its gradient is complete; those of `at_end` at END."""
    last_use = {use.unit: use for use in step.uses}
    reduced: list[int] = []
    end_of_step = len(step.triggers) - 1

    def turn(use: _Use) -> tuple[bool, int]:
        return (True, -use.unit) if use.unit in at_end else (False, use.end)

    for use in sorted(last_use.values(), key=turn):
        unit = use.unit
        at = end_of_step if unit in at_end else step.once_from(use.end, end_of_step)
        actions = table[step.triggers[at]]
        if len(reduced) >= REDUCES_IN_FLIGHT:
            actions.append(Action(Verb.WAIT_REDUCE, reduced[-REDUCES_IN_FLIGHT], -1))
        actions.append(Action(Verb.REDUCE, unit, -1))
        if strategies[unit].replicate:
            actions.append(Action(Verb.ALL_REDUCE, unit, -1))
        reduced.append(unit)
    table[END] += [Action(Verb.WAIT_REDUCE, unit, -1) for unit in reduced[-REDUCES_IN_FLIGHT:]]


_MIRROR = {Phase.PRE_FORWARD: Phase.POST_BACKWARD, Phase.POST_FORWARD: Phase.PRE_BACKWARD}


def mirrored(order: tuple[Trigger, ...]) -> tuple[Trigger, ...]:
    """The triggers of the backward that follows a forward of `order`."""
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
    """The slot of each unit.

    Units of one pool that are equally deep inside others are never in use at once, and rotate over the pool's slots. A
    unit has a slot of its own if it keeps its parameters from forward to backward, while others are in use, or if no
    call of it is known.
    """
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
    """How deep each unit is inside others: deeper than every unit inside which it is ever called."""
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
    except CycleError:  # two units, each inside the other in different calls: no units share slots
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
    """A value for each of `count` units: `given` itself, or the entries of `given` if it is a list."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) < count:
            raise ValueError(f"there are {len(given)} entries for {count} units: {given!r}")
        return [checked(each) for each in given]
    return [checked(given)] * count


def _at_least(name: str, least: int, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value
