"""A net for the state dicts of optimizers, sharded and unsharded, and the optimizers that train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardcomm
from support.twins import twins, values

STEPS = 3
INPUTS = 5


class Net(nn.Module):
    """With fewer rows than ranks, rows that no number of ranks divides, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(INPUTS, 7)
        self.down = nn.Linear(7, 3, bias=False)
        self.few = nn.Parameter(torch.randn(1, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x))) + self.few) * self.scale


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [param for name, param in named if "up" in name], "lr": 0.02},
        {"params": [param for name, param in named if "up" not in name]},
    ]


OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
BY_ELEMENTS: dict[str, OptimizerOf] = {
    "AdamW": lambda model: torch.optim.AdamW(groups(model), lr=0.05),
    "amsgrad": lambda model: shardcomm.AdamW(groups(model), lr=0.05, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=0.1
    ),  # state from the start
}
OPTIMIZERS: dict[str, OptimizerOf] = {
    **BY_ELEMENTS,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}
GRANULARITIES = ["row", "element", "tensor"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """On batches that all ranks share, of which the mean gradient is each one's."""
    for step in steps:
        model(values(4, INPUTS, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = twins(Net)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(steps))
    return model, optimizer
