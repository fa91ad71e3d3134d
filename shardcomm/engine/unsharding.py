"""Full parameters beside the slots: between `unit.unshard()` and `reshard()`, and inside of torch.func's transforms.

They are in memory of their own, so that autograd may keep them, and computation with them may be outside of the unit's
forward. A gradient that comes to one of them joins those of the unit's forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardcomm.comm.mesh import FailingTogether
from shardcomm.engine.actions import Actions
from shardcomm.parameter.plain import grad_of, plain, set_grad
from shardcomm.sharded import now
from shardcomm.sharded.apart import Apart
from shardcomm.sharded.hooks import weakly
from shardcomm.sharded.sharded_unit import IDLE, ShardedUnit
from shardcomm.sharded.unit_param import UnitParam


class Unsharding:
    """Unshards units, and takes the gradients of their parameters from outside of their forwards.

    Args:
        actions: Has what is queued, which comes first.
        together: Ends the other groups if a gather fails.
        join_backward: Begins the engine's part of the backward that goes on, if it has not begun.
    """

    def __init__(
        self, actions: Actions, together: FailingTogether, join_backward: Callable[[], None]
    ) -> None:
        self._actions = actions
        self._together = together
        self._join_backward = join_backward

    def unshard(self, unit: ShardedUnit) -> None:
        """See `ShardedUnit.unshard`."""
        if unit.apart is not None:
            raise RuntimeError(
                f"unshard of unit {unit.name!r} inside of engine.gathered(), where its full parameters are shown "
                "already; call it after that context"
            )
        if unit.unsharded is not None:
            return
        if now.in_backward():
            raise RuntimeError(f"unshard of unit {unit.name!r}: autograd runs; call it before")
        self._actions.wait_all()  # what is queued comes first, on every rank
        unit.unsharded = Apart(
            unit, self._together, to_compute=True, on_gradient=weakly(self._on_gradient)
        )

    def reshard(self, unit: ShardedUnit) -> None:
        """Ends what `unshard` began; without it, does nothing."""
        unsharded, unit.unsharded = unit.unsharded, None
        if unsharded is None:
            return
        try:
            unsharded.check()
        finally:
            unit.show_shard()
            if unit.state is not IDLE:
                unit.show_full()

    def begin_transform(self, unit: ShardedUnit) -> None:
        """Unshards the unit for a forward inside of torch.func's transforms, where no mark can announce a backward."""
        with now.outside_transforms():
            unit.forward.in_transform = unit.unsharded is None
            self.unshard(unit)

    def end_transform(self, unit: ShardedUnit) -> None:
        """Ends what `begin_transform` began; without it, does nothing."""
        if unit.forward.in_transform:
            unit.forward.in_transform = False
            with now.outside_transforms():
                self.reshard(unit)

    def _on_gradient(self, unit: ShardedUnit, param: UnitParam, grad: torch.Tensor) -> None:
        """Takes a gradient of an unsharded parameter.

        It is reduced together with the gradients that the unit's own forward and backward leave, or after these.
        """
        self._join_backward()
        with plain():
            grad, other = grad.detach().to_dense(), grad_of(param.full)
            # Autograd adds to it in place, and may have given the same tensor to others.
            set_grad(param.full, grad.clone() if other is None else other.to_dense() + grad)
        unit.gradients.begin()

    def on_shard_gradient(
        self, unit: ShardedUnit, param: UnitParam, grad: torch.Tensor
    ) -> torch.Tensor:
        """Takes a gradient of a whole parameter from outside of its unit's forward; returns what `.grad` gets.

        Raises:
            RuntimeError: It cannot be added to the gradients of the unit's forward, or other ranks cannot have one.
        """
        shard, full = param.shard, param.full
        if param.whole.is_part:
            raise RuntimeError(
                f"backward: a gradient came to {param.name!r} from outside of the forward of unit {unit.name!r}, on "
                "the one rank that has all of it; compute in that forward, or between unshard() and reshard() of the "
                "unit, where every rank has it"
            )
        if now.in_autograd_grad(shard):
            param.whole.refuse_autograd_grad()
        if shard._post_accumulate_grad_hooks or param.distribution is not None:
            raise RuntimeError(
                f"backward: a gradient came to {param.name!r} from outside of the forward of unit {unit.name!r}, which "
                "a DTensor does not take, nor a parameter with register_post_accumulate_grad_hook; compute in that "
                "forward, or between unshard() and reshard() of the unit"
            )
        self._on_gradient(unit, param, grad.to(full.device, full.dtype))
        return grad.new_zeros(()).expand_as(grad)
