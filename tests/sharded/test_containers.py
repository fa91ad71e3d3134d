"""The containers that a unit is given stay its caller's, and what it writes into them is there."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, MixedPrecision, fully_shard
from support.computing_units import WIDTH, Apply, Carried
from support.thread_ranks import run_threads
from support.twins import assert_same_gradients, twins, values


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
    serialized_type_name="test_containers.Output",
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
    serialized_type_name="test_containers.Anew",
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
