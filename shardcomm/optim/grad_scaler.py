"""Loss scaling for float16: torch's GradScaler, with which all ranks take a step, or all skip it."""

from __future__ import annotations

from typing import Any

import torch

from shardcomm.arguments.checks import check_type
from shardcomm.engine.engine import Engine
from shardcomm.parameter.plain import plain


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a sharded model. All methods are torch's.

    A rank sees the gradients of its rows only. Torch's scaler would skip the step on ranks that find an Inf there, and
    take it on the others. This one skips it on all ranks, with an all-reduce of one number for each `unscale_`. (For
    the DTensors of PyTorch FSDP2 torch does that itself, and for the plain tensors of FSDP1 its `ShardedGradScaler`
    does.)

    Args:
        engine: What `fully_shard` returned.
        **options: Torch's arguments: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.

    Raises:
        TypeError: `engine` is not what `fully_shard` returned.

    Example:
        ```python
        half = shardcomm.MixedPrecision(param_dtype=torch.float16)
        model = torch.nn.Linear(64, 64)
        engine = shardcomm.fully_shard(model, comm, mixed_precision=half)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = shardcomm.GradScaler(engine)
        scaler.scale(model(torch.randn(8, 64)).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        ```
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        check_type("GradScaler", "engine", engine, Engine, "what fully_shard returned")
        super().__init__(engine.mesh.device.type, **options)
        self._mesh = engine.mesh
        self._shards = next((param.device for param in engine.model.parameters()), None)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # If shards are in host memory the scale is there, too: torch's optimizers would not wait for its copy from the
        # device.
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
        # Of each device on which it has gradients: units may be offloaded. A rank without rows has found nothing.
        here = [each.to(self._mesh.device) for each in (found_inf, *found.values())]
        anywhere = torch.stack(here).amax(dim=0)
        self._mesh.all_reduce(anywhere, "max")
        return {found_inf.device: anywhere.to(found_inf.device)}
