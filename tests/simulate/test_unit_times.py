"""The time of a unit: counted by hand, and read from traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, UnitTime, fully_shard, times_by_flops, times_of_trace
from shardcomm.models.gpt import GPT
from shardcomm.models.shapes import SHAPES
from shardcomm.simulate.unit_times import unit_flops
from shardcomm.trace.timeline import RankTimeline, Span, Timeline
from support.machines import machine
from support.nets import batch, loss_of, make


def test_a_token_takes_two_operations_for_each_element_of_a_matrix() -> None:
    with torch.device("meta"):
        model = GPT(width=64, layers=2, context=16)
    of_root, *of_blocks = unit_flops(model, tokens=10, attention=100)
    assert of_root == 10 * 2 * 64 * 256  # the head; tokens and positions are looked up
    assert of_blocks == [10 * (2 * 12 * 64 * 64 + 100)] * 2


def test_the_operations_of_llama3_8b_are_those_of_its_matrices() -> None:
    """7.5e9 of its 8.03e9 parameters multiply: all but the embedding and the norms."""
    of_units = unit_flops(SHAPES["llama3-8b"].on_meta(), tokens=1)
    norms = (2 * 32 + 1) * 4096
    assert sum(of_units) == 2 * (8_030_261_248 - 128256 * 4096 - norms)


def test_a_tied_embedding_multiplies() -> None:
    assert unit_flops(SHAPES["gpt2"].on_meta(), tokens=1)[0] == 2 * 50257 * 768


def test_times_are_operations_by_the_rate_and_what_a_unit_takes_beside_them() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False))
    where = machine(flops_per_s=1e6, unit_s=0.5, backward=2.0)
    found = times_by_flops(model, where, tokens=50, units=[nn.Linear])
    assert found == (UnitTime(0.5, 1.0), UnitTime(1.5, 3.0))
    again = times_by_flops(model, where, tokens=50, units=[nn.Linear], recompute=True)
    assert again == (UnitTime(0.5, 1.0), UnitTime(1.5, 4.5))


def test_a_frozen_matrix_takes_one_product_less_in_backward() -> None:
    """Each of two matrices has 1e6 operations in forward, which take a second, and twice as many in backward."""
    unit = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    model = nn.Sequential(nn.Linear(10, 10, bias=False), unit)
    where = machine(flops_per_s=1e6, backward=2.0)

    def backward_s(**options: bool) -> float:
        *_, last = times_by_flops(model, where, tokens=50, units=[unit], **options)
        assert last.forward_s == 2.0
        return last.backward_s

    assert backward_s() == 4.0
    unit[1].requires_grad_(False)
    assert backward_s() == 3.0
    unit.requires_grad_(False)
    assert backward_s() == 2.0  # the gradient of its input, for what is trained before it
    assert backward_s(recompute=True) == 4.0


def test_backward_does_not_come_to_what_is_in_front_of_all_trained_units() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.GELU()) for _ in range(4)))
    for unit in (0, 1, 3):
        model[unit].requires_grad_(False)
    where = machine(unit_s=1.0)
    found = times_by_flops(model, where, tokens=1, units=list(model), recompute=True)
    assert [each.backward_s > 0 for each in found] == [True, False, False, True, True]
    model.requires_grad_(False)
    found = times_by_flops(model, where, tokens=1, units=list(model))
    assert {each.backward_s for each in found} == {0.0}


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"tokens": 0}, ValueError, "tokens is 0; it must be a whole number from 1"),
        ({"tokens": -5}, ValueError, "tokens is -5; it must be a whole number from 1"),
        ({"tokens": "8"}, ValueError, "tokens is '8'; it must be a whole number from 1"),
        ({"attention": -1e9}, ValueError, "attention is -1000000000.0; it must be a whole number"),
        ({"recompute": "no"}, ValueError, "recompute is 'no'; it must be True or False"),
        ({"machine": "8xH100"}, TypeError, "machine is a str; it must be a shardcomm.Machine"),
        ({"model": None}, TypeError, r"model is a NoneType; it must be a torch\.nn\.Module"),
    ],
)
def test_odd_arguments_are_refused(
    changed: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    given = {"model": nn.Linear(4, 4), "machine": machine(), "tokens": 8} | changed
    with pytest.raises(error, match=f"^times_by_flops: {sentence}"):
        times_by_flops(**given)


def timeline(*spans: tuple[str, str, float, float]) -> Timeline:
    made = tuple(Span(row, name, begin, end, 0) for row, name, begin, end in spans)
    return Timeline((RankTimeline(0, made, {}),), "a clock")


def test_a_traced_unit_has_the_time_outside_of_those_in_it() -> None:
    """The root: 1 s before its block and 2 s after it; the block's is its own."""
    traced = timeline(
        ("step", "step 0", 0.0, 20.0),
        ("compute", "forward (root)", 0.0, 8.0),
        ("compute", "forward block", 1.0, 6.0),
        ("compute", "backward (root)", 8.0, 19.0),
        ("compute", "backward block", 9.0, 18.0),
    )
    assert times_of_trace(traced, ["(root)", "block"]) == (UnitTime(3.0, 2.0), UnitTime(5.0, 9.0))


def test_units_in_units_and_beside_them_are_told_apart() -> None:
    """What comes between two units inside of another, such as from 4 to 5, is nobody's."""
    traced = timeline(
        ("step", "step 0", 0.0, 40.0),
        ("compute", "forward a", 2.0, 4.0),
        ("compute", "forward b", 5.0, 9.0),
        ("compute", "forward outer", 1.0, 10.0),
        ("compute", "forward c", 11.0, 15.0),
        ("compute", "forward (root)", 0.0, 20.0),
    )
    found = times_of_trace(traced, ["(root)", "outer", "a", "b", "c"])
    assert [each.forward_s for each in found] == [6.0, 2.0, 2.0, 4.0, 4.0]


def test_a_model_whose_inputs_have_no_gradient_has_what_comes_before_its_block() -> None:
    traced = timeline(
        ("step", "step 0", 0.0, 20.0),
        ("compute", "forward (root)", 0.0, 8.0),
        ("compute", "forward block", 1.0, 6.0),
        ("compute", "backward block", 9.5, 18.0),
    )
    assert times_of_trace(traced, ["(root)", "block"])[0] == UnitTime(3.0, 1.5)


def test_the_first_unit_has_what_comes_before_its_reduce() -> None:
    """Nothing announces the end of its backward, from 14 to 18, beside the reduce of b. Then comes the optimizer."""
    traced = timeline(
        ("step", "step 0", 0.0, 30.0),
        ("compute", "forward (root)", 0.0, 8.0),
        ("compute", "forward a", 0.0, 2.0),
        ("compute", "forward b", 2.0, 5.0),
        ("compute", "backward b", 9.0, 14.0),
        ("reduce", "b", 14.0, 15.0),
        ("reduce", "a", 18.0, 20.0),
        ("reduce", "(root)", 18.5, 18.5),
    )
    found = times_of_trace(traced, ["(root)", "a", "b"])
    assert found == (UnitTime(3.0, 1.5), UnitTime(2.0, 4.0), UnitTime(3.0, 5.0))


def test_a_reduce_that_begins_after_its_step_tells_of_the_step_alone() -> None:
    """It is put on a stream of its own, which may be late."""
    traced = timeline(
        ("step", "step 0", 0.0, 10.0),
        ("compute", "forward a", 0.0, 2.0),
        ("reduce", "a", 12.0, 13.0),
        ("step", "step 1", 20.0, 30.0),
        ("compute", "forward a", 20.0, 22.0),
        ("reduce", "a", 30.0, 31.0),
    )
    assert times_of_trace(traced, ["a"]) == (UnitTime(2.0, 8.0),)


def test_a_reduce_in_the_next_steps_forward_is_that_of_the_step_before() -> None:
    traced = timeline(
        ("step", "step 0", 0.0, 10.0),
        ("compute", "forward a", 0.0, 2.0),
        ("step", "step 1", 10.0, 20.0),
        ("reduce", "a", 10.5, 11.0),
        ("compute", "forward a", 10.0, 12.0),
        ("reduce", "a", 20.0, 21.0),
    )
    assert times_of_trace(traced, ["a"]) == (UnitTime(2.0, 8.0),)


def test_no_time_is_negative() -> None:
    """Also where a step was marked in the middle of another one: nothing had ended when its first backward began."""
    traced = timeline(
        ("step", "step 0", 0.0, 20.0),
        ("reduce", "outer", 0.5, 1.0),
        ("compute", "backward a", 0.0, 2.0),
        ("compute", "forward outer", 2.0, 9.0),
        ("compute", "forward a", 3.0, 6.0),
    )
    assert times_of_trace(traced, ["outer", "a"]) == (UnitTime(4.0, 0.0), UnitTime(3.0, 2.0))


@pytest.mark.parametrize("reduced", [True, False], ids=["each reduces", "the last reduces"])
def test_steps_of_several_micro_batches_are_refused(reduced: bool) -> None:
    """Which of them the backward of a was in is not known."""

    def micro_batch(begin_s: float, *, reduces: bool) -> list[tuple[str, str, float, float]]:
        spans = [
            ("compute", "forward a", begin_s, begin_s + 2),
            ("compute", "forward b", begin_s + 2, begin_s + 5),
            ("compute", "backward b", begin_s + 5, begin_s + 10),
            ("reduce", "a", begin_s + 14, begin_s + 15),
        ]
        return spans if reduces else spans[:-1]

    step = ("step", "step 0", 0.0, 40.0)
    first, last = micro_batch(0.0, reduces=reduced), micro_batch(15.0, reduces=True)
    with pytest.raises(ValueError, match="has 2 forwards of 'a' in 'step 0', and no span of their"):
        times_of_trace(timeline(step, *first, *last), ["a", "b"])
    inner = [span for span in (*first, *last) if not span[1].endswith("a")]
    assert times_of_trace(timeline(step, *inner), ["b"]) == (UnitTime(6.0, 10.0),)


def test_a_frozen_unit_to_which_backward_does_not_come_computes_nothing_in_it() -> None:
    traced = timeline(
        ("step", "step 0", 0.0, 30.0),
        ("compute", "forward frozen", 0.0, 2.0),
        ("compute", "forward trained", 2.0, 5.0),
        ("reduce", "trained", 11.0, 12.0),
    )
    found = times_of_trace(traced, ["frozen", "trained"])
    assert found == (UnitTime(2.0, 0.0), UnitTime(3.0, 6.0))


def test_a_unit_around_others_has_what_comes_before_the_first_of_them() -> None:
    """From when the backward behind it has ended, at 9: not from its own forward on."""
    traced = timeline(
        ("step", "step 0", 0.0, 30.0),
        ("compute", "forward outer", 0.0, 4.0),
        ("compute", "forward a", 0.0, 1.0),
        ("compute", "forward b", 1.0, 3.0),
        ("compute", "forward c", 4.0, 6.0),
        ("compute", "backward c", 7.0, 9.0),
        ("compute", "backward b", 11.0, 15.0),
    )
    found = times_of_trace(traced, ["outer", "a", "b", "c"])
    assert [each.backward_s for each in found] == [2.0, 0.0, 4.0, 2.0]


def test_the_median_step_of_a_trace_is_taken() -> None:
    spans = []
    for number, seconds in enumerate((1.0, 7.0, 2.0)):
        spans.append(("step", f"step {number}", 10.0 * number, 10.0 * number + 9))
        spans.append(("compute", "forward a", 10.0 * number, 10.0 * number + seconds))
    assert times_of_trace(timeline(*spans), ["a"]) == (UnitTime(2.0, 0.0),)


def test_a_trace_without_steps_or_of_another_model_is_refused() -> None:
    span = ("compute", "forward a", 0.0, 1.0)
    with pytest.raises(ValueError, match="the trace has no steps"):
        times_of_trace(timeline(span), ["a"])
    stepped = timeline(("step", "step 0", 0.0, 1.0), span)
    with pytest.raises(
        ValueError, match=r"of another model: it has 1 units and the model 2, .*'b'"
    ):
        times_of_trace(stepped, ["a", "b"])


def test_a_trace_of_several_ranks_is_refused() -> None:
    """Ranks that communicate wait inside of what they compute."""
    alone = timeline(("step", "step 0", 0.0, 1.0), ("compute", "forward a", 0.0, 1.0))
    assert times_of_trace(alone, ["a"]) == (UnitTime(1.0, 0.0),)
    (one,) = alone.ranks
    gathers = replace(one, spans=(*one.spans, Span("gather", "a", 0.0, 0.5, 4)))
    both = replace(alone, ranks=(one, replace(one, rank=1)))
    for several in (both, replace(alone, ranks=(gathers,))):  # measured, and simulated
        with pytest.raises(ValueError, match="the trace is of several ranks, which communicate;"):
            times_of_trace(several, ["a"])


def test_the_engines_trace_of_a_rank_alone_is_read() -> None:
    model = make()
    engine = fully_shard(model, Communicator.local_group(1)[0])
    with engine.trace() as trace:
        for number in range(2):
            with trace.step(number):
                loss_of(model, batch(0, number)).backward()
    times = times_of_trace(trace.timeline(), [unit.name for unit in engine.units])
    assert all(each.forward_s > 0 and each.backward_s > 0 for each in times)
    step_s = max(span.end_s - span.begin_s for span in trace.spans() if span.row == "step")
    assert sum(map(sum, times)) < step_s


@pytest.mark.parametrize("frozen", [0, 3])
def test_all_units_of_the_engines_trace_together_compute_no_longer_than_its_step(
    frozen: int,
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    engine = fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear)
    inputs = torch.ones(32, 64)
    with engine.trace() as trace, trace.step(0):
        model(inputs).square().mean().backward()
    times = times_of_trace(trace.timeline(), [unit.name for unit in engine.units])
    of_layers = times[1:]
    assert [each.backward_s > 0 for each in of_layers] == [False] * frozen + [True] * (6 - frozen)
    (step,) = (span for span in trace.spans() if span.row == "step")
    assert sum(map(sum, times)) <= step.end_s - step.begin_s
