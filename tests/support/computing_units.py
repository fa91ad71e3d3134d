"""Units that compute with what they are given by functions of a test's own, and what they hand on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardcomm import Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import assert_same_gradients, twins, values

WIDTH = 4


@dataclasses.dataclass
class Carried:
    """What blocks hand on, and write into."""

    hidden: torch.Tensor
    aux: torch.Tensor | None = None
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    cache: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class Apply(nn.Module):
    """Computes with what it is given by a function of its own."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


def keep_and_return(unit: Any, state: dict[str, Any]) -> Any:
    unit.kept = state
    state["x"] = unit.linear(state["x"])
    return state


class Blocks(nn.Module):
    """Four of them, each called by a function of its caller's."""

    def __init__(self, compute: Callable[..., Any], call: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Apply(compute) for _ in range(4))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def assert_as_plain(compute: Callable[..., Any], call: Callable[..., Any], strategy: str) -> None:
    """Compares the gradients of sharded `Blocks` with those of plain ones."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Blocks(compute, call))
        engine = fully_shard(model, comm, units=Apply, strategy=strategy)
        inputs = [values(3, WIDTH).requires_grad_() for _ in range(2)]
        for net, x in zip((model, plain), inputs, strict=True):
            # An optimizer in backward needs to know when a unit's gradients are complete.
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(lambda param: None)
            net(x * 1).square().sum().backward()  # of no leaf, which may not be changed in place
        assert_same_gradients(engine, model, plain)
        torch.testing.assert_close(*[x.grad for x in inputs])

    run_threads(body, 2)
