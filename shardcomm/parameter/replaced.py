"""Parameters as they were before `fully_shard`. The model does not use them any more, and a read of `.grad` says so.

Otherwise what clips or steps on a list of parameters that was taken before would find no gradient, and do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardcomm.parameter.plain import set_grad


class ReplacedParameter(nn.Parameter):
    """A parameter that was replaced by a rank's rows of it. In everything but `.grad` it is a plain parameter."""

    _shardcomm_refused: str

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


def take_over(param: nn.Parameter) -> None:
    """Makes `param` plain again if it is a ReplacedParameter, since another engine comes to shard it."""
    if isinstance(param, ReplacedParameter):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
