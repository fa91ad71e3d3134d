"""What PyTorch's FSDP2 calls otherwise, for the errors that say what it is called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

METHODS = {
    "reshard": "engine.unit(module).reshard()",
    "set_is_last_backward": "with engine.no_sync(): around all backwards but the last",
    "set_modules_to_backward_prefetch": "fully_shard(..., backward_prefetch=)",
    "set_modules_to_forward_prefetch": "fully_shard(..., prefetch=)",
    "set_requires_gradient_sync": "with engine.no_sync():",
    "set_reshard_after_backward": "fully_shard(..., strategy=)",
    "set_reshard_after_forward": "fully_shard(..., strategy=), which does not change later",
    "unshard": "engine.unit(module).unshard()",
}
"""The methods of a module that FSDP2 has sharded."""

ARGUMENTS = {
    "mesh": "comm=, which takes the mesh too",
    "mp_policy": "mixed_precision=shardcomm.MixedPrecision(...)",
    "offload_policy": "cpu_offload=True",
    "shard_placement_fn": "shard_dim=",
}
"""The arguments of its `fully_shard`."""


def told_arguments(fully_shard: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates our `fully_shard`: a call with FSDP2's arguments, or with none of ours, says what to write here.

    Raises:
        TypeError: The call has an argument that `fully_shard` does not have, or no `comm`.
    """
    ours = inspect.signature(fully_shard).parameters

    @functools.wraps(fully_shard)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given: dict[str, Any] = kwargs
        for name in ARGUMENTS.keys() & given.keys():
            raise TypeError(f"{name}=, of PyTorch's FSDP2, is here: {ARGUMENTS[name]}")
        for name in given.keys() - ours.keys():
            raise TypeError(f"there is no argument {name}=; accepted: {', '.join(ours)}")
        if len(args) == 1 and "comm" not in given:
            raise TypeError(
                "comm is missing: give shardcomm.Communicator.from_env(), or a DeviceMesh as PyTorch's FSDP2 takes it"
            )
        return fully_shard(*args, **kwargs)

    return told
