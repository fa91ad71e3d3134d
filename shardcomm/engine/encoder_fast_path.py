"""The fast path of `nn.TransformerEncoder`, which leaves zeros at padded places in evaluation, with sharded layers.

Torch takes it if no parameter of the first layer has a `__torch_function__`, as guarded rows have. So these are plain
from the beginning of the encoder's forward to that of its first layer, in between which only torch's own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardcomm.sharded.hooks import Hooks
from shardcomm.sharded.sharded_unit import ShardedUnit


def install(units: Sequence[ShardedUnit]) -> Iterator[Any]:
    """Lets the encoders in the model, whose unit is the first of `units`, take it; yields the handles of the hooks.

    An encoder takes it if its layers are units, or are in a unit around it: the fast path of a layer needs all of its
    parameters at once.
    """
    unit_of = {unit.module: unit for unit in units}
    for encoder in units[0].module.modules():
        if not isinstance(encoder, nn.TransformerEncoder) or not len(encoder.layers):
            continue
        layers: list[nn.Module] = [*encoder.layers]
        is_cut = any(m in unit_of for layer in layers for m in layer.modules() if m is not layer)
        first = unit_of.get(layers[0])
        if first is None or is_cut or any(param.distribution for param in first.params):
            continue
        hooks = _FirstLayer(first)
        yield encoder.register_forward_pre_hook(hooks.make_plain)
        yield first.module.register_forward_pre_hook(hooks.guard, prepend=True)
        # An exception of the encoder's own, as for a mask of another dtype, comes before the first layer.
        yield encoder.register_forward_hook(hooks.guard_after, always_call=True)


class _FirstLayer(Hooks):
    def __init__(self, unit: ShardedUnit) -> None:
        self._params = unit.params

    def make_plain(self, encoder: nn.Module, args: tuple[Any, ...]) -> None:
        if not (encoder.training or torch.compiler.is_compiling()):
            for param in self._params:
                param.shard.__class__ = nn.Parameter

    def guard(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not (layer.training or torch.compiler.is_compiling()):
            for param in self._params:
                param.guard()

    def guard_after(self, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.guard(encoder, args)
