"""The parameters of well-known models, as names and shapes: for benchmarks and plans that need no weights.

Linear weights are (out, in), as `torch.nn.Linear` holds them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelShapes:
    """A model of equal blocks.

    Attributes:
        block: The names and shapes of one block's parameters.
        layers: How many blocks there are.
        rest: The parameters outside of the blocks; tied ones once.
        lookups: Those of `rest` that are only looked up in, and multiply nothing.
        width: The width of the attention of a block, all heads together; 0: it is not known.
    """

    block: Shapes
    layers: int
    rest: Shapes
    lookups: tuple[str, ...] = ()
    width: int = 0

    @property
    def numel(self) -> int:
        """How many elements the parameters of the whole model have."""
        block, rest = (sum(map(math.prod, part.values())) for part in (self.block, self.rest))
        return self.layers * block + rest

    def on_meta(self) -> nn.Module:
        """A module with these parameters on the meta device, in float32, its blocks in a ModuleList. It cannot run."""
        model = _Parameters(self.rest, self.lookups)
        model.blocks = nn.ModuleList(_Parameters(self.block) for _ in range(self.layers))
        return model


class _Parameters(nn.Module):
    def __init__(self, shapes: Shapes, lookups: Collection[str] = ()) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, attribute = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, _lookup(*shape) if name in lookups else nn.Module())
                owner = owner.get_submodule(part)
            param = nn.Parameter(torch.empty(shape, device="meta"))
            owner.register_parameter(attribute, param)

    def forward(self) -> None:
        raise NotImplementedError("these are shapes only; they can be planned for, not run")


def _lookup(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding(rows, width, device="meta")


def equal_blocks(numel: int, layers: int) -> ModelShapes:
    """The shapes of a model of which only the number of parameters is known: `layers` equal blocks."""
    rest = {"rest": (numel % layers,)} if numel % layers else {}
    return ModelShapes({"weight": (numel // layers,)}, layers, rest)


SHAPES: Mapping[str, ModelShapes] = {
    # Names as in Meta's reference code, https://github.com/meta-llama/llama3
    "llama3-8b": ModelShapes(
        block={
            "attention.wq.weight": (4096, 4096),
            "attention.wk.weight": (1024, 4096),
            "attention.wv.weight": (1024, 4096),
            "attention.wo.weight": (4096, 4096),
            "feed_forward.w1.weight": (14336, 4096),
            "feed_forward.w2.weight": (4096, 14336),
            "feed_forward.w3.weight": (14336, 4096),
            "attention_norm.weight": (4096,),
            "ffn_norm.weight": (4096,),
        },
        layers=32,
        rest={
            "tok_embeddings.weight": (128256, 4096),
            "norm.weight": (4096,),
            "output.weight": (128256, 4096),
        },
        lookups=("tok_embeddings.weight",),
        width=4096,
    ),
    # Names as in https://github.com/openai/gpt-2 and its ports
    "gpt2": ModelShapes(
        block={
            "attn.c_attn.weight": (2304, 768),
            "attn.c_attn.bias": (2304,),
            "attn.c_proj.weight": (768, 768),
            "attn.c_proj.bias": (768,),
            "mlp.c_fc.weight": (3072, 768),
            "mlp.c_fc.bias": (3072,),
            "mlp.c_proj.weight": (768, 3072),
            "mlp.c_proj.bias": (768,),
            "ln_1.weight": (768,),
            "ln_1.bias": (768,),
            "ln_2.weight": (768,),
            "ln_2.bias": (768,),
        },
        layers=12,
        rest={
            "wte.weight": (50257, 768),
            "wpe.weight": (1024, 768),
            "ln_f.weight": (768,),
            "ln_f.bias": (768,),
        },
        lookups=("wpe.weight",),
        width=768,
    ),
}
