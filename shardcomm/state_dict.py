"""Full state dicts: the model's own names and shapes, gathered from or cut into the shards, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardcomm.sharded_unit import ShardedUnit


def full_state_dict(model: nn.Module, units: Iterable[ShardedUnit]) -> dict[str, Any]:
    """`model.state_dict()` as it would be without sharding, in the shards' dtype, on every rank; collective.

    All tensors are copies; what modules give by `get_extra_state` is passed on as it is.
    """
    full: dict[nn.Parameter, torch.Tensor] = {}
    for unit in units:
        for bucket, params in unit.buckets:
            for param, value in zip(params, bucket.gathered_shards(), strict=True):
                full[param.shard] = value
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if _is_extra(name):
            state[name] = value
        else:
            state[name] = full[value] if value in full else value.detach().clone()
    return state


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, units: Sequence[ShardedUnit], state_dict: Mapping[str, Any]
) -> None:
    """Takes this rank's rows, the buffers and the extra state from `state_dict`; no communication."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    shape_of = {
        param.shard: placement.spec.shape
        for unit in units
        for bucket, params in unit.buckets
        for param, placement in zip(params, bucket.layout.placements, strict=True)
    }
    _check(state, state_dict, shape_of)
    values: dict[nn.Parameter, torch.Tensor] = {}
    for name, current in state.items():
        if _is_extra(name):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(state_dict[name])
        elif current in shape_of:
            values[current] = state_dict[name]
        else:
            current.copy_(state_dict[name])
    for unit in units:
        for bucket, params in unit.buckets:
            bucket.load([values[param.shard] for param in params])


def _check(
    state: Mapping[str, Any],
    given: Mapping[str, Any],
    shape_of: Mapping[nn.Parameter, tuple[int, ...]],
) -> None:
    missing, unknown = state.keys() - given.keys(), given.keys() - state.keys()
    if missing or unknown:
        raise ValueError(
            f"load_full_state_dict: state_dict lacks {sorted(missing)} and has unknown {sorted(unknown)}"
        )
    for name, current in state.items():
        if _is_extra(name):
            continue
        wanted = shape_of.get(current, tuple(current.shape))
        value = given[name]
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"load_full_state_dict: {name} is a {type(value).__name__}; it must be a tensor"
            )
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"load_full_state_dict: {name} has shape {tuple(value.shape)}; the model's is {wanted}"
            )


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == nn.modules.module._EXTRA_STATE_KEY_SUFFIX
