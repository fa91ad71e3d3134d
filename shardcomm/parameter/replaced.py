"""Parameters as they were before `fully_shard`. The model does not use them any more, and whoever does is told so.

What clips or steps on a list of parameters that was taken before would otherwise find no gradient, and do nothing: a
read of `.grad` raises. A forward that has a parameter from a list or a closure would compute with values that nobody
trains: its gradient raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardcomm.parameter.plain import set_grad


class ReplacedParameter(nn.Parameter):
    """A parameter that was replaced by a rank's rows of it. In everything but `.grad` it is a plain parameter."""

    _shardcomm_refused: str
    _shardcomm_hook: Any = None

    @property
    def grad(self) -> torch.Tensor | None:
        """Raises RuntimeError: no backward of the model leaves a gradient here."""
        raise RuntimeError(f"a .grad was read of {self._shardcomm_refused}")

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_grad(self, None)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


def replace(param: nn.Parameter) -> None:
    """Makes `param` a ReplacedParameter, unless it is of a class of its own, as another engine's parameters are."""
    if type(param) is nn.Parameter:
        param.__class__ = ReplacedParameter
        assert isinstance(param, ReplacedParameter)
        if param.requires_grad:
            refuse = partial(_refuse_gradient, param._shardcomm_refused)
            param._shardcomm_hook = param.register_hook(refuse)  # type: ignore[no-untyped-call]


def _refuse_gradient(of: str, grad: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        f"backward: a gradient came to {of}. A forward that computes with it, past the module that has it, should read "
        "it from the module: self.embed.weight, and not a list or a variable with that"
    )


def take_over(param: nn.Parameter) -> None:
    """Makes `param` plain again if it is a ReplacedParameter, since another engine comes to shard it."""
    if isinstance(param, ReplacedParameter):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
        if param._shardcomm_hook is not None:
            param._shardcomm_hook.remove()
