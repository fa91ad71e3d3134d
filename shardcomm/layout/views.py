"""Views: a parameter, or a rank's rows of it, as a tensor in a flat buffer, and rows of a full parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcomm.arguments.checks import check_has_memory, check_list
from shardcomm.layout.layout import Layout
from shardcomm.layout.placement import Piece, Placement


def check_shape(operation: str, name: str, tensor: torch.Tensor, placement: Placement) -> None:
    """ValueError unless `tensor` has the parameter's full shape."""
    if tensor.shape != placement.spec.shape:
        raise ValueError(
            f"{operation}: {name} for {placement.spec.name} has shape {tuple(tensor.shape)}; the layout "
            f"says {placement.spec.shape}"
        )


def check_full(name: str, tensor: torch.Tensor, *, sparse: bool = False) -> None:
    """Checks that `tensor` has values; with `sparse` it may also be a sparse one.

    Raises:
        TypeError: It is no tensor, or no dense one.
        ValueError: Its memory was freed.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    dense = tensor.layout is torch.strided or sparse
    if not dense or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{name} is {tensor.dtype} of {tensor.layout} on {tensor.device}; it must be a dense tensor with values, "
            "not quantised"
        )
    if tensor.layout is torch.strided:
        check_has_memory(name, tensor)


def check_count(
    operation: str, name: str, tensors: Sequence[torch.Tensor | None], layout: Layout
) -> None:
    """ValueError unless `tensors` has one entry for each parameter."""
    check_list(operation, name, tensors)
    if len(tensors) != len(layout.placements):
        raise ValueError(
            f"{operation}: {name} has {len(tensors)} entries; the layout has "
            f"{len(layout.placements)} parameters"
        )


def full_view(flat: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The full parameter as a view of the full buffer `flat`."""
    stored = flat[placement.offset : placement.offset + placement.numel]
    if not placement.spec.shape:
        return stored.view(())
    return stored.view(placement.stored_shape).movedim(0, placement.shard_dim)


def shard_view(flat: torch.Tensor, placement: Placement, piece: Piece) -> torch.Tensor:
    """A rank's rows of a parameter as a view of its shard `flat`."""
    stored = flat[piece.offset : piece.offset + piece.numel].view(piece.shape)
    return stored.movedim(0, placement.shard_dim) if placement.shard_dim else stored


def rows(tensor: torch.Tensor, placement: Placement, piece: Piece) -> torch.Tensor:
    """The part of a full parameter that `piece` describes, in the shape of the shard's view."""
    if piece.numel == placement.numel:
        return tensor
    if tensor.dim() == 0:
        return tensor.reshape(-1)[:0]
    if placement.spec.granularity == "element":
        run = tensor.movedim(placement.shard_dim, 0).reshape(-1)[piece.start : piece.stop]
        return run.view(piece.shape).movedim(0, placement.shard_dim)
    return tensor.narrow(placement.shard_dim, piece.start, piece.stop - piece.start)


def as_stored(grad: torch.Tensor, placement: Placement, dtype: torch.dtype) -> torch.Tensor:
    """`grad` with the shard dim outermost and contiguous, as the pack plan reads it. It rarely needs a copy."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    grad = grad.resolve_neg()  # of an imaginary part autograd leaves a lazily negated view
    if grad.dtype == dtype and placement.shard_dim == 0 and grad.is_contiguous():
        return grad
    if grad.dim() > 0:
        grad = grad.movedim(placement.shard_dim, 0)
    return grad.to(dtype).contiguous()
