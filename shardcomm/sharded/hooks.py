"""Hooks: what a sharded model's modules hold of its engine. A copy of the model holds the same, and is told so."""

from __future__ import annotations

from typing import Any, NoReturn, Self


class Hooks:
    """Its methods are given to a module as hooks."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a copy of the module has parameters of its own, which no hook finds

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "a model sharded by fully_shard cannot be pickled, as torch.save(model) does: its memory belongs to the "
            "engine. Save it by torch.distributed.checkpoint, or engine.full_state_dict() by torch.save"
        )
