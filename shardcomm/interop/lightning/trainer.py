"""The strategy for Lightning's Trainer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden

from shardcomm._C import CommError
from shardcomm.checkpoint.folders import at
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
from shardcomm.interop.parts import check_whole
from shardcomm.unit.unit import Units

_SHARDED = (
    "state_dict",
    "optimizer_states",
)  # in a checkpoint: what save_checkpoint brings together


class ShardcommTrainerStrategy(DDPStrategy):
    """Shards the `LightningModule` of a `Trainer` by [`fully_shard`][shardcomm.fully_shard], over all its devices.

    The Trainer's arguments, hooks and callbacks do what they do under DDP: `gradient_clip_val` is of the norm of the
    whole model, `accumulate_grad_batches` reduces once, `ckpt_path` and `ModelCheckpoint` have whole models, and
    losses are those of DDP. The model is sharded after `configure_model`, and `configure_optimizers` is called after
    that. With manual optimization, `training_step` computes by `self(...)`.

    Args:
        units: As `units` of `fully_shard`.
        replicas: How many copies of the model there are, for `strategy="hybrid_shard"`.
        state_dict_type: "full": a checkpoint is one file, with the whole model and optimizers, as DDP's. "sharded": it
            is a folder, to which each rank adds its part. `ckpt_path` may name either, whatever number of devices saved
            it.
        process_group_backend: The backend of torch.distributed. None: "shardcomm" on CPUs, NCCL on GPUs.
        timeout: How long a rank waits for another one.
        start_method: How the Trainer starts processes: "popen", "spawn", "fork" or "forkserver".
        sharding: Other keyword arguments of `fully_shard`, such as `strategy` and `mixed_precision`.

    Attributes:
        engine: The engine of the model, once the Trainer has set it up; None before.

    Raises:
        TypeError: `sharding` has an argument that `fully_shard` does not have.
        ValueError: `state_dict_type` or `replicas` is out of its range.

    Example:
        ```py
        strategy = ShardcommTrainerStrategy(units=Block)
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, gradient_clip_val=1.0)
        trainer.fit(model, loader)
        ```
    """

    _process_group_backend: str | None
    model: Any

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
        self.engine: Engine | None = None

    def setup(self, trainer: Any) -> None:
        """Shards the model, unless an earlier call has done so, and then has its optimizers made."""
        self.accelerator.setup(trainer)
        if self._layer_sync is not None:
            raise ValueError(
                "ShardcommTrainerStrategy: sync_batchnorm is True; convert the model in configure_model instead, by "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
            )
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"ShardcommTrainerStrategy: the callback {type(callback).__name__} averages copies of the whole "
                    "model; leave it out, and average this rank's rows by "
                    "shardcomm.ExponentialMovingAverage(self.trainer.strategy.engine) in the LightningModule"
                )
        if self.engine is None or self.engine.model is not self.model:
            self.model = self.precision_plugin.convert_module(self.model)
            self.engine = self._sharding.shard(self.model, self.root_device)
            self._gather_for_steps(self.engine)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _gather_for_steps(self, engine: Engine) -> None:
        """Has the Trainer's own calls gather parameters as a forward does.

        With manual optimization, `training_step` also runs the backward, which cannot be inside of a forward.
        """
        steps = ["validation_step", "test_step", "predict_step"]
        if engine.model.automatic_optimization:
            steps.append("training_step")
        for step in steps:
            if is_overridden(step, engine.model):
                engine.register_forward_method(engine.model, step)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """A context for `configure_model`: on the CPU, or with `empty_init` on the meta device."""
        with (
            torch.device("meta") if empty_init else nullcontext(),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """`Engine.no_sync`, for `accumulate_grad_batches`."""
        with self._set_up().no_sync():
            yield

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: what a checkpoint has is loaded into this rank's rows."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's part of a checkpoint, full on rank 0 or this rank's rows; collective. See `state_dict_type`."""
        engine = self._set_up()
        with self._exceptions_first():
            if self._sharding.state_dict_type == "full":
                return engine.full_state_dict(rank=0)
            # Ranks that are in a step tell the others so, which would wait for them in torch.distributed.
            engine.mesh.shard.barrier()
            return engine.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's part of a checkpoint: this rank's rows, which `save_checkpoint` brings together."""
        plain = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        return self._set_up().optimizer_state(plain).state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Saves `checkpoint`, as a file or a folder; collective. See `state_dict_type`."""
        with self._exceptions_first():
            self._save(checkpoint, filepath, storage_options)

    def _save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        path = local_path(self.broadcast(filepath), type(self).__name__)
        check_whole(
            {key: checkpoint[key] for key in checkpoint if key not in _SHARDED},
            "checkpoint",
            "leave the model out of on_save_checkpoint, since the strategy saves it, or put whole tensors there, as of "
            "self.trainer.strategy.engine.full_state_dict()",
        )
        states = checkpoint.pop("optimizer_states", None)
        named = {_optimizer(number): state for number, state in enumerate(states or [])}
        if self._sharding.state_dict_type == "full":
            full = full_optimizer_states(path, named)
            if states is not None:
                checkpoint["optimizer_states"] = [*full.values()]
            with one_file(path, self.checkpoint_io) as file:
                super().save_checkpoint(checkpoint, file, storage_options)
            return
        check_own_io(self.checkpoint_io, storage_options, type(self).__name__)
        save_folder(path, {"model": checkpoint.pop("state_dict"), **named}, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file, or a folder, whose model and optimizers are loaded in place; collective."""
        path = self.broadcast(at(local_path(checkpoint_path, type(self).__name__)))
        if not is_folder(path):
            file: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return file
        engine = self._set_up()
        optimizers = {_optimizer(n): each for n, each in enumerate(self.optimizers)}
        values: dict[str, Any] = {n: engine.optimizer_state(o) for n, o in optimizers.items()}
        values["model"] = engine
        checkpoint = load_folder(
            path,
            values,
            weights_only=weights_only,
            optional=optimizers.keys(),
            strict=self.lightning_module.strict_loading,
        )
        # The Trainer loads these once more: they are views of what they are loaded into. It raises if it wants to load
        # optimizers, and there are none.
        checkpoint["state_dict"] = engine.state_dict()
        if optimizers.keys() <= values.keys():
            checkpoint["optimizer_states"] = [each.state_dict() for each in self.optimizers]
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads full tensors, of which each rank takes its rows, or this rank's rows."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Ends a run of the Trainer. The model stays sharded, for the next run and for `strategy.engine`."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @contextmanager
    def _exceptions_first(self) -> Iterator[None]:
        """A context for a save, after which an exception of one rank still leaves the run that it has ended.

        Callbacks such as `OnExceptionCheckpoint` save then, which the other ranks do not.
        """
        ended_by = sys.exc_info()[1]
        try:
            yield
        except CommError as error:
            status = self.lightning_module.trainer.state.status
            if ended_by is None or status != TrainerStatus.INTERRUPTED:
                raise
            warnings.warn(
                f"{type(self).__name__}: no checkpoint is saved after {ended_by!r}, since the ranks could not save "
                f"together: {error}",
                stacklevel=2,
            )
            context = ended_by.__context__
            try:
                raise ended_by
            finally:
                # Its own, and not the CommError, of which the warning tells.
                ended_by.__context__ = context

    def _set_up(self) -> Engine:
        if self.engine is None:
            raise RuntimeError(
                "ShardcommTrainerStrategy: the model is not sharded yet; the Trainer does it at the begin of fit, "
                "validate, test or predict"
            )
        return self.engine

    def _get_process_group_backend(self) -> str:
        self._process_group_backend = self._process_group_backend or backend_for(self.root_device)
        return str(super()._get_process_group_backend())


def _optimizer(number: int) -> str:
    return f"optimizer_{number}"
