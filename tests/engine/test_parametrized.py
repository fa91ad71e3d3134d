"""Weights that a parametrization, a norm or a mask computes of parameters, from before sharding or from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from shardcomm import Communicator, fully_shard
from support.generator import seeded
from support.thread_ranks import run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, train_alike, twins, values

RANKS = 2


def pruned(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "weight", amount=0.5)  # type: ignore[no-untyped-call]


TOOLS: list[Callable[[nn.Linear], Any]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
    pruned,
]


def chain_of(tool: Callable[[nn.Linear], Any]) -> nn.Module:
    """The same at each call. A deep copy of a parametrized module would have the original's cache."""

    def block() -> nn.Module:
        made = Block()
        tool(made.linear)
        return made

    with seeded():
        return Chain(block)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_are_computed_from_before_train_as_without_sharding(
    tool: Callable[[nn.Linear], Any], strategy: str
) -> None:
    nets = [(chain_of(tool), chain_of(tool)) for _ in range(RANKS)]

    def body(comm: Communicator) -> None:
        model, plain = nets[comm.rank]
        engine = fully_shard(model, comm, strategy=strategy)
        train_alike(model, plain)
        assert torch.allclose(model(values(3, WIDTH)), plain(values(3, WIDTH)), atol=1e-6)
        assert_same_gradients(engine, model, plain)

    run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_computing_weights_from_then_on_is_refused(
    tool: Callable[[nn.Linear], Any], strategy: str
) -> None:
    nets = [twins(Chain)[0] for _ in range(RANKS)]

    def body(comm: Communicator) -> None:
        model = nets[comm.rank]
        fully_shard(model, comm, strategy=strategy)
        tool(model.stem)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=r"before fully_shard|outside of the forward of"):
        run_threads(body, RANKS)  # where one rank has all rows, it may get further than the other


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def squared(linear: nn.Linear) -> None:
    parametrize.register_parametrization(linear, "weight", Squared())


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_cached_weights_are_used_by_several_forwards_and_one_backward(strategy: str) -> None:
    nets = [(chain_of(squared), chain_of(squared)) for _ in range(RANKS)]

    def body(comm: Communicator) -> None:
        model, plain = nets[comm.rank]
        engine = fully_shard(model, comm, strategy=strategy)
        for each in (model, plain):
            losses = [each(values(3, WIDTH, seed=seed)).square().sum() for seed in (1, 2)]
            torch.stack(losses).sum().backward()
        assert_same_gradients(engine, model, plain)

    with parametrize.cached():  # all threads share it
        run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_second_backward_to_cached_weights_trains_or_says_so(strategy: str) -> None:
    nets = [(chain_of(squared), chain_of(squared)) for _ in range(RANKS)]

    def backwards(model: nn.Module) -> None:
        for seed in (1, 2):
            model(values(3, WIDTH, seed=seed)).square().sum().backward(retain_graph=True)

    def body(comm: Communicator) -> None:
        model, plain = nets[comm.rank]
        engine = fully_shard(model, comm, strategy=strategy)
        if strategy == "full_shard":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backwards(model)
            return
        backwards(model)
        backwards(plain)
        assert_same_gradients(engine, model, plain)

    with parametrize.cached():
        run_threads(body, RANKS)
