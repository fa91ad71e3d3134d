"""A model to shard and its plain twin, and the comparison of their gradients.

Every rank has the same batch, so the mean over ranks is one rank's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from shardcomm.engine.engine import Engine
from support.generator import seeded

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """A root with parameters around `layers` units; `between` is called after each of them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda i, x: x
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = self.between(i, block(x))
        return x


class Encoder(Chain):
    """With a method that computes as its forward does."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """One to shard and its plain twin; the same on every rank."""
    with seeded():
        model = make()
    return model, copy.deepcopy(model)


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train_alike(*models: nn.Module) -> None:
    """Three steps of SGD of each model, on the same values; the last step's gradients are left."""
    for model in models:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            sgd.zero_grad()
            model(values(3, WIDTH, seed=step)).square().sum().backward()
            sgd.step()


def full_gradients(engine: Engine, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """By writing the gradients where the parameters are, and reading those back."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    state = engine.full_state_dict()
    return {name: None if grad is None else state[name] for name, grad in grads.items()}


def assert_same_gradients(engine: Engine, model: nn.Module, plain: nn.Module) -> None:
    got = full_gradients(engine, model)
    for name, param in plain.named_parameters():
        if param.grad is None:
            assert got[name] is None, name
        else:
            grad = got[name]
            assert grad is not None, name
            torch.testing.assert_close(grad, param.grad, msg=name)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter or of its gradient; the tensor itself if it is all here."""
    rows = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    assert isinstance(rows, torch.Tensor)
    return rows
