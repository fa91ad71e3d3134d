"""A small model in many variants, its data, and its training: in one process, and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, Mesh, fully_shard
from support.generator import seeded
from support.rank_sums import combined

STEPS = 4


class TiedEnds(nn.Module):
    """Layers between an embedding of 11 tokens and a head that has the embedding's weight."""

    def __init__(self, width: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding and head in the root, blocks as units; `variant` bends it in the way a test wants."""

    def __init__(self, variant: str = "", layers: int = 4, width: int = 6) -> None:
        super().__init__()
        self.variant = variant
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 11, bias=False)
        if variant == "tied":
            self.head.weight = self.embed.weight
        if variant == "tied-across-units":
            self.blocks[2].up.weight = self.blocks[0].up.weight
        if variant == "frozen":
            self.blocks[1].requires_grad_(False)
            self.blocks[2].down.weight.requires_grad_(False)
            self.embed.requires_grad_(False)
        if variant == "unused":
            self.blocks[1].extra = nn.Linear(width, width)
            self.spare = nn.Parameter(torch.ones(3))
        if variant == "nested":
            self.blocks[1].inner = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in range(len(self.blocks)):
            if self.variant == "skipped" and i == 2:
                continue
            block = self.blocks[-1 - i if self.variant == "reversed" else i]
            if self.variant in ("checkpoint", "checkpoint-reentrant"):
                x = checkpoint(block, x, use_reentrant=self.variant == "checkpoint-reentrant")
            elif self.variant == "checkpoint-two" and i % 2 == 0:
                x = checkpoint(nn.Sequential(block, self.blocks[i + 1]), x, use_reentrant=False)
            elif self.variant != "checkpoint-two":
                x = block(x)
            if self.variant == "nested" and i == 1:
                for inner in block.inner:
                    x = inner(x)
            if self.variant == "twice" and i == 1:
                x = block(x)
        return self.head(x)


def make(variant: str = "", seed: int = 0, **sizes: int) -> Net:
    with seeded(seed):
        return Net(variant, **sizes)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 11, (3, 5), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    """For comparisons within rounding: Adam divides by it."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def reference(
    model: Net,
    ranks: int,
    steps: int = STEPS,
    micro: int = 1,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
) -> Net:
    """Data-parallel training in one process, as DDP does it: every rank's gradient, averaged over the ranks."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        grads: list[list[torch.Tensor | None]] = []
        for rank in range(ranks):
            model.zero_grad()
            for m in range(micro):
                loss_of(model, batch(rank, step * micro + m)).backward()
            grads.append([param.grad for param in model.parameters()])
        for param, *of_ranks in zip(model.parameters(), *grads, strict=True):
            zeros = torch.zeros_like(param)  # of a rank that did not use the parameter
            total = combined([zeros if grad is None else grad for grad in of_ranks])
            is_used = any(grad is not None for grad in of_ranks)
            param.grad = total * (1.0 / ranks) if is_used else None
        optimizer.step()
    return model


def train(
    comm: Communicator | Mesh,
    model: Net,
    steps: int = STEPS,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    **options: object,
) -> dict[str, torch.Tensor]:
    """The same, sharded; the full parameters."""
    engine = fully_shard(model, comm, **options)  # type: ignore[arg-type]
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss_of(model, batch(comm.rank, step).to(comm.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict()
    engine.close()
    return state


def assert_same(
    state: dict[str, torch.Tensor], expected: nn.Module, *, bitwise: bool, rtol: float = 1e-5
) -> None:
    wanted = expected.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        if name.endswith("calls"):
            continue  # a buffer: counts this process's own calls
        if bitwise:
            assert torch.equal(state[name], value), name
        else:
            torch.testing.assert_close(state[name], value, rtol=rtol, atol=1e-6, msg=name)
