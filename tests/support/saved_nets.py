"""A model with all that state dicts have to cope with, its optimizer, and what training it must arrive at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardcomm.parameter.shard_tensor import ShardTensor
from support.generator import seeded
from support.nets import TiedEnds, reference

SAVED_BY = 4
STEPS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, 3, 5) / 4)
        self.shift = nn.Parameter(torch.randn(3))  # fewer rows than ranks
        self.wide = nn.Linear(5, 5, bias=False)
        self.register_buffer("scale", torch.rand(5))
        self.history = ["made"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("...c,arc->...ar", x, self.mix) + self.shift
        return x + torch.relu(self.wide(x)) * self.scale + y.mean((-2, -1)).unsqueeze(-1)

    def get_extra_state(self) -> object:
        return self.history

    def set_extra_state(self, state: object) -> None:
        self.history = list(state)  # type: ignore[call-overload]


class Tied(TiedEnds):
    """With tied weights, a frozen parameter, a buffer, extra state, and shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(5, (Layer() for _ in range(2)))
        self.layers[1].wide.requires_grad_(False)


def make(seed: int = 0) -> Tied:
    with seeded(seed):
        return Tied()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With two groups of parameters."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [p for n, p in named if "wide" not in n], "lr": 0.05},
        {"params": [p for n, p in named if "wide" in n], "lr": 0.02, "weight_decay": 0.3},
    ]
    return torch.optim.AdamW(groups, foreach=False)


OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


def trained(optimizer_of: OptimizerOf = adamw) -> tuple[Tied, torch.optim.Optimizer]:
    """What SAVED_BY ranks must arrive at."""
    optimizers = []

    def keep(model: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(optimizer_of(model))
        return optimizers[0]

    model = reference(make(), SAVED_BY, STEPS, optimizer_of=keep)  # type: ignore[arg-type]
    for layer in model.layers:
        layer.history = ["trained"]
    return model, optimizers[0]


# For a rank that wants less than a checkpoint has, DCP's planner lets the process flatten state dicts as torch 2.3 did
# for a moment. Another thread's planner would then ask for "optim.param_groups", which no checkpoint has.
_one_planner = threading.Lock()


def load_here(state: dict[str, Any], checkpoint: Path) -> None:
    """Without a process group: every rank of threads reads its own part."""
    with _one_planner:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)


def assert_equal(state: Any, wanted: Any, path: str = "") -> None:
    """All values, and for a ShardTensor those of its rectangles."""
    if isinstance(wanted, dict):
        assert state.keys() == wanted.keys(), path
        for key in wanted:
            assert_equal(state[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list) and path.endswith("groups"):
        for i, (group, wanted_group) in enumerate(zip(state, wanted, strict=True)):
            assert_equal(group, wanted_group, f"{path}.{i}")
    elif isinstance(state, ShardTensor):
        for rectangle, part in zip(state.rectangles, state.parts, strict=True):
            assert torch.equal(part, wanted[rectangle.slices]), f"{path}: {state}"
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(state, wanted), path
    else:
        assert state == wanted, path
