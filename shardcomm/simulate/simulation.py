"""A step on the clock: the actions of the schedule that the engine runs, with what each of them waits for there.

For each trigger, in the order of the step (compare `engine/step.py` and `engine/actions.py`)::

    post_forward(u)   first u computes what is its own, then come the actions
    pre_backward(u)   first the actions, then u computes

    gather u          put on the channel of gathers, behind those before; skipped if the slot holds u. In a block
                      format its encoding and decoding come there, too. Under no_shard no action gathers: a unit that
                      computes in another dtype is cast at its pre_forward, and waited for
    wait_gather u     the rank waits
    release u         the slot is free: the next gather into it was issued after that, on every rank
    reduce u          the rank waits until the reduce before has left the buffer, packs, and puts it on its channel
    all_reduce u      behind u's reduce, on the channel of replicas
    wait_reduce u     the rank waits for both

All ranks do the same, so that one of them is enough; where they differ in speed, the slowest is. They do not do it at
one time, though: see `_step`.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

from shardcomm.arguments.checks import check_list, check_type
from shardcomm.planner.planner import MemoryPlan
from shardcomm.schedule.triggers import Phase, Verb
from shardcomm.simulate import collectives
from shardcomm.simulate.clock import Collective, Compute, Instruction, Issue, Wait, run
from shardcomm.simulate.cost import HOST, MEMORY, NETWORK, NO_LINKS, Cost, Group
from shardcomm.simulate.machine import Machine
from shardcomm.simulate.unit_times import UnitTime
from shardcomm.trace.timeline import COMMUNICATION, SIMULATED, RankTimeline, Span, Timeline

_SHARE = 1e-3  # how near the share of computation is found


@dataclass(frozen=True)
class Simulation:
    """A step of a model on a machine that need not be there. `Simulation.of` makes it.

    Attributes:
        plan: The plan of the model, whose schedule was run.
        machine: The machine.
        step_s: The seconds of a forward and a backward. The optimizer's step is not in it.
        compute_s: The part of it in which the rank computed, packed gradients, or was slowed in that.
        exposed_s: The part in which it waited for communication. The two make the step.
        link_bytes: The bytes that a rank moves in a step: over "memory" (read and written), "host" (to ranks of its
            host) or "network" (its share of what its host sends to others).
        spans: What was done when.

    Example:
        ```python
        import torch, shardcomm

        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))
        units = [torch.nn.Linear]
        machine = shardcomm.Machine.load("8xH100")
        plan = shardcomm.MemoryPlan.of(model, ranks=64, units=units)
        times = shardcomm.times_by_flops(model, machine, tokens=8192, units=units)
        step = shardcomm.Simulation.of(plan, times, machine)
        print(f"{step.step_s:.4f} s, of which {step.exposed_s:.4f} s exposed communication")
        ```
    """

    plan: MemoryPlan
    machine: Machine
    step_s: float
    compute_s: float
    exposed_s: float
    link_bytes: dict[str, float]
    spans: tuple[Span, ...]

    @classmethod
    def of(
        cls,
        plan: MemoryPlan,
        times: Sequence[UnitTime],
        machine: Machine,
        *,
        slowest: float = 1.0,
    ) -> Simulation:
        """Runs a step.

        Args:
            plan: The plan, from `MemoryPlan.of`. Nothing of it may be in host memory.
            times: The time of each unit of the plan.
            machine: The machine.
            slowest: The factor of the slowest rank, which multiplies `times`.

        Returns:
            The step: its time, and what was done when.

        Raises:
            TypeError: An argument is not of its type.
            ValueError: The plan's ranks or units do not fit the others, a time is no number from 0 on, or `slowest` is
                no factor; the message says how.
        """
        check_type("Simulation.of", "plan", plan, MemoryPlan, "a shardcomm.MemoryPlan")
        check_type(
            "Simulation.of",
            "machine",
            machine,
            Machine,
            "a shardcomm.Machine, as Machine.load gives it",
        )
        check_list("Simulation.of", "times", times)
        _check(plan, times, machine)
        if not (_is_finite(slowest) and slowest > 0):
            raise ValueError(f"slowest is {slowest!r}; it must be a number above 0, and finite")
        ran = _step(plan, times, machine, slowest)
        step = Span("step", "step 0", 0.0, ran.step_s, 0)
        return cls(
            plan=plan,
            machine=machine,
            step_s=ran.step_s,
            compute_s=ran.seconds("compute"),
            exposed_s=ran.seconds("waiting"),
            link_bytes=ran.link_bytes,
            spans=(step, *ran.spans),
        )

    def timeline(self) -> Timeline:
        """The step as a trace of one rank, for `shardcomm trace` and Perfetto."""
        paths = {row: f"simulated {self.machine.transport}" for row in COMMUNICATION}
        units = {unit.name: unit.numel for unit in self.plan.units}
        return Timeline((RankTimeline(0, self.spans, paths),), SIMULATED, units)

    def figures(self) -> dict[str, Any]:
        """The figures of the step, flat: a line of a table.

        Returns:
            The figures by name; times are in seconds.
        """
        plan = self.plan
        return {
            "strategy": plan.strategy,
            "ranks": plan.ranks,
            "replicas": plan.replicas,
            "step_s": self.step_s,
            "compute_s": self.compute_s,
            "exposed_s": self.exposed_s,
            "gathered_bytes": plan.gathered_bytes,
            "reduced_bytes": plan.reduced_bytes,
            "memory_bytes_moved": self.link_bytes.get(MEMORY, 0.0),
            "host_bytes_moved": self.link_bytes.get(HOST, 0.0),
            "network_bytes_moved": self.link_bytes.get(NETWORK, 0.0),
            "peak_bytes": plan.peak_bytes,
        }

    def as_json(self) -> dict[str, Any]:
        """Everything as a dict for a JSON file.

        Returns:
            The figures, and what they were made of, by name.
        """
        return {
            **self.figures(),
            "machine": asdict(self.machine),
            "spans": [span._asdict() for span in self.spans],
        }


def as_csv(figures: Sequence[dict[str, Any]]) -> str:
    """Figures as CSV, a line each."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(figures[0]))
    writer.writeheader()
    writer.writerows(figures)
    return text.getvalue()


def _is_finite(value: object) -> bool:
    """Whether `value` is a real number, and finite. True and False are none."""
    return (
        isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max  # type: ignore[operator]
    )


def _check(plan: MemoryPlan, times: Sequence[UnitTime], machine: Machine) -> None:
    if len(times) != len(plan.units):
        raise ValueError(
            f"times has {len(times)} entries; the plan has {len(plan.units)} units, and each needs one"
        )
    for unit, time in zip(plan.units, times, strict=True):
        check_type(
            "Simulation.of", f"times of unit {unit.name!r}", time, UnitTime, "a shardcomm.UnitTime"
        )
        if not all(_is_finite(seconds) and seconds >= 0 for seconds in time):
            raise ValueError(
                f"times has {time!r} for unit {unit.name!r}; both must be numbers of seconds from 0 on, and finite"
            )
    if plan.host_bytes:
        raise ValueError("plan has parameters in host memory, whose copies are not simulated")
    crosses = machine.transport == "hosts" and plan.ranks > machine.ranks_per_host
    if any(unit.reduce_format for unit in plan.units) and (plan.replicas > 1 or not crosses):
        raise ValueError(
            "plan has a reduce_format, in which the sums of hosts cross: that takes a machine of transport 'hosts', "
            f"more ranks than a host has, and no replicas. Machine {machine.name!r} is of transport "
            f"{machine.transport!r}, with {machine.ranks_per_host} ranks a host; the plan's ranks are {plan.ranks}, in "
            f"groups of {plan.ranks // plan.replicas} that hold the model between them"
        )
    laid = plan.ranks // plan.replicas, plan.replicas
    for unit in plan.units:
        if (unit.shards, unit.replicas) != laid:
            raise ValueError(
                f"plan has unit {unit.name!r} laid over ranks in another way than the rest, which is not simulated; "
                "leave the comm and the strategy out of its Policy"
            )
    if plan.ranks <= machine.ranks_per_host:
        return
    if machine.transport == "shm" or not machine.network_bytes_per_s:
        raise ValueError(
            f"ranks is {plan.ranks}; machine {machine.name!r} is one host, of {machine.ranks_per_host} ranks at most"
        )
    if plan.ranks % machine.ranks_per_host:
        raise ValueError(
            f"ranks is {plan.ranks}; on several hosts it must be a multiple of the {machine.ranks_per_host} ranks "
            f"of a host of {machine.name!r}"
        )
    regathering = (("reshard_after_forward", unit.regather_ranks) for unit in plan.units)
    for argument, ranks in (("replicas", plan.ranks // plan.replicas), *regathering):
        if ranks % machine.ranks_per_host and machine.ranks_per_host % ranks:
            raise ValueError(
                f"plan has groups of {ranks} ranks, by {argument}, of which some would lie on parts of two hosts of "
                f"{machine.name!r}, of {machine.ranks_per_host} ranks; one number must divide the other"
            )


class _Step(NamedTuple):
    """What was done when, and the bytes that a rank moved over each link."""

    spans: list[Span]
    link_bytes: dict[str, float]

    @property
    def step_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def seconds(self, row: str) -> float:
        return sum(span.end_s - span.begin_s for span in self.spans if span.row == row)


def _step(plan: MemoryPlan, times: Sequence[UnitTime], machine: Machine, slowest: float) -> _Step:
    """A step, in which threads wait for their turns among as many ranks as compute in it at once.

    Ranks do not wait at one time, so that a thread that wants a core finds a part of them computing: on average the
    share of the step in which a rank computes. Turns grow with the square of the ranks that compute (2, 5, 13 and 24 ms
    beside 1 to 4 of them on two cores): as many more threads of the collective have to wait, each for as many more
    slices. The longer turns are, the smaller is the share, so that there is one share with which a step has just that.
    """
    low, high = 0.0, 1.0
    while machine.turn_s and high - low > _SHARE:
        share = (low + high) / 2
        ran = _step_beside(share, plan, times, machine, slowest)
        if ran.seconds("compute") > share * ran.step_s:
            low = share
        else:
            high = share
    return _step_beside(high, plan, times, machine, slowest)


def _step_beside(
    share: float, plan: MemoryPlan, times: Sequence[UnitTime], machine: Machine, slowest: float
) -> _Step:
    """A step beside ranks that compute for such a share of it."""
    there = replace(machine, turn_s=machine.turn_s * share**2)
    program = _Program(plan, times, there, slowest)
    on_host = min(plan.ranks, machine.ranks_per_host)
    burst_s = 0.0
    if machine.network_bytes_per_s:
        burst_s = machine.network_burst_bytes / machine.network_bytes_per_s
    spans = run(program.instructions(), partial(_speeds, machine, on_host), burst_s=burst_s)
    return _Step(spans, dict(program.link_bytes))


def _speeds(
    machine: Machine, on_host: int, computing: bool, links: Sequence[str]
) -> tuple[float, Sequence[float]]:
    """The speeds of what goes on at once, on `on_host` ranks of a host alike; see `clock.Speeds`."""
    busy = Counter(links)
    shares = {link: 1 / count for link, count in busy.items()}
    if not machine.cores:
        return 1.0 - machine.contention * bool(links), [shares[link] for link in links]
    threads = on_host * (computing + busy[MEMORY])
    core = min(1.0, machine.cores / threads) if threads else 1.0
    if on_host > machine.cores:
        core /= machine.crowding
    return core, [core if link == MEMORY else shares[link] for link in links]


class _Program:
    """What a rank does in a step, instruction by instruction."""

    def __init__(
        self,
        plan: MemoryPlan,
        times: Sequence[UnitTime],
        machine: Machine,
        slowest: float,
    ) -> None:
        self.link_bytes: defaultdict[str, float] = defaultdict(float)  # of what was yielded
        self._plan = plan
        self._times = times
        self._machine = machine
        self._slowest = slowest
        on_host = min(plan.ranks, machine.ranks_per_host)
        self._on_host = on_host
        shards = plan.ranks // plan.replicas
        self._shard = Group.of(shards, 1, on_host)
        self._replicas = Group.of(plan.replicas, shards, on_host)
        self._gathers: dict[int, Collective] = {}
        self._reduces: dict[int, list[Collective]] = {}
        self._in_buffer: Collective | None = None  # the reduce that reads it, or has read it

    def instructions(self) -> Iterator[Instruction]:
        do: dict[Verb, Callable[[int], Iterable[Instruction]]] = {
            Verb.GATHER: self._gather,
            Verb.WAIT_GATHER: self._wait_gather,
            Verb.RELEASE: lambda _: (),
            Verb.REDUCE: self._reduce,
            Verb.ALL_REDUCE: self._all_reduce,
            Verb.WAIT_REDUCE: self._wait_reduce,
        }
        for (phase, computing), actions, _ in self._plan.schedule.replay():
            if phase is Phase.POST_FORWARD:
                yield self._compute(computing, "forward", self._times[computing].forward_s)
            for verb, unit, _ in actions:
                yield from do[verb](unit)
            if phase is Phase.PRE_FORWARD and computing not in self._gathers:
                # A strategy that gathers nothing. What computes in another dtype is cast on demand (`Actions.require`).
                yield from self._gather(computing)
                yield from self._wait_gather(computing)
            if phase is Phase.PRE_BACKWARD:
                yield self._compute(computing, "backward", self._times[computing].backward_s)

    def _compute(self, unit: int, what: str, seconds: float) -> Compute:
        return Compute(f"{what} {self._plan.units[unit].name}", seconds * self._slowest)

    def _gather(self, unit: int) -> Iterator[Instruction]:
        of, again = self._plan.units[unit], unit in self._gathers
        if not of.full_bytes:
            return  # its shard is all of it
        group = Group.of(of.regather_ranks, 1, self._on_host) if again else self._shard
        costs = [collectives.gather(of, group, self._machine, again=again)]
        if of.encoding_bytes and not (again and of.secondary_bytes):
            # All of it behind the gather, on whose channel it is; no other collective could use the time before.
            costs.append(collectives.coding(of, group, self._machine))
        for cost in costs:
            self._gathers[unit] = made = self._made("gather", unit, cost)
            yield Issue(made)

    def _wait_gather(self, unit: int) -> Iterator[Instruction]:
        if unit in self._gathers:
            yield Wait(self._gathers[unit])

    def _reduce(self, unit: int) -> Iterator[Instruction]:
        of = self._plan.units[unit]
        if not of.full_gradient_bytes:
            return
        if self._in_buffer is not None:
            yield Wait(self._in_buffer)
        yield self._compute(unit, "pack", collectives.pack_s(of, self._machine))
        self._reduces[unit] = []
        if self._shard.ranks > 1:
            cost = collectives.reduce(of, self._shard, self._machine)
            self._in_buffer = made = self._made("reduce", unit, cost)
            self._reduces[unit].append(made)
            yield Issue(made)

    def _all_reduce(self, unit: int) -> Iterator[Instruction]:
        of = self._plan.units[unit]
        if self._replicas.ranks > 1 and unit in self._reduces:
            cost = collectives.all_reduce(of, self._replicas, self._machine)
            after = self._reduces[unit][-1] if self._reduces[unit] else None
            made = self._made("all_reduce", unit, cost, after)
            self._reduces[unit].append(made)
            yield Issue(made)

    def _wait_reduce(self, unit: int) -> Iterable[Instruction]:
        return map(Wait, self._reduces.get(unit, []))

    def _made(
        self, channel: str, unit: int, cost: Cost, after: Collective | None = None
    ) -> Collective:
        for move in chain.from_iterable(cost.stages):
            if move.link not in NO_LINKS:
                self.link_bytes[move.link] += move.nbytes
        return Collective(channel, self._plan.units[unit].name, cost, after)
