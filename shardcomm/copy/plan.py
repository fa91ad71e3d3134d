"""CopyPlan: which rectangles move where. Compiled once, run every step with fresh tensors.

A plan that packs three tensors into one flat buffer, with a gap that is zeroed:

    tensors (f32)     0: 5        1: 4      2: 6
                      |           |         |
                      v           v         v
    flat (bf16)   [0 0 0 0 0 | 1 1 1 1 | - - - | 2 2 2 2 2 2]
    offset         0           5         9       12          18

Each arrow is a segment of one row. A segment of several rows copies a rectangle, for instance some columns of a matrix.
A run is one call into the core, whatever the number of segments.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.arguments.arrays import ArrayLike
from shardcomm.arguments.checks import check_flag, check_list
from shardcomm.arguments.dtype import wire_dtype
from shardcomm.arguments.scalars import checked_scale, is_whole
from shardcomm.copy.bound_copy import BoundCopy, Executor
from shardcomm.copy.operands import checked_operands, device_of, pointers_of
from shardcomm.copy.segment import ZEROS, Segment, draw
from shardcomm.stream.streams import compute_stream, core_index, on_host, uses_core


@dataclass(frozen=True)
class CopyPlan:
    """Copies of many rectangles as one launch: segments, compiled once into tiles of equal work.

    float32, bfloat16 and float16 convert among each other, rounding to nearest even; any other dtype copies only to
    itself. `pack`, `unpack`, `copy_out` and `chunk_cat` make the usual plans. `repr()` lists the segments.

    Attributes:
        segments: The rectangles. Destinations of different segments must not overlap.
        src_dtype: The dtype of all sources.
        dst_dtype: The dtype of all destinations.
        core: The compiled plan.

    Raises:
        TypeError: A dtype is no torch.dtype, or `segments` is no list.
        ValueError: A segment has a negative size or a pitch shorter than a row, or is no Segment; or there is no
            conversion between the dtypes.

    Example:
        ```python
        tensors = [torch.ones(5), torch.ones(4)]
        plan = shardcomm.CopyPlan.pack([5, 4], [0, 8], torch.float32, torch.bfloat16, zero_ranges=[(5, 8)])
        flat = torch.empty(12, dtype=torch.bfloat16)
        plan.run(tensors, [flat])
        assert flat.tolist() == [1.0] * 5 + [0.0] * 3 + [1.0] * 4
        ```
    """

    segments: tuple[Segment, ...]
    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    core: _C.CopyPlan = field(init=False, repr=False, compare=False)
    _uploaded: dict[torch.device, Executor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _uploading: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("src_dtype", "dst_dtype"):
            if not isinstance(getattr(self, name), torch.dtype):
                raise TypeError(
                    f"CopyPlan: {name} is {getattr(self, name)!r}; it must be a torch.dtype"
                )
        src_wire, src_items = wire_dtype(self.src_dtype)
        dst_wire, dst_items = wire_dtype(self.dst_dtype)
        if self.src_dtype != self.dst_dtype and _C.DType.u8 in (src_wire, dst_wire):
            raise ValueError(
                f"CopyPlan: no conversion from {self.src_dtype} to {self.dst_dtype}: float32, "
                "bfloat16 and float16 convert, others only copy to themselves"
            )
        # A dtype that the core does not know travels as bytes, which all numbers along a row then count.
        units = (1, 1, src_items, src_items, dst_items, dst_items, 1, dst_items)
        check_list("CopyPlan", "segments", self.segments)
        if not all(isinstance(s, Sequence) and len(s) == len(units) for s in self.segments):
            raise ValueError("CopyPlan: segments must be Segments, of 8 numbers each")
        wire_segments = [
            tuple(n * unit for n, unit in zip(s, units, strict=True)) for s in self.segments
        ]
        try:
            core = _C.CopyPlan(wire_segments, src_wire, dst_wire)
        except TypeError:  # a field is no number, or none of 64 bits
            raise ValueError(
                "CopyPlan: segments must be Segments of whole numbers, which count less than 2**63 bytes"
            ) from None
        object.__setattr__(self, "core", core)

    @classmethod
    def pack(
        cls,
        sizes: Sequence[int],
        offsets: Sequence[int],
        src_dtype: torch.dtype,
        dst_dtype: torch.dtype,
        zero_ranges: Sequence[tuple[int, int]] = (),
    ) -> CopyPlan:
        """A plan that packs contiguous tensors into one flat tensor.

        Args:
            sizes: How many elements each tensor has.
            offsets: Where each tensor begins in the flat one, in elements.
            src_dtype: The dtype of the tensors.
            dst_dtype: The dtype of the flat tensor.
            zero_ranges: Ranges [begin, end) of the flat tensor, in elements, to fill with zeros.

        Returns:
            The plan, with a source for each of `sizes` and one destination.

        Raises:
            TypeError: `sizes`, `offsets` or `zero_ranges` is no list.
            ValueError: `sizes` and `offsets` differ in length, a zero range is no pair of whole numbers, or parts of
                the flat tensor overlap; or as `CopyPlan`.
        """
        _check_lengths("pack", sizes, offsets)
        check_list("pack", "zero_ranges", zero_ranges)
        for each in zero_ranges:
            if not (
                isinstance(each, Sequence)
                and len(each) == 2
                and all(isinstance(bound, int) for bound in each)
            ):
                raise ValueError(
                    f"pack: zero_ranges has {each!r}; each must be a pair of whole numbers, begin and end"
                )
        tensors = [
            Segment(i, 0, 0, size, offset, size, 1, size)
            for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        ]
        zeros = [
            Segment(ZEROS, 0, 0, end - begin, begin, end - begin, 1, end - begin)
            for begin, end in zero_ranges
        ]
        plan = cls((*tensors, *zeros), src_dtype, dst_dtype)
        written = sorted((s.dst_offset, s.dst_offset + s.cols) for s in plan.segments if s.cols)
        for (begin, end), (following, its_end) in pairwise(written):
            if following < end:
                raise ValueError(
                    f"pack: elements [{begin}, {end}) and [{following}, {its_end}) of the flat tensor overlap; each "
                    "may be written once"
                )
        return plan

    @classmethod
    def unpack(
        cls,
        sizes: Sequence[int],
        offsets: Sequence[int],
        src_dtype: torch.dtype,
        dst_dtype: torch.dtype,
    ) -> CopyPlan:
        """A plan that copies the parts of one flat tensor to contiguous tensors.

        Args:
            sizes: How many elements each tensor has.
            offsets: Where each part begins in the flat tensor, in elements.
            src_dtype: The dtype of the flat tensor.
            dst_dtype: The dtype of the tensors.

        Returns:
            The plan, with one source and a destination for each of `sizes`.

        Raises:
            TypeError: `sizes` or `offsets` is no list.
            ValueError: `sizes` and `offsets` differ in length; or as `CopyPlan`.
        """
        _check_lengths("unpack", sizes, offsets)
        segments = [
            Segment(0, i, offset, size, 0, size, 1, size)
            for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        ]
        return cls(tuple(segments), src_dtype, dst_dtype)

    @classmethod
    def copy_out(
        cls, sizes: Sequence[int], ranks: int, src_dtype: torch.dtype, dst_dtype: torch.dtype
    ) -> CopyPlan:
        """A plan for FSDP2's copy-out, which is `torch.split_with_sizes_copy` on dim 1.

        The source is a gathered tensor of shape (ranks, sum(sizes)), in which each rank's parts lie side by side.
        Destination i has shape (ranks, sizes[i]).

        Args:
            sizes: How many elements of each tensor a rank has.
            ranks: How many ranks there are.
            src_dtype: The dtype of the gathered tensor.
            dst_dtype: The dtype of the destinations.

        Returns:
            The plan, with one source and a destination for each of `sizes`.

        Raises:
            TypeError: `sizes` is no list.
            ValueError: `ranks` is less than 1; or as `CopyPlan`.
        """
        check_list("copy_out", "sizes", sizes)
        if not is_whole(ranks, 1):
            raise ValueError(f"copy_out: ranks is {ranks!r}, it must be at least 1, and whole")
        total = sum(sizes)
        starts = accumulate(sizes, initial=0)
        segments = [
            Segment(0, i, start, total, 0, size, ranks, size)
            for i, (size, start) in enumerate(zip(sizes, starts, strict=False))
        ]
        return cls(tuple(segments), src_dtype, dst_dtype)

    @classmethod
    def chunk_cat(
        cls,
        shapes: Sequence[Sequence[int]],
        chunks: int,
        src_dtype: torch.dtype,
        dst_dtype: torch.dtype,
    ) -> CopyPlan:
        """A plan for FSDP2's copy-in of gradients, which is `torch._chunk_cat` on dim 0.

        Each tensor is cut on dim 0 into chunks of equal size, with zeros where it ends too early. Row c of the flat
        destination holds chunk c of all tensors, side by side.

        Args:
            shapes: The shape of each tensor, of at least one dim.
            chunks: How many chunks each tensor is cut into, at least 1.
            src_dtype: The dtype of the tensors.
            dst_dtype: The dtype of the destination.

        Returns:
            The plan, with a source for each of `shapes` and one destination of `chunks` rows.

        Raises:
            TypeError: `shapes`, or one of them, is no list.
            ValueError: `chunks` is less than 1, or a shape has no dims; or as `CopyPlan`.
        """
        if not is_whole(chunks, 1):
            raise ValueError(f"chunk_cat: chunks is {chunks!r}, it must be at least 1, and whole")
        check_list("chunk_cat", "shapes", shapes)
        for shape in shapes:
            check_list("chunk_cat", "a shape", shape)
        if any(len(shape) == 0 for shape in shapes):
            raise ValueError(
                "chunk_cat: shapes has that of a scalar, which has no dim 0 to be cut on"
            )
        per_chunk = [-(-shape[0] // chunks) for shape in shapes]
        sizes = [rows * math.prod(shape[1:]) for rows, shape in zip(per_chunk, shapes, strict=True)]
        total = sum(sizes)
        starts = accumulate(sizes, initial=0)
        segments = []
        for i, (shape, size, start) in enumerate(zip(shapes, sizes, starts, strict=False)):
            if size == 0:
                continue
            full, rest = divmod(math.prod(shape), size)
            segments.append(Segment(i, 0, 0, size, start, total, full, size))
            if full < chunks:
                end = full * total + start
                missing = size - rest
                empty = chunks - full - 1
                segments += [
                    Segment(i, 0, full * size, rest, end, rest, 1, rest),
                    Segment(ZEROS, 0, 0, missing, end + rest, missing, 1, missing),
                    Segment(ZEROS, 0, 0, size, end + total, total, empty, size),
                ]
        return cls(tuple(segments), src_dtype, dst_dtype)

    def __reduce__(self) -> tuple[type[CopyPlan], tuple[object, ...]]:
        """Copied and pickled as what it says; where it is read, it is compiled again."""
        return type(self), (self.segments, self.src_dtype, self.dst_dtype)

    def run(
        self,
        sources: Sequence[ArrayLike | None],
        destinations: Sequence[ArrayLike],
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        threads: int = 1,
    ) -> None:
        """Runs the plan: writes scale * source, or with `accumulate` destination + scale * source.

        It computes in float32 and rounds once. Operands are contiguous tensors, or arrays of other libraries that can
        be seen as such (NumPy, CuPy, JAX, Numba), of the plan's dtypes, on one device and of any shape, with at least
        the elements that the plan touches. Sources and destinations must not overlap. On a GPU it runs on the current
        stream; the first run there also uploads the plan, and waits for that.

        Args:
            sources: The sources, by their numbers in the segments; None counts as zeros.
            destinations: The destinations, by their numbers in the segments.
            scale: A factor, for dtypes that convert.
            accumulate: Whether to add to the destinations, for dtypes that convert.
            threads: How many threads of the CPU copy, at least 1.

        Raises:
            TypeError: An operand has another dtype or device, or is no dense tensor or array.
            ValueError: An operand is not contiguous, is too small, or begins at an address that is no multiple of its
                element's size; there is a wrong number of them; `threads` is less than 1; or `scale` or `accumulate`
                is given for dtypes without conversion.
        """
        scale = checked_scale("CopyPlan.run", scale)
        check_flag("CopyPlan.run", "accumulate", accumulate)
        _check_threads("CopyPlan.run", threads)
        read, written = checked_operands(sources, destinations, bound=False)
        device = device_of(written)
        if on_host(device):
            self._executor(read, written, device, threads).run(scale, accumulate)
            return
        with self._uploading:  # another thread's operands must not come between these and their run
            if device not in self._uploaded:
                self._uploaded[device] = self._executor(read, written, device, threads)
            executor = self._uploaded[device]
            executor.set_operands(*self._pointers(read, written, device))
            executor.run(scale, accumulate, stream=compute_stream(device))

    def bind(
        self,
        sources: Sequence[ArrayLike | None],
        destinations: Sequence[ArrayLike],
        *,
        threads: int = 1,
    ) -> BoundCopy:
        """Checks the operands now, for copies that run later, as often as wanted.

        On a GPU the runs can be captured in a CUDA graph; keep the result alive as long as the graph.

        Args:
            sources: As in `run`.
            destinations: As in `run`.
            threads: As in `run`.

        Returns:
            A copy with `run(scale=, accumulate=, nonfinite=, stream=)` and `set_sources(sources)`. It keeps the
            operands alive.

        Raises:
            TypeError: As `run`.
            ValueError: As `run`.
        """
        _check_threads("CopyPlan.bind", threads)
        read, written = checked_operands(sources, destinations, bound=True)
        core = self._executor(read, written, device_of(written), threads)
        return BoundCopy(self, core, read, tuple(written))

    def _executor(
        self,
        read: Sequence[Tensor | None],
        written: Sequence[Tensor],
        device: torch.device,
        threads: int,
    ) -> Executor:
        pointers = self._pointers(read, written, device)
        if uses_core(device):
            return _C.BoundCopy(self.core, *pointers, threads, core_index(device))
        from shardcomm.copy.triton import TritonCopy  # noqa: PLC0415  (needs Triton)

        return TritonCopy(self.core, *pointers, device)

    def _pointers(
        self, read: Sequence[Tensor | None], written: Sequence[Tensor], device: torch.device
    ) -> tuple[list[int], list[int]]:
        extents = self.core.dst_extents
        return (
            self.source_pointers(read, device),
            pointers_of("destinations", written, self.dst_dtype, extents, device),
        )

    def source_pointers(self, tensors: Sequence[Tensor | None], device: torch.device) -> list[int]:
        """The addresses of source tensors, for an executor.

        Args:
            tensors: The sources, checked as in `run`.
            device: The device of the destinations.

        Returns:
            An address for each; 0 for None.
        """
        return pointers_of("sources", tensors, self.src_dtype, self.core.src_extents, device)

    def __repr__(self) -> str:
        shown = 12
        lines = [f"CopyPlan {self.src_dtype} -> {self.dst_dtype}"]
        lines += [f"  {draw(segment)}" for segment in self.segments[:shown]]
        if len(self.segments) > shown:
            lines.append(f"  ... {len(self.segments) - shown} more segments")
        return "\n".join(lines)


def _check_lengths(operation: str, sizes: Sequence[int], offsets: Sequence[int]) -> None:
    check_list(operation, "sizes", sizes)
    check_list(operation, "offsets", offsets)
    if len(sizes) != len(offsets):
        raise ValueError(
            f"{operation}: there are {len(sizes)} sizes and {len(offsets)} offsets; each tensor has one of both"
        )


def _check_threads(operation: str, threads: int) -> None:
    if not is_whole(threads, 1):
        raise ValueError(f"{operation}: threads is {threads!r}, it must be at least 1, and whole")
