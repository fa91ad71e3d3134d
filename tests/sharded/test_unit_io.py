"""What leaves a unit announces its backward, and is its caller's."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, fully_shard
from shardcomm.sharded.sharded_unit import State
from shardcomm.sharded.unit_gradients import Stage
from support.called import Called
from support.computing_units import WIDTH, Apply, assert_as_plain, keep_and_return
from support.thread_ranks import run_threads
from support.twins import assert_same_gradients, twins, values


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_view_that_came_and_leaves_makes_no_traffic(strategy: str) -> None:
    """What it is a view of is not the unit's: backward comes there when the unit's is over."""

    def with_views(unit: Any, x: torch.Tensor, views: tuple[torch.Tensor]) -> Any:
        return torch.sin(unit.linear(x)), views[0].view(-1)

    def without(unit: Any, x: torch.Tensor, views: tuple[torch.Tensor]) -> Any:
        return torch.sin(unit.linear(x)), views[0]

    def body(comm: Communicator) -> None:
        traffic = []
        for compute in (with_views, without):
            model = nn.ModuleList(Apply(compute) for _ in range(5))
            engine = fully_shard(model, comm, units=Apply, strategy=strategy)
            x = values(3, WIDTH).requires_grad_() * 1
            view = (x * 2).view(-1)
            for block in model:
                x, view = block(x, (view,))
            (x.sum() + view.sum()).backward()
            traffic.append((engine.traffic.gathered_bytes, engine.traffic.reduced_bytes))
        assert traffic[0] == traffic[1]

    run_threads(body, 2)


def test_units_with_one_input_are_reduced_one_after_the_other() -> None:
    def body(comm: Communicator) -> None:
        model = nn.ModuleList(Apply(lambda unit, x, _: unit.linear(x)) for _ in range(2))
        engine = fully_shard(model, comm, units=Apply, strategy="no_shard")
        seen: list[Stage] = []
        x = values(3, WIDTH).requires_grad_() * 1
        first = Called.apply(
            model[0](x, None), lambda: seen.append(engine.unit(model[1]).gradients.stage)
        )
        (first + model[1](x, None)).sum().backward()
        assert seen[0] not in (Stage.EMPTY, Stage.LOCAL)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("more", [None, [1]], ids=["nothing more", "a list"])
def test_units_in_reentrant_checkpoints_may_have_more_than_a_tensor(
    more: Any, strategy: str
) -> None:
    assert_as_plain(
        lambda unit, x, _: torch.sin(unit.linear(x)),
        lambda block, x: checkpoint(block, x, more, use_reentrant=True),
        strategy,
    )


def test_a_unit_that_is_used_again_within_its_own_backward_keeps_its_parameters() -> None:
    """A tensor from the middle of its first use is an input of its second one."""

    def compute(unit: Any, state: list[torch.Tensor]) -> torch.Tensor:
        middle = torch.sin(Called.apply(unit.linear(torch.ones(3, WIDTH)), look))
        unit.middle = middle
        return unit.linear(middle) + sum(each.mean() for each in state)

    seen: list[State] = []

    def look() -> None:
        seen.append(engine.units[0].state)

    model = Apply(compute)
    engine = fully_shard(model, Communicator.local_group(1)[0])
    (model([]) + model([model.middle])).square().sum().backward()
    assert seen == [State.BACKWARD] * 2


def test_forwards_leave_nothing_at_an_input_that_is_kept() -> None:
    model = Apply(lambda unit, state: torch.sin(unit.linear(state["x"])))
    engine = fully_shard(model, Communicator.local_group(1)[0])
    x = values(3, WIDTH).requires_grad_() * 1
    gc.disable()  # no cycle of references may keep activations
    try:
        for _ in range(5):
            model({"x": x})
    finally:
        gc.enable()
    assert not x._backward_hooks
    assert not engine.units[0].gradients.awaited


def test_a_view_of_a_parameter_in_a_container_is_refused() -> None:
    """Other units' parameters come into its memory; what a unit returns is copied."""

    def compute(unit: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["row"] = unit.linear.weight[0]
        out: torch.Tensor = unit.linear(state["x"])
        return out

    def body(comm: Communicator) -> None:
        model = nn.Sequential(Apply(compute), Apply(compute), Apply(compute))
        fully_shard(model, comm, units=Apply)
        with pytest.raises(
            RuntimeError, match=r"unit '0' has left a view .* put a clone\(\) of it"
        ):
            model({"x": values(3, WIDTH)})

    run_threads(body, 2)


WRAPS = {"itself": lambda x: x, "in a tuple": lambda x: (x, x), "in a dict": lambda x: {"x": x}}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_an_input_that_is_returned_as_it_came_is_the_callers(wrap: Callable[..., Any]) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(
            lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), Apply(lambda _, x: x)])
        )
        engine = fully_shard(model, comm, units=[*model])
        for net in (model, plain):
            x = net[0](values(3, WIDTH))
            out = net[1](wrap(x))
            for each in pytree.tree_leaves(out):
                assert each is x
            x.sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_an_input_that_the_loss_does_not_use_has_no_gradient() -> None:
    model = Apply(lambda unit, x, other: (unit.linear(x), other * 2))
    fully_shard(model, Communicator.local_group(1)[0])
    x, other = values(3, WIDTH).requires_grad_(), values(3, WIDTH).requires_grad_()
    model(x, other)[0].sum().backward()
    assert x.grad is not None
    assert other.grad is None


VIEWS = {
    "of a result": lambda unit, x: unit.linear(x).view(WIDTH, 3),
    "of an input": lambda unit, x: x.view(WIDTH, 3),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_view_that_a_unit_returns_may_be_changed_in_place(
    strategy: str, view: Callable[..., Any]
) -> None:
    def call(block: Any, x: torch.Tensor) -> torch.Tensor:
        out = block(x * 1)
        out += 1
        changed: torch.Tensor = out.view(3, WIDTH)
        return changed

    assert_as_plain(view, call, strategy)


def test_the_gradients_of_units_that_hand_on_a_dict_are_reduced_while_backward_goes_on() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: nn.ModuleList(Apply(keep_and_return) for _ in range(3)))
        engine = fully_shard(model, comm, units=Apply, strategy="no_shard")
        seen: list[Stage] = []

        def look() -> None:
            seen.extend(engine.unit(block).gradients.stage for block in model)

        state = {"x": values(3, WIDTH).requires_grad_() * 1}
        model[0](state)
        state["x"] = Called.apply(state["x"], look)
        for block in model[1:]:
            block(state)
        state["x"].sum().backward()
        assert seen[0] is Stage.EMPTY
        assert seen[1] not in (Stage.EMPTY, Stage.LOCAL)
        assert seen[2] not in (Stage.EMPTY, Stage.LOCAL)

    run_threads(body, 2)


def test_an_input_in_a_dict_may_come_from_another_thread() -> None:
    """Which has recorded more nodes of autograd's graph, so that their order says nothing."""

    def body(comm: Communicator) -> None:
        seen: list[State] = []

        def compute(unit: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
            first = unit.linear(torch.ones(3, WIDTH))  # its backward comes last
            return Called.apply(first, lambda: seen.append(engine.units[0].state)) + state["x"] * 2

        def elsewhere() -> None:
            for _ in range(100):
                state["x"] = state["x"] * 1

        engine = fully_shard(model := Apply(compute), comm, strategy="no_shard")
        state = {"x": values(3, WIDTH).requires_grad_()}
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        model(state).sum().backward()
        assert seen == [State.BACKWARD]

    run_threads(body, 2)
