"""Optimizers on a rank's rows against the same optimizer on the whole model, on one batch that all ranks share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_ranks import run_threads
from torch import nn

from shardcomm import AdamW, Communicator, fully_shard

WIDTH = 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    x = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    for step in range(steps):
        model(x + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def matrices_decay(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups, told apart by name: a rank's rows may have other shapes than the whole parameter."""
    named = dict(model.named_parameters())
    decayed = {"0.weight", "3.weight"}
    return [
        {"params": [param for name, param in named.items() if name in decayed]},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.Adagrad(groups, lr=0.1),
        lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
        lambda groups: torch.optim.AdamW(groups, lr=0.05),
        lambda groups: AdamW(groups, lr=0.05),
    ],
    ids=["SGD", "Adagrad", "RMSprop", "AdamW", "shardcomm.AdamW"],
)
def test_elementwise_optimizers_and_groups_work_on_rows(
    make: Callable[[Any], torch.optim.Optimizer], granularity: str
) -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    train(plain, make(matrices_decay(plain)))

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, granularity=granularity)  # type: ignore[arg-type]
        train(model, make(matrices_decay(model)))
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_adafactor_on_whole_parameters_is_exact() -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    train(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1), steps=20)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, granularity="tensor")
        train(model, torch.optim.Adafactor(model.parameters(), lr=0.1), steps=20)
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_look_at_whole_parameters_are_refused_on_some_rows(make: Any) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, 64, bias=False)
        fully_shard(model, comm)
        optimizer = make(model.parameters(), lr=0.1)
        model(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match='granularity="tensor"'):
            optimizer.step(lambda: torch.ones(()))

    run_threads(body, 2)
