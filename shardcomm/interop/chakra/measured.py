"""When a rank's timeline did what the nodes of a step's graph say."""

from __future__ import annotations

from typing import NamedTuple

from shardcomm.interop.chakra.graph import Kind, Node, StepGraph
from shardcomm.trace.timeline import RankTimeline, Span

_ROUNDED_BYTES = 64  # a timeline counts each bucket of a unit by itself, and rounds what it sends


def reached(step: RankTimeline) -> set[str]:
    """The names of the units to which backward came. To frozen ones in front of all trained ones it does not."""
    return {
        span.name.removeprefix("backward ")
        for span in step.spans
        if span.row == "reduce" or (span.row == "compute" and span.name.startswith("backward "))
    }


class Time(NamedTuple):
    """When a node began, in seconds since its step did, and how long it took."""

    begin_s: float
    duration_s: float


def times(graph: StepGraph, step: RankTimeline) -> list[Time]:
    """The times of the graph's nodes.

    A collective takes as long as the timeline says, waiting for other ranks included. Computation goes from the end of
    the computation before, or the step's begin, to its own end, without the waits in between. So all computation
    together takes what the step does without exposed communication.

    Raises:
        ValueError: The timeline is of another model, strategy or schedule than the graph.
    """
    (whole,) = (span for span in step.spans if span.row == "step")
    ends = _ends(graph, step, whole)
    waits = [span for span in step.spans if span.row == "waiting"]
    collectives = {kind: _in_order(step, kind) for kind in Kind if kind is not Kind.COMPUTE}
    done, found = whole.begin_s, []
    for position, node in enumerate(graph.nodes):
        if node.kind is Kind.COMPUTE:
            begin, done = done, max(done, ends[position])
            waited = sum(_overlap(span, begin, done) for span in waits)
            duration = done - begin - waited
            found.append(Time(done - duration - whole.begin_s, duration))
        else:
            span = _next(collectives[node.kind], node, step)
            moved = graph.moved_bytes(node)
            if abs(span.nbytes - moved) > _ROUNDED_BYTES:
                raise _other_model(
                    step,
                    f"{span.nbytes} B in a {node.kind.value} of {node.name}, and the plan {moved} B",
                )
            found.append(Time(span.begin_s - whole.begin_s, span.end_s - span.begin_s))
    for kind, left in collectives.items():
        for name, spans in left.items():
            if spans:
                raise _other_model(step, f"one more {kind.value} of {name} than the plan")
    return found


def _ends(graph: StepGraph, step: RankTimeline, whole: Span) -> dict[int, float]:
    """When each computation of the graph ended, by its position.

    The backward of a unit that contains others goes on around theirs. Its own part ends where theirs begin.

    Only a gradient of a unit's input announces the end of its backward, and the input of a model has none. Such a
    backward ends where the unit's reduce begins. Without a reduce it ends with the computation before: it took no time.
    """
    spans = _in_order(step, Kind.COMPUTE)
    reduces = {span.name: span.begin_s for span in step.spans if span.row == "reduce"}
    around = {f"backward {name}" for name in graph.containers}
    ends: dict[int, float] = {}
    next_begin = whole.end_s
    for position, node in reversed(list(enumerate(graph.nodes))):
        if node.kind is not Kind.COMPUTE:
            continue
        if node.name in around or node.name == "optimizer":
            ends[position] = next_begin
            continue
        what, _, unit = node.name.partition(" ")
        if not spans.get(node.name):
            if what == "forward":
                raise _other_model(step, f"no {node.name}, which the plan has")
            ends[position] = reduces.get(unit, whole.begin_s)
            continue
        span = spans[node.name].pop()
        ends[position], next_begin = span.end_s, span.begin_s
    for name, left in spans.items():
        if left and name not in around:
            raise _other_model(step, f"one more {name} than the plan")
    return ends


def _in_order(step: RankTimeline, kind: Kind) -> dict[str, list[Span]]:
    """The spans of a row by their names, in the order in which they began.

    A collective that moves nothing is none of the graph's: it casts parameters, or packs gradients.
    """
    found: dict[str, list[Span]] = {}
    for span in sorted(step.spans, key=lambda span: span.begin_s):
        if span.row == kind.value and (kind is Kind.COMPUTE or span.nbytes):
            found.setdefault(span.name, []).append(span)
    return found


def _next(spans: dict[str, list[Span]], node: Node, step: RankTimeline) -> Span:
    left = spans.get(node.name)
    if not left:
        raise _other_model(step, f"one {node.kind.value} of {node.name} less than the plan")
    return left.pop(0)


def _overlap(span: Span, begin_s: float, end_s: float) -> float:
    return max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s))


def _other_model(step: RankTimeline, difference: str) -> ValueError:
    return ValueError(
        "the trace is of another model, context, strategy, dtype or prefetch than the plan: "
        f"rank {step.rank} has {difference}"
    )
