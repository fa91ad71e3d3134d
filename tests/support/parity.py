"""A sharded model beside its plain twin: the same steps of both, and what must be equal after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from shardcomm import Communicator, Engine, Mesh
from support.twins import values

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


class MLP(nn.Module):
    def __init__(self, width: int, times: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, times * width, bias=bias)
        self.down = nn.Linear(times * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.relu(self.up(x))))


def three() -> nn.Module:
    return nn.Sequential(*(MLP(16) for _ in range(3)))


class MLPs(nn.Sequential):
    """After a layer of the root's own, three units."""

    def __init__(self, width: int, mlps: int = 3) -> None:
        super().__init__(nn.Linear(width, width), *(MLP(width) for _ in range(mlps)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or its gradient in full; of rows collectively."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    assert isinstance(full, torch.Tensor)
    return full.detach()


def assert_same_params(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), (other, theirs) in _pairs(model, plain):
        assert name == other
        torch.testing.assert_close(whole(ours), theirs.detach(), msg=lambda m, n=name: f"{n}: {m}")


def assert_same_grads(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), (_, theirs) in _pairs(model, plain):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(
                whole(ours.grad), theirs.grad, msg=lambda m, n=name: f"{n}: {m}"
            )


def _pairs(model: nn.Module, plain: nn.Module) -> Iterator[Any]:
    return zip(model.named_parameters(), plain.named_parameters(), strict=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def numbers(*shape: int) -> Callable[[int, int], tuple[torch.Tensor]]:
    """A batch of random numbers for each (rank, index)."""
    return lambda rank, index: (values(*shape, seed=1000 * index + rank),)


def tokens(vocabulary: int, *shape: int) -> Callable[[int, int], tuple[torch.Tensor]]:
    """A batch of random token ids for each (rank, index)."""

    def batch(rank: int, index: int) -> tuple[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * index + rank)
        return (torch.randint(vocabulary, shape, generator=generator),)

    return batch


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def train_alike(
    ranks: Communicator | Mesh,
    engine: Engine,
    model: nn.Module,
    plain: nn.Module,
    inputs: Callable[[int, int], tuple[Any, ...]],
    *,
    steps: int = 3,
    micro: int = 1,
    no_sync: bool = False,
    loss: Callable[[Any], torch.Tensor] = loss_of,
) -> None:
    """Each rank trains on its batches, `plain` on those of all ranks; after each step all is equal.

    A step accumulates `micro` batches; with `no_sync` only the last one's backward reduces.
    """
    optimizers = [adam(model), adam(plain)]
    for step in range(steps):
        for index in range(step * micro, (step + 1) * micro):
            last = index == (step + 1) * micro - 1
            unsynced: AbstractContextManager[None] = (
                nullcontext() if last or not no_sync else engine.no_sync()
            )
            with unsynced:
                ours = loss(model(*inputs(ranks.rank, index)))
                ours.backward()
            for rank in range(ranks.size):
                theirs = loss(plain(*inputs(rank, index)))
                (theirs / ranks.size).backward()
                if rank == ranks.rank:
                    torch.testing.assert_close(ours, theirs)
        assert_same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert_same_params(model, plain)
