"""What a unit is given and gives: containers and tensors stay the caller's, and what leaves announces backward."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, MixedPrecision, fully_shard
from shardcomm.sharded.sharded_unit import State
from shardcomm.sharded.unit_gradients import Stage
from support.called import Called
from support.thread_ranks import run_threads
from support.twins import assert_same_gradients, twins, values

WIDTH = 4


@dataclasses.dataclass
class Carried:
    """What blocks hand on, and write into."""

    hidden: torch.Tensor
    aux: torch.Tensor | None = None
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    cache: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, carried: Carried, kept: list[torch.Tensor], name: str) -> torch.Tensor:
        x = torch.tanh(self.linear(carried.hidden))
        carried.seen.append(x)
        carried.cache[name] = x.detach()
        carried.aux = x.sum() if carried.aux is None else carried.aux + x.sum()
        kept.append(x)
        kept[0] = kept[0] * 2
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Carried, list[torch.Tensor]]:
        carried, kept = Carried(x), [x]
        for number, block in enumerate(self.blocks):
            carried.hidden = block(carried, kept, name=str(number))
        assert carried.aux is not None
        return carried.hidden.sum() + carried.aux + sum(each.sum() for each in kept), carried, kept


def assert_same(ours: Any, theirs: Any) -> None:
    loss, carried, kept = ours
    other_loss, other, other_kept = theirs
    for mine, his in [(loss, other_loss), (carried.hidden, other.hidden), (carried.aux, other.aux)]:
        torch.testing.assert_close(mine, his)
    for mine, his in [(kept, other_kept), (carried.seen, other.seen)]:
        assert len(mine) == len(his)
        torch.testing.assert_close(mine, his)
    torch.testing.assert_close(carried.cache, other.cache)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_what_a_unit_writes_into_its_arguments_reaches_the_caller(
    strategy: str, grad: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Net)
        engine = fully_shard(model, comm, strategy=strategy)
        with torch.set_grad_enabled(grad):
            ours, theirs = model(values(3, WIDTH)), plain(values(3, WIDTH))
        assert_same(ours, theirs)
        if grad:
            for loss, *_ in (ours, theirs):
                loss.backward()
            assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_it_does_so_where_inputs_are_cast() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, cache: dict[str, torch.Tensor]) -> torch.Tensor:
            assert cache["x"].dtype == torch.bfloat16
            cache["y"] = self.linear(cache["x"])
            return cache["y"]

    def body(comm: Communicator) -> None:
        model = Keeping()
        fully_shard(model, comm, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        cache = {"x": values(3, WIDTH)}
        given = cache["x"]
        with torch.no_grad():
            out = model(cache)
        assert cache["y"] is out
        assert cache["x"] is given

    run_threads(body, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, same: list[torch.Tensor]) -> torch.Tensor:
        assert same[0] is x
        same[0].mul_(3)
        return self.linear(x) + same[0]


def test_a_tensor_that_is_given_twice_stays_one() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), Pair()]))
        engine = fully_shard(model, comm, units=[*model])
        for net in (model, plain):
            x = net[0](values(3, WIDTH))
            net[1](x, [x]).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Both a dataclass and a registered dict, and written only as a whole, as a Hugging Face ModelOutput is."""

    hidden: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__setitem__("hidden", self.hidden)

    def update(self, *_: object, **__: object) -> None:
        raise AssertionError


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), None),
    lambda values, _: Output(*values),
    serialized_type_name="test_unit_io.Output",
)


def test_a_registered_type_is_opened_by_its_own_functions() -> None:
    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: Output) -> Output:
            assert given["hidden"] is given.hidden
            assert given.hidden is not None
            return Output(self.linear(given.hidden))

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(Giving(), Giving()))
        engine = fully_shard(model, comm, units=Giving)
        for net in (model, plain):
            out = net(Output(values(3, WIDTH)))
            assert out["hidden"] is out.hidden
            out["hidden"].sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Anew:
    """Of a registered type whose tensors are made when it is opened."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


pytree.register_pytree_node(
    Anew,
    lambda anew: ([anew.tensor.view_as(anew.tensor)], None),
    lambda values, _: Anew(*values),
    serialized_type_name="test_unit_io.Anew",
)


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, anew: Anew, seen: deque[torch.Tensor]) -> Anew:
        seen.append(self.linear(anew.tensor))
        return Anew(seen[-1] * seen[0])


def test_a_type_that_makes_its_tensors_anew_and_a_deque() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.ModuleList([Appending(), Appending()]))
        engine = fully_shard(model, comm, units=[*model])
        for net in (model, plain):
            x = values(3, WIDTH).requires_grad_()
            carried, seen = Anew(x), deque([x])
            for block in net:
                carried = block(carried, seen)
            assert len(seen) == 3
            (carried.tensor.sum() + sum(each.sum() for each in seen)).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Writing(nn.Module):
    """Hands on by what it writes into its arguments, in each of three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, into: dict[str, torch.Tensor], also: list[Any]) -> None:
        into["y"] = torch.tanh(self.linear(x))
        also.append(into["y"] * 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_recomputed_unit_writes_reaches_what_is_recomputed_after_it(
    reentrant: bool,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.writer = Writing()
            self.head = nn.Linear(WIDTH, WIDTH)

        def block(self, x: torch.Tensor) -> torch.Tensor:
            into, also = {"x": x}, [x]
            self.writer(x, into, also)
            return self.head(into["y"] + also[-1]) * into["x"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.block, self.stem(x), use_reentrant=reentrant)
            return result

    def body(comm: Communicator) -> None:
        model, plain = twins(Net)
        engine = fully_shard(model, comm, units=[model.writer, model.head], strategy="no_shard")
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Apply(nn.Module):
    """Computes with what it is given by a function of its own."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


class Blocks(nn.Module):
    """Four of them, each called by a function of its caller's."""

    def __init__(self, compute: Callable[..., Any], call: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Apply(compute) for _ in range(4))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def assert_as_plain(compute: Callable[..., Any], call: Callable[..., Any], strategy: str) -> None:
    """Compares the gradients of sharded `Blocks` with those of plain ones."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Blocks(compute, call))
        engine = fully_shard(model, comm, units=Apply, strategy=strategy)
        inputs = [values(3, WIDTH).requires_grad_() for _ in range(2)]
        for net, x in zip((model, plain), inputs, strict=True):
            # An optimizer in backward needs to know when a unit's gradients are complete.
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(lambda param: None)
            net(x * 1).square().sum().backward()  # of no leaf, which may not be changed in place
        assert_same_gradients(engine, model, plain)
        torch.testing.assert_close(*[x.grad for x in inputs])

    run_threads(body, 2)


class Box:
    """Of a registered type; it has an attribute that its functions do not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.note: Any = None


pytree.register_pytree_node(
    Box,
    lambda box: ([box.tensor], None),
    lambda values, _: Box(*values),
    serialized_type_name="test_unit_io.Box",
)


def keep_and_return(unit: Any, state: dict[str, Any]) -> Any:
    unit.kept = state
    state["x"] = unit.linear(state["x"])
    return state


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


def test_containers_with_many_ways_to_a_tensor_are_opened_once() -> None:
    for cast in (None, torch.bfloat16):
        x = values(3, WIDTH).requires_grad_() * 1
        model = Apply(lambda unit, state: unit.linear(state["both"][0]["both"][0]["x"]))
        precision = MixedPrecision(param_dtype=cast)
        fully_shard(model, Communicator.local_group(1)[0], mixed_precision=precision)
        state: dict[str, Any] = {"x": x}
        for _ in range(25):
            state = {"x": x, "both": [state, state]}
        model(state).sum().backward()


def test_a_dict_that_is_given_twice_stays_one_where_inputs_are_cast() -> None:
    def compute(unit: Any, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Any:
        assert one is other
        one["y"] = unit.linear(one["x"])
        return other["y"]

    model = Apply(compute)
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    fully_shard(model, Communicator.local_group(1)[0], mixed_precision=precision)
    state = {"x": values(3, WIDTH)}
    assert model(state, state) is state["y"]


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


def test_what_a_unit_has_written_before_it_raised_is_there() -> None:
    def fail(unit: Any, state: dict[str, Any]) -> None:
        state["y"] = state["x"]
        raise ZeroDivisionError

    model = Apply(fail)
    fully_shard(model, Communicator.local_group(1)[0])
    state = {"x": values(3, WIDTH).requires_grad_() * 1}
    with pytest.raises(ZeroDivisionError):
        model(state)
    assert state["y"] is state["x"]


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
