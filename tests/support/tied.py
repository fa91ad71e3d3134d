"""A model whose embedding is a unit of its own, sharded on each rank beside a plain twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardcomm import Communicator, Engine, fully_shard
from support.generator import seeded
from support.thread_ranks import run_threads
from support.twins import WIDTH

RANKS = 2


class Tied(nn.Module):
    """An embedding that is a unit of its own, and whose weight the model's forward may read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor, *, tied: bool = False) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.embed.weight) if tied else x


def model_of(seed: int = 0) -> Tied:
    with seeded(seed):
        return Tied()


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])


def with_sharded(
    body: Callable[[Tied, Engine, Tied], Any], ranks: int = RANKS, **options: Any
) -> list[Any]:
    """What `body` gives on each rank, for a sharded model, its engine and its plain twin, both after a backward."""
    plain = model_of()
    nets = [copy.deepcopy(plain) for _ in range(2 * ranks)]

    def rank(comm: Communicator) -> Any:
        model, twin = nets[2 * comm.rank], nets[2 * comm.rank + 1]
        engine = fully_shard(model, comm, units=[nn.Linear, nn.Embedding], **options)
        for each in (model, twin):
            each(IDS).square().sum().backward()
        return body(model, engine, twin)

    return run_threads(rank, ranks)
