"""FullGradients: packs the gradients that a backward leaves for the parameters of a layout into one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcomm.copy.bound_copy import Executor
from shardcomm.copy.plan import CopyPlan
from shardcomm.layout.layout import Layout
from shardcomm.layout.views import as_stored, check_shape
from shardcomm.stream.streams import AnyStream

Sources = tuple[list[int], torch.dtype, Sequence[torch.Tensor | None]]
"""Gradients that are ready to be packed: their addresses (0 for one that counts as zeros), the dtype of all, and the
tensors that must live until they have been packed, copies among them."""


class FullGradients:
    """Packs gradients, with one launch for all.

    Gradients have `param_dtype`. If some are sums in `reduce_dtype`, all are packed from that.
    """

    def __init__(self, layout: Layout, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self._layout = layout
        self._param_dtype = param_dtype
        self._reduce_dtype = reduce_dtype
        # The length of each parameter that is stored as autograd leaves its gradient; -1 for the others.
        self._numels = [p.numel if p.shard_dim == 0 else -1 for p in layout.placements]
        self._singles = [i for i, p in enumerate(layout.placements) if p.numel == 1]
        self._packs: dict[tuple[torch.dtype, torch.dtype, bool], Executor] = {}

    def checked(self, grads: Sequence[torch.Tensor | None]) -> Sources:
        """`grads` as the copies read them.

        Raises:
            ValueError: There is not one gradient of its size, or None, for each parameter.
        """
        dtype = self._param_dtype
        # Mostly gradients can be read as they are. This loop is short, since there may be a thousand in every step.
        addresses = [
            0
            if grad is None
            else grad.data_ptr()
            if grad.numel() == numel and grad.dtype is dtype and grad.is_contiguous()
            else -1
            for grad, numel in zip(grads, self._numels, strict=True)
        ]
        if -1 not in addresses and not (self._singles and self._has_negated(grads)):
            return addresses, dtype, ()
        return self._made_readable(grads)

    def _has_negated(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether a gradient is the lazily negated view that autograd leaves of an imaginary part.

        Larger ones of these have gaps between their elements: they are not contiguous.
        """
        return any((grad := grads[i]) is not None and grad.is_neg() for i in self._singles)

    def _made_readable(self, grads: Sequence[torch.Tensor | None]) -> Sources:
        dtype = self._param_dtype
        if dtype != self._reduce_dtype and any(
            grad is not None and grad.dtype == self._reduce_dtype for grad in grads
        ):
            dtype = self._reduce_dtype
        stored: list[torch.Tensor | None] = []
        for grad, placement in zip(grads, self._layout.placements, strict=True):
            if grad is None:
                stored.append(None)
                continue
            check_shape("reduce_scatter", "grads", grad, placement)
            stored.append(as_stored(grad, placement, dtype))
        return [0 if each is None else each.data_ptr() for each in stored], dtype, stored

    def pack(
        self,
        sources: Sources,
        flat: torch.Tensor,
        stream: AnyStream | None,
        scale: float = 1.0,
        *,
        add: bool = False,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """Copies gradients into a flat buffer.

        Args:
            sources: What `checked` returned.
            flat: As long as the layout: a buffer to reduce, or the gradient itself where there is one rank.
            stream: Where to queue it; None: the host does it now.
            scale: A factor.
            add: Whether to add to what `flat` holds.
            nonfinite: A flag of one int32 element, set to 1 if NaN or Inf is written.
        """
        addresses, dtype, _ = sources
        key = dtype, flat.dtype, add
        pack = self._packs.get(key)
        if pack is None:
            placements = self._layout.placements
            plan = CopyPlan.pack(
                [p.numel for p in placements],
                [p.offset for p in placements],
                dtype,
                flat.dtype,
                () if add else self._layout.gaps(),
            )
            # Without the BoundCopy, which would keep this `flat` alive.
            pack = self._packs[key] = plan.bind(
                [None] * len(placements), [flat], threads=torch.get_num_threads()
            ).core
        # Not by `set_sources`: `checked` has made its checks already, at a fraction of their cost.
        pack.set_operands(addresses, [flat.data_ptr()])
        flag = 0 if nonfinite is None else nonfinite.data_ptr()
        pack.run(scale, add, flag, stream)
