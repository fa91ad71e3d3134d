"""The actions of a schedule, done: collectives of units are issued and awaited, and slots change their occupants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shardcomm.schedule import Action, Schedule, Trigger, Verb
from shardcomm.sharded_unit import ShardedUnit, State
from shardcomm.streams import Streams
from shardcomm.traffic import Traffic

Program = dict[Trigger, tuple[tuple[Callable[[ShardedUnit], None], ShardedUnit], ...]]
"""A schedule's actions, each bound to what does it."""


class Actions:
    """What can be done to `units`. Each is idempotent: a trigger that fires twice, or not at all, does no harm.

    Attributes:
        sync: whether gradients are reduced, or left where backward put them.
        traffic: what it amounted to so far.
    """

    def __init__(self, units: Sequence[ShardedUnit], streams: Streams) -> None:
        self.sync = True
        self.traffic = Traffic()
        self._units = units
        self._streams = streams
        self._occupant: dict[int, ShardedUnit] = {}  # of each slot
        users = Counter(unit.slot for unit in units if unit.slot >= 0)
        for unit in units:
            unit.shares_slot = users[unit.slot] > 1

    def program(self, schedule: Schedule) -> Program:
        """`schedule`, ready to run."""
        do: dict[Verb, Callable[[ShardedUnit], None]] = {
            Verb.GATHER: self.gather,
            Verb.WAIT_GATHER: self.wait_gather,
            Verb.RELEASE: self.release,
            Verb.REDUCE: self.reduce,
            Verb.WAIT_REDUCE: self.wait_reduce,
        }

        def bound(action: Action) -> tuple[Callable[[ShardedUnit], None], ShardedUnit]:
            return do[action.verb], self._units[action.unit]

        return {
            trigger: tuple(bound(action) for action in actions)
            for trigger, actions in schedule.actions.items()
        }

    def occupant(self, unit: ShardedUnit) -> ShardedUnit | None:
        """Whose parameters were gathered last into the slot of `unit`."""
        return self._occupant.get(unit.slot)

    def gather(self, unit: ShardedUnit) -> None:
        """Issues the gather, unless the slot is in use by another unit."""
        if unit.gathered:
            return
        if unit.slot >= 0:
            occupant = self._occupant.get(unit.slot)
            if occupant is not None and occupant is not unit:
                if occupant.state is not State.IDLE:
                    return  # only a prefetch can come here; `require` says it where it matters
                occupant.gathered = False
            self._occupant[unit.slot] = unit
        unit.gather()
        self.traffic.gathered_bytes += unit.gather_bytes

    def require(self, unit: ShardedUnit) -> None:
        """The parameters of `unit` are there, gathered now if no schedule did it."""
        if not unit.gathered:
            self.gather(unit)
        if not unit.gathered:
            raise RuntimeError(
                f"unit {unit.name!r} is needed while unit {self._occupant[unit.slot].name!r}, which has the same "
                f"slot {unit.slot}, is still in use; call fully_shard with slots={len(self._units)}"
            )
        self.wait_gather(unit)

    def wait_gather(self, unit: ShardedUnit) -> None:
        """Computation goes on with the parameters of `unit`."""
        if unit.gathers:
            self._wait(unit.gathers)

    def release(self, unit: ShardedUnit) -> None:
        """Whoever needs the parameters next gathers them."""
        unit.gathered = False

    def reduce(self, unit: ShardedUnit) -> None:
        """Issues the reduce, unless another backward of `unit` is to come."""
        if not (self.sync and unit.needs_reduce) or unit.pending_calls:
            return
        self.wait_reduce(unit)
        unit.needs_reduce = False
        self.traffic.reduced_bytes += unit.reduce()

    def wait_reduce(self, unit: ShardedUnit) -> None:
        """Computation goes on with the reduced gradients of `unit`."""
        if unit.reduces:
            self._wait(unit.reduces)

    def wait_all(self) -> None:
        """Nothing is on its way any more."""
        for unit in self._units:
            self.wait_gather(unit)
            self.wait_reduce(unit)

    def _wait(self, works: list[Any]) -> None:
        compute = self._streams.compute()
        begin = compute.record(timed=True)
        for work in works:
            work.wait()
        works.clear()
        self.traffic.waited(begin, compute.record(timed=True))
