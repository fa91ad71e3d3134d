"""`loss.backward(inputs=params)`, which would leave no gradient at all: autograd's own leaves are the full parameters.

Autograd asks no Python of its inputs, so that `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardcomm.parameter.sharded_parameter import ShardedParameter, WholeParameter


@cache
def install() -> None:
    """Wraps `torch.autograd.backward`, once in the process."""
    backward: Any = torch.autograd.backward

    @wraps(backward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        inputs = args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs")
        if inputs is not None:
            for each in tree_leaves(inputs):
                if isinstance(each, ShardedParameter | WholeParameter) and each.whole is not None:
                    each.whole.refuse_backward_inputs()
        return backward(*args, **kwargs)

    torch.autograd.backward = checked


_INPUTS = 5
"""The place of `inputs` among the arguments of `torch.autograd.backward`."""
