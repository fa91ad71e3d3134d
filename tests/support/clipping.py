"""An optimizer with a step of its own around torch's."""

from __future__ import annotations

from typing import Any

import torch


class Clipping(torch.optim.SGD):
    """Clips in its own step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)
