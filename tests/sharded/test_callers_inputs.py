"""Units that keep, change and return what they are given, in many ways, have the gradients of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from support.computing_units import WIDTH, Carried, assert_as_plain, keep_and_return


class Box:
    """Of a registered type; it has an attribute that its functions do not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.note: Any = None


pytree.register_pytree_node(
    Box,
    lambda box: ([box.tensor], None),
    lambda values, _: Box(*values),
    serialized_type_name="test_callers_inputs.Box",
)


def write_twice(unit: Any, states: list[Any]) -> Any:
    assert states[0] is states[1]
    states[0]["x"] = unit.linear(states[1]["x"])
    return states[1]["x"]


def write_attributes(unit: Any, box: Box, carried: Carried) -> Any:
    box.note = carried.note = unit.linear(box.tensor)  # type: ignore[attr-defined]
    return box.note * carried.hidden


def write_into_itself(unit: Any, state: dict[str, Any]) -> Any:
    state["self"] = state
    return unit.linear(state["x"])


def return_nothing(unit: Any, x: torch.Tensor, into: list[torch.Tensor]) -> None:
    into.append(torch.tanh(unit.linear(x)))


def keep_what_came(unit: Any, x: torch.Tensor, into: list[torch.Tensor]) -> Any:
    into.append(x)
    return unit.linear(x).detach()


def add_in_place(unit: Any, state: dict[str, Any]) -> None:
    state["x"].add_(torch.sin(unit.linear(state["x"].clone())))


def call_keep_and_return(block: Any, x: torch.Tensor) -> Any:
    state = {"x": x}
    out = block(state)
    assert out is state
    out["y"] = out["x"] * 2
    assert block.kept["y"] is out["y"]
    return out["x"] + block.kept["y"]


def call_write_twice(block: Any, x: torch.Tensor) -> Any:
    state = {"x": x}
    return block([state, state]) + state["x"]


def call_write_attributes(block: Any, x: torch.Tensor) -> Any:
    box, carried = Box(x), Carried(x)
    return block(box, carried) + box.note + carried.note  # type: ignore[attr-defined]


def call_write_into_itself(block: Any, x: torch.Tensor) -> Any:
    state: dict[str, Any] = {"x": x}
    state["self"] = state
    return block(state)


def call_return_nothing(block: Any, x: torch.Tensor) -> Any:
    into: list[torch.Tensor] = []
    assert block(x, into) is None
    return into[0]


def call_keep_what_came(block: Any, x: torch.Tensor) -> Any:
    into: list[torch.Tensor] = []
    block(x, into)
    assert into[0] is x
    return into[0]


def call_add_in_place(block: Any, x: torch.Tensor) -> Any:
    state = {"x": x * 2}
    block(state)
    return state["x"]


def call_twice_with_one_state(block: Any, x: torch.Tensor) -> Any:
    state = {"x": x}
    return block(state)["x"] + block(state)["x"].square()


def change_and_return(unit: Any, x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def call_change_and_return(block: Any, x: torch.Tensor) -> Any:
    x = x * 1
    out = block(x)
    assert out is x
    out.mul_(3)
    return out + x


def return_flat(unit: Any, x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def call_return_flat(block: Any, x: torch.Tensor) -> Any:
    x = x * 1
    block(x).mul_(2)
    return x


def change_alone(unit: Any, x: torch.Tensor, *_: Any) -> None:
    x.add_(torch.sin(unit.linear(x.clone())))


def call_change_alone(block: Any, x: torch.Tensor) -> Any:
    x = x * 1
    block(x)
    return x


def call_change_alone_of_two(block: Any, x: torch.Tensor) -> Any:
    x = x * 1
    block(x, None)
    return x


def add_to(unit: Any, total: torch.Tensor, x: torch.Tensor) -> None:
    total += torch.sin(unit.linear(x))


def call_add_to(block: Any, x: torch.Tensor) -> Any:
    total = torch.zeros_like(x, requires_grad=False)
    block(total, x)
    return total


def call_with_a_stale_view(block: Any, x: torch.Tensor) -> Any:
    whole = x * 1
    state = {"x": x, "parts": whole.split(2)}
    whole.mul_(2)  # autograd refuses the parts from now on
    return block(state)["x"]


def return_views(unit: Any, x: torch.Tensor, views: tuple[torch.Tensor]) -> Any:
    return torch.sin(unit.linear(x)), views[0].view(-1)


def call_return_views(block: Any, x: torch.Tensor) -> Any:
    out, view = block(x, ((x * 2).view(-1),))
    return out + view.view(3, WIDTH)


class _Reversed(torch.autograd.Function):
    """A view whose gradient is another than that of a view."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return -grad


def reverse(unit: Any, x: torch.Tensor) -> Any:
    return _Reversed.apply(x), unit.linear(x)


def return_a_watched_view(unit: Any, x: torch.Tensor) -> Any:
    view = x.view(x.shape)
    view.register_hook(lambda grad: grad * 3)
    return view, unit.linear(x)


def return_a_view_of_a_watched_view(unit: Any, x: torch.Tensor) -> Any:
    view = x.view(-1)
    view.register_hook(lambda grad: grad * 3)
    return view.view(x.shape), unit.linear(x)


def return_a_view_without_gradient(unit: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        view = x.view(x.shape)
    return view, unit.linear(x)


def call_for_two(block: Any, x: torch.Tensor) -> Any:
    one, other = block(x * 1)
    return one.sin() + other


def keep_a_history(unit: Any, x: torch.Tensor) -> Any:
    unit.history = [x]
    return unit.linear(x), unit.history


def call_keep_a_history(block: Any, x: torch.Tensor) -> Any:
    x = x * 1
    out, history = block(x)
    assert history is block.history
    assert history[0] is x
    return out


class OwnDict(dict):  # type: ignore[type-arg]
    """Which pytree does not open."""


def write_into_own_dict(unit: Any, state: OwnDict) -> None:
    state["x"] = torch.sin(unit.linear(state["x"]))


def call_write_into_own_dict(block: Any, x: torch.Tensor) -> Any:
    state = OwnDict(x=x)
    block(state)
    return state["x"]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    ("compute", "call"),
    [
        (keep_and_return, call_keep_and_return),
        (keep_and_return, call_twice_with_one_state),
        (write_twice, call_write_twice),
        (write_attributes, call_write_attributes),
        (write_into_itself, call_write_into_itself),
        (return_nothing, call_return_nothing),
        (keep_what_came, call_keep_what_came),
        (add_in_place, call_add_in_place),
        (change_and_return, call_change_and_return),
        (return_flat, call_return_flat),
        (change_alone, call_change_alone),
        (change_alone, call_change_alone_of_two),
        (add_to, call_add_to),
        (keep_and_return, call_with_a_stale_view),
        (return_views, call_return_views),
        (write_into_own_dict, call_write_into_own_dict),
        (reverse, call_for_two),
        (return_a_watched_view, call_for_two),
        (return_a_view_of_a_watched_view, call_for_two),
        (return_a_view_without_gradient, call_for_two),
        (keep_a_history, call_keep_a_history),
    ],
    ids=lambda function: function.__name__,
)
def test_a_unit_has_the_callers_own_inputs(
    compute: Callable[..., Any], call: Callable[..., Any], strategy: str
) -> None:
    assert_as_plain(compute, call, strategy)
