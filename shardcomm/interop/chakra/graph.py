"""A step as a graph: what a rank computes and communicates, and what each of these needs to have ended.

For two blocks under `full_shard`, with one unit gathered ahead, each node beside those that it needs::

    0  gather (root)
    1  gather blocks.0      0 (one channel, one gather after the other)
    2  gather blocks.1      1
    3  forward blocks.0     0, 1
    4  forward blocks.1     3, 2
    5  forward (root)       4
    6  backward (root)      5
    7  backward blocks.1    6
    8  reduce blocks.1      7
    9  backward blocks.0    7
    ...

A gather also needs the computation that last read the slot into which it gathers. So the graph says what the streams of
a GPU keep, and not when the host came to issue it. Nodes are in the order in which they can begin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shardcomm.planner.planner import MemoryPlan
from shardcomm.planner.unit_plan import UnitPlan
from shardcomm.schedule.triggers import Phase, Trigger, Verb
from shardcomm.trace import traffic


class Kind(Enum):
    """What a node does. The values are the rows of a timeline that show it."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"


class Among(Enum):
    """With which ranks a collective is made."""

    SHARDS = "shards"
    HOST = "host"  # those that gather for backward among themselves
    REPLICAS = "replicas"


@dataclass(frozen=True)
class Node:
    """Something that every rank does in a step.

    Attributes:
        kind: Computation, or which collective.
        name: As the timeline calls it, such as "forward blocks.0" or, of a gather, "blocks.0".
        needs: The positions in the graph of the nodes that must have ended before it begins.
        nbytes: Of a collective, what a rank puts in. Of computation, the parameters, gradients and optimizer state that
            it reads or writes, without activations.
        ops: Of computation that does not depend on the batch, the operations.
        ops_a_token: Of other computation, the operations for each token.
        among: With which ranks a collective is made; None for computation.
    """

    kind: Kind
    name: str
    needs: tuple[int, ...]
    nbytes: int
    ops: int = 0
    ops_a_token: int = 0
    among: Among | None = None


# Of a trigger in backward that does not fire. What it would have reduced or awaited, the end of backward does.
_OF_FULL = (Verb.GATHER, Verb.WAIT_GATHER, Verb.RELEASE)

_OPS_OF_PARAMETER = 2
"""Operations (a product and a sum) for each parameter and token: once in forward, and twice in backward.

There one half is for the gradient of the input, and the other for that of the parameter, if it is trained. Source:
Kaplan et al., "Scaling Laws for Neural Language Models", arXiv 2001.08361, section 2.1.
"""

# Operations for each element, as torch's loops without foreach have them: AdamW 1 to decay, 3 and 4 for its moments, 3
# for the denominator, 3 to update.
_OPS_OF_OPTIMIZER = {"adamw": 14, "momentum": 4, "sgd": 2}


@dataclass(frozen=True)
class StepGraph:
    """A step of a plan.

    Attributes:
        nodes: What a rank does, each node after those that it needs.
        sizes: How many ranks make the collectives of each kind of group together.
        ranks: How many ranks there are.
        containers: The names of the units whose forward contains that of another.
    """

    nodes: tuple[Node, ...]
    sizes: Mapping[Among, int]
    ranks: int
    containers: frozenset[str]

    def moved_bytes(self, node: Node) -> int:
        """What a collective moves as a timeline counts it: what a rank receives by a gather, else what it sends."""
        if node.among is None:
            return 0
        size = self.sizes[node.among]
        if node.kind is Kind.GATHER:
            return node.nbytes * (size - 1)
        if node.kind is Kind.REDUCE:
            return node.nbytes - node.nbytes // size
        return traffic.all_reduce_bytes(node.nbytes, size)

    @classmethod
    def of(cls, plan: MemoryPlan, reached: Collection[str] | None = None) -> StepGraph:
        """The graph of a step of `plan`.

        Args:
            plan: The plan.
            reached: The names of the units to which backward comes. None: all from the first with a trained parameter
                on, and those around them.

        Raises:
            ValueError: Ranks hold parts of different sizes, some units are on other ranks than the rest, or the plan
                has what an execution trace does not tell: parameters in host memory, or bytes in another format.
        """
        shards = plan.ranks // plan.replicas
        if plan.host_bytes:
            raise ValueError(
                "plan has parameters in host memory, whose copies an execution trace does not tell; leave cpu_offload "
                "out"
            )
        if plan.wire_bytes:
            raise ValueError(
                "plan has gathers in a block format, which an execution trace does not tell; leave gather_format out"
            )
        if any(unit.reduce_format for unit in plan.units):
            raise ValueError(
                "plan has reduces whose sums cross between hosts in another format, which an execution trace does not "
                "tell; leave reduce_format out"
            )
        for unit in plan.units:
            _check_even(unit, shards, plan.replicas)
        hosts = {unit.regather_ranks for unit in plan.units if unit.secondary_bytes}
        if len(hosts) > 1:
            raise ValueError(
                f"plan gathers for backward among {sorted(hosts)} ranks; all units must do so among as many"
            )
        sizes = {
            Among.SHARDS: shards,
            Among.HOST: max(hosts, default=1),
            Among.REPLICAS: plan.replicas,
        }
        containers = _containers(plan.schedule.triggers())
        if reached is None:
            reached = {plan.units[unit].name for unit in _from_the_first_trained(plan)}
        nodes = _in_order(_GraphBuilder(plan, sizes, containers, reached).nodes)
        names = frozenset(plan.units[unit].name for unit in containers)
        return cls(nodes, sizes, plan.ranks, names)


class _GraphBuilder:
    """Goes through a step's triggers, and notes what each node needs."""

    def __init__(
        self,
        plan: MemoryPlan,
        sizes: Mapping[Among, int],
        containers: Collection[int],
        reached: Collection[str],
    ) -> None:
        self.nodes: list[Node] = []
        self._plan = plan
        self._sizes = sizes
        self._slot_of = plan.schedule.slot_of
        self._latest: dict[Kind, int] = {}  # a channel, or the compute stream, goes in order
        self._awaited: set[int] = set()  # what the next computation has to wait for
        self._gathered: dict[int, int] = {}  # by unit: its latest gather
        self._reduced: dict[int, set[int]] = {}  # by unit: its reduce and all-reduce
        self._read: dict[int, int] = {}  # by slot: the computation that read it last
        do: dict[Verb, Callable[[int], None]] = {
            Verb.GATHER: self._gather,
            Verb.WAIT_GATHER: self._wait_gather,
            Verb.RELEASE: self._release,
            Verb.REDUCE: self._reduce,
            Verb.ALL_REDUCE: self._all_reduce,
            Verb.WAIT_REDUCE: self._wait_reduce,
        }
        # A unit that contains others computes what is its own after theirs in forward, and before theirs in backward.
        for (phase, computing), actions, _ in plan.schedule.replay():
            in_backward = phase in (Phase.PRE_BACKWARD, Phase.POST_BACKWARD)
            fires = not in_backward or plan.units[computing].name in reached
            if phase is Phase.POST_FORWARD:
                self._compute("forward", computing)
            elif phase is Phase.POST_BACKWARD and fires and computing not in containers:
                self._compute("backward", computing)
            for verb, unit, _ in actions:
                if fires or verb not in _OF_FULL:
                    do[verb](unit)
            if phase is Phase.PRE_BACKWARD and fires and computing in containers:
                self._compute("backward", computing)
        self._end()

    def _compute(self, what: str, unit: int) -> None:
        planned = self._plan.units[unit]
        nbytes = planned.full_bytes or planned.parameter_bytes
        multiplied = planned.numel
        if what == "backward":
            nbytes += planned.full_gradient_bytes
            multiplied += planned.trained_numel
        ops = _OPS_OF_PARAMETER * multiplied
        self._computation(f"{what} {planned.name}", nbytes, ops_a_token=ops)

    def _end(self) -> None:
        plan = self._plan
        elements = sum(unit.trained_numel for unit in plan.units) // self._sizes[Among.SHARDS]
        ops = _OPS_OF_OPTIMIZER[plan.optimizer] * elements
        self._computation("optimizer", plan.state_bytes, ops=ops)

    def _computation(self, name: str, nbytes: int, *, ops: int = 0, ops_a_token: int = 0) -> None:
        self._add(Kind.COMPUTE, name, self._awaited, nbytes, ops=ops, ops_a_token=ops_a_token)
        self._awaited = set()

    def _gather(self, unit: int) -> None:
        planned = self._plan.units[unit]
        again = unit in self._gathered and planned.secondary_bytes > 0
        received = planned.regather_bytes if again else planned.gather_bytes
        if not received:
            return
        slot = self._slot_of[unit]
        needs = {self._read[slot]} if slot in self._read else set()
        among = Among.HOST if again else Among.SHARDS
        own = planned.full_bytes - received
        self._gathered[unit] = self._collective(Kind.GATHER, unit, needs, own, among)

    def _wait_gather(self, unit: int) -> None:
        if unit in self._gathered:
            self._awaited.add(self._gathered[unit])

    def _release(self, unit: int) -> None:
        self._read[self._slot_of[unit]] = self._latest[Kind.COMPUTE]

    def _reduce(self, unit: int) -> None:
        reduced = self._reduced[unit] = set()
        packed = self._plan.units[unit].packed_gradient_bytes
        if self._sizes[Among.SHARDS] > 1 and packed:
            needs = {self._latest[Kind.COMPUTE]}
            reduced.add(self._collective(Kind.REDUCE, unit, needs, packed, Among.SHARDS))

    def _all_reduce(self, unit: int) -> None:
        planned = self._plan.units[unit]
        if planned.all_reduce_bytes:
            needs = self._reduced[unit] or {self._latest[Kind.COMPUTE]}
            shard = planned.packed_gradient_bytes // self._sizes[Among.SHARDS]
            added = self._collective(Kind.ALL_REDUCE, unit, needs, shard, Among.REPLICAS)
            self._reduced[unit].add(added)

    def _wait_reduce(self, unit: int) -> None:
        self._awaited |= self._reduced[unit]

    def _collective(self, kind: Kind, unit: int, needs: set[int], nbytes: int, among: Among) -> int:
        return self._add(kind, self._plan.units[unit].name, needs, nbytes, among=among)

    def _add(
        self,
        kind: Kind,
        name: str,
        needs: set[int],
        nbytes: int,
        *,
        ops: int = 0,
        ops_a_token: int = 0,
        among: Among | None = None,
    ) -> int:
        position = len(self.nodes)
        if kind in self._latest:
            needs = needs | {self._latest[kind]}
        self._latest[kind] = position
        self.nodes.append(Node(kind, name, tuple(sorted(needs)), nbytes, ops, ops_a_token, among))
        return position


def _in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes in the order in which they can begin: a collective right after the last computation that it needs.

    In ASTRA-sim a rank makes one collective at a time, whatever its kind, and takes the first node that may begin
    (`HardwareResource::is_available`, `Workload::issue_dep_free_nodes`). In this order all ranks take the same one,
    however long each of them computes: what a collective needs has ended when what a later one needs has. In another
    order, one rank could wait in a gather and another in a reduce for ever.
    """
    # Of each node the latest computation that ends before it begins; of a computation, itself.
    after: list[int] = []
    for position, node in enumerate(nodes):
        needed = max((after[need] for need in node.needs), default=-1)
        after.append(position if node.kind is Kind.COMPUTE else needed)
    order = sorted(range(len(nodes)), key=lambda position: after[position])
    moved = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(nodes[old], needs=tuple(sorted(moved[need] for need in nodes[old].needs)))
        for old in order
    )


def _from_the_first_trained(plan: MemoryPlan) -> set[int]:
    """The first unit with a trained parameter, those behind it, and those around them."""
    for unit, planned in enumerate(plan.units):
        if planned.trained_numel:
            order = plan.schedule.order
            return {each for _, each in order[order.index(Trigger(Phase.PRE_FORWARD, unit)) :]}
    return set()


def _containers(triggers: tuple[Trigger, ...]) -> set[int]:
    """The units whose forward contains that of another."""
    containers: set[int] = set()
    inside: list[int] = []
    for phase, unit in triggers:
        if phase is Phase.PRE_FORWARD:
            containers.update(inside)
            inside.append(unit)
        elif phase is Phase.POST_FORWARD:
            inside.pop()
    return containers


def _check_even(unit: UnitPlan, shards: int, replicas: int) -> None:
    """Raises ValueError unless each of the plan's ranks has the same part of the unit."""
    received = unit.full_bytes - unit.full_bytes // shards
    sent = traffic.all_reduce_bytes(unit.packed_gradient_bytes // shards, replicas)
    even = unit.gather_bytes == received and abs(unit.all_reduce_bytes - sent) <= replicas
    if not even or (unit.shards, unit.replicas) != (shards, replicas):
        raise ValueError(
            f"plan has unit {unit.name!r} in parts of different sizes, or on other ranks than the rest; an execution "
            'trace needs equal parts, as with granularity="row" and without a unit\'s own comm'
        )
