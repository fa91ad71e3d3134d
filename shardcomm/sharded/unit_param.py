"""A parameter of a unit at run time: the full tensor, with which forward and backward compute, and this rank's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardcomm.parameter.full_parameter import Origin, gathered_class
from shardcomm.parameter.optimizer_steps import replaced
from shardcomm.parameter.sharded_parameter import ShardedParameter
from shardcomm.parameter.tensor_parallel import shown
from shardcomm.parameter.whole import Whole
from shardcomm.parameter.whole_parameter import WholeParameter
from shardcomm.sharded.unit_gradients import ParamGradient
from shardcomm.unit.unit import OwnedParam

_OURS = (ShardedParameter, WholeParameter)  # classes that another engine may have given it


class UnitParam:
    """One parameter: the optimizer sees `shard`, and forward and backward compute with `full`.

    Both are views that are made once: of the bucket's shard, and of the unit's slot.
    """

    def __init__(
        self,
        owned: OwnedParam,
        shard: nn.Parameter,
        full: torch.Tensor,
        whole: Whole,
        given: list[tuple[str, torch.Tensor]] | None,
    ) -> None:
        requires_grad = owned.param.requires_grad
        self.name = owned.name
        self.owned = owned
        # The user's own marks, such as `_no_weight_decay`; not torch's, and not those of another engine.
        marks = {
            name: value
            for name, value in vars(owned.param).items()
            if name != "_is_param" and not name.startswith("_shardcomm_")
        }
        kind = type(owned.param)
        replaced(owned.param, owned.name)
        self.distribution = owned.distribution
        self._kind = ShardedParameter if whole.is_part else WholeParameter
        owned.param = shard  # drops the full parameter
        vars(shard).update(marks)
        shard.requires_grad = requires_grad
        self.whole = shard.whole = whole  # type: ignore[attr-defined]
        self.counts = whole.counts  # whether norms count it on this rank
        self.shard = shard
        self.guard()
        self.full = shown(full, self.distribution, requires_grad=requires_grad)
        vars(self.full).update(marks)
        if self.distribution is None:
            is_users = issubclass(kind, nn.Parameter) and not issubclass(kind, _OURS)
            _become(self.full, kind if is_users else nn.Parameter, owned.name)
            self.full._shardcomm_origin = Origin(owned.name, whole.unit, shard, given)  # type: ignore[attr-defined]
        self.gradient = ParamGradient(self.full, shard, whole)
        self.watch: Any = None  # the hook of ShardedUnit.watch_gradients
        self.shard_watch: Any = None  # the hook of ShardedUnit.watch_shards

    def guard(self) -> None:
        """Makes the shard guarded again. An exception in an optimizer's step may have left it plain."""
        self.shard.__class__ = self._kind
        self.whole.in_step = False


def _become(full: nn.Parameter, kind: type[nn.Parameter], name: str) -> None:
    try:
        full.__class__ = gathered_class(kind)
    except TypeError as error:  # the class has __slots__, for instance
        raise TypeError(
            f"parameter {name!r} is a {kind.__name__}, which a gathered parameter cannot become: {error}; "
            "make it an nn.Parameter, or leave it to each rank by ignored_params="
        ) from None
