"""Sharded parameters as plain tensors, for the engine's own code; see `sharded_parameter.py`.

Inside of `with plain():` torch's functions treat sharded parameters as plain tensors. There, `grad_of(param)` and
`set_grad(param, grad)` read and write `param.grad`, past the property of ShardedParameter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as plain

_GRAD: Any = torch._C.TensorBase.grad

grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__

__all__ = ["grad_of", "plain", "set_grad"]
