"""What one rank holds of a tensor, as `torch.distributed.checkpoint` (DCP) saves and loads it.

A checkpoint keeps a tensor as rectangles, each with its offsets in the whole, and reads from those that overlap the
wanted part. Whole rows are one rectangle, and a run of elements is a few. Elements 4 to 16 of a 4 x 6 tensor are
three::

    .  .  .  .  a  a        a: offsets (0, 4), sizes (1, 2)
    b  b  b  b  b  b        b: offsets (1, 0), sizes (1, 6)
    c  c  c  c  c  .        c: offsets (2, 0), sizes (1, 5)
    .  .  .  .  .  .

So every rank writes and reads what it holds, whatever the layout was or will be on the other side, and ranks exchange
only this list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from shardcomm.layout.placement import Piece, Placement
from shardcomm.parameter.plain import plain
from shardcomm.parameter.tensor_parallel import Distribution, is_dtensor

if TYPE_CHECKING:  # DCP takes long to import, and a caller of the methods for it has done so
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


SAVE_BY = (
    "Save by torch.distributed.checkpoint, an optimizer as engine.optimizer_state(optimizer), or "
    "engine.full_state_dict() by torch.save; in a framework by fabric.save, "
    "trainer.save_checkpoint or accelerator.save_model"
)


@dataclass(frozen=True)
class Rectangle:
    """A rectangular part of a tensor: in every dim its first index and its size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the rectangle in the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def shifted(self, by: Sequence[int]) -> Rectangle:
        """The rectangle in a larger tensor, in which this tensor begins at `by`."""
        offsets = tuple(map(sum, zip(self.offsets, by, strict=True)))
        return Rectangle(offsets, self.sizes)


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[Rectangle]:
    """The elements [begin, end) of a contiguous tensor of `shape` as few rectangles, in the elements' order."""
    if begin >= end:
        return []
    if not shape:
        return [Rectangle((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        return _in_row(shape, last, begin - last * row, end - last * row)
    found = []
    if begin < first * row:
        found += _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        found.append(Rectangle((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < end:
        found += _in_row(shape, last, 0, end - last * row)
    return found


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[Rectangle]:
    return [
        Rectangle((row, *inner.offsets), (1, *inner.sizes))
        for inner in rectangles(shape[1:], begin, end)
    ]


@dataclass(frozen=True)
class Part:
    """The part of a parameter that a rank holds; also of tensors of its shape, such as an optimizer's state.

    Attributes:
        placement: Where the parameter lies in the flat buffer; for a DTensor, where its local tensor lies.
        piece: What this rank holds of it.
        ranks: How many ranks hold the parameter together.
        how: How a DTensor is distributed; None for a plain parameter.
    """

    placement: Placement
    piece: Piece
    ranks: int
    how: Distribution | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.placement.spec.shape if self.how is None else self.how.shape

    @property
    def elsewhere(self) -> bool:
        """Whether another rank owns the whole parameter, its gradient and its optimizer state."""
        return self.placement.is_elsewhere(self.piece)

    def __deepcopy__(self, memo: Any) -> Part:
        return self  # a value; and process groups of a DTensor's mesh cannot be copied

    def of(self, held: torch.Tensor) -> ShardTensor:
        """The ShardTensor of `held`, which has the shape of the parameter's entry in `Bucket.shards`."""
        with plain():
            return ShardTensor(self, held.detach().as_subclass(torch.Tensor))

    def split(self, held: torch.Tensor) -> tuple[list[Rectangle], list[torch.Tensor]]:
        """The rectangles of the whole that `held` covers, and for each of them a view of `held`."""
        shape, dim = self.placement.spec.shape, self.placement.shard_dim
        if math.prod(self.shape) == 0:
            # No rank holds anything of an empty tensor, but it must be in the checkpoint all the same.
            return [Rectangle((0,) * len(shape), self.shape)], [held.new_empty(self.shape)]
        start, stop, numel = self.piece.start, self.piece.stop, self.piece.numel
        row = numel // max(stop - start, 1)
        stored = rectangles(self.placement.stored_shape, start * row, stop * row)
        where = [_moved(rectangle, dim) for rectangle in stored]
        if [each.sizes for each in where] == [held.shape]:
            parts = [held]
        else:  # a run of elements, or nothing
            runs = torch.split(held.reshape(-1), [math.prod(r.sizes) for r in stored])
            parts = [
                run.view(r.sizes).movedim(0, dim) if shape else run.view(())
                for r, run in zip(stored, runs, strict=True)
            ]
        if self.how is not None:
            where = [rectangle.shifted(self.how.offsets) for rectangle in where]
        return where, parts


class ShardTensor(torch.Tensor):
    """A tensor of the whole's shape, of which this rank has a part.

    DCP saves, loads and stages it, by its `_Checkpointable` protocol. It is not to compute with.

    Attributes:
        part: Which part this rank has.
        held: The part's values.
        rectangles: Where each of `parts` lies in the whole.
        parts: Views of `held`.
    """

    part: Part
    held: torch.Tensor
    rectangles: tuple[Rectangle, ...]
    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, part: Part, held: torch.Tensor) -> ShardTensor:  # noqa: D102
        self: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=held.dtype, device=held.device
        )
        self.part, self.held = part, held
        where, parts = part.split(held)
        self.rectangles, self.parts = tuple(where), tuple(parts)
        return self

    @torch.no_grad()
    def load_(self, values: torch.Tensor) -> None:
        """Copies this rank's part of `values`, which is the whole tensor or a ShardTensor of the same rectangles."""
        if isinstance(values, ShardTensor):
            for part, value in zip(self.parts, values.parts, strict=True):
                if part.data_ptr() != value.data_ptr():  # DCP loads in place
                    part.copy_(value)
            return
        for rectangle, part in zip(self.rectangles, self.parts, strict=True):
            part.copy_(values[rectangle.slices])

    # DCP's protocol: torch/distributed/_checkpointable.py.

    def __create_write_items__(self, fqn: str, tensor: object) -> list[WriteItem]:
        if self.part.ranks > 1 and not dist.is_initialized():
            raise RuntimeError(
                f"torch.distributed has no process group, without which each of the {self.part.ranks} ranks would "
                "write a checkpoint of its part alone; call torch.distributed.init_process_group('gloo') before saving"
            )
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
        from torch.distributed.checkpoint.planner import (  # noqa: PLC0415
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

        return [
            ChunkStorageMetadata(torch.Size(rectangle.offsets), torch.Size(rectangle.sizes))
            for rectangle in self.rectangles
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for rectangle, part in zip(self.rectangles, self.parts, strict=True):
            if index.offset is not None and tuple(index.offset) == rectangle.offsets:
                return part
        raise ValueError(f"{index.fqn}: this rank holds {self!r}, nothing at {index.offset}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        """Runs what torch's tools for state dicts need: copies, also to another device. It refuses everything else."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.new_empty.default:  # a stager copies to it
            return args[0].part.of(torch.empty_like(args[0].held, device=kwargs.get("device")))
        if func in _COPIES:
            return args[0].part.of(func(args[0].held, *args[1:], **kwargs))
        if func is torch.ops.aten.copy_.default and all(isinstance(a, cls) for a in args[:2]):
            args[0].load_(args[1])
            return args[0]
        raise NotImplementedError(
            f"{func} of a ShardTensor, which is for checkpoints only, and whose values other ranks may have; compute "
            "with the parameters, for an average by shardcomm.ExponentialMovingAverage, or with "
            "engine.full_state_dict(). Of an optimizer, torch's dcp_to_torch_save makes "
            "whole tensors of a checkpoint. (To stage one for async_save, take DCP's DefaultStager.)"
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Torch asks it of what is not there. An AttributeError, since programs try attributes to know DTensors."""
        if name in _OF_DTENSORS:
            raise AttributeError(
                f"{self!r} has no {name}, which entries of FSDP2's state dicts have: it is this rank's part alone. "
                f"Take engine.full_state_dict(), or {name} of the parameter if it has one. {SAVE_BY}"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def __deepcopy__(self, memo: Any) -> ShardTensor:
        return self.part.of(self.held.clone())  # its own values, not the memory around them

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{self!r} cannot be pickled, as by torch.save: it is this rank's part alone. {SAVE_BY}"
        )

    def untyped_storage(self) -> NoReturn:  # noqa: D102
        raise RuntimeError(
            f"{self!r} has no storage of its own, as safetensors wants it: it is this rank's part alone. {SAVE_BY}; "
            "under transformers' Trainer by a save_model as that of examples/accelerate_trainer.py"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = [
            "[" + ", ".join(f"{s.start}:{s.stop}" for s in rectangle.slices) + "]"
            for rectangle in self.rectangles
        ]
        return f"ShardTensor({', '.join(held) or 'nothing'} of {tuple(self.shape)}, {self.dtype})"


def check_value(operation: str, name: str, current: torch.Tensor, value: object) -> None:
    """Checks that `value` can be copied to `current`.

    Raises:
        ValueError: `value` is no tensor of the shape of `current`, has no values, or is another part of it.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{operation}: {name} is a {type(value).__name__}; it must be a tensor")
    if value.shape != current.shape:
        raise ValueError(
            f"{operation}: {name} has shape {tuple(value.shape)}; the model's is {tuple(current.shape)}"
        )
    if value.is_meta and not current.is_meta:
        raise ValueError(
            f"{operation}: {name} is on the meta device, where tensors have no values; give one that has "
            "some"
        )
    if is_dtensor(value) and not is_dtensor(current):
        raise ValueError(
            f"{operation}: {name} is a DTensor, of which other ranks may have what this one wants; pass full_tensor() "
            "of it, or save and load by torch.distributed.checkpoint"
        )
    if isinstance(value, ShardTensor) and not (
        isinstance(current, ShardTensor) and value.rectangles == current.rectangles
    ):
        raise ValueError(
            f"{operation}: {name} is {value!r}; this rank holds {current!r}. Between layouts, save and load by "
            "torch.distributed.checkpoint, or pass full tensors"
        )


def load_value(current: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a checked `value` to `current`, or the part of it that `current` is."""
    if isinstance(current, ShardTensor):
        current.load_(value)
    else:
        current.copy_(value)


_OF_DTENSORS = {"device_mesh", "full_tensor", "placements", "redistribute", "to_local"}

_COPIES = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
}


def _moved(rectangle: Rectangle, dim: int) -> Rectangle:
    """`rectangle` with its dims moved from the stored order, the shard dim outermost, to the tensor's own order."""

    def moved(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[1 : dim + 1], sizes[0], *sizes[dim + 1 :]) if sizes else ()

    return Rectangle(moved(rectangle.offsets), moved(rectangle.sizes))
