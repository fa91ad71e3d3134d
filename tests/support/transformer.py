"""A small transformer whose head may be its embedding's, and whose layers may be computed again."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.parity import MLP


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of k has no gradient but noise
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(width), "b": nn.LayerNorm(width)})
        self.attention = Attention(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms["a"](x))
        return x + self.mlp(self.norms["b"](x))


VOCABULARY = 13


class Transformer(nn.Module):
    """`recompute`: by which of torch's ways its blocks are."""

    def __init__(self, recompute: str = "", layers: int = 3, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(TransformerBlock(8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight
        for i, layer in enumerate(self.layers):
            if recompute == "wrapper":
                self.layers[i] = checkpoint_wrapper(layer)
            elif recompute == "composable":
                composable_checkpoint(layer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            again = self.recompute == "utils"
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out
