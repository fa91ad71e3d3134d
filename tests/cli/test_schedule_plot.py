"""The picture of a schedule: what its boxes claim, for every strategy, and that it is drawn."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path

import pytest

from shardcomm.cli.schedule_plot import Box, boxes_of, draw
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import STRATEGIES
from shardcomm.schedule.triggers import Phase, Trigger

BLOCKS = (1, 2, 3)


def plan(strategy: str, **options: int) -> Schedule:
    """A root around three blocks."""
    inner = [Trigger(p, u) for u in BLOCKS for p in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
    order = [Trigger(Phase.PRE_FORWARD, 0), *inner, Trigger(Phase.POST_FORWARD, 0)]
    return Schedule.plan(order, strategy, **options)


def of(boxes: list[Box], what: str) -> list[Box]:
    return sorted((box for box in boxes if box.what == what), key=lambda box: box.start)


@pytest.fixture(params=STRATEGIES)
def boxes(request: pytest.FixtureRequest) -> list[Box]:
    return boxes_of(plan(request.param))


def test_a_lane_does_one_thing_at_a_time(boxes: list[Box]) -> None:
    by_lane = sorted(boxes, key=lambda box: (box.lane, box.start))
    for _, lane in groupby(by_lane, key=lambda box: box.lane):
        assert all(first.stop <= second.start for first, second in pairwise(lane))


def test_forward_runs_the_blocks_in_order_and_backward_in_reverse(boxes: list[Box]) -> None:
    for what, expected in (("forward", BLOCKS), ("backward", BLOCKS[::-1])):
        assert [box.unit for box in of(boxes, what) if box.unit] == list(expected)


def test_a_unit_computes_only_while_its_slot_holds_it_in_full(boxes: list[Box]) -> None:
    full = of(boxes, "full")
    for box in (*of(boxes, "forward"), *of(boxes, "backward")):
        assert any(
            each.unit == box.unit and each.start <= box.start and box.stop <= each.stop
            for each in full
        ), box


def test_gradients_are_reduced_after_their_backward_and_all_reduced_after_that() -> None:
    boxes = boxes_of(plan("hybrid_shard"))
    backward = {box.unit: box.stop for box in of(boxes, "backward")}
    reduce = {box.unit: box for box in of(boxes, "reduce")}
    all_reduce = {box.unit: box for box in of(boxes, "all-reduce")}
    assert reduce.keys() == all_reduce.keys() == {0, *BLOCKS}
    for unit, box in reduce.items():
        assert backward[unit] <= box.start
        assert box.stop <= all_reduce[unit].start


def test_what_travels_is_what_the_strategy_sends() -> None:
    def collectives(strategy: str) -> dict[str, int]:
        boxes = boxes_of(plan(strategy))
        counted = {what: len(of(boxes, what)) for what in ("gather", "reduce", "all-reduce")}
        return {what: count for what, count in counted.items() if count}

    assert collectives("no_shard") == {"all-reduce": 4}
    assert collectives("shard_grad_op") == {"gather": 4, "reduce": 4}
    assert collectives("full_shard") == {"gather": 5, "reduce": 4}  # block 1 twice
    assert collectives("hybrid_shard") == {"gather": 5, "reduce": 4, "all-reduce": 4}


def test_without_prefetch_every_gather_is_waited_for() -> None:
    """2 for each forward of a block, 4 for each backward, 1.5 for each of 5 gathers, in between 0.3 for the root."""
    boxes = boxes_of(plan("full_shard", prefetch=0, slots=2))
    ends = max(box.stop for box in boxes if box.lane == "compute")
    assert ends == pytest.approx(3 * (2 + 4) + 5 * 1.5 + 8 * 0.3)


def test_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "schedules.png"
    draw(str(file), {name: plan(name) for name in STRATEGIES})
    assert file.read_bytes().startswith(b"\x89PNG")
