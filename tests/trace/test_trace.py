"""An engine's trace: what ran when, and that it agrees with the engine's own count of exposed time."""

from __future__ import annotations

import pytest
import torch

from shardcomm import CommError, Communicator, Mesh, fully_shard
from shardcomm.trace.timeline import Span, Timeline
from support.nets import batch, loss_of, make
from support.thread_ranks import run_mesh, run_threads

CLOCK_S = 1e-5  # a GPU's, between two streams
RANKS_CLOCKS_S = 1e-3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def traced_step(comm: Communicator) -> tuple[list[Span], float, float]:
    model = make()
    engine = fully_shard(model, comm)
    engine.traffic.time_waits()
    tokens = batch(comm.rank, 0).to(comm.device)
    loss_of(model, tokens).backward()
    before = engine.traffic.exposed_s
    with engine.trace() as trace:
        loss_of(model, tokens).backward()
    spans, exposed_s = trace.spans(), engine.traffic.exposed_s - before
    loss_of(model, tokens).backward()
    assert len(trace.spans()) == len(spans)  # it has ended
    return spans, exposed_s, trace.exposed_s


@pytest.mark.covers("tracing")
@pytest.mark.parametrize("device", DEVICES)
def test_every_unit_computes_gathers_and_reduces_in_order(device: str) -> None:
    for spans, _, _ in run_threads(traced_step, 2, device=device):
        by = {(span.row, span.name): span for span in spans}
        for i in range(4):
            unit = f"blocks.{i}"
            forward, backward = by["compute", f"forward {unit}"], by["compute", f"backward {unit}"]
            assert 0 <= forward.begin_s <= forward.end_s <= backward.begin_s <= backward.end_s
            reduce = by["reduce", unit]
            assert backward.end_s <= reduce.begin_s <= reduce.end_s
            assert reduce.nbytes > 0
            first = next(span for span in spans if span[:2] == ("gather", unit))
            # (Not its end: a CPU's stream may be held up between a gather and the mark of its end.)
            assert first.begin_s <= forward.begin_s + CLOCK_S
            assert first.nbytes > 0


@pytest.mark.covers("tracing")
@pytest.mark.parametrize("device", DEVICES)
def test_exposed_time_is_that_of_the_engine(device: str) -> None:
    for _, engines, traces in run_threads(traced_step, 2, device=device):
        assert traces == pytest.approx(engines, rel=1e-3, abs=1e-6)
        assert traces > 0


@pytest.mark.covers("tracing", "failed ranks")
def test_a_failure_of_one_group_ends_the_timeline_of_all() -> None:
    """Not by the deadline: rank 0 is in no group with rank 3."""

    def body(mesh: Mesh) -> None:
        engine = fully_shard(make(layers=1), mesh, strategy="hybrid_shard")
        with engine.trace() as trace:
            pass
        if mesh.rank == 3:
            mesh.shard.abort("the data is bad")
        with pytest.raises(CommError, match="rank 1 aborted: the data is bad"):
            trace.timeline()

    run_mesh(body, 2, 2)


@pytest.mark.covers("tracing")
@pytest.mark.parametrize(("replicas", "sharing"), [(1, 2), (2, 2)])
def test_timeline_has_all_ranks_in_order_on_one_clock(replicas: int, sharing: int) -> None:
    def body(mesh: Mesh) -> tuple[Timeline, list[Span]]:
        model = make()
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        with engine.trace() as trace:
            for step in range(2):
                with trace.step(step):
                    loss_of(model, batch(mesh.rank, step)).backward()
        return trace.timeline(), trace.spans()

    results = run_mesh(body, replicas, sharing)
    timeline = results[0][0]
    assert timeline.clock == "one host's, for all ranks"
    assert timeline.steps() == ["step 0", "step 1"]
    for rank, (theirs, spans) in enumerate(results):
        assert theirs == timeline
        of_rank = timeline.ranks[rank]
        assert of_rank.rank == rank
        shift = of_rank.spans[0].begin_s - spans[0].begin_s
        assert shift >= 0
        for shown, own in zip(of_rank.spans, spans, strict=True):
            assert (shown.row, shown.name, shown.nbytes) == (own.row, own.name, own.nbytes)
            assert shown.begin_s - own.begin_s == pytest.approx(shift, abs=1e-9)
        assert set(of_rank.paths) == {"gather", "reduce"} | (
            {"all_reduce"} if replicas > 1 else set()
        )
    # A reduce-scatter ends on no rank before it has begun on all of its group.
    groups = [range(first, first + sharing) for first in range(0, replicas * sharing, sharing)]
    for group in groups:
        reduces = [
            [span for span in timeline.ranks[rank].spans if span.row == "reduce"] for rank in group
        ]
        for same in zip(*reduces, strict=True):
            assert max(s.begin_s for s in same) <= min(s.end_s for s in same) + RANKS_CLOCKS_S


def test_nothing_is_recorded_outside_a_trace() -> None:
    comm = Communicator.local_group(1)[0]
    engine = fully_shard(make(), comm)
    with engine.trace() as trace:
        pass
    engine.model(torch.zeros(1, 2, dtype=torch.int64))
    assert trace.spans() == []
