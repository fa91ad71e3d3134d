"""Models, how `parallelize_module` spreads them, and their training, as one process does it and as ranks do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HIDDEN, HEAD_WIDTH, LAYERS = 24, 16, 32, 4, 2
STEPS, BATCH, LENGTH = 2, 4, 8
MAX_NORM = 0.5  # below the norms of these models' gradients


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Net(nn.Module):
    """Its `scale` is in nobody's plan: a plain parameter among DTensors."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale


def mlp_net() -> Net:
    return Net(Mlp)


def attention_net() -> Net:
    return Net(Layer)


def columns_and_rows(net: Net, tp: DeviceMesh) -> None:
    """Activations between layers are whole on every rank; norms stay plain, and embedding and head are whole."""
    mlp = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    attention = dict.fromkeys("qkv", ColwiseParallel()) | {"o": RowwiseParallel()}
    for layer in net.layers:
        if isinstance(layer, Mlp):
            parallelize_module(layer, tp, mlp)
        else:
            parallelize_module(layer.mlp, tp, mlp)
            parallelize_module(layer.attention, tp, attention)


def sequence(net: Net, tp: DeviceMesh, *, local: bool = True) -> None:
    """Activations between layers are cut along the sequence; all parameters but `scale` are DTensors.

    `local`: the activations are plain tensors, else DTensors.
    """
    norm = SequenceParallel(use_local_output=local)
    columns = ColwiseParallel(input_layouts=Shard(1))
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=local)
    plan = {
        "embed": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
        ),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(LAYERS):
        plan |= {f"layers.{i}.{name}": norm for name in ("attention_norm", "mlp_norm")}
        plan |= {f"layers.{i}.attention.{name}": columns for name in "qkv"}
        plan |= {f"layers.{i}.attention.o": rows}
        plan |= {f"layers.{i}.mlp.up": up, f"layers.{i}.mlp.down": rows}
    parallelize_module(net, tp, plan)


def twins(make: Callable[[], Net]) -> tuple[Net, Net]:
    """The same on every rank."""
    torch.manual_seed(0)
    net = make()
    return net, copy.deepcopy(net)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    part: int = 0,
    parts: int = 1,
    *,
    clip: Callable[[], torch.Tensor] | None = None,
    steps: range = range(STEPS),
) -> list[float]:
    """On this part of each batch; returns the norms of the whole gradients."""
    norms = []
    for step in steps:
        tokens, targets = (x.chunk(parts)[part] for x in batch(step))
        optimizer.zero_grad()
        F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        clipping = clip or (lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM))
        norms.append(float(clipping()))
        optimizer.step()
    return norms
