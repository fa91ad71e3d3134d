"""Loss scaling for float16: torch's GradScaler, with all ranks of one mind about a step."""

from __future__ import annotations

from typing import Any

import torch

from shardcomm.arguments.checks import check_type
from shardcomm.engine.engine import Engine
from shardcomm.parameter.plain import plain


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the model of `engine`; everything else is torch's.

    A rank sees the gradients of its rows only. torch's scaler would skip the step on ranks that find an Inf there and
    take it on the others; this one skips it on all, with an all-reduce of one number for each `unscale_`. (For
    DTensors, as of PyTorch FSDP2, torch does that itself; for FSDP1's plain tensors its `ShardedGradScaler` does.)

    Args:
        engine: from `fully_shard`.
        options: of torch's: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        check_type("GradScaler", "engine", engine, Engine, "what fully_shard returned")
        super().__init__(engine.mesh.device.type, **options)
        self._mesh = engine.mesh
        self._shards = next((param.device for param in engine.model.parameters()), None)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Of shards in host memory it stays there: torch's optimizers would not wait for its copy from the device.
        super()._lazy_init_scale_growth_tracker(self._shards or dev)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        with plain():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = found.get(found_inf.device, found_inf)  # nothing was found where no row is
        anywhere = here.to(self._mesh.device)
        self._mesh.all_reduce(anywhere, "max")
        return {here.device: anywhere.to(here.device)}
