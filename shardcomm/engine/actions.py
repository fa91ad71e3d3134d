"""Executes the actions of a schedule: issues and awaits the units' collectives, and tracks what is in each slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

from shardcomm.bucket.offload import Offload
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import FailingTogether
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.triggers import Action, Trigger, Verb
from shardcomm.sharded.sharded_unit import IDLE, ShardedUnit
from shardcomm.sharded.unit_gradients import LOCAL
from shardcomm.stream.streams import AnyEvent, AnyStream
from shardcomm.stream.work import Work
from shardcomm.trace.recording import Trace
from shardcomm.trace.traffic import Traffic

Program = dict[Trigger, tuple[tuple[Callable[[ShardedUnit], None], ShardedUnit], ...]]
"""A schedule that is ready to run: for each trigger with actions, the functions to call and their units."""

_OF_SLOTS = (Verb.GATHER, Verb.WAIT_GATHER, Verb.RELEASE)


class Actions:
    """The actions on `units`. Each is idempotent: a trigger that fires twice, or not at all, does no harm.

    Attributes:
        sync: Whether gradients are reduced; False leaves them where backward put them.
        all_reduces: Whether reduced gradients are averaged over replicas; False puts that off.
        keeps_secondary: Whether gathered parameters are copied to secondary shards: in a forward that a backward
            follows.
        traffic: The bytes that were communicated so far.
        trace: The trace that records the actions; None: they are not recorded.
    """

    def __init__(self, units: Sequence[ShardedUnit], together: FailingTogether) -> None:
        self.sync = True
        self.all_reduces = True
        self.keeps_secondary = False
        self.traffic = Traffic()
        self.trace: Trace | None = None
        self._units = units
        self._together = together
        self._compute = units[0].streams.compute
        self._offloads = {b.offload for unit in units for b, _ in unit.buckets if b.offload}
        self._occupant: dict[int, ShardedUnit] = {}  # of each slot
        self._to_reduce: dict[ShardedUnit, None] = {}  # in the order in which backward came to them
        self._reducing: dict[Communicator, ShardedUnit] = {}  # whose gradients are in its buffer
        users = Counter(unit.full.slot for unit in units if unit.full.slot >= 0)
        for unit in units:
            unit.full.shares_slot = users[unit.full.slot] > 1

    def program(self, schedule: Schedule) -> Program:
        """`schedule`, ready to run."""
        do: dict[Verb, Callable[[ShardedUnit], None]] = {
            Verb.GATHER: self.gather,
            Verb.WAIT_GATHER: self.wait_gather,
            Verb.RELEASE: self.release,
            Verb.REDUCE: self.reduce,
            Verb.ALL_REDUCE: self.all_reduce,
            Verb.WAIT_REDUCE: self.wait_reduce,
        }

        def bound(action: Action) -> tuple[Callable[[ShardedUnit], None], ShardedUnit]:
            return do[action.verb], self._units[action.unit]

        def does(action: Action) -> bool:
            return self._units[action.unit].full.slot >= 0 or action.verb not in _OF_SLOTS

        return {
            trigger: tuple(bound(action) for action in done)
            for trigger, actions in schedule.actions.items()
            if (done := [action for action in _own_first(trigger, actions) if does(action)])
        }

    def occupant(self, unit: ShardedUnit) -> ShardedUnit | None:
        """The unit whose parameters were gathered last into the slot of `unit`."""
        return self._occupant.get(unit.full.slot)

    def gather(self, unit: ShardedUnit) -> None:
        """Issues the gather of `unit`, unless another unit uses its slot."""
        full = unit.full
        if full.gathered:
            return
        occupant = self._occupant.get(full.slot)
        if occupant is not None and occupant is not unit:
            if occupant.state is not IDLE:
                return  # a prefetch can do without; `require` raises where the unit is needed now
            occupant.full.overwritten()
        self._occupant[full.slot] = unit
        nbytes = full.gather_bytes
        with self._issuing("gather", unit, unit.streams.gather, nbytes):
            full.gather(keep=self.keeps_secondary)
        if occupant is unit:  # the gather overwrites its own earlier values
            full.arrive()
        self.traffic.gathered_bytes += nbytes

    def require(self, unit: ShardedUnit) -> None:
        """Makes the parameters of `unit` available to compute with: gathers them now if no schedule did."""
        full = unit.full
        if full.slot >= 0:  # else the shard is the whole unit
            if not full.gathered:
                self.gather(unit)
            if not full.gathered:
                raise RuntimeError(
                    f"unit {unit.name!r} is needed while unit {self._occupant[full.slot].name!r}, which has the same "
                    f"slot {full.slot}, is still in use; call fully_shard with slots={len(self._units)}"
                )
            self.wait_gather(unit)
        if self.trace is not None:
            unit.began = self._compute().record(timed=True)

    def wait_gather(self, unit: ShardedUnit) -> None:
        """Has computation wait for the gather of `unit`."""
        if unit.full.gathers:
            self._finish(unit.full.gathers, "gather", unit)
        unit.full.arrive()

    def release(self, unit: ShardedUnit) -> None:
        """Marks the parameters of `unit` as not gathered: the next use gathers them."""
        unit.full.gathered = False

    def reduce(self, unit: ShardedUnit) -> None:
        """Issues the reduce of `unit` and of units that wait for theirs, and drops their full gradients.

        While a graph that somebody keeps may bring another backward of a unit, the unit's reduce is held back, and the
        reduces of later units queue behind it. So every rank reduces in the same order, whether or not it still has the
        graph.
        """
        if not self.sync or unit.gradients.stage is not LOCAL:
            return
        if unit.gradients.complete and not self._to_reduce:  # as in most steps
            self._reduce(unit)
            return
        self._to_reduce[unit] = None
        self.reduce_waiting()

    def reduce_waiting(self) -> None:
        """Issues the reduces that nothing is waited for any more."""
        while self._to_reduce:
            unit = next(iter(self._to_reduce))
            if not unit.gradients.complete:
                return
            del self._to_reduce[unit]
            self._reduce(unit)
            self.all_reduce(unit)

    def forget_waiting(self) -> None:
        """Drops the reduces that wait, after an exception."""
        self._to_reduce.clear()

    def _reduce(self, unit: ShardedUnit) -> None:
        self.wait_reduce(unit)
        before = self._reducing.get(unit.mesh.shard)
        if before is not None and before.gradients.reduces:
            self._finish(before.gradients.reduces, "reduce", before)
            before.gradients.arrived()
        self._reducing[unit.mesh.shard] = unit
        nbytes = unit.gradients.reduce_bytes
        with self._issuing("reduce", unit, unit.streams.reduce, nbytes):
            unit.gradients.reduce(put_off=not self.all_reduces)
        self.traffic.reduced_bytes += nbytes
        unit.gradients.arrived()

    def all_reduce(self, unit: ShardedUnit) -> None:
        """Issues the all-reduce of the gradients that `reduce` left, if there are any."""
        if not (self.sync and self.all_reduces and unit.gradients.awaits_replicas):
            return
        if self.trace is not None:  # else its span would begin with a wait for the reduce
            unit.streams.replicate.wait(unit.streams.reduce.record())
        nbytes = unit.gradients.all_reduce_bytes
        with self._issuing("all_reduce", unit, unit.streams.replicate, nbytes):
            unit.gradients.all_reduce()
        self.traffic.reduced_bytes += nbytes

    def wait_reduce(self, unit: ShardedUnit) -> None:
        """Has computation wait for the reduces of `unit`."""
        gradients = unit.gradients
        if gradients.reduces or gradients.all_reduces:
            self._finish(gradients.reduces, "reduce", unit)
            self._finish(gradients.all_reduces, "all_reduce", unit)
            gradients.arrived()

    def wait_all(self) -> None:
        """Has computation wait for all collectives that are under way."""
        for unit in self._units:
            if unit.full.gathers:
                self.wait_gather(unit)
            self.wait_reduce(unit)
        self.wait_host()

    def wait_host(self) -> None:
        """Has the host wait until it may read gradients and write shards, where these are in its memory."""
        if self._offloads:
            self._wait(self._offloads, "host", "memory")

    def _finish(self, works: list[Work], what: str, unit: ShardedUnit) -> None:
        if works:
            self._wait(works, what, unit.name)
            works.clear()

    def _wait(self, works: Iterable[Work | Offload], what: str, name: str) -> None:
        timed = self.trace is not None or self.traffic.waits_timed
        compute = self._compute()
        begin = compute.record(timed=True) if timed else None
        with self._together:
            for work in works:
                work.wait()
        if begin is None:
            return
        end = compute.record(timed=True)
        if self.traffic.waits_timed:
            self.traffic.waited(begin, end)
        if self.trace is not None:
            self.trace.add("waiting", f"{what} {name}", begin, end)

    def end_compute(self, unit: ShardedUnit, began: AnyEvent, what: str) -> None:
        """For a trace: the forward or backward of `unit` has ended."""
        if self.trace is not None:
            end = self._compute().record(timed=True)
            self.trace.add("compute", f"{what} {unit.name}", began, end)
        unit.began = None

    def _issuing(
        self, row: str, unit: ShardedUnit, stream: AnyStream, nbytes: int
    ) -> AbstractContextManager[object]:
        """A context in which a collective is put on `stream`: traced, and a CommError in it ends the other groups."""
        if self.trace is None:
            return self._together
        span = ExitStack()
        span.enter_context(self._together)
        span.enter_context(self.trace.span(row, unit.name, stream, nbytes))
        return span


def _own_first(trigger: Trigger, actions: Sequence[Action]) -> Iterator[Action]:
    """`actions`, with a gather of the trigger's own unit before those of units ahead.

    The gather does nothing in a step as planned. In one that deviates, the unit may be missing, and is needed first.
    """
    if any(action.verb is Verb.GATHER for action in actions):
        yield Action(Verb.GATHER, trigger.unit, -1)
    yield from actions
