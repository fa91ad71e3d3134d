"""Full state dicts: the model's own names and shapes, gathered from or cut into the shards, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from shardcomm.sharded_unit import ShardedUnit


def full_state_dict(model: nn.Module, units: Iterable[ShardedUnit]) -> dict[str, torch.Tensor]:
    """`model.state_dict()` as it would be without sharding, in the shards' dtype, on every rank; collective."""
    full: dict[nn.Parameter, torch.Tensor] = {}
    for unit in units:
        for bucket, params in unit.buckets:
            for param, value in zip(params, bucket.gathered_shards(), strict=True):
                full[param.shard] = value
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {
        name: full[value] if isinstance(value, nn.Parameter) and value in full else value.detach()
        for name, value in state.items()
    }


def load_full_state_dict(
    model: nn.Module, units: Sequence[ShardedUnit], state_dict: Mapping[str, torch.Tensor]
) -> None:
    """Takes this rank's rows, and the buffers, from `state_dict`; no communication."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    missing, unknown = state.keys() - state_dict.keys(), state_dict.keys() - state.keys()
    if missing or unknown:
        raise ValueError(
            f"load_full_state_dict: state_dict lacks {sorted(missing)} and has unknown {sorted(unknown)}"
        )
    values: dict[nn.Parameter, torch.Tensor] = {}
    for name, current in state.items():
        if isinstance(current, nn.Parameter):
            values[current] = state_dict[name]
        else:
            current.copy_(state_dict[name])
    for unit in units:
        for bucket, params in unit.buckets:
            bucket.load([values[param.shard] for param in params])
