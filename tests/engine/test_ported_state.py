"""What PyTorch states of FSDP2's state dicts, clipping, scaling and set-up, stated of `fully_shard`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, Engine, Mesh, MixedPrecision, ShardedParameter, fully_shard
from shardcomm.parameter.shard_tensor import ShardTensor
from support.parity import (
    MLP,
    MLPs,
    assert_same_grads,
    assert_same_params,
    numbers,
    train_alike,
    whole,
)
from support.thread_ranks import run_mesh, run_threads
from support.twins import local, twins, values

# State dicts.


def nested(width: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        inner = nn.Sequential(MLP(width), nn.Linear(width, width))
        return nn.Sequential(MLP(width), inner, MLP(width))

    return make


def held(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory that a ShardTensor views; all of a plain one's."""
    return list(tensor.parts) if isinstance(tensor, ShardTensor) else [tensor]


def assert_saves_and_loads(model: nn.Module) -> None:
    """A state dict views the shards, and values of another one are taken in place."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    addresses = {name: local(param).data_ptr() for name, param in model.named_parameters()}
    state = model.state_dict()
    assert state.keys() == addresses.keys()
    assert all(part.eq(1).all() for value in state.values() for part in held(value))
    for name, param in model.named_parameters():
        for part in held(state[name]):
            assert part.data_ptr() == local(param).data_ptr()
    other = {name: value.detach().clone() for name, value in state.items()}
    for value in other.values():
        for part in held(value):
            part.fill_(7)
    assert all(local(param).eq(1).all() for param in model.parameters())
    model.load_state_dict(other)
    for name, param in model.named_parameters():
        assert local(param).eq(7).all()
        assert local(param).data_ptr() == addresses[name]


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("dim", [0, -1, "auto"])
def test_a_state_dict_views_shards_and_is_loaded_in_place(
    dim: Any, strategy: str, width: int
) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(nested(width))
        fully_shard(model, comm, units=MLP, strategy=strategy, shard_dim=dim)
        assert_saves_and_loads(model)
        before = {name: repr(value) for name, value in model.state_dict().items()}
        model(values(2, width))  # units that keep their parameters gathered show rows all the same
        assert {name: repr(value) for name, value in model.state_dict().items()} == before
        assert_saves_and_loads(model)

    run_threads(body, 3)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("width", [2, 3])
def test_state_dicts_of_replicas_of_shards(width: int) -> None:
    def body(mesh: Mesh) -> None:
        model, _ = twins(nested(width))
        fully_shard(model, mesh, units=MLP, strategy="hybrid_shard")
        assert_saves_and_loads(model)

    run_mesh(body, 2, 2)


def test_a_state_dict_that_is_kept_sees_what_training_writes() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Linear(5, 5, bias=False))
        engine = fully_shard(model, comm)
        state = model.state_dict()
        train_alike(comm, engine, model, plain, numbers(2, 5))
        rows = local(next(model.parameters()))
        for part in held(state["weight"]):
            assert part.data_ptr() == rows.data_ptr()
            assert torch.equal(part, rows)

    run_threads(body, 2)


@pytest.mark.covers("state dicts", "CPU offload", "meta device")
def test_state_dicts_of_parts_of_an_offloaded_meta_model_are_loaded_one_by_one() -> None:
    def body(comm: Communicator) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        fully_shard(model, comm, units=nn.Linear, cpu_offload=True)
        full = {name: values(4, 4, seed=i) for i, name in enumerate(model.state_dict())}
        for name, value in full.items():
            model.load_state_dict({name: value}, strict=False, assign=True)
        x = values(3, 4)
        torch.testing.assert_close(model(x), x @ full["0.weight"].T @ full["1.weight"].T)
        assert all(value.device.type == "cpu" for value in model.state_dict().values())

    run_threads(body, 2)


@pytest.mark.covers("state dicts")
def test_a_full_state_dict_on_rank_0_alone() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(nested(3))
        engine = fully_shard(model, comm, units=MLP)
        state = engine.full_state_dict(rank=0)
        if comm.rank:
            assert state == {}
            return
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value)

    run_threads(body, 2)


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shapes_in_a_state_dict_are_the_models(ranks: int, strategy: str, granularity: Any) -> None:
    """Those of parameters too, where a rank has all of one."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Odd)
        fully_shard(model, comm, strategy=strategy, granularity=granularity)
        for name, value in plain.state_dict().items():
            assert model.state_dict()[name].shape == value.shape, name
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.shape == theirs.shape or ours.shape.numel() < theirs.numel()
            # A rank without the only element of a scalar has none of one dimension.
            assert ours.ndim == theirs.ndim or (theirs.ndim, ours.shape.numel()) == (0, 0)

    run_threads(body, ranks)


# Clipping.


@pytest.mark.covers("gradient clipping")
@pytest.mark.parametrize("kind", [1, 2, 3, math.inf])
@pytest.mark.parametrize("foreach", [True, None])
@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (1, 4), (2, 2)])
def test_clipping_by_the_norm_of_all_ranks_gradients(
    kind: float, foreach: bool | None, replicas: int, shards: int
) -> None:
    max_norm = 1.0

    def body(mesh: Mesh) -> None:
        model, plain = twins(lambda: MLPs(6))
        engine = fully_shard(model, mesh, units=MLP, strategy="hybrid_shard")
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
        for step in range(3):
            (100 * model(values(8, 6, seed=10 * step + mesh.rank)).square().sum()).backward()
            for rank in range(mesh.size):
                loss = 100 * plain(values(8, 6, seed=10 * step + rank)).square().sum()
                (loss / mesh.size).backward()
            assert_same_grads(model, plain)
            norms = [
                nn.utils.clip_grad_norm_(
                    net.parameters(), max_norm, norm_type=kind, foreach=foreach
                )
                for net in (model, plain)
            ]
            assert norms[1] > max_norm
            torch.testing.assert_close(*norms)
            assert_same_grads(model, plain)
            if kind == 2:  # the engine's own finds what is left
                torch.testing.assert_close(
                    engine.clip_grad_norm_(math.inf), torch.tensor(max_norm), rtol=1e-4, atol=0
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_params(model, plain)

    run_mesh(body, replicas, shards)


# Loss scaling.


@pytest.mark.covers("loss scaling, NaN and Inf")
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_a_scaler_unscales_and_finds_an_inf_of_any_rank(bad_rank: int | None) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: MLP(64, bias=False))
        fully_shard(model, comm, units=nn.Linear)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler.scale(model(values(4, 64)).sum()).backward()
        weight = next(model.parameters())
        assert weight.grad is not None
        if comm.rank == bad_rank:
            local(weight.grad)[0, 0] = math.inf
        scaled = local(weight.grad).clone()
        before = [local(param).clone() for param in model.parameters()]
        scaler.unscale_(optimizer)
        assert torch.equal(local(weight.grad), scaled / 2)
        scaler.step(optimizer)
        scaler.update()
        changed = [
            not torch.equal(local(param), old)
            for param, old in zip(model.parameters(), before, strict=True)
        ]
        if bad_rank is None:
            assert all(changed)
            assert scaler.get_scale() == 2.0
        else:
            assert not any(changed)
            assert not optimizer.state
            assert scaler.get_scale() == 1.0

    run_threads(body, 2)


# Set-up.


class ListWithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


class DictWithForward(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.values():
            x = module(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: ListWithForward([nn.Linear(4, 4), nn.Linear(4, 4)]),
        lambda: DictWithForward({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}),
    ],
    ids=["list", "dict"],
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_container_with_a_forward_is_a_model_and_a_unit(
    make: Callable[[], nn.Module], inner: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(make(), nn.Linear(4, 4)) if inner else make())
        units: Any = [model[0]] if inner else []  # type: ignore[index]
        engine = fully_shard(model, comm, units=units)
        train_alike(comm, engine, model, plain, numbers(2, 4))

    run_threads(body, 2)


def test_a_container_without_a_forward_is_refused_unless_its_entries_are_units() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="without a forward"):
            fully_shard(twins(lambda: nn.ModuleDict({"0": MLP(4)}))[0], comm)
        model, plain = twins(lambda: nn.ModuleList(MLP(4) for _ in range(2)))
        engine = fully_shard(model, comm)
        for _ in range(2):
            for ours, theirs in zip(model, plain, strict=True):  # type: ignore[call-overload]
                train_alike(comm, engine, ours, theirs, numbers(2, 4))

    run_threads(body, 2)


class Odd(nn.Module):
    """A scalar, a parameter without elements, a transposed one, and convolution weights in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(6, 5).T)
        self.conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.conv(x).mean((2, 3))[:, :6] * self.scale
        return pooled @ self.transposed.T + self.nothing.sum()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scalars_and_parameters_that_are_not_contiguous_train(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Odd)
        engine = fully_shard(model, comm)
        train_alike(comm, engine, model, plain, numbers(2, 8, 5, 5))

    run_threads(body, ranks)


@pytest.mark.covers("meta device")
@pytest.mark.parametrize("width", [8, 3, 1])
@pytest.mark.parametrize("mixed_precision", [None, MixedPrecision(torch.bfloat16, torch.float32)])
def test_a_meta_model_is_initialised_by_its_modules(
    width: int, mixed_precision: MixedPrecision | None
) -> None:
    """Also where some ranks hold nothing of a parameter."""

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(
                MLP(width, 1, bias=False), nn.BatchNorm1d(width), MLP(width, 1, bias=False)
            )
        engine = fully_shard(model, comm, units=MLP, mixed_precision=mixed_precision)
        for param in model.parameters():
            assert isinstance(param, ShardedParameter)
            assert param.device == comm.device
        assert torch.equal(model[1].running_var, torch.ones(width))
        model[0](values(4, width)).float().sum().backward()
        return engine.full_state_dict()

    states = run_threads(body, 4)
    for name, value in states[0].items():
        assert not value.is_floating_point() or value.isfinite().all()
        assert all(torch.equal(state[name], value) for state in states)


@pytest.mark.covers("meta device", "state dicts")
def test_a_meta_model_is_loaded_from_a_full_state_dict() -> None:
    _, reference = twins(lambda: MLPs(6))

    def body(comm: Communicator) -> None:
        with torch.device("meta"):
            model = MLPs(6)
        engine = fully_shard(model, comm, units=MLP)
        model.load_state_dict(reference.state_dict(), assign=True)
        _, plain = twins(lambda: MLPs(6))
        assert_same_params(model, plain)
        train_alike(comm, engine, model, plain, numbers(2, 6))

    run_threads(body, 4)


def test_replicas_start_from_the_first_ones_values() -> None:
    def body(mesh: Mesh) -> None:
        model = MLP(4)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(mesh.rank)
        fully_shard(model, mesh, strategy="hybrid_shard")
        assert all(whole(param).eq(0).all() for param in model.parameters())

    run_mesh(body, 2, 2)


def test_shards_tile_each_parameter_in_rank_order() -> None:
    """Also of modules that are there twice."""

    def make() -> nn.Module:
        model = nn.Sequential(*(MLP(3, 3) for _ in range(3)))
        model[0].up = model[1].up
        return model

    _, plain = twins(make)

    def body(comm: Communicator) -> list[torch.Tensor]:
        model, _ = twins(make)
        engine: Engine = fully_shard(model, comm, units=MLP)
        assert sum(len(unit.params) for unit in engine.units) == len(list(plain.parameters()))
        return [local(param).clone() for param in model.parameters()]

    ranks = run_threads(body, 2)
    for index, param in enumerate(plain.parameters()):
        pieces = [rank[index] for rank in ranks if rank[index].numel()]
        assert torch.equal(torch.cat(pieces), param.detach())


def test_a_dim_that_no_parameter_has_is_named() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="bias"):
            fully_shard(nn.Linear(16, 16), comm, shard_dim=1)

    run_threads(body, 2)
