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


def _llama(width: int, hidden: int, layers: int) -> ModelShapes:
    """Llama 3 with 8 heads of 128 for keys and values; names as in https://github.com/meta-llama/llama3."""
    keys, vocabulary = 8 * 128, 128256
    return ModelShapes(
        block={
            "attention.wq.weight": (width, width),
            "attention.wk.weight": (keys, width),
            "attention.wv.weight": (keys, width),
            "attention.wo.weight": (width, width),
            "feed_forward.w1.weight": (hidden, width),
            "feed_forward.w2.weight": (width, hidden),
            "feed_forward.w3.weight": (hidden, width),
            "attention_norm.weight": (width,),
            "ffn_norm.weight": (width,),
        },
        layers=layers,
        rest={
            "tok_embeddings.weight": (vocabulary, width),
            "norm.weight": (width,),
            "output.weight": (vocabulary, width),
        },
        lookups=("tok_embeddings.weight",),
        width=width,
    )


SHAPES: Mapping[str, ModelShapes] = {
    "llama3-8b": _llama(width=4096, hidden=14336, layers=32),
    "llama3-70b": _llama(width=8192, hidden=28672, layers=80),
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
