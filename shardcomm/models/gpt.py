"""A byte-level GPT: pre-norm transformer blocks, learned positions, an untied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256


class Block(nn.Module):
    """A transformer block: attention and a four times wider MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns a tensor of shape (batch, context, width)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        grown = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        x = x + self.mlp_out(grown)
        return x


def heads_of(width: int) -> int:
    """How many heads a GPT of this width has, of which `width` must be a multiple."""
    return max(1, width // 64)


class GPT(nn.Module):
    """A GPT that takes bytes as tokens (batch, length up to `context`) and returns logits (batch, length, 256).

    It is initialised as GPT-2.
    """

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        heads = heads_of(width)
        self.context = context
        self.token = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() > 1:
                # Weights that add to the residual stream are smaller in deeper models (Radford et al. 2019).
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the next byte at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
