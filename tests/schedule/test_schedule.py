"""Schedules, checked by carrying them out (`support.replayed_schedule`), and against brute force.

The one literal plan is written by hand from the FSDP paper (arXiv 2304.11277).
"""

import inspect
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardcomm.schedule.schedule
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import STRATEGIES
from shardcomm.schedule.triggers import END, Action, Phase, Verb
from support.replayed_schedule import Replay, call, post, post_backward, pre, pre_backward, replay

CASES = settings(max_examples=150, deadline=None, print_blob=True)


def chain(num_units):
    return tuple(trigger for unit in range(num_units) for trigger in call(unit))


@st.composite
def orders(draw, max_units=8, repeats=True):
    """Random calls: trees of any shape and flat orders, some units called again, some never."""
    labels = draw(st.permutations(range(max_units)))
    order, open_units, used = [], [], []
    for _ in range(draw(st.integers(1, 10))):
        again = [unit for unit in used if unit not in open_units] if repeats else []
        fresh = [unit for unit in labels if unit not in used]
        if again and (not fresh or draw(st.integers(0, 3)) == 0):
            unit = draw(st.sampled_from(again))
        elif fresh:
            unit = fresh[0]
            used.append(unit)
        else:
            break
        order.append(pre(unit))
        open_units.append(unit)
        while open_units and draw(st.booleans()):
            order.append(post(open_units.pop()))
    order += [post(unit) for unit in reversed(open_units)]
    return tuple(order)


@st.composite
def cases(draw, **kwargs):
    """An order and the arguments to plan it with."""
    order = draw(orders(**kwargs))
    return order, {
        "strategy": draw(st.sampled_from([*STRATEGIES])),
        "prefetch": draw(st.integers(0, 4)),
        "backward_prefetch": draw(st.none() | st.integers(0, 4)),
        "slots": draw(st.none() | st.integers(1, 5)),
        "backward": draw(st.booleans()),
    }


def depths_of(arguments):
    """How far ahead each direction may gather: the backward as the forward, unless it is said."""
    prefetch, back = arguments["prefetch"], arguments["backward_prefetch"]
    return {Phase.PRE_FORWARD: prefetch, Phase.PRE_BACKWARD: prefetch if back is None else back}


@CASES
@given(cases())
def test_any_step_finds_what_it_uses_reduces_each_unit_once_and_leaves_nothing_behind(case):
    order, arguments = case
    done = replay(order, arguments)  # asserts at each trigger that what is in use is there
    called = {unit for _, unit in order}
    assert sorted(done.reduced) == (sorted(called) if arguments["backward"] else [])
    assert not done.slots
    assert not done.unfinished


@CASES
@given(cases(repeats=False))
def test_units_called_once_are_gathered_again_only_if_another_took_their_slot(case):
    order, arguments = case
    done = replay(order, arguments)
    slot_of = done.schedule.slot_of
    for unit in {unit for _, unit in order}:
        times = Counter(gathered for _, gathered in done.gathers)[unit]
        after = order[order.index(post(unit)) :]
        taken = any(
            slot_of[u] == slot_of[unit] and phase is Phase.PRE_FORWARD for phase, u in after
        )
        again = taken and arguments["backward"]
        assert times == (1 + again if done.sharded else 0)


@CASES
@given(cases())
def test_reported_gathers_are_those_that_happen(case):
    order, arguments = case
    done = replay(order, arguments)
    assert done.schedule.gathers().total() == len(done.gathers)
    for unit, times in Counter(unit for _, unit in done.gathers).items():
        assert done.schedule.gathers()[unit] == times
    assert done.schedule.triggers() == tuple(done.step)


@CASES
@given(cases(repeats=False))
def test_units_called_once_go_and_are_reduced_right_after_their_last_use(case):
    order, arguments = case
    schedule = Schedule.plan(order, **arguments)
    for unit in {unit for _, unit in order}:
        last = post_backward(unit) if arguments["backward"] else post(unit)
        verbs = {action.verb for action in schedule.actions[last] if action.unit == unit}
        assert (Verb.RELEASE in verbs) == (arguments["strategy"] != "no_shard")
        assert (Verb.REDUCE in verbs) == arguments["backward"]


@CASES
@given(cases())
def test_planning_is_deterministic(case):
    order, arguments = case
    assert Schedule.plan(order, **arguments) == Schedule.plan(order, **arguments)


@CASES
@given(cases(), orders())
def test_another_order_is_planned_with_the_slots_of_the_first(case, observed):
    order, arguments = case
    every_unit = tuple(trigger for unit in range(8) for trigger in call(unit))
    used = {unit for _, unit in order}
    flat = order + tuple(trigger for trigger in every_unit if trigger.unit not in used)
    slot_of = Schedule.plan(flat, **arguments).slot_of
    again = arguments | {"slots": slot_of}
    try:
        schedule = Schedule.plan(observed, **again)
    except ValueError as error:
        assert "slots" in str(error)  # noqa: PT017 - a refusal is right only if two units collide
        assert any(slot_of[outer] == slot_of[inner] for outer, inner in nested_pairs(observed))
        return
    assert schedule.slot_of == slot_of
    assert not replay(observed, again, schedule).slots


def nested_pairs(order):
    """The pairs (outer, inner) of units that are open at the same time."""
    pairs, open_units = set(), []
    for phase, unit in order:
        if phase is Phase.PRE_FORWARD:
            pairs |= {(outer, unit) for outer in open_units}
            open_units.append(unit)
        else:
            open_units.pop()
    return pairs


@CASES
@given(cases())
def test_units_rotate_over_slots_with_those_that_are_equally_deep_inside_others(case):
    order, arguments = case
    strategy, slots = arguments["strategy"], arguments["slots"]
    schedule = Schedule.plan(order, **arguments)
    slot_of = schedule.slot_of
    assert len(slot_of) == 1 + max(unit for _, unit in order)
    assert set(slot_of) == set(range(schedule.num_slots))
    pairs = nested_pairs(order)
    assert all(slot_of[outer] != slot_of[inner] for outer, inner in pairs)
    rotating = max(depths_of(arguments).values()) + 1 if slots is None else slots
    if strategy not in ("full_shard", "hybrid_shard"):
        rotating = len(slot_of)
    # Units of a depth are those that are left once all that are less deep are taken away.
    left, expected = {unit for _, unit in order}, len(slot_of) - len({unit for _, unit in order})
    while left:
        outermost = {unit for unit in left if not any((outer, unit) in pairs for outer in left)}
        if not outermost:  # two that are each in the other, in different calls
            assert schedule.num_slots == len(slot_of)
            return
        expected += min(rotating, len(outermost))
        left -= outermost
    assert schedule.num_slots == expected


@CASES
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 4))
def test_gathers_of_a_chain(num_units, slots, prefetch):
    def gathers(strategy):
        schedule = Schedule.plan(chain(num_units), strategy, slots=slots, prefetch=prefetch)
        return schedule.gathers().total()

    assert gathers("full_shard") == num_units + max(num_units - slots, 0)
    assert gathers("shard_grad_op") == num_units
    assert gathers("no_shard") == 0


@CASES
@given(st.integers(2, 20), st.integers(1, 6), st.none() | st.integers(0, 6), st.booleans())
def test_a_chain_gathers_ahead_by_the_depth_of_each_direction(num_units, prefetch, back, backward):
    order = chain(num_units)
    schedule = Schedule.plan(order, prefetch=prefetch, backward_prefetch=back, backward=backward)
    done = Replay(schedule, order, backward=backward)
    back = prefetch if back is None else back
    forward = {unit: position for position, unit in reversed(done.gathers)}
    for unit in range(num_units):
        assert done.step[forward[unit]] == pre(max(unit - prefetch, 0))
    again = [(done.step[p], unit) for p, unit in done.gathers if p > len(order)]
    resident = max(prefetch, back) + 1  # the forward's last units, kept in its slots
    if backward:
        assert again == [
            (pre_backward(unit + back), unit) for unit in reversed(range(num_units - resident))
        ]


@CASES
@given(cases(repeats=False))
def test_units_are_gathered_as_early_as_depth_and_slots_allow_and_no_earlier(case):
    """Brute force: at each PRE trigger, of as many next units as the direction looks ahead, those that fit."""
    order, arguments = case
    done = replay(order, arguments)
    depths, slot_of = depths_of(arguments), done.schedule.slot_of
    held = {}  # slot -> unit
    for position, trigger in enumerate(done.step):
        released = [a.slot for a in done.schedule.actions[trigger] if a.verb is Verb.RELEASE]
        held = {slot: unit for slot, unit in held.items() if slot not in released}
        coming = [unit for phase, unit in done.step[position + 1 :] if phase in depths]
        ahead = [*dict.fromkeys(coming)][: depths.get(trigger.phase, 0)]
        expected = []
        for unit in [trigger.unit, *ahead] if trigger.phase in depths else []:
            if done.sharded and slot_of[unit] not in held:
                held[slot_of[unit]] = unit
                expected.append(unit)
        assert [unit for at, unit in done.gathers if at == position] == expected


@CASES
@given(cases())
def test_a_unit_is_waited_for_once_all_gathers_of_its_trigger_are_issued_its_own_first(case):
    """On a CPU the wait blocks the thread that issues: what it issues later leaves the link idle."""
    order, arguments = case
    schedule = Schedule.plan(order, **arguments)
    waiting = set()
    for trigger, actions in schedule.actions.items():
        gathers = [at for at, action in enumerate(actions) if action.verb is Verb.GATHER]
        waits = [at for at, action in enumerate(actions) if action.verb is Verb.WAIT_GATHER]
        assert trigger.unit not in [actions[at].unit for at in gathers[1:]]
        assert [actions[at].unit for at in waits] == [trigger.unit] * len(waits)
        assert all(gather < wait for gather in gathers for wait in waits)
        assert waits or not gathers
        waiting |= {trigger} if waits else set()
    begins = {each for each in schedule.triggers() if each.phase in depths_of(arguments)}
    assert waiting == (set() if arguments["strategy"] == "no_shard" else begins)


def test_three_blocks_and_a_root_are_planned_as_in_the_paper():
    """arXiv 2304.11277, one block ahead, two slots for the three blocks.

    Forward: gather a unit before its computation, issue the next gather before waiting, free it
    after; the root stays, and so do the last units, which the backward needs first. Backward: the
    same from the last unit on; where a unit's gradients are complete, free it and start its
    reduce-scatter, which overlaps with the next unit's computation. Wait for them all at the end.
    """
    root, first, second, third = 0, 1, 2, 3
    slot = {first: 0, second: 1, third: 0, root: 2}

    def gather(unit):
        return Action(Verb.GATHER, unit, slot[unit])

    def wait(unit):
        return Action(Verb.WAIT_GATHER, unit, slot[unit])

    def free(unit):
        return Action(Verb.RELEASE, unit, slot[unit])

    def reduce(unit):
        return Action(Verb.REDUCE, unit, -1)

    def reduced(unit):
        return Action(Verb.WAIT_REDUCE, unit, -1)

    order = call(root, call(first), call(second), call(third))
    schedule = Schedule.plan(order, "full_shard", prefetch=1)

    assert schedule.order == order
    assert schedule.slot_of == (2, 0, 1, 0)
    assert schedule.num_slots == 3
    assert schedule.actions == {
        pre(root): (gather(root), gather(first), wait(root)),
        pre(first): (gather(second), wait(first)),
        post(first): (free(first),),
        pre(second): (gather(third), wait(second)),
        post(second): (),
        pre(third): (wait(third),),
        post(third): (),
        post(root): (),
        pre_backward(root): (wait(root),),
        pre_backward(third): (wait(third),),
        post_backward(third): (free(third), reduce(third)),
        pre_backward(second): (gather(first), wait(second)),
        post_backward(second): (free(second), reduce(second)),
        pre_backward(first): (wait(first),),
        post_backward(first): (free(first), reduced(third), reduce(first)),
        post_backward(root): (free(root), reduced(second), reduce(root)),
        END: (reduced(first), reduced(root)),
    }


def test_a_unit_called_first_and_last_costs_no_gather_more_than_its_slot_requires():
    """A tied embedding: gathered for the first call, again for the last, kept for the backward."""
    embedding = 1
    order = call(0, call(embedding), call(2), call(3), call(4), call(embedding))
    done = Replay(Schedule.plan(order), order)
    assert done.schedule.gathers()[embedding] == 3  # first call, last call, backward of the first
    assert done.reduced.count(embedding) == 1


def test_no_shard_only_reduces():
    schedule = Schedule.plan(call(0, call(1), call(2)), "no_shard")
    verbs = {action.verb for actions in schedule.actions.values() for action in actions}
    assert verbs == {Verb.REDUCE, Verb.ALL_REDUCE, Verb.WAIT_REDUCE}
    assert schedule.num_slots == 3


def test_an_unused_unit_has_a_slot_and_no_actions():
    schedule = Schedule.plan(call(0, call(1), call(3)), slots=range(6))
    assert len(schedule.slot_of) == 6
    units = {action.unit for actions in schedule.actions.values() for action in actions}
    assert units == {0, 1, 3}


def test_the_drawing_at_the_top_of_the_file_is_the_real_one():
    drawing = repr(Schedule.plan(call(0, call(1), call(2), call(3))))
    documentation = inspect.cleandoc(shardcomm.schedule.schedule.__doc__)
    assert all(f"    {line}\n" in documentation for line in drawing.splitlines())
    assert len(drawing.splitlines()) == 1 + 17


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"order": ()}, "order must open and close"),
        ({"order": (pre(0),)}, r"still open: \[0\]"),
        ({"order": (post(0),)}, r"order\[0\] is post_forward\(0\)"),
        ({"order": (pre(0), pre(1), post(0), post(1))}, r"innermost open unit is 1"),
        ({"order": (pre(0), pre(0), post(0), post(0))}, "inside itself"),
        ({"order": (pre_backward(0), post_backward(0))}, r"order\[0\] is pre_backward\(0\)"),
        ({"order": (END,)}, r"order\[0\] is end_of_backward"),
        ({"strategy": "zero_3"}, "strategy is 'zero_3'; .*full_shard"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"backward_prefetch": -1}, "backward_prefetch is -1"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": (0,)}, r"slots is \(0,\); .*3 units"),
        ({"slots": (0, 1, -1)}, r"slots is \(0, 1, -1\)"),
        ({"slots": (0, 0, 1)}, "slots gives unit 0 and unit 1 inside it one slot"),
        ({"slots": (2, 0, 0), "strategy": "no_shard"}, "no_shard each unit needs its own"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changed, message):
    arguments = {"order": call(0, call(1), call(2))} | changed
    with pytest.raises(ValueError, match=message):
        Schedule.plan(**arguments)
