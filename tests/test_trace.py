"""An engine's trace: what ran when, and that it agrees with the engine's own count of exposed time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_engine import batch, loss_of, make
from thread_ranks import run_threads

from shardcomm import Communicator, fully_shard
from shardcomm.trace import Span

CLOCK_S = 1e-5  # a GPU's, between two streams
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def traced_step(comm: Communicator, path: Path | None = None) -> tuple[list[Span], float, float]:
    model = make()
    engine = fully_shard(model, comm)
    tokens = batch(comm.rank, 0).to(comm.device)
    loss_of(model, tokens).backward()
    before = engine.traffic.exposed_s
    with engine.trace() as trace:
        loss_of(model, tokens).backward()
    spans, exposed_s = trace.spans(), engine.traffic.exposed_s - before
    loss_of(model, tokens).backward()
    assert len(trace.spans()) == len(spans)  # it has ended
    if path is not None:
        trace.save(path)
    return spans, exposed_s, trace.exposed_s


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
            assert first.end_s <= forward.begin_s + CLOCK_S
            assert first.nbytes > 0


@pytest.mark.parametrize("device", DEVICES)
def test_exposed_time_is_that_of_the_engine(device: str) -> None:
    for _, engines, traces in run_threads(traced_step, 2, device=device):
        assert traces == pytest.approx(engines, rel=1e-3, abs=1e-6)
        assert traces > 0


def test_file_is_a_chrome_trace(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[Span]:
        return traced_step(comm, tmp_path / f"{comm.rank}.json")[0]

    for rank, spans in enumerate(run_threads(body, 2)):
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        shown = [event for event in events if event["ph"] == "X"]
        assert [event["name"] for event in shown] == [span.name for span in spans]
        assert {event["pid"] for event in events} == {rank}
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert {*rows.values()} == {"compute", "waiting", "gather", "reduce", "all_reduce"}
        for event, span in zip(shown, spans, strict=True):
            assert event["dur"] == pytest.approx((span.end_s - span.begin_s) * 1e6)
            assert rows[event["tid"]] == span.row


def test_nothing_is_recorded_outside_a_trace() -> None:
    comm = Communicator.local_group(1)[0]
    engine = fully_shard(make(), comm)
    with engine.trace() as trace:
        pass
    engine.model(torch.zeros(1, 2, dtype=torch.int64))
    assert trace.spans() == []
