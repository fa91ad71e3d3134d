"""Units that are unsharded by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardcomm import Communicator, Engine, Mesh, MixedPrecision, fully_shard
from support.gathered import assert_full, assert_rows, interrupted, with_sharded
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values


class Tied(nn.Module):
    """An embedding whose weight is the head's, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.embed.weight)


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])
UNITS: Any = [nn.Embedding, nn.Linear]


def assert_same_rows(engine: Engine, model: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[name], value)


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("resharded", ["by the backward", "by hand", "before the backward"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_weight_that_is_unsharded_by_hand_trains_as_without_sharding(
    resharded: str, strategy: str
) -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        unit = engine.unit(model.embed)
        sgd = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
        for _ in range(3):
            unit.unshard()
            unit.unshard()
            assert_full(model.embed, plain.embed)  # type: ignore[arg-type]
            loss = model(IDS).square().sum()
            if resharded == "before the backward":
                unit.reshard()
            loss.backward()
            if resharded == "by hand":
                unit.reshard()
            plain(IDS).square().sum().backward()
            assert model.embed.weight is engine.units[1].params[0].shard
            assert_same_gradients_by_name(model, plain)
            for optimizer in sgd:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_rows(engine, model, plain)

    with_sharded(body, Tied, units=UNITS, strategy=strategy)


def assert_same_gradients_by_name(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if p.grad is not None:
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(full, q.grad, msg=name)


def alone(model: Any) -> torch.Tensor:
    """No unit's forward runs."""
    return F.linear(values(2, WIDTH), model.embed.weight).square().sum()


def last(model: Any) -> torch.Tensor:
    """The weight's gradient comes before any unit's backward."""
    x = model.blocks[0](values(2, WIDTH).requires_grad_())
    return F.linear(x, model.embed.weight).square().sum()


def first(model: Any) -> torch.Tensor:
    """The unit's own backward, and its reduce, come before."""
    x = F.linear(values(2, WIDTH), model.blocks[1].weight)
    return (model.blocks[1](model.blocks[0](x)) + model.blocks[1].bias).square().sum()


@pytest.mark.parametrize("use", [alone, last, first])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_weights_gradient_may_come_at_any_time(
    use: Callable[[Any], torch.Tensor], strategy: str, sync: bool
) -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        for turn in range(2):
            for unit in engine.units:
                unit.unshard()
            with torch.enable_grad() if sync or turn else engine.no_sync():
                use(model).backward()
            use(plain).backward()
        assert_same_gradients_by_name(model, plain)

    with_sharded(body, Tied, units=UNITS, strategy=strategy)


@pytest.mark.covers("gathered and unshard")
def test_of_ranks_in_two_dimensions_a_gradient_is_the_mean_of_all() -> None:
    def rank(mesh: Mesh) -> None:
        model, plain = twins(Tied)
        engine = fully_shard(model, mesh, strategy="hybrid_shard", units=UNITS)
        engine.unit(model.embed).unshard()  # type: ignore[arg-type]
        ((mesh.rank + 1) * model(IDS).sum()).backward()
        (2.5 * plain(IDS).sum()).backward()  # the mean of 1 to 4
        assert_same_gradients_by_name(model, plain)

    run_mesh(rank, 2, 2)


@pytest.mark.covers("gathered and unshard")
def test_a_weight_is_unsharded_in_the_forward_that_needs_it() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        unit = engine.unit(model.embed)

        def forward(ids: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(model.blocks[1](torch.tanh(model.blocks[0](model.embed(ids)))))
            unit.unshard()
            y = F.linear(x, model.embed.weight)
            unit.reshard()
            return y

        model.forward = forward
        for _ in range(2):
            for each in (model, plain):
                each(IDS).square().sum().backward()
        assert_same_gradients_by_name(model, plain)

    with_sharded(body, Tied, units=UNITS)


def test_an_unsharded_root_steps_as_any() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        engine.unit(model).unshard()
        for _ in range(2):
            for each in (model, plain):
                each(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    with_sharded(body)


def test_what_is_unsharded_is_in_the_dtype_to_compute_in() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        unit = engine.unit(model.embed)
        unit.unshard()
        assert torch.equal(model.embed.weight, plain.embed.weight.bfloat16())  # type: ignore[union-attr,operator]
        out = model(IDS)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, plain.bfloat16()(IDS))
        unit.reshard()
        assert model.embed.weight.dtype == torch.float32

    with_sharded(
        body, Tied, units=UNITS, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_weight_that_is_unsharded_by_hand_evaluates_as_without_sharding(strategy: str) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        unit = engine.unit(model.embed)
        with torch.no_grad():
            for factor in (1, 3):
                for each in (model, plain):
                    for p in each.parameters():
                        p.mul_(factor)
                unit.unshard()
                x = values(2, WIDTH)
                assert torch.equal(F.linear(x, model.embed.weight), F.linear(x, plain.embed.weight))
                for _ in range(2):
                    assert torch.equal(model(IDS), plain(IDS))
                unit.reshard()
                unit.reshard()

    with_sharded(body, Tied, units=UNITS, strategy=strategy)


def test_a_change_of_what_is_unsharded_is_refused() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        gathered = partial(interrupted, engine, model)
        for call in (engine.unit(model).reshard, model.state_dict, gathered):
            engine.unit(model).unshard()
            for p in (model.stem.weight, model.stem.bias):
                p.data.add_(1.0)
            with pytest.raises(RuntimeError, match=r"was changed.*write=True"):
                call()
            assert_rows(model, plain)

    with_sharded(body)


def test_to_unshard_what_is_gathered_is_refused() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        block = engine.unit(model.blocks[0])
        with engine.gathered(model.blocks[0]):
            with pytest.raises(RuntimeError, match=r"unshard of unit 'blocks\.0' inside of engine"):
                block.unshard()
            assert_full(model.blocks[0], plain.blocks[0])  # type: ignore[index]
            engine.unit(model).unshard()  # another
        block.unshard()
        assert_full(model.blocks[0], plain.blocks[0])  # type: ignore[index]
        engine.release()
        assert_rows(model, plain)

    with_sharded(body)


def test_a_state_dict_ends_an_unshard() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        engine.unit(model).unshard()
        with engine.gathered():
            assert_full(model, plain)
        assert_rows(model, plain)
        engine.unit(model).unshard()
        state = model.state_dict()
        assert all(hasattr(value, "rectangles") for value in state.values())
        assert_rows(model, plain)

    with_sharded(body)


def test_unshard_is_a_context() -> None:
    def body(comm: Communicator) -> None:
        model, twin = twins(Chain)
        engine = fully_shard(model, comm, units=[Block])
        unit = engine.units[1]
        name = unit.params[0].name
        with unit.unshard():
            assert torch.equal(model.get_parameter(name), twin.get_parameter(name))
        assert model.get_parameter(name) is unit.params[0].shard

    run_threads(body, 2)
