"""The parts of torch's FSDP2 that shardcomm uses besides its public interface, and whether this torch has them."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
except ImportError as error:
    raise ImportError(
        f"shardcomm.fsdp2: torch {torch.__version__} has no FSDP2 that takes custom collectives; install torch 2.13"
    ) from error

__all__ = [
    "AllGather",
    "AllGatherResult",
    "FSDPModule",
    "FSDPParam",
    "ReduceScatter",
    "difference",
    "param_groups",
    "torchs_gather",
]

torchs_gather: Any = _fsdp_param_group
"""The module that calls `foreach_all_gather` and `foreach_all_gather_copy_out`, by these names in its namespace."""

# The attributes of a parameter group that all levels use, besides FSDPModule's methods that set its collectives.
_OF_GROUPS = {
    "_all_gather_comm",
    "_all_gather_process_group",
    "_reduce_scatter_comm",
    "_reduce_scatter_process_group",
    "device",
    "mesh_info",
}
# The functions that level "full" uses. Tested with torch 2.11, 2.13 and 2.15.
_SIGNATURES = {
    (_fsdp_param_group, "foreach_all_gather"): (
        "fsdp_params",
        "group",
        "async_op",
        "all_gather_copy_in_stream",
        "all_gather_stream",
        "device",
        "all_gather_comm",
    ),
    (_fsdp_param_group, "foreach_all_gather_copy_out"): (
        "all_gather_result",
        "fsdp_params",
        "group",
    ),
    (FSDPParam, "init_all_gather_outputs"): (
        "self",
        "all_gather_input_numels",
        "all_gather_input_dtypes",
        "world_size",
        "device",
    ),
    (FSDPParam, "init_unsharded_param"): ("self",),
    (FSDPParam, "free_unsharded_param"): ("self",),
    (_fsdp_param_group.FSDPParamGroup, "wait_for_unshard"): ("self",),
    (_fsdp_param_group.FSDPParamGroup, "_to_sharded"): ("self",),
}


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of one module; RuntimeError if this torch keeps them elsewhere."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    else:  # torch 2.11 has one at most. If it has neither, `state` fails the check below.
        only = getattr(state, "_fsdp_param_group", state)
        groups = [] if only is None else [only]
    for group in groups:
        missing = _OF_GROUPS - {*dir(type(group)), *vars(group)}
        if missing:
            raise RuntimeError(
                f"attach: parameter groups of torch {torch.__version__}'s FSDP2 have no {', '.join(sorted(missing))}; "
                "use a torch that shardcomm is tested with (2.13), or leave the model as it is"
            )
    return groups


@cache  # level "full" later puts its own functions in their place
def difference() -> str:
    """How this torch's gather differs from the one with which level "full" was tested; "" if it does not."""
    for (owner, name), expected in _SIGNATURES.items():
        function = getattr(owner, name, None)
        if function is None:
            return f"torch {torch.__version__}'s FSDP2 has no {name}"
        parameters = inspect.signature(function).parameters.values()
        needed = tuple(p.name for p in parameters if p.default is p.empty)
        if needed != expected:
            return f"{name} of torch {torch.__version__}'s FSDP2 takes {', '.join(needed)}"
    return ""
