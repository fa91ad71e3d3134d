"""What frameworks save and load of sharded models: checks with sentences that all ranks raise alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.utils._pytree import keystr, tree_leaves_with_path

from shardcomm.engine.engine import Engine
from shardcomm.parameter.shard_tensor import ShardTensor


def check_whole(state: Any, what: str, instead: str) -> None:
    """TypeError if a rank's part of a tensor is in `state`, which one rank is to write.

    Args:
        state: What is to be written.
        what: What `state` is, for the message.
        instead: What to call; the message ends with it.
    """
    for path, leaf in tree_leaves_with_path(state):
        if isinstance(leaf, ShardTensor):
            raise TypeError(
                f"{what}{keystr(path)} is this rank's part of a tensor of shape {tuple(leaf.shape)} alone, and one "
                f"rank would write it; {instead}"
            )


def check_parts(
    folder: Path, values: Mapping[str, Any], saved: Collection[str], instead: str
) -> None:
    """RuntimeError unless the checkpoint in `folder` has all parts of `values`, and no others of their models.

    DCP would say the first in a page, and pass over the second.

    Args:
        folder: The checkpoint.
        values: By name, what DCP is to load: an Engine, a module, or an optimizer's state.
        saved: The names in the checkpoint.
        instead: How to load what both have.
    """
    for name, value in values.items():
        wanted = {*flatten_state_dict({name: value.state_dict()})[0]}
        lacking = wanted.difference(saved)
        left: set[str] = set()
        if isinstance(value, Engine | nn.Module):
            elsewhere = value.elsewhere.names if isinstance(value, Engine) else ()
            left = {key for key in saved if key.startswith(f"{name}.")} - wanted
            left -= {f"{name}.{each}" for each in elsewhere}
        if lacking or left:
            raise RuntimeError(
                f"the checkpoint {folder} is of another {name}: it lacks {_some(lacking)}, and has {_some(left)} "
                f"beside; load it into what it is of, or only what both have {instead}"
            )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "") or "nothing"
