"""What PyTorch states of FSDP2's frozen parameters, stated of `fully_shard`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.nn import functional as F

from shardcomm import Communicator, fully_shard
from support.parity import MLP, STRATEGIES, assert_same_grads, numbers, three, train_alike
from support.thread_ranks import run_threads
from support.twins import twins, values


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("freeze_after", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_biases_alone_are_trained(strategy: str, freeze_after: bool, recompute: bool) -> None:
    """Only they are reduced: a unit's frozen parameters are in a bucket of their own, unless frozen afterwards."""

    def freeze(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)

    def make() -> nn.Module:
        model = three()
        for mlp in model if recompute else ():  # type: ignore[attr-defined]
            composable_checkpoint(mlp)
        return model

    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        if not freeze_after:
            freeze(model)
        engine = fully_shard(model, comm, units=MLP, strategy=strategy)
        for net in (model, plain):
            freeze(net)
        train_alike(comm, engine, model, plain, numbers(8, 16))
        if not freeze_after:
            reduced = sum(p.numel() for n, p in plain.named_parameters() if "bias" in n) * 4
            assert engine.traffic.reduced_bytes <= 3 * 1.5 * reduced

    run_threads(body, 2)


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_other_unit_is_frozen_and_perhaps_thawed(strategy: str, thaw: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(
            lambda: nn.Sequential(
                *(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh()))
            )
        )
        engine = fully_shard(model, comm, units=nn.Linear, strategy=strategy)

        def set_requires_grad(requires: bool) -> None:
            for net in (model, plain):
                for i in (0, 4):
                    net[i].requires_grad_(requires)  # type: ignore[index]

        set_requires_grad(False)
        train_alike(comm, engine, model, plain, numbers(8, 8), steps=1)
        with torch.no_grad():
            torch.testing.assert_close(model(values(8, 8)), plain(values(8, 8)))
        set_requires_grad(thaw)
        train_alike(comm, engine, model, plain, numbers(8, 8), steps=2)

    run_threads(body, 2)


class UsedInTurns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.trained = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_that_are_used_again_with_and_without_gradients(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(UsedInTurns)
        engine = fully_shard(model, comm, units=nn.Linear, strategy=strategy)
        train_alike(comm, engine, model, plain, numbers(8, 5))

    run_threads(body, 2)


@pytest.mark.covers("mixed precision", "frozen and tied parameters")
def test_a_frozen_parameter_in_float8_is_moved_as_it_is() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.randn(8, 8).to(torch.float8_e4m3fn)
            self.table = nn.Parameter(table, requires_grad=False)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x @ self.table.to(x.dtype))
            return out

    def body(comm: Communicator) -> None:
        model, plain = twins(Mixed)
        fully_shard(model, comm)
        for net in (model, plain):
            net(values(2, 8)).square().sum().backward()
        assert_same_grads(model, plain)

    run_threads(body, 2)
