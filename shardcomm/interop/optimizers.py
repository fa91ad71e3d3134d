"""Optimizers that a framework's user makes before the framework shards the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardcomm.engine.engine import Engine
from shardcomm.engine.sharded_modules import is_sharded


class Successors:
    """What became of a model's parameters: made before `fully_shard`, it moves optimizers to the rows after it.

    Args:
        model: The model, which is not sharded yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # All names of a tied parameter, since fully_shard keeps the ties.
        self._names = {p: name for name, p in model.named_parameters(remove_duplicate=False)}

    def take_over(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Gives `optimizers` this rank's rows in the place of the full parameters, in the groups that they have.

        Raises:
            ValueError: An optimizer has state already, which would be of the full parameters.
        """
        rows = dict(self._model.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                params = group["params"]
                if optimizer.state and any(p in self._names for p in params):
                    raise ValueError(
                        f"optimizer: this {type(optimizer).__name__} keeps state of the full parameters already; shard "
                        "the model first, make the optimizer of model.parameters() after it, and load the state by a "
                        "checkpoint"
                    )
                # In place, since some optimizers keep the list.
                params[:] = [rows[self._names[p]] if p in self._names else p for p in params]


def check_made_after(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module], instead: str
) -> None:
    """ValueError if `optimizer` has a parameter that is none of `models`, which are sharded.

    Args:
        optimizer: The optimizer.
        models: The models that are sharded.
        instead: What to call; the message ends with it.
    """
    known = {p for model in models for p in model.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in known:
                raise ValueError(
                    f"optimizer: this {type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that no "
                    f"sharded model has, as one that was made before the model was sharded; {instead}"
                )


def engine_of_optimizer(
    optimizer: torch.optim.Optimizer, engines: Iterable[Engine], whose: str, call: str
) -> Engine:
    """The engine of the model whose parameters `optimizer` has.

    Args:
        optimizer: The optimizer.
        engines: The engines of all models that the framework has sharded.
        whose: Who looks for it; the message begins with it.
        call: The call that shards a model and its optimizer.

    Raises:
        ValueError: It has parameters of none of the models, or of several.
    """
    params = {p for group in optimizer.param_groups for p in group["params"]}
    found = [engine for engine in engines if params & {*engine.model.parameters()}]
    name = f"{whose}: this {type(optimizer).__name__}"
    if not found:
        raise ValueError(f"{name} is of no model that is sharded; call {call} first")
    if len(found) > 1:
        raise ValueError(
            f"{name} is of {len(found)} models, whose parameters' names its saved state could not tell apart; make an "
            f"optimizer of each model, or set up one nn.ModuleDict of all of them by {call}"
        )
    return found[0]


def check_not_sharded(model: nn.Module, whose: str) -> None:
    """ValueError if `model`, or a module in it, is sharded already.

    Args:
        model: The model.
        whose: Who is to shard it; the message begins with it.
    """
    if any(map(is_sharded, model.modules())):
        raise ValueError(
            f"{whose}: model is a {type(model).__name__} that is sharded already, and it shards models itself; give "
            "it the model as it was before fully_shard, or go on with the object that sharded it"
        )
