"""The actions of a schedule, done: collectives of units are issued and awaited, and slots change their occupants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

from shardcomm.bucket.offload import Offload
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import FailingTogether
from shardcomm.schedule.schedule import Action, Schedule, Trigger, Verb
from shardcomm.sharded.sharded_unit import IDLE, ShardedUnit
from shardcomm.stream.streams import Event, Stream
from shardcomm.stream.work import Work
from shardcomm.trace.recording import Trace
from shardcomm.trace.traffic import Traffic

Program = dict[Trigger, tuple[tuple[Callable[[ShardedUnit], None], ShardedUnit], ...]]
"""A schedule's actions, each bound to what does it; of triggers that have any."""

_OF_SLOTS = (Verb.GATHER, Verb.WAIT_GATHER, Verb.RELEASE)


class Actions:
    """What can be done to `units`. Each is idempotent: a trigger that fires twice, or not at all, does no harm.

    Attributes:
        sync: whether gradients are reduced, or left where backward put them.
        all_reduces: whether what is reduced is averaged over replicas, or put off.
        keeps_secondary: whether what is gathered is copied to secondary shards: in a forward that a backward follows.
        traffic: what it amounted to so far.
        trace: what is to record it, if anything.
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
        self._reducing: dict[Communicator, ShardedUnit] = {}  # whose gradients are in its buffer
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
            Verb.ALL_REDUCE: self.all_reduce,
            Verb.WAIT_REDUCE: self.wait_reduce,
        }

        def bound(action: Action) -> tuple[Callable[[ShardedUnit], None], ShardedUnit]:
            return do[action.verb], self._units[action.unit]

        def does(action: Action) -> bool:
            return self._units[action.unit].slot >= 0 or action.verb not in _OF_SLOTS

        return {
            trigger: tuple(bound(action) for action in done)
            for trigger, actions in schedule.actions.items()
            if (done := [action for action in actions if does(action)])
        }

    def occupant(self, unit: ShardedUnit) -> ShardedUnit | None:
        """Whose parameters were gathered last into the slot of `unit`."""
        return self._occupant.get(unit.slot)

    def gather(self, unit: ShardedUnit) -> None:
        """Issues the gather, unless the slot is in use by another unit."""
        if unit.gathered:
            return
        occupant = self._occupant.get(unit.slot)
        if occupant is not None and occupant is not unit:
            if occupant.state is not IDLE:
                return  # only a prefetch can come here; `require` says it where it matters
            occupant.overwritten()
        self._occupant[unit.slot] = unit
        nbytes = unit.gather_bytes
        with self._issuing("gather", unit, unit.streams.gather, nbytes):
            unit.gather(keep=self.keeps_secondary)
        if occupant is unit:  # its earlier values go now
            unit.versions.arrive()
        self.traffic.gathered_bytes += nbytes

    def require(self, unit: ShardedUnit) -> None:
        """The parameters of `unit` are there, gathered now if no schedule did it; it begins to compute."""
        if unit.slot >= 0:  # else the shard is the whole unit
            if not unit.gathered:
                self.gather(unit)
            if not unit.gathered:
                raise RuntimeError(
                    f"unit {unit.name!r} is needed while unit {self._occupant[unit.slot].name!r}, which has the same "
                    f"slot {unit.slot}, is still in use; call fully_shard with slots={len(self._units)}"
                )
            self.wait_gather(unit)
        if self.trace is not None:
            unit.began = self._compute().record(timed=True)

    def wait_gather(self, unit: ShardedUnit) -> None:
        """Computation goes on with the parameters of `unit`."""
        if unit.gathers:
            self._finish(unit.gathers, "gather", unit)
        unit.versions.arrive()

    def release(self, unit: ShardedUnit) -> None:
        """Whoever needs the parameters next gathers them."""
        unit.gathered = False

    def reduce(self, unit: ShardedUnit) -> None:
        """Issues the reduce, unless another backward of `unit` is to come; its full gradients are let go of."""
        if not (self.sync and unit.gradients.complete):
            return
        if unit.gradients.reduces or unit.gradients.all_reduces:
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
        """Issues the all-reduce of what `reduce` left, if anything."""
        if not (self.sync and self.all_reduces and unit.gradients.awaits_replicas):
            return
        if self.trace is not None:  # else its span would begin with a wait for the reduce
            unit.streams.replicate.wait(unit.streams.reduce.record())
        nbytes = unit.gradients.all_reduce_bytes
        with self._issuing("all_reduce", unit, unit.streams.replicate, nbytes):
            unit.gradients.all_reduce()
        self.traffic.reduced_bytes += nbytes

    def wait_reduce(self, unit: ShardedUnit) -> None:
        """Computation goes on with the reduced gradients of `unit`."""
        gradients = unit.gradients
        if gradients.reduces or gradients.all_reduces:
            self._finish(gradients.reduces, "reduce", unit)
            self._finish(gradients.all_reduces, "all_reduce", unit)
            gradients.arrived()

    def wait_all(self) -> None:
        """Nothing is on its way any more."""
        for unit in self._units:
            if unit.gathers:
                self.wait_gather(unit)
            if unit.gradients.reduces or unit.gradients.all_reduces:
                self.wait_reduce(unit)
        self.wait_host()

    def wait_host(self) -> None:
        """The host may read gradients and write shards, where they are in its memory."""
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

    def end_compute(self, unit: ShardedUnit, began: Event, what: str) -> None:
        """For a trace: the forward or backward of `unit` has ended."""
        if self.trace is not None:
            end = self._compute().record(timed=True)
            self.trace.add("compute", f"{what} {unit.name}", began, end)
        unit.began = None

    def _issuing(
        self, row: str, unit: ShardedUnit, stream: Stream, nbytes: int
    ) -> AbstractContextManager[object]:
        """Around what is put on `stream`: it fails together with the other groups, and is traced."""
        if self.trace is None:
            return self._together
        span = ExitStack()
        span.enter_context(self._together)
        span.enter_context(self.trace.span(row, unit.name, stream, nbytes))
        return span
