"""ShardGradients: the gradients of this rank's rows: their memory, what a reduce adds to, and what `.grad` shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress

import torch
from torch import nn

from shardcomm.bucket.offload import Offload
from shardcomm.layout.placement import Piece, Placement
from shardcomm.parameter.plain import grad_of, plain, set_grad
from shardcomm.parameter.sharded_parameter import ShardedRows
from shardcomm.parameter.whole import Whole
from shardcomm.stream.streams import AnyStream


class ShardGradients:
    """The gradients of a bucket's shard.

    Args:
        shard: The flat shard.
        shards: The parameters that are views of it.
        placed: Where each of these is in it.
        offload: Where the shard is in host memory, what brings gradients there; None: it is on the device.

    Attributes:
        dtype: The dtype of the gradients, which is the shard's.
        flat: The gradients, as long as the shard; allocated by the first reduce, or at first use.
        rows: The same memory, as a view for each parameter.
        stays: Whether reduces go on with this memory, also where somebody has kept a view of it.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        shards: Sequence[nn.Parameter],
        placed: Sequence[tuple[Placement, Piece]],
        offload: Offload | None,
    ) -> None:
        self.dtype = shard.dtype
        self._flat: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, ...] | None = None
        self.stays = False
        self._unshown = False  # whether there was a reduce since the last `show`
        self._added = False  # whether that reduce added to what `.grad` showed before
        self._shard = shard
        self._pinned = shard.is_pinned()
        self._offload = offload
        self._shards = shards
        self._elsewhere = [placement.is_elsewhere(piece) for placement, piece in placed]
        self._views = [(s.shape, s.stride(), s.storage_offset()) for s in shards]

    # Not cached properties: these have a lock, which ranks of one process would share.

    @property
    def flat(self) -> torch.Tensor:  # noqa: D102  (in the class's docstring, as the next)
        if self._flat is None:
            self._flat = torch.zeros_like(self._shard, pin_memory=self._pinned)
        return self._flat

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:  # noqa: D102
        if self._rows is None:
            flat = self.flat
            self._rows = tuple(
                _guarded(flat.as_strided(*view), shard)
                for view, shard in zip(self._views, self._shards, strict=True)
            )
            with plain():
                self._addresses = [rows.data_ptr() for rows in self._rows]
            self._uses = _uses_of_memory(flat)
        return self._rows

    @property
    def adds(self) -> bool:
        """Whether the next reduce adds to gradients that are there."""
        with plain():
            return self._unshown or self._has_grad()

    def begin_reduce(self) -> bool:
        """Prepares `flat` for a reduce; returns whether the reduce must add to what `flat` holds.

        If it must, `flat` has zeros where a parameter has no `.grad`.
        """
        with plain():
            if self._rows is not None:
                self._take_moved(self._rows)
                if not self._unshown:
                    self._leave_kept(self._rows)
            add = self._unshown or self._has_grad()
        if not add and self._flat is None:  # all of it is written
            self._flat = torch.empty_like(self._shard, pin_memory=self._pinned)
        if not self._unshown:
            self._added = add
            if add:
                self._add_to_shown()
        self._unshown = True
        return add

    def written(
        self, stream: AnyStream | None, *, add: bool
    ) -> AbstractContextManager[torch.Tensor]:
        """A context for work that writes the gradients; with an offload they then go on to host memory.

        Args:
            stream: The stream of the work. None: the work is done when its call returns, and there is no offload.
            add: What `begin_reduce` returned.

        Returns:
            The context, which gives the tensor to write.
        """
        if self._offload is None or stream is None:
            return nullcontext(self.flat)
        return self._offload.gradient(self.flat, stream, add=add)

    def _take_moved(self, every: Sequence[torch.Tensor]) -> None:
        """Copies back the values of gradients to which `grad.data = ...` has given other memory."""
        for rows, address, view in zip(every, self._addresses, self._views, strict=True):
            if rows.data_ptr() != address:
                values = rows.clone()
                rows.data = self.flat.as_strided(*view)
                rows.copy_(values)

    def _leave_kept(self, every: tuple[torch.Tensor, ...]) -> None:
        """Leaves what no `.grad` is any more to those who have kept it, as `.grad` or as a view such as `grad.data`.

        They keep all of the memory, unless some of it is needed here; then each `.grad` that was kept gets its own.
        """
        shown = [grad_of(shard) is every[i] for i, shard in enumerate(self._shards)]
        kept = [  # one reference is that of `every`, and one the argument's
            sys.getrefcount(every[i]) > 2 and not (shown[i] or self._elsewhere[i])
            for i in range(len(every))
        ]
        if not (self.stays or any(shown)):
            if any(kept) or _uses_of_memory(self.flat) > self._uses:
                self._flat = self._rows = None
            return
        own = list(every)
        for i in compress(range(len(every)), kept):
            every[i].data = every[i].clone()
            own[i] = _guarded(self.flat.as_strided(*self._views[i]).data, self._shards[i])
        self._rows = tuple(own)

    def _has_grad(self) -> bool:
        # A list takes half of a generator's time.
        return any([grad_of(shard) is not None for shard in self._shards])

    def _add_to_shown(self) -> None:
        with plain():
            for rows, shard in zip(self.rows, self._shards, strict=True):
                grad = grad_of(shard)
                if grad is None:
                    rows.zero_()
                elif grad is not rows:  # a tensor of the user's own
                    rows.copy_(grad)

    def show(self, used: Sequence[bool] | None = None) -> None:
        """Sets `.grad` of all shards, or of those that were used; the others keep theirs.

        A parameter that another rank owns has no `.grad`.

        Args:
            used: For each parameter whether it was used. None: all were.
        """
        with plain():
            shown = zip(self._shards, self.rows, self._elsewhere, strict=True)
            for shard, rows, elsewhere in shown if used is None else compress(shown, used):
                if not elsewhere:
                    set_grad(shard, rows)
                elif isinstance(rows, ShardedRows):
                    rows.whole.grad_elsewhere = rows
        self._unshown = False

    def forget(self, *, shown: bool) -> None:
        """Forgets the latest reduce: the next one does not add to it.

        Args:
            shown: Whether `.grad` shows it already; then `.grad` becomes None, unless that reduce was added to an
                earlier gradient.
        """
        self._unshown = False
        if shown and not self._added:
            for shard in self._shards:
                shard.grad = None

    def drop(self) -> None:
        """Gives the memory back until the next reduce if nothing needs what is in it, as is usual after `zero_grad()`.

        A `.grad` that shows it needs it, and so does a sum that a later `show` is to show.
        """
        with plain():
            if not (self.stays or self._unshown or self._has_grad()):
                self._flat = self._rows = None

    @property
    def nbytes(self) -> int:
        """The bytes that the gradients take: none before the first reduce."""
        return 0 if self._flat is None else self._flat.nbytes


def _uses_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors, of any dtype and shape, are in its memory."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def _guarded(rows: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    whole: Whole | None = getattr(shard, "whole", None)
    return ShardedRows.guarding(rows, whole) if whole is not None and whole.is_part else rows
