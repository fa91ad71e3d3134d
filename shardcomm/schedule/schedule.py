"""The schedule: what is gathered, awaited, released and reduced in a step, and when, as data.

A model's hooks fire *triggers*, and the schedule says which *actions* each trigger sets off. Another strategy, prefetch
depth or number of slots is another table, not other code.

An example: a root (unit 0) around three blocks (1, 2, 3), ``full_shard``, ``prefetch=1``. The blocks rotate over slots
0 and 1, and the root has slot 2::

    trigger         slot:    0   1   2  actions
    pre_forward(0)          >1   .   0  gather 0, gather 1, wait_gather 0
    pre_forward(1)           1  >2   0  gather 2, wait_gather 1
    post_forward(1)          .  >2   0  release 1
    pre_forward(2)          >3   2   0  gather 3, wait_gather 2
    post_forward(2)         >3   2   0
    pre_forward(3)           3   2   0  wait_gather 3
    post_forward(3)          3   2   0
    post_forward(0)          3   2   0
    pre_backward(0)          3   2   0  wait_gather 0
    pre_backward(3)          3   2   0  wait_gather 3
    post_backward(3)         .   2   0  release 3, reduce 3
    pre_backward(2)         >1   2   0  gather 1, wait_gather 2
    post_backward(2)        >1   .   0  release 2, reduce 2
    pre_backward(1)          1   .   0  wait_gather 1
    post_backward(1)         .   .   0  release 1, wait_reduce 3, reduce 1
    post_backward(0)         .   .   .  release 0, wait_reduce 2, reduce 0
    end_of_backward          .   .   .  wait_reduce 1, wait_reduce 0

The middle columns show what each slot holds once the actions are issued: ``>2`` is unit 2 on its way, ``2`` is the unit
ready to use, and ``.`` is a free slot. Unit 2 travels while unit 1 computes, and so on. A trigger waits after all its
gathers are issued: if unit 1 is still on its way, unit 2 is queued behind unit 1 before computation stands still. Units
2 and 3 are the last of the forward. No other unit needs their slots before their backward, so that they stay, and only
unit 1 is gathered twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardcomm.schedule.planning import mirrored, plan_step
from shardcomm.schedule.strategy import Strategy
from shardcomm.schedule.triggers import END, Action, Trigger, Verb


@dataclass(frozen=True, repr=False)
class Schedule:
    """What is gathered, awaited, released and reduced in a step: for each trigger its actions, in the order of issue.

    `Schedule.plan` makes it. `repr()` draws it, a line for each trigger, as at the top of its file. The engine executes
    it, the planner counts its bytes, the simulator takes its time, and the pictures of `shardcomm plan` show it.

    Attributes:
        order: The forward's triggers for which it was planned.
        slot_of: The slot of each unit's full parameters, fixed for the whole run.
        num_slots: How many slots there are.
        actions: The actions of each trigger in `triggers()`.

    The contract between a schedule and what executes it:

    - A step starts and ends with every unit released and no reduce unfinished.
    - The backward is the forward mirrored, then END_OF_BACKWARD.
    - A unit that is called twice in a step fires its triggers twice, and the same actions run each time. So GATHER of a
      gathered unit, WAIT_GATHER of one that has arrived, and RELEASE of a released one do nothing. Actions that reduce
      are only at triggers that fire once a step.
    - Every PRE trigger waits for its unit, after all gathers that the trigger issues. Where a wait blocks the thread
      that issues, as on a CPU, the next gathers are queued behind the unit's own by then.
    - At a PRE trigger an executor corrects a step that deviates from `order`: it gathers a unit that is not gathered,
      into its slot, once no unit there is in use, and before the units ahead. At other triggers it skips a GATHER whose
      slot holds another unit.
    - Where parameters are not sharded, nothing is gathered or released.
    - REDUCE packs the unit's gradients, once the reduce-scatter before has left the reduce buffer, and drops the full
      ones; then it reduces. It leaves each rank its shard's gradient, the mean over the ranks that shard the model.
      Where several ranks hold the same shard, ALL_REDUCE comes right after it and takes the mean over these, on a
      stream of its own, beside the next unit's REDUCE. WAIT_REDUCE waits for both.

    Example:
        ```python
        import shardcomm
        from shardcomm import Phase, Trigger

        blocks = [Trigger(phase, u) for u in (1, 2, 3) for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
        order = [Trigger(Phase.PRE_FORWARD, 0), *blocks, Trigger(Phase.POST_FORWARD, 0)]
        schedule = shardcomm.Schedule.plan(order, "full_shard", prefetch=1)
        print(schedule)
        assert schedule.gathers()[1] == 2  # once in forward, and once in backward
        ```
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
        at_end: Collection[int] = (),
        backward: bool = True,
    ) -> Schedule:
        """Plans a step.

        Args:
            order: The forward's triggers, PRE and POST properly nested. A unit may be called several times, but not
                inside itself. A unit that is missing gets a slot and no actions.
            strategy: One of [`STRATEGIES`][shardcomm.STRATEGIES], or its name; or one for each unit.
            prefetch: How many units are gathered ahead in forward, at least 0; or such a number for each unit, which
                counts at that unit's triggers. At each PRE_FORWARD this many of the units that are needed next are
                looked at, and those are gathered that are not there and whose slots are free.
            backward_prefetch: The same at each PRE_BACKWARD. None: as `prefetch`.
            slots: A number of slots, at least 1: units that are equally deep inside others, and are resharded after
                forward, rotate over so many slots, in the order of first use; other units have a slot each. Or the
                slot of every unit, to plan another order for a run whose slots are given. None: one more than the
                deepest prefetch.
            pools: Which units have memory of the same kind, as a number for each unit: slots are shared within a pool.
                None: all units are in one pool.
            at_end: Units that are reduced when backward has ended, the last unit first, and not after their last use:
                those to which backward comes on some of their ranks alone.
            backward: Whether the step has a backward. False plans evaluation: the forward alone, with units released
                after their last use.

        Returns:
            The schedule: for each trigger of the step the actions that it fires.

        Raises:
            ValueError: An argument is not as described (the message names it), or `slots` gives the same slot to two
                units that are in use at the same time.
        """
        slot_of, actions = plan_step(
            order,
            strategy,
            prefetch=prefetch,
            backward_prefetch=prefetch if backward_prefetch is None else backward_prefetch,
            slots=slots,
            pools=pools,
            at_end=at_end,
            backward=backward,
        )
        return cls(tuple(order), slot_of, 1 + max(slot_of), actions)

    def to_json(self) -> str:
        """The schedule as text that programs in other languages read, `shc_schedule_parse` of the C library for one.

        Returns:
            A JSON object of `shardcomm_schedule` (1, the version of this form), `num_slots`, `slot_of`, and `triggers`:
            for each of `triggers()` its `phase`, its `unit` (-1 at the end of backward) and its `actions`, each as
            [verb, unit, slot].

        Example:
            ```python
            import json, shardcomm
            from shardcomm import Phase, Trigger

            order = [Trigger(Phase.PRE_FORWARD, 0), Trigger(Phase.POST_FORWARD, 0)]
            schedule = shardcomm.Schedule.plan(order)
            first = json.loads(schedule.to_json())["triggers"][0]
            assert first["actions"] == [["gather", 0, 0], ["wait_gather", 0, 0]]
            ```
        """
        triggers = [
            {
                "phase": trigger.phase.value,
                "unit": trigger.unit,
                "actions": [(verb.value, unit, slot) for verb, unit, slot in self.actions[trigger]],
            }
            for trigger in dict.fromkeys(self.triggers())
        ]
        return json.dumps(
            {
                "shardcomm_schedule": 1,
                "num_slots": self.num_slots,
                "slot_of": self.slot_of,
                "triggers": triggers,
            }
        )

    def triggers(self) -> tuple[Trigger, ...]:
        """The triggers of a step in order: those of the forward and, if it was planned, of the backward and END."""
        return (*self.order, *mirrored(self.order), END) if END in self.actions else self.order

    def gathers(self) -> Counter[int]:
        """How often each unit is gathered in a step.

        Returns:
            The number of gathers by the unit's number.
        """
        return Counter(
            unit
            for _, actions, _ in self.replay()
            for verb, unit, _ in actions
            if verb is Verb.GATHER
        )

    def replay(self) -> Iterator[tuple[Trigger, list[Action], dict[int, str]]]:
        """Goes through the step for those who draw or simulate it, and keeps account of the slots, as the engine does.

        Yields:
            Each trigger; its actions, but for a GATHER of what is gathered already; and what each slot then holds.
        """
        verbs = {action.verb for actions in self.actions.values() for action in actions}
        held: dict[int, str] = {}
        if Verb.GATHER not in verbs:  # full parameters never leave
            held = {slot: str(unit) for unit, slot in enumerate(self.slot_of)}
        for trigger in self.triggers():
            done = []
            for action in self.actions[trigger]:
                verb, unit, slot = action
                if verb is Verb.GATHER:
                    if slot in held:
                        continue
                    held[slot] = f">{unit}"
                elif verb is Verb.WAIT_GATHER:
                    held[slot] = str(unit)
                elif verb is Verb.RELEASE:
                    held.pop(slot, None)
                done.append(action)
            yield trigger, done, held

    def __repr__(self) -> str:
        """Draws the step, a line per trigger, as at the top of this file."""

        def line(trigger: str, cells: Sequence[object], actions: str) -> str:
            return f"{trigger:<22}{''.join(f'{cell:>4}' for cell in cells)}  {actions}".rstrip()

        slots = range(self.num_slots)
        lines = [line("trigger         slot:", slots, "actions")]
        for trigger, _, held in self.replay():
            actions = ", ".join(map(str, self.actions[trigger]))
            lines.append(line(str(trigger), [held.get(slot, ".") for slot in slots], actions))
        return "\n".join(lines)
