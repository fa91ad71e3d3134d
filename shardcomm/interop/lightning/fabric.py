"""The strategy for Lightning's Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from shardcomm.checkpoint.folders import at
from shardcomm.checkpoint.optimizer_state import OptimizerState
from shardcomm.engine.engine import Engine
from shardcomm.interop.lightning.shards import (
    Sharding,
    StateDictType,
    backend_for,
    check_own_io,
    full_optimizer_states,
    is_folder,
    load_folder,
    local_path,
    one_file,
    save_folder,
)
from shardcomm.interop.optimizers import Successors, check_made_after, engine_of_optimizer
from shardcomm.interop.parts import check_whole
from shardcomm.unit.unit import Units

Filter = Callable[[str, Any], bool]

_SAVE = (
    "give the model and the optimizer themselves, as fabric.save(path, {'model': model, 'optimizer': optimizer}), or "
    "whole tensors, as of fabric.strategy.engine_of(model).full_state_dict()"
)


class ShardcommStrategy(DDPStrategy):
    """Shards models that `Fabric` sets up by [`fully_shard`][shardcomm.fully_shard], over all of Fabric's devices.

    `fabric.setup(model, optimizer)`, `clip_gradients`, `no_backward_sync`, `save` and `load` are called as under DDP,
    and losses are those of DDP. Fabric's `precision` does what it does there: "bf16-mixed" computes under autocast of
    parameters that are gathered in float32. To gather them in bfloat16, leave `precision` and give
    `mixed_precision=shardcomm.MixedPrecision(...)`.

    Args:
        units: As `units` of `fully_shard`.
        replicas: How many copies of the model there are, for `strategy="hybrid_shard"`.
        state_dict_type: "full": `fabric.save` writes one file, with the whole model and optimizers, as DDP's.
            "sharded": it writes a folder, to which each rank adds its part. `fabric.load` reads both, whatever number
            of devices saved them.
        process_group_backend: The backend of torch.distributed. None: "shardcomm" on CPUs, NCCL on GPUs.
        timeout: How long a rank waits for another one.
        start_method: How Fabric starts processes: "popen", "spawn", "fork" or "forkserver".
        sharding: Other keyword arguments of `fully_shard`, such as `strategy` and `mixed_precision`.

    Raises:
        TypeError: `sharding` has an argument that `fully_shard` does not have.
        ValueError: `state_dict_type` or `replicas` is out of its range.

    Example:
        ```py
        fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardcommStrategy(units=Block))
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        ```
    """

    _process_group_backend: str | None

    def __init__(
        self,
        units: Units = None,
        *,
        replicas: int = 1,
        state_dict_type: StateDictType = "full",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        **sharding: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        name = type(self).__name__
        self._sharding = Sharding(name, state_dict_type, replicas, {"units": units, **sharding})
        self._backward_sync_control = _NoSync()
        self._engines: list[Engine] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards `module`."""
        engine = self._sharding.shard(module, self.root_device)
        self._engines.append(engine)
        return _Sharded(engine)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shards `module`, and has `optimizers`, which were made of it before, go on with this rank's rows."""
        successors = Successors(module)
        sharded = self.setup_module(module)
        successors.take_over(optimizers)
        return sharded, [*map(self.setup_optimizer, optimizers)], scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns `optimizer`, all of whose parameters must be of models that are set up.

        Raises:
            ValueError: They are not.
        """
        check_made_after(
            optimizer,
            [engine.model for engine in self._engines],
            "set both up together by fabric.setup(model, optimizer), or make the optimizer after "
            "model = fabric.setup_module(model)",
        )
        return optimizer

    def engine_of(self, model: nn.Module) -> Engine:
        """The engine of a model that is set up, for what a loop calls beside Fabric, such as `gathered`.

        Args:
            model: What `fabric.setup` returned, or what it was given.

        Raises:
            ValueError: The model is not set up.
        """
        models = {*model.modules()}
        for engine in self._engines:
            if engine.model in models:
                return engine
        raise ValueError(
            f"ShardcommStrategy: model is a {type(model).__name__} that is not set up; call fabric.setup(model) first"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """Leaves `module` where it is: `fully_shard` moves what it shards, so that no GPU holds the whole model."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """A context for `fabric.init_module`: on the CPU, or with `empty_init` on the meta device."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state dict of `module` on rank 0, and {} on others; collective."""
        if isinstance(module, _Sharded):
            return module.engine.full_state_dict(rank=0)
        return module.state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Loads full tensors, of which each rank takes its rows."""
        model = module.engine.model if isinstance(module, _Sharded) else module
        model.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Filter] | None = None,
    ) -> None:
        """Saves `state`, as a file or a folder; collective. See `state_dict_type`."""
        path = local_path(self.broadcast(path), type(self).__name__)
        optimizers = {
            key: self._state_of(obj)
            for key, obj in state.items()
            if isinstance(obj, torch.optim.Optimizer)
        }
        if self._sharding.state_dict_type == "full":
            full = full_optimizer_states(path, optimizers)
            state = {key: full.get(key, {}) if key in optimizers else state[key] for key in state}
            state = self._convert_stateful_objects_in_state(state, dict(filter or {}))
            check_whole(state, "state", _SAVE)
            with one_file(path, self.checkpoint_io) as file:
                super().save_checkpoint(file, state, storage_options)
            return
        check_own_io(self.checkpoint_io, storage_options, type(self).__name__)
        values: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        for key, obj in state.items():
            wanted = (filter or {}).get(key)
            if isinstance(obj, nn.Module):
                of_model = (
                    obj.engine.state_dict() if isinstance(obj, _Sharded) else obj.state_dict()
                )
                values[key] = _filtered(of_model, wanted)
            elif key in optimizers:
                values[key] = _filtered(optimizers[key].state_dict(), wanted)
            else:
                meta[key] = _filtered(
                    obj.state_dict() if hasattr(obj, "state_dict") else obj, wanted
                )
        check_whole(meta, "state", _SAVE)
        save_folder(path, values, meta)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a file or a folder into `state`, and returns what it does not ask for; collective."""
        path = Path(self.broadcast(at(local_path(path, type(self).__name__))))
        if not is_folder(path):
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return rest
        if not isinstance(state, dict):
            raise ValueError(
                f"ShardcommStrategy: {path} is a folder, and state is a {type(state).__name__}; load it with a dict, "
                "such as fabric.load(path, {'model': model})"
            )
        values: dict[str, Any] = {}
        for key, obj in state.items():
            if isinstance(obj, nn.Module):
                values[key] = obj.engine if isinstance(obj, _Sharded) else obj
            elif isinstance(obj, torch.optim.Optimizer):
                values[key] = self._state_of(obj)
        others = state.keys() - values.keys()
        optional = () if strict else [*values]
        meta = load_folder(
            path, values, weights_only=weights_only, optional=optional, strict=strict
        )
        for key in others:
            if key not in meta:
                if strict:
                    raise KeyError(
                        f"the checkpoint {path} has no {key!r}; it has {sorted(meta)} beside what DCP holds; "
                        "strict=False passes it over"
                    )
            elif hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(meta.pop(key))
            else:
                state[key] = meta.pop(key)
        return meta

    def _state_of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        engine = engine_of_optimizer(
            optimizer, self._engines, "ShardcommStrategy", "fabric.setup(model, optimizer)"
        )
        return engine.optimizer_state(optimizer)

    def _get_process_group_backend(self) -> str:
        self._process_group_backend = self._process_group_backend or backend_for(self.root_device)
        return str(super()._get_process_group_backend())


class _Sharded(nn.Module):
    """What Fabric calls for the model. Fabric sends methods through its forward: see `mark_forward_method`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.module = engine.model
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """`Engine.no_sync` of the model, if `enabled`."""
        return (
            module.engine.no_sync() if enabled and isinstance(module, _Sharded) else nullcontext()
        )


def _filtered(state: Any, wanted: Filter | None) -> Any:
    if wanted is None or not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if wanted(key, value)}
