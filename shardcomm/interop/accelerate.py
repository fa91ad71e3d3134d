"""Hugging Face's accelerate with the engine: an `Accelerator` that shards, and `prepared` for transformers' Trainer.

    from shardcomm.interop.accelerate import Accelerator
    accelerator = Accelerator(cpu=True, sharding={"units": Block})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

accelerate's own `Accelerator` puts DistributedDataParallel around a model on CPUs, also where it was given an FSDP
plugin, and around a model that is sharded already, which is refused. Only this module imports `accelerate`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardcomm.checkpoint.manifest import files_in
from shardcomm.checkpoint.optimizer_state import OptimizerState
from shardcomm.checkpoint.unpickling import check_unpickling
from shardcomm.comm.communicator import Communicator
from shardcomm.engine.engine import Engine
from shardcomm.engine.sharding import fully_shard
from shardcomm.interop.backend import NAME
from shardcomm.interop.optimizers import (
    Successors,
    check_made_after,
    check_not_sharded,
    engine_of_optimizer,
)
from shardcomm.interop.parts import check_parts
from shardcomm.interop.settings import check_settings

try:
    import accelerate
    from accelerate.utils import InitProcessGroupKwargs
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ModuleNotFoundError(
        "shardcomm.interop.accelerate needs the package accelerate: pip install accelerate",
        name="accelerate",
    ) from None

_FOLDER = "sharded"


def prepared(engine: Engine) -> nn.Module:
    """Marks an engine's model as prepared: accelerate, and the Trainer of transformers, then take it as it is.

    Without the mark they would put DistributedDataParallel around it, which is refused. Accumulation goes through
    `Engine.no_sync`. Call it before the model is given to `accelerator.prepare`, or to `transformers.Trainer`.

    Args:
        engine: The engine of the model.

    Returns:
        The model.

    Example:
        ```py
        engine = shardcomm.fully_shard(model, comm, units=LlamaDecoderLayer)
        trainer = transformers.Trainer(model=prepared(engine), args=args, train_dataset=data)
        ```
    """
    model: Any = engine.model
    model._is_accelerate_prepared = True  # accelerate looks for it
    model.no_sync = engine.no_sync  # and for this, when it accumulates
    return engine.model


class Accelerator(accelerate.Accelerator):
    """accelerate's `Accelerator`, whose `prepare` shards models by [`fully_shard`][shardcomm.fully_shard].

    `backward`, `accumulate`, `clip_grad_norm_`, `autocast`, `gather` and the rest do what they do there, and losses are
    those of its DistributedDataParallel. `get_state_dict` gives the full weights on rank 0, and `save_state` and
    `load_state` save and load each rank's rows by `torch.distributed.checkpoint`: any number of ranks loads them.
    On CPUs it begins the process group, unless the program has begun one: with the backend "shardcomm", or as an
    `InitProcessGroupKwargs` among `kwargs_handlers` says.

    Args:
        args: As accelerate's.
        sharding: Keyword arguments of `fully_shard`, such as `units` and `strategy`.
        kwargs: As accelerate's.

    Raises:
        TypeError: `sharding` has a key that is no argument of `fully_shard`.
        ValueError: `kwargs`, or `accelerate launch`, asks for another engine: FSDP, DeepSpeed or Megatron-LM.

    Example:
        ```py
        accelerator = Accelerator(cpu=True, sharding={"units": Block}, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ```
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(sharding, Mapping | None):
            raise TypeError(
                f"Accelerator: sharding is a {type(sharding).__name__}; it must be a dict of arguments of fully_shard, "
                "such as {'units': Block}"
            )
        self._sharding = dict(sharding or {})
        check_settings(self._sharding, "Accelerator: sharding")
        for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true":
                raise ValueError(
                    f"Accelerator: accelerate launch asks for {engine}, by ACCELERATE_USE_{engine} in the environment, "
                    "and shardcomm's engine shards the model here; launch without it, and give the arguments of "
                    "fully_shard as sharding={...}"
                )
        for other in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"):
            if kwargs.get(other) is not None:
                raise ValueError(
                    f"Accelerator: {other} is a {type(kwargs[other]).__name__}, and shardcomm's engine shards the "
                    "model here; leave it out, and give the arguments of fully_shard as sharding={...}"
                )
        if kwargs.get("cpu") and "RANK" in os.environ and not dist.is_initialized():
            # Else accelerate would begin one of Gloo. It refuses any other backend for CPUs.
            group: dict[str, Any] = {"backend": NAME}
            handlers = kwargs.get("kwargs_handlers") or []
            for handler in handlers:
                if isinstance(handler, InitProcessGroupKwargs):
                    group |= handler.to_kwargs()
            dist.init_process_group(**group)
            kwargs["kwargs_handlers"] = [
                each for each in handlers if not isinstance(each, InitProcessGroupKwargs)
            ]
        super().__init__(*args, **kwargs)
        self._engines: list[Engine] = []
        self._state: dict[str, Any] = {}  # while it is saved or loaded
        self._strict = True  # while it is loaded
        self.register_save_state_pre_hook(
            lambda models, weights, folder: save(self._state, checkpoint_id=Path(folder, _FOLDER))
        )
        self.register_load_state_pre_hook(lambda models, folder: self._load(Path(folder, _FOLDER)))

    def engine_of(self, model: nn.Module) -> Engine:
        """The engine of a model that was prepared.

        Raises:
            ValueError: The model was not prepared.
        """
        for engine in self._engines:
            if engine.model is model:
                return engine
        raise ValueError(
            f"Accelerator: model is a {type(model).__name__} that was not prepared; call "
            "accelerator.prepare(model) first"
        )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares models, optimizers, loaders and schedulers, as accelerate does, and shards the models.

        Raises:
            ValueError: An optimizer is of a model that was not prepared, neither before nor in this call.
        """
        successors = [
            Successors(arg)
            for arg in args
            if isinstance(arg, nn.Module) and not getattr(arg, "_is_accelerate_prepared", False)
        ]
        result = super().prepare(*args, device_placement=device_placement)
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        for each in successors:
            each.take_over(optimizers)
        for optimizer in optimizers:
            check_made_after(
                optimizer,
                [engine.model for engine in self._engines],
                "prepare both together by accelerator.prepare(model, optimizer), or make the optimizer after "
                "model = accelerator.prepare(model)",
            )
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shards `model`, unless it was prepared before."""
        if getattr(model, "_is_accelerate_prepared", False):
            return model
        check_not_sharded(model, "Accelerator")
        # With evaluation_mode accelerate does all but put DistributedDataParallel around it. fully_shard moves the
        # model to the device, unit by unit.
        placed = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if placed is not model:
            raise ValueError(
                f"Accelerator: accelerate has put a {type(placed).__name__} around the model, as it does to compile "
                "it or for fp8; leave dynamo_plugin and fp8 out, and compile the model's blocks by block.compile() "
                "before prepare"
            )
        comm = (
            Communicator.from_process_group(device=self.device)
            if dist.is_initialized()
            else Communicator.local_group(1, device=self.device)[0]
        )
        engine = fully_shard(model, comm, **self._sharding)
        self._engines.append(engine)
        return prepared(engine)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict of a model on rank 0, and {} on others; collective."""
        return self.engine_of(model).full_state_dict(rank=0)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Saves all that was prepared or registered in a folder; collective."""
        with self._without_sharded():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Loads what `save_state` saved; collective.

        Raises:
            FileNotFoundError: It was saved by accelerate's own `Accelerator`, or is no checkpoint.
            RuntimeError: It is of another model or optimizer. With `strict=False` what it lacks stays as it is.
        """
        self._strict = strict
        with self._without_sharded():
            super().load_state(*args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Lets go of all that was prepared, as accelerate does."""
        self._engines.clear()
        return super().free_memory(*objects)

    @contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """A context in which accelerate saves and loads all but models and optimizers; its hooks do these."""
        held = self._models, self._optimizers
        self._state = {f"model_{i}": self.engine_of(model) for i, model in enumerate(self._models)}
        for i, wrapped in enumerate(self._optimizers):
            self._state[f"optimizer_{i}"] = self._optimizer_state(wrapped.optimizer)
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = held
            self._state = {}

    def _load(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"Accelerator: {folder.parent} has no folder {folder.name!r}, where save_state puts the model; load "
                "weights that accelerate's own Accelerator saved into the model before prepare, by load_state_dict"
            )
        check_unpickling(folder, frozenset(files_in(folder)))
        if self._strict:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
            check_parts(folder, self._state, saved, "by accelerator.load_state(..., strict=False)")
        planner = DefaultLoadPlanner(allow_partial_load=not self._strict)
        load(self._state, checkpoint_id=folder, planner=planner)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        engine = engine_of_optimizer(
            optimizer, self._engines, "Accelerator", "accelerator.prepare(model, optimizer)"
        )
        return engine.optimizer_state(optimizer)
