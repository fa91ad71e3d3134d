"""A step as files: an execution trace for each rank, and the groups of ranks beside."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardcomm.arguments.scalars import is_whole
from shardcomm.files.whole_file import written_whole
from shardcomm.interop.chakra import schema
from shardcomm.interop.chakra.graph import Among, Kind, Node, StepGraph
from shardcomm.interop.chakra.measured import Time, reached, times
from shardcomm.planner.planner import MemoryPlan
from shardcomm.trace.timeline import SIMULATED, Timeline

_COMM_TYPES = {
    Kind.GATHER: schema.ALL_GATHER,
    Kind.REDUCE: schema.REDUCE_SCATTER,
    Kind.ALL_REDUCE: schema.ALL_REDUCE,
}


def write_step(
    plan: MemoryPlan,
    folder: str | Path,
    *,
    tokens: int | None = None,
    timeline: Timeline | None = None,
) -> None:
    """Writes a step as Chakra execution traces: `step.RANK.et` for each rank, and `comm_groups.json`.

    Nodes are a unit's forward and backward, its gathers, reduces and all-reduces, and the optimizer's step. Their
    `data_deps` are what streams and channels keep: the order of each, what computation waits for, and the computation
    that has to leave a slot before another unit is gathered there. They are in the order in which they can begin.
    Computation has `num_ops` and `tensor_size` (the bytes of parameters, gradients and optimizer state; both are at
    least 1), for simulators with a roofline. A collective has `comm_type`, `comm_size` (the bytes that a rank puts in)
    and `pg_name`, the name of its group in `comm_groups.json`.

    Args:
        plan: What is written, with parts of one size on all ranks.
        folder: A new or empty folder, which is made where there is none.
        tokens: How many tokens a rank computes in a step: computation is 2 operations for each parameter and token in
            forward and 4 in backward (2 for a frozen one, and none in frozen units in front of all trained ones). What
            attention computes besides, which depends on the context, is not counted.
        timeline: A measured timeline of the same model, strategy and ranks: each node then has when it began and how
            long it took in the step of median duration. One of `tokens` and `timeline` is needed.

    Raises:
        ImportError: protobuf is not installed.
        OSError: A file cannot be written.
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range; ranks have parts of different sizes; the folder is not empty; or
            the timeline is of something else.
    """
    if not isinstance(plan, MemoryPlan):
        raise TypeError(f"plan is a {type(plan).__name__}; it must be a shardcomm.MemoryPlan")
    if tokens is not None and not is_whole(tokens, 1):
        raise ValueError(f"tokens is {tokens!r}; it must be a whole number above 0, below 2**31")
    if tokens is None and timeline is None:
        raise ValueError(
            "tokens and timeline are None; give tokens, of which operations follow, or a measured timeline"
        )
    step = None if timeline is None else _median_step(plan, timeline)
    came = None if step is None else set().union(*map(reached, step.ranks))
    graph = StepGraph.of(plan, came)
    groups = _Groups(graph)
    measured = None if step is None else [tuple(times(graph, each)) for each in step.ranks]
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise ValueError(
            f"folder is {str(folder)!r}, which is not empty; it must be a new or empty one"
        )
    encoded = functools.lru_cache(maxsize=1)(functools.partial(_encoded, graph, tokens))
    for rank in range(graph.ranks):
        trace = encoded(groups.names_of(rank), measured[rank] if measured else None)
        path = into / f"step.{rank}.et"
        with written_whole(path):
            path.write_bytes(trace)
    path = into / "comm_groups.json"
    with written_whole(path):
        path.write_text(json.dumps(groups.members) + "\n")


class _Groups:
    """The groups of ranks that make collectives together.

    Ranks of one replica follow each other, and so do those of a host among them.

    Attributes:
        members: Each group's ranks by its name: a number above 0, since ASTRA-sim keeps 0 for all ranks
            (`CommunicatorGroup::set_id`).
    """

    def __init__(self, graph: StepGraph) -> None:
        self.members: dict[str, list[int]] = {}
        self._names: list[tuple[tuple[Among, str], ...]] = [()] * graph.ranks
        used = {node.among for node in graph.nodes}
        for among in Among:
            if among in used:
                for members in _members(among, graph):
                    self._add(among, members)

    def _add(self, among: Among, members: Sequence[int]) -> None:
        name = str(len(self.members) + 1)
        self.members[name] = list(members)
        for rank in members:
            self._names[rank] += ((among, name),)

    def names_of(self, rank: int) -> tuple[tuple[Among, str], ...]:
        """Of which kind and name the groups are in which `rank` is."""
        return self._names[rank]


def _members(among: Among, graph: StepGraph) -> Iterator[Sequence[int]]:
    shards = graph.sizes[Among.SHARDS]
    if among is Among.REPLICAS:
        yield from (range(first, graph.ranks, shards) for first in range(shards))
        return
    size = graph.sizes[among]
    yield from (range(first, first + size) for first in range(0, graph.ranks, size))


def _median_step(plan: MemoryPlan, timeline: Timeline) -> Timeline:
    if not isinstance(timeline, Timeline):
        raise TypeError(f"timeline is a {type(timeline).__name__}; it must be a Timeline")
    if timeline.clock == SIMULATED:
        raise ValueError(
            "timeline is of a simulation; it must be measured, by engine.trace(), or give tokens instead"
        )
    if not timeline.steps():
        raise ValueError("timeline has no steps; mark them by trace.step(n)")
    step = timeline.only(timeline.median_step())
    if [each.rank for each in step.ranks] != list(range(plan.ranks)):
        raise ValueError(
            f"timeline is of {len(step.ranks)} ranks, and plan of {plan.ranks}; they must be the same ranks"
        )
    return step


def _encoded(
    graph: StepGraph,
    tokens: int | None,
    groups: tuple[tuple[Among, str], ...],
    measured: tuple[Time, ...] | None,
) -> bytes:
    """The trace of a rank in `groups`.

    A unit without parameters has 1 operation and 1 byte. ASTRA-sim divides by both, and what waits for a computation of
    0 bytes may never begin there (`Workload::issue_comp`).
    """
    names = dict(groups)
    parts = [schema.delimited(schema.GlobalMetadata(version=schema.VERSION))]
    for position, node in enumerate(graph.nodes):
        message = schema.Node(id=position, name=_full_name(node), data_deps=node.needs)
        if node.among is None:
            message.type = schema.COMP_NODE
            attributes: dict[str, dict[str, object]] = {
                "is_cpu_op": {"bool_val": False},
                "tensor_size": {"uint64_val": max(1, node.nbytes)},
            }
            if tokens is not None:
                attributes["num_ops"] = {"int64_val": max(1, node.ops + node.ops_a_token * tokens)}
        else:
            message.type = schema.COMM_COLL_NODE
            attributes = {
                "is_cpu_op": {"bool_val": False},
                "comm_type": {"int64_val": _COMM_TYPES[node.kind]},
                "comm_size": {"int64_val": node.nbytes},
                "pg_name": {"string_val": names[node.among]},
            }
        message.attr.extend(
            schema.Attribute(name=name, **value) for name, value in attributes.items()
        )
        if measured is not None:
            message.start_time_micros = round(measured[position].begin_s * 1e6)
            message.duration_micros = round(measured[position].duration_s * 1e6)
        parts.append(schema.delimited(message))
    return b"".join(parts)


def _full_name(node: Node) -> str:
    return node.name if node.kind is Kind.COMPUTE else f"{node.kind.value} {node.name}"
