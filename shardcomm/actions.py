"""The actions of a schedule, done: collectives of units are issued and awaited, and slots change their occupants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from shardcomm.mesh import Mesh
from shardcomm.offload import Offload
from shardcomm.schedule import Action, Schedule, Trigger, Verb
from shardcomm.sharded_unit import ShardedUnit, State
from shardcomm.streams import Stream
from shardcomm.trace import Trace
from shardcomm.traffic import Traffic
from shardcomm.work import Work

_UNTRACED = nullcontext()

Program = dict[Trigger, tuple[tuple[Callable[[ShardedUnit], None], ShardedUnit], ...]]
"""A schedule's actions, each bound to what does it."""


class Actions:
    """What can be done to `units`. Each is idempotent: a trigger that fires twice, or not at all, does no harm.

    Attributes:
        sync: whether gradients are reduced, or left where backward put them.
        traffic: what it amounted to so far.
        trace: what is to record it, if anything.
    """

    def __init__(self, units: Sequence[ShardedUnit], mesh: Mesh) -> None:
        self.sync = True
        self.traffic = Traffic()
        self.trace: Trace | None = None
        self._units = units
        self._together = mesh.failing_together
        self._streams = mesh.streams
        self._offloads = {b.offload for unit in units for b, _ in unit.buckets if b.offload}
        self._occupant: dict[int, ShardedUnit] = {}  # of each slot
        self._reducing: ShardedUnit | None = None  # whose gradients are in the reduce buffer
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
        with self._together, self._traced("gather", unit, self._streams.gather, unit.gather_bytes):
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
        self._finish(unit.gathers, "gather", unit)

    def release(self, unit: ShardedUnit) -> None:
        """Whoever needs the parameters next gathers them."""
        unit.gathered = False

    def reduce(self, unit: ShardedUnit) -> None:
        """Issues the reduce, unless another backward of `unit` is to come; its full gradients are let go of."""
        if not (self.sync and unit.needs_reduce) or unit.pending_calls:
            return
        self.wait_reduce(unit)
        unit.needs_reduce = False
        if self._reducing is not None:
            self._finish(self._reducing.reduces, "reduce", self._reducing)
        self._reducing = unit
        nbytes = unit.reduce_bytes
        with self._together, self._traced("reduce", unit, self._streams.reduce, nbytes):
            unit.reduce()
        self.traffic.reduced_bytes += nbytes

    def all_reduce(self, unit: ShardedUnit) -> None:
        """Issues the all-reduce of what `reduce` left, if anything."""
        if not unit.needs_all_reduce:
            return
        if self.trace is not None:  # else its span would begin with a wait for the reduce
            self._streams.replicate.wait(self._streams.reduce.record())
        with (
            self._together,
            self._traced("all_reduce", unit, self._streams.replicate, unit.all_reduce_bytes),
        ):
            unit.all_reduce()
        self.traffic.reduced_bytes += unit.all_reduce_bytes

    def wait_reduce(self, unit: ShardedUnit) -> None:
        """Computation goes on with the reduced gradients of `unit`."""
        self._finish(unit.reduces, "reduce", unit)
        self._finish(unit.all_reduces, "all_reduce", unit)

    def wait_all(self) -> None:
        """Nothing is on its way any more."""
        for unit in self._units:
            self.wait_gather(unit)
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
        compute = self._streams.compute()
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

    def begin_compute(self, unit: ShardedUnit) -> None:
        """For a trace: what `unit` computes begins."""
        if self.trace is not None:
            unit.began = self._streams.compute().record(timed=True)

    def end_compute(self, unit: ShardedUnit, what: str) -> None:
        """For a trace: its forward or backward has ended."""
        if self.trace is not None and unit.began is not None:
            end = self._streams.compute().record(timed=True)
            self.trace.add("compute", f"{what} {unit.name}", unit.began, end)
        unit.began = None

    def _traced(
        self, row: str, unit: ShardedUnit, stream: Stream, nbytes: int
    ) -> AbstractContextManager[None]:
        return _UNTRACED if self.trace is None else self.trace.span(row, unit.name, stream, nbytes)
