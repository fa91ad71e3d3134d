"""The full state dict: parameters, buffers, extra state, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, fully_shard
from support.nets import assert_same, make
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, twins, values


class Normed(nn.Module):
    """Has parameters, buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.history = ["made"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))

    def get_extra_state(self) -> list[str]:
        return self.history

    def set_extra_state(self, state: list[str]) -> None:
        self.history = state


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_state_dict_is_a_copy_of_parameters_and_buffers() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Normed)
        engine = fully_shard(model, comm)
        state = engine.full_state_dict()
        model(values(4, WIDTH))
        assert not torch.equal(model.norm.running_mean, plain.norm.running_mean)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        for name, value in plain.state_dict().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[name], value), name

    run_threads(body, 1)


def test_a_full_state_dict_for_a_rank_that_is_not_there_is_refused() -> None:
    def body(comm: Communicator) -> None:
        engine = fully_shard(twins(Normed)[0], comm)
        for rank in (2, -1, "0"):
            with pytest.raises(ValueError, match=f"rank is {rank!r}; .* a rank from 0 to 1"):
                engine.full_state_dict(rank)  # type: ignore[arg-type]
        assert bool(engine.full_state_dict(rank=1)) is (comm.rank == 1)

    run_threads(body, 2)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("make", [Normed, Nested])
def test_extra_state_passes_both_ways(make: type[nn.Module]) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        owner = model if make is Normed else model.inner
        engine = fully_shard(model, comm)
        state = engine.full_state_dict()
        assert state.keys() == plain.state_dict().keys()
        plain.load_state_dict(state)
        name = next(name for name in state if name.endswith("_extra_state"))
        assert state[name] == ["made"]
        engine.load_state_dict({**state, name: ["loaded"]})
        assert owner.history == ["loaded"]

    run_threads(body, 2)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("by_engine", [False, True])
def test_copies_of_parameters_are_loaded_by_the_layout_that_they_have(
    by_engine: bool, granularity: str, strategy: str
) -> None:
    """Early stopping keeps such copies: `{name: p.detach().clone() for name, p in model.named_parameters()}`."""
    options: dict[str, Any] = {"granularity": granularity, "strategy": strategy}

    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm, units=nn.Linear, **options)
        load = engine.load_state_dict if by_engine else model.load_state_dict
        best = {name: p.detach().clone().double() for name, p in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        load({**model.state_dict(), **best})
        assert_same(engine.full_state_dict(), plain, bitwise=True)
        load({**model.state_dict(), **dict(model.named_parameters())})  # themselves
        assert_same(engine.full_state_dict(), plain, bitwise=True)
        other, _ = twins(Chain)
        other_engine = fully_shard(
            other, comm, units=nn.Linear, **options | {"granularity": other_cut}
        )
        before = other_engine.full_state_dict()
        if strategy == "full_shard":
            load = other_engine.load_state_dict if by_engine else other.load_state_dict
            with pytest.raises(
                (ValueError, RuntimeError), match="Between layouts, save and load by"
            ):
                load({**other.state_dict(), **best})
            if by_engine:
                torch.testing.assert_close(other_engine.full_state_dict(), before, rtol=0, atol=0)

    other_cut = "element" if granularity == "tensor" else "tensor"
    run_threads(body, 2)


@pytest.mark.parametrize("wrong", ["norm.running_var", "norm.bias", "linear.weight"])
@pytest.mark.parametrize("value", [torch.zeros(3), [0.0]])
def test_refused_state_dict_changes_nothing(wrong: str, value: object) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Normed)
        engine = fully_shard(model, comm)
        state = {
            name: value + 1 if isinstance(value, torch.Tensor) else ["changed"]
            for name, value in plain.state_dict().items()
        }
        state[wrong] = value
        with pytest.raises(ValueError, match=f"{wrong} (has shape|is a list)"):
            engine.load_state_dict(state)
        after = engine.full_state_dict()
        for name, expected in plain.state_dict().items():
            if isinstance(expected, torch.Tensor):
                assert torch.equal(after[name], expected), name
            else:
                assert after[name] == expected

    run_threads(body, 2)


@pytest.mark.covers("state dicts")
def test_state_dict_round_trip() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make("tied", seed=1)
        engine = fully_shard(model, comm)
        engine.load_state_dict(make("tied", seed=7).state_dict())
        return engine.full_state_dict()

    for state in run_threads(body, 3):
        assert_same(state, make("tied", seed=7), bitwise=True)


def changed_by_a_hook(net: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has `net.state_dict()` give changed parameters, and an entry that is no tensor, as quantisers do."""

    def hook(_net: object, state: dict[str, Any], _prefix: str, _metadata: object) -> None:
        state |= {name: change(value) for name, value in state.items()}
        state["version"] = [1]

    net._register_state_dict_hook(hook)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("wrong", ["norm.running_var", "linear.weight"])
def test_values_on_the_meta_device_are_refused_by_name(wrong: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Normed)
        engine = fully_shard(model, comm)
        state = plain.state_dict()
        state[wrong] = state[wrong].to("meta")
        with pytest.raises(ValueError, match=f"{wrong} is on the meta device"):
            engine.load_state_dict(state)
        with pytest.raises(RuntimeError, match=f"{wrong}.*meta"):  # as torch says for a buffer
            model.load_state_dict(state)

    run_threads(body, 2)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_what_a_hook_makes_of_the_parameters_is_of_whole_ones_or_refused(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm, strategy=strategy)
        for net in (model, plain):
            changed_by_a_hook(net, torch.Tensor.bfloat16)
        expected = plain.state_dict()
        if strategy == "no_shard":
            full = engine.full_state_dict()
        else:
            with pytest.raises(RuntimeError, match=r"made of this rank's rows .* engine\.gathered"):
                engine.full_state_dict()
            with engine.gathered():
                full = copy.deepcopy(model.state_dict())
        assert full.keys() == expected.keys()
        assert full.pop("version") == [1]
        for name, value in full.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        parts = engine.state_dict()
        for name, param in model.named_parameters():
            assert parts[name].dtype == torch.bfloat16
            assert parts[name].shape == expected[name].shape
            held = getattr(parts[name], "held", parts[name])  # of a ShardTensor
            assert torch.equal(held, param.to_local().bfloat16())

    run_threads(body, 2)


class Untold(Normed):
    """Overrides `state_dict`, and passes no `keep_vars` on."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **{**kwargs, "keep_vars": False})


class Told(Normed):
    """Saves its weight once more, and something that is no parameter, nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "detached"] = self.linear.weight.detach()
        destination[prefix + "scale"] = self.scale


class Extra(Normed):
    """Its extra state is a parameter."""

    def get_extra_state(self) -> Any:
        return self.linear.weight


@pytest.mark.parametrize(
    ("make", "name"),
    [(Untold, "linear.weight"), (Told, "detached"), (Extra, "_extra_state")],
)
def test_rows_by_another_way_are_no_full_state_and_loaded_where_they_lie(
    make: type[Normed], name: str
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        engine = fully_shard(model, comm, units=[nn.Linear])
        with pytest.raises(
            RuntimeError, match=f"full_state_dict: '{name}' was made of this rank's"
        ):
            engine.full_state_dict()
        if make is Extra:
            return
        given = {
            name: value + 1 if isinstance(value, torch.Tensor) else value
            for name, value in plain.state_dict().items()
        }
        engine.load_state_dict(given)
        assert torch.equal(model.linear.weight.full_tensor(), given["linear.weight"])
        assert torch.equal(model.norm.running_mean, given["norm.running_mean"])
        if isinstance(model, Told):
            assert torch.equal(model.scale, given["scale"])

    run_threads(body, 2)


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.clone])
def test_nothing_is_loaded_into_what_a_hook_has_made(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def body(comm: Communicator) -> None:
        model, other = twins(Chain)
        with torch.no_grad():
            for param in other.parameters():
                param.add_(1)
        engine = fully_shard(model, comm)
        before = engine.full_state_dict()
        changed_by_a_hook(model, change)
        with pytest.raises(
            RuntimeError, match=r"made anew by a hook .* call model\.load_state_dict"
        ):
            engine.load_state_dict({**other.state_dict(), "version": [1]})
        after = dict(model.named_parameters())
        for name, value in before.items():
            assert torch.equal(after[name].full_tensor(), value)
        model.load_state_dict(other.state_dict())
        for name, value in other.state_dict().items():
            assert torch.equal(after[name].full_tensor(), value)

    run_threads(body, 2)


def test_state_dict_with_wrong_names_is_refused() -> None:
    def body(comm: Communicator) -> None:
        engine = fully_shard(make(), comm)
        state = make().state_dict()
        state["tail"] = state.pop("head.weight")
        with pytest.raises(ValueError, match=r"lacks \['head.weight'\] and has unknown \['tail'\]"):
            engine.load_state_dict(state)

    run_threads(body, 1)
