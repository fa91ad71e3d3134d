"""ShardGradients: the gradients of this rank's rows. Their memory, what a reduce adds to, and what `.grad` shows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn

from shardcomm.layout import Piece, Placement
from shardcomm.plain import grad_of, plain, set_grad
from shardcomm.sharded_parameter import ShardedParameter, ShardedRows


class ShardGradients:
    """The gradients of the flat `shard`, whose views `shards` are placed in it as `placed` says.

    Attributes:
        flat: as the shard; allocated by the first reduce, or when asked for.
        rows: the same memory, a view a parameter.
        unshown: whether there was a reduce since `show`.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        shards: Sequence[nn.Parameter],
        placed: Sequence[tuple[Placement, Piece]],
    ) -> None:
        self.unshown = False
        self._shard = shard
        self._pinned = shard.is_pinned()
        self._shards = shards
        self._placed = placed
        self._views = [(s.shape, s.stride(), s.storage_offset()) for s in shards]

    @cached_property
    def flat(self) -> torch.Tensor:  # noqa: D102  (in the class's docstring, as the next)
        return torch.zeros_like(self._shard, pin_memory=self._pinned)

    @cached_property
    def rows(self) -> tuple[torch.Tensor, ...]:  # noqa: D102
        return tuple(self.flat.as_strided(*view) for view in self._views)

    @property
    def adds(self) -> bool:
        """Whether the next reduce adds to what there is."""
        # A list: half of a generator's time.
        with plain():
            return self.unshown or any([grad_of(shard) is not None for shard in self._shards])

    def begin_reduce(self) -> bool:
        """Whether the reduce must add to what `flat` holds, which is zeros then where a parameter has no `.grad`."""
        add = self.adds
        if not add and "flat" not in vars(self):
            # All of it is written.
            vars(self)["flat"] = torch.empty_like(self._shard, pin_memory=self._pinned)
        if add and not self.unshown:
            with plain():
                for rows, shard in zip(self.rows, self._shards, strict=True):
                    grad = grad_of(shard)
                    if grad is None:
                        rows.zero_()
                    elif grad is not rows:  # a tensor of the user's own
                        rows.copy_(grad)
        self.unshown = True
        return add

    def show(self, used: Sequence[bool] | None = None) -> None:
        """Sets `.grad` of all shards, or of those `used`; the others keep theirs. What another rank owns has none."""
        with plain():
            for i, (shard, rows, (placement, piece)) in enumerate(
                zip(self._shards, self.rows, self._placed, strict=True)
            ):
                if used is not None and not used[i]:
                    continue
                if not placement.is_elsewhere(piece):
                    set_grad(shard, rows)
                elif isinstance(shard, ShardedParameter):
                    shard.whole.grad_elsewhere = ShardedRows(rows, shard.whole)
        self.unshown = False

    def drop(self) -> None:
        """Gives the memory back until the next reduce, if no shard has a `.grad`: after `zero_grad()` mostly so."""
        with plain():
            unused = all(grad_of(shard) is None for shard in self._shards)
        if unused:
            for name in ("flat", "rows"):
                vars(self).pop(name, None)

    @property
    def nbytes(self) -> int:
        """What they take: nothing before the first reduce."""
        return self.flat.nbytes if "flat" in vars(self) else 0
