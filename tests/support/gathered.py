"""What tests of full parameters outside of a step share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardcomm import Communicator, Engine, fully_shard
from support.thread_ranks import run_threads
from support.twins import Chain, twins

Body = Callable[[nn.Module, Engine, nn.Module], Any]


def with_sharded(body: Body, make: Callable[[], nn.Module] = Chain, **options: Any) -> list[Any]:
    """What `body` gives on each of two ranks, for a sharded model, its engine and its plain twin."""

    def rank(comm: Communicator) -> Any:
        model, plain = twins(make)
        return body(model, fully_shard(model, comm, **options), plain)

    return run_threads(rank, 2)


def assert_full(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, nn.Parameter), name
        assert not hasattr(p, "to_local"), name
        assert torch.equal(p, q), name


def assert_rows(model: nn.Module, plain: nn.Module) -> None:
    """The model shows rows, of these values."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert hasattr(p, "to_local"), name
        assert torch.equal(p.full_tensor(), q.detach()), name


def interrupted(engine: Engine, model: nn.Module) -> None:
    with engine.gathered():
        pass
