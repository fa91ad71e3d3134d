"""Sharded parameters as any tensor, for the engine's own code; see `sharded_parameter.py`.

In `with plain():` torch's functions do not look at what they are given. There, `grad_of(param)` and
`set_grad(param, grad)` are `param.grad` without what a ShardedParameter makes of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as plain

_GRAD: Any = torch._C.TensorBase.grad

grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__

__all__ = ["grad_of", "plain", "set_grad"]
