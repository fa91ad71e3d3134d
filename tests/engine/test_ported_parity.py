"""What PyTorch states of FSDP2's parity with data parallel, stated of `fully_shard`; see docs/fsdp2_cases.md."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint

from shardcomm import Communicator, fully_shard
from support.parity import (
    MLP,
    STRATEGIES,
    MLPs,
    assert_same_grads,
    assert_same_params,
    numbers,
    tokens,
    train_alike,
)
from support.thread_ranks import run_threads
from support.transformer import VOCABULARY, Transformer
from support.twins import twins


@pytest.mark.covers("shard_dim", "training parity")
@pytest.mark.parametrize("dim", [0, "largest", "auto"])
@pytest.mark.parametrize("shapes", [((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8))])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_one_unit_on_any_dim(
    ranks: int, shapes: tuple[tuple[int, int], ...], dim: Literal[0, "largest", "auto"]
) -> None:
    def largest(name: str, param: nn.Parameter) -> int:
        return param.shape.index(max(param.shape))

    def body(comm: Communicator) -> None:
        model, plain = twins(
            lambda: nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1]))
        )
        shard_dim = largest if dim == "largest" else dim
        engine = fully_shard(model, comm, shard_dim=shard_dim)
        train_alike(comm, engine, model, plain, numbers(4, shapes[0][0]))
        if ranks == 1:
            assert engine.traffic.gathered_bytes == engine.traffic.reduced_bytes == 0

    run_threads(body, ranks)


@pytest.mark.covers("prefetch and slots", "training parity")
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("prefetch", [(0, 0), (1, 1), (2, 2), (2, 0)])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_several_units_with_any_prefetch(
    strategy: str, prefetch: tuple[int, int], cpu_offload: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Transformer)
        engine = fully_shard(
            model,
            comm,
            strategy=strategy,
            prefetch=prefetch[0],
            backward_prefetch=prefetch[1],
            cpu_offload=cpu_offload,
        )
        train_alike(comm, engine, model, plain, tokens(VOCABULARY, 3, 6))

    run_threads(body, 2)


def kinds_of_units(model: Any, kind: str) -> list[nn.Module]:
    layers = list(model.layers)
    inner = [getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers]
    return {
        "blocks": layers,
        "blocks and ends": [*layers, model.embed, model.norm, model.head],
        "nested": [*layers, *(layer.attention for layer in inner), *(b.mlp for b in inner)],
    }[kind]


@pytest.mark.covers("activation checkpointing")
@pytest.mark.parametrize(("strategy", "tied"), [("full_shard", False), ("shard_grad_op", True)])
@pytest.mark.parametrize("kind", ["blocks", "blocks and ends", "nested"])
@pytest.mark.parametrize("recompute", ["composable", "utils", "wrapper"])
def test_activation_checkpointing(recompute: str, kind: str, strategy: str, tied: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Transformer(recompute, tied=tied))
        engine = fully_shard(model, comm, units=kinds_of_units(model, kind), strategy=strategy)
        train_alike(comm, engine, model, plain, tokens(VOCABULARY, 3, 6))

    run_threads(body, 2)


def test_a_unit_trains_by_itself_after_the_model() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: MLPs(6))
        engine = fully_shard(model, comm, units=MLP)
        train_alike(comm, engine, model, plain, numbers(8, 6), steps=1)
        train_alike(comm, engine, model[1], plain[1], numbers(8, 6), steps=2)  # type: ignore[index]
        train_alike(comm, engine, model, plain, numbers(8, 6), steps=1)

    run_threads(body, 2)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x) + torch.tanh(self.inner(x)))
        return out


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_a_forward_uses_twice(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(UsedTwice)
        engine = fully_shard(model, comm, units=[model.inner], strategy=strategy)  # type: ignore[list-item]
        train_alike(comm, engine, model, plain, numbers(32, 4))

    run_threads(body, 2)


# A head that is called by itself, chunk by chunk, after a forward without it.


class ChunkedHead(nn.Module):
    def __init__(self, *, recompute: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if recompute:
            composable_checkpoint(self.body)

    def forward(self, ids: torch.Tensor, *, with_head: bool = True) -> torch.Tensor:
        x: torch.Tensor = self.norm(self.body(self.embed(ids)))
        return self.head(x) if with_head else x

    def chunked(self, ids: torch.Tensor, scale: float = 1.0) -> None:
        """Backward of the model's mean square, in which at most one chunk of the head's output exists."""
        hidden = self(ids, with_head=False)
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(3, dim=1)]
        for chunk in chunks:
            (scale * self.head(chunk).square().sum()).backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks], dim=1))  # type: ignore[misc]


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_head_called_by_itself_in_chunks(strategy: str, recompute: bool, micro: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: ChunkedHead(recompute=recompute))
        parts: Any = [model.embed, model.body, model.norm, model.head]
        engine = fully_shard(model, comm, units=parts, strategy=strategy)
        batch = tokens(VOCABULARY, 2, 6)
        optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (model, plain)]
        for step in range(2):
            for index in range(step * micro, (step + 1) * micro):
                if index == (step + 1) * micro - 1:
                    model.chunked(*batch(comm.rank, index))  # type: ignore[operator]
                else:
                    with engine.no_sync():
                        model.chunked(*batch(comm.rank, index))  # type: ignore[operator]
                for rank in range(comm.size):
                    plain.chunked(*batch(rank, index), scale=1 / comm.size)  # type: ignore[operator]
            assert_same_grads(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, plain)

    run_threads(body, 2)


def test_a_head_whose_weight_is_the_roots_says_what_to_do_when_called_by_itself() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: ChunkedHead(tied=True))
        fully_shard(model, comm, units=[nn.Embedding, nn.Linear])
        with pytest.raises(
            RuntimeError, match=r"'embed\.weight': outside of the forward of unit '\(root\)'"
        ):
            model.chunked(*tokens(VOCABULARY, 2, 6)(0, 0))  # type: ignore[operator]

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_without_the_head_before_one_backward(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(ChunkedHead)
        parts: Any = [model.norm, model.head]
        fully_shard(model, comm, units=parts, strategy=strategy)
        batch = tokens(VOCABULARY, 2, 6)
        for net in (model, plain):
            first, second = (net(*batch(0, i), with_head=False) for i in range(2))
            (first.square().sum() + second.sum()).backward()
        assert model.head.weight.grad is None  # type: ignore[union-attr]
        assert_same_grads(model, plain)

    run_threads(body, 2)


class Raiser(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed:
            raise ArithmeticError("armed")
        out: torch.Tensor = self.inner(x)
        return out


@pytest.mark.covers("exceptions")
def test_the_step_after_a_forward_that_raised_is_right() -> None:
    def make() -> nn.Module:
        model = ChunkedHead()
        model.body = Raiser(model.body)  # type: ignore[assignment]
        return model

    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        parts: Any = [model.norm, model.head]
        engine = fully_shard(model, comm, units=parts)
        model.body.armed = True  # type: ignore[union-attr]
        with pytest.raises(ArithmeticError):
            model(*tokens(VOCABULARY, 2, 6)(0, 0))
        model.body.armed = False  # type: ignore[union-attr]
        train_alike(comm, engine, model, plain, tokens(VOCABULARY, 2, 6))

    run_threads(body, 2)


@pytest.mark.covers("activation checkpointing", "odd forwards")
@pytest.mark.parametrize("recompute", ["composable", "utils"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_two_forwards_of_nested_units_that_are_recomputed(
    strategy: str, recompute: str
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Transformer(recompute))
        fully_shard(model, comm, units=kinds_of_units(model, "nested"), strategy=strategy)
        batch = tokens(VOCABULARY, 2, 6)
        for net in (model, plain):
            chosen, rejected = (net(*batch(0, i)).sum() for i in range(2))
            (chosen - rejected).square().backward()
        assert_same_grads(model, plain)

    run_threads(body, 2)


# Shared parameters.


class TiedEnds(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(ids))
        return out


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_ends_of_a_number_of_rows_that_does_not_divide(strategy: str, apart: bool) -> None:
    """Also where either end is a unit: the weight belongs to the unit around both."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: TiedEnds(4 * comm.size + 1))
        units = [nn.Embedding, nn.Linear] if apart else []
        engine = fully_shard(model, comm, units=units, strategy=strategy)
        batch = tokens(4 * comm.size + 1, 2, 6)
        train_alike(comm, engine, model, plain, batch)

    run_threads(body, 4)
