"""Elements of 8 bits that share a scale in blocks: a quarter of float32's bytes on the wire, with a bound on the error.

The formats follow the OCP Microscaling specification (MX) 1.0. `csrc/include/shardcomm/blocks.h` defines them to the
bit. Three tensors of 70, 40 and 32 elements in blocks of 32, with a gap, and what they take of a wire part:

    tensors       0 0 0            1 1        2
                  | | |            | |        |
                  v v v            v v        v
    blocks        0 1 2     3      4 5        6
    codes       | 32 bytes each: 32, 32, 6 + zeros | zeros | 32, 8 + zeros | 32 |
    scales      | 7 bytes |                              and zeros up to a multiple of 128 bytes

A wire part has as many blocks as its bytes have room for: its length alone says where the scales begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.arguments.checks import check_flag, check_has_memory, check_list, check_type
from shardcomm.arguments.dtype import FLOATS, core_dtype
from shardcomm.arguments.scalars import checked_scale, is_whole
from shardcomm.copy.nonfinite import flag_address
from shardcomm.copy.wire_stats import WireStats
from shardcomm.stream.streams import (
    AnyStream,
    check_stream,
    compute_stream,
    core_index,
    on_host,
    uses_core,
)

WIRE_ALIGN = 128
"""The alignment of wire parts, in bytes."""


@dataclass(frozen=True)
class BlockFormat:
    """How elements are coded: one byte each, and one scale byte for a block of them.

    Attributes:
        name: "mxint8", whose steps are equal throughout a block, or "mxfp8" (E4M3), whose steps grow with the element.
        block: How many elements share a scale: 32, 64 or 128.
        rounding: "nearest", ties to even; or "stochastic": up or down at random, so that the mean over seeds is the
            element. The bound of an error is then twice as large.

    Raises:
        ValueError: `name`, `block` or `rounding` is none of the accepted values.
    """

    name: Literal["mxint8", "mxfp8"]
    block: int = 32
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.name not in ("mxint8", "mxfp8"):
            raise ValueError(f'BlockFormat: name is {self.name!r}; accepted: "mxint8" and "mxfp8"')
        if not is_whole(self.block, 32) or self.block not in (32, 64, 128):
            raise ValueError(f"BlockFormat: block is {self.block!r}; accepted: 32, 64 and 128")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'BlockFormat: rounding is {self.rounding!r}; accepted: "nearest" and "stochastic"'
            )

    def nbytes(self, numel: int) -> int:
        """The bytes of a wire part of `numel` elements, a multiple of 128.

        Args:
            numel: How many elements the part has.

        Returns:
            The size of the part in bytes.

        Raises:
            ValueError: `numel` is no whole number from 0 on, or too large to count its bytes in 63 bits.
        """
        if not is_whole(numel, 0, (1 << 62) - 1):
            raise ValueError(
                f"BlockFormat.nbytes: numel is {numel!r}; it must be a whole number from 0 to 2**62 - 1"
            )
        return _C.wire_bytes(core_format(self), numel)


ReduceFormat = BlockFormat | torch.dtype
"""In what partial sums of gradients travel: a block format, or torch.bfloat16."""


def check_reduce_format(what: str, format: object) -> None:
    """TypeError unless `format` is a ReduceFormat or None. `what` says where it comes from."""
    if format is not None and format != torch.bfloat16 and not isinstance(format, BlockFormat):
        raise TypeError(
            f"{what} is {format!r}; it must be torch.bfloat16, a shardcomm.BlockFormat such as "
            'BlockFormat("mxint8"), or None'
        )


def check_repeats(what: str, format: BlockFormat) -> None:
    """ValueError unless the same elements are always the same on the wire. `what` says where `format` comes from."""
    if format.rounding != "nearest":
        raise ValueError(
            f"{what} is {format}, with which backward would gather other values than forward has computed with; "
            'accepted: rounding="nearest"'
        )


@cache
def core_format(format: BlockFormat) -> _C.BlockFormat:
    """The core's own form of `format`."""
    return _C.BlockFormat(
        getattr(_C.BlockCode, format.name), format.block, getattr(_C.Rounding, format.rounding)
    )


def core_coding(format: ReduceFormat | None, stats: WireStats | None) -> _C.Coding | None:
    """The core's own form of `format`, with what it costs. The caller keeps `stats` alive."""
    if format is None:
        return None
    blocks = core_format(format) if isinstance(format, BlockFormat) else None
    return _C.Coding(blocks, 0 if stats is None else stats.numbers.data_ptr())


class BlockSegment(NamedTuple):
    """A contiguous tensor, and the block of the wire at which it begins. Its last block may be partial.

    Attributes:
        tensor: float32, bfloat16 or float16.
        first_block: Its first block in the wire part.
    """

    tensor: Tensor
    first_block: int


def encode(
    format: BlockFormat,
    segments: Sequence[BlockSegment],
    wire: Tensor,
    *,
    seed: int = 0,
    stats: WireStats | None = None,
    stream: AnyStream | None = None,
    threads: int = 1,
) -> None:
    """Writes all of a wire part: the segments' elements as codes and scales, and zeros where there is no segment.

    It is one call into the core, and on a GPU one launch, whatever the number of segments. Keep the tensors alive while
    it is queued on a stream.

    Args:
        format: How elements are coded.
        segments: What to encode, in any order, all of one dtype. Blocks of different segments must not overlap.
        wire: Flat uint8 of `format.nbytes(n)` elements, aligned to 128 bytes, as communication memory is.
        seed: For stochastic rounding. Element e of the wire takes word e % 4 of Philox4x32-10 with this key and the
            counter e / 4; so the same elements at the same place round alike wherever the seed is the same.
        stats: Three numbers that grow with what this call costs. None: nobody asks, which is faster.
        stream: Where it runs. None: on a CPU here and now; on a GPU where torch computes now.
        threads: How many threads of the CPU encode, at least 1.

    Raises:
        TypeError: An argument has another type, or a tensor another dtype or device.
        ValueError: A tensor is not contiguous; segments overlap or lie outside the wire; the wire is no multiple of 128
            bytes, or not aligned; `seed` has more than 64 bits; or `threads` is less than 1.
    """
    _check_call("encode", format, wire, stream, threads)
    if not is_whole(seed, 0, (1 << 64) - 1):
        raise ValueError(f"encode: seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")
    dtype, addresses = _addresses("encode", segments, wire.device)
    numbers = 0
    if stats is not None:
        check_type("encode", "stats", stats, WireStats, "a WireStats, or None")
        if stats.numbers.device != wire.device:
            raise TypeError(
                f"encode: stats is on {stats.numbers.device}; it must be on {wire.device}, as the wire is"
            )
        numbers = stats.numbers.data_ptr()
    if not uses_core(wire.device):
        from shardcomm.copy import blocks_triton  # noqa: PLC0415  (needs Triton)

        stochastic = format.rounding == "stochastic"
        blocks_triton.encode(
            format.name, format.block, stochastic, addresses, dtype, wire, seed, numbers, stream
        )
        return
    _C.encode_blocks(
        core_format(format),
        addresses,
        dtype,
        wire.data_ptr(),
        wire.numel(),
        seed,
        numbers,
        threads,
        core_index(wire.device),
        _stream_of(wire.device, stream),
    )


def decode(
    format: BlockFormat,
    wire: Tensor,
    segments: Sequence[BlockSegment],
    *,
    stream: AnyStream | None = None,
    threads: int = 1,
) -> None:
    """Writes the segments' tensors from a wire part, rounded to their dtype. Other blocks are not read.

    Args:
        format: How elements are coded; its rounding plays no part.
        wire: As for `encode`.
        segments: What to write, in any order, all of one dtype.
        stream: As for `encode`.
        threads: How many threads of the CPU decode, at least 1.

    Raises:
        TypeError: As `encode`.
        ValueError: As `encode`.
    """
    _check_call("decode", format, wire, stream, threads)
    dtype, addresses = _addresses("decode", segments, wire.device)
    if not uses_core(wire.device):
        from shardcomm.copy import blocks_triton  # noqa: PLC0415  (needs Triton)

        blocks_triton.decode(format.name, format.block, wire, addresses, dtype, stream)
        return
    _C.decode_blocks(
        core_format(format),
        wire.data_ptr(),
        wire.numel(),
        addresses,
        dtype,
        threads,
        core_index(wire.device),
        _stream_of(wire.device, stream),
    )


def decode_sum(
    format: BlockFormat,
    wires: Tensor,
    parts: int,
    destination: Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    nonfinite: Tensor | None = None,
    stream: AnyStream | None = None,
    threads: int = 1,
) -> None:
    """Writes scale * the sum of several wire parts, or with `accumulate` adds that to the destination.

    It decodes and adds in float32, part 0 first, in the order of the parts, and rounds once.

    Args:
        format: How elements are coded; its rounding plays no part.
        wires: The parts, one after another: flat uint8 of `parts * format.nbytes(destination.numel())` elements,
            aligned to 128 bytes.
        parts: How many there are, at least 1.
        destination: A contiguous tensor of float32, bfloat16 or float16.
        scale: A factor.
        accumulate: Whether to add to the destination.
        nonfinite: One int32 element, which is set to 1 if an element that is written is NaN or Inf, and else left as it
            is.
        stream: As for `encode`.
        threads: How many threads of the CPU decode, at least 1.

    Raises:
        TypeError: As `encode`.
        ValueError: As `encode`; also if `wires` has another number of bytes, or `parts` is less than 1.
    """
    _check_call("decode_sum", format, wires, stream, threads)
    if not is_whole(parts, 1):
        raise ValueError(f"decode_sum: parts is {parts!r}; it must be a whole number, at least 1")
    _check_tensor("decode_sum", "destination", destination, wires.device)
    part_bytes = format.nbytes(destination.numel())
    if wires.numel() != parts * part_bytes:
        raise ValueError(
            f"decode_sum: wires has {wires.numel()} bytes; {parts} parts of {destination.numel()} elements have "
            f"{parts} * {part_bytes}"
        )
    check_flag("decode_sum", "accumulate", accumulate)
    dtype = core_dtype(destination.dtype, "decode_sum: destination")
    scale = checked_scale("decode_sum", scale)
    flag = flag_address("decode_sum", nonfinite, wires.device)
    if not uses_core(wires.device):
        from shardcomm.copy import blocks_triton  # noqa: PLC0415  (needs Triton)

        blocks_triton.decode_sum(
            format.name,
            format.block,
            wires,
            parts,
            destination,
            dtype,
            scale,
            accumulate,
            flag,
            stream,
        )
        return
    _C.decode_sum(
        core_format(format),
        wires.data_ptr(),
        parts,
        destination.data_ptr(),
        destination.numel(),
        dtype,
        scale,
        accumulate,
        flag,
        threads,
        core_index(wires.device),
        _stream_of(wires.device, stream),
    )


def _check_call(
    operation: str, format: object, wire: object, stream: object, threads: object
) -> None:
    check_type(operation, "format", format, BlockFormat, "a BlockFormat")
    wires = "wires" if operation == "decode_sum" else "wire"
    if not isinstance(wire, Tensor):
        raise TypeError(
            f"{operation}: {wires} is a {type(wire).__name__}; it must be a torch.Tensor"
        )
    if wire.dtype != torch.uint8 or wire.ndim != 1 or not wire.is_contiguous():
        raise TypeError(
            f"{operation}: {wires} is {wire.dtype} of shape {tuple(wire.shape)} and strides {wire.stride()}; it must "
            "be flat contiguous torch.uint8"
        )
    if wire.device.type == "meta":
        raise TypeError(f"{operation}: {wires} is on meta; it must have memory")
    if stream is not None:
        check_stream(operation, stream)
    if not is_whole(threads, 1):
        raise ValueError(f"{operation}: threads is {threads!r}, it must be at least 1, and whole")


def _check_tensor(operation: str, name: str, tensor: object, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{operation}: {name} is a {type(tensor).__name__}; it must be a torch.Tensor"
        )
    if tensor.layout is not torch.strided or tensor.is_neg():
        raise TypeError(
            f"{operation}: {name} is a tensor of {tensor.layout}{', negated' if tensor.is_neg() else ''}; it must be "
            "dense, and no view that negates memory"
        )
    if tensor.dtype not in FLOATS or tensor.device != device:
        raise TypeError(
            f"{operation}: {name} is {tensor.dtype} on {tensor.device}; accepted: torch.float32, torch.bfloat16 and "
            f"torch.float16 on {device}, where the wire is"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} is not contiguous, its strides are {tensor.stride()}"
        )
    check_has_memory(f"{operation}: {name}", tensor)


def _addresses(
    operation: str, segments: Sequence[BlockSegment], device: torch.device
) -> tuple[_C.DType, list[tuple[int, int, int]]]:
    """The segments as the core takes them, and their dtype."""
    check_list(operation, "segments", segments)
    dtype = torch.float32
    addresses = []
    for i, segment in enumerate(segments):
        if not isinstance(segment, tuple) or len(segment) != 2:
            raise TypeError(
                f"{operation}: segments[{i}] is a {type(segment).__name__}; it must be a BlockSegment: a tensor, "
                "and its first block"
            )
        tensor, first_block = segment
        _check_tensor(operation, f"segments[{i}].tensor", tensor, device)
        if not is_whole(first_block, 0, (1 << 63) - 1):
            raise ValueError(
                f"{operation}: segments[{i}].first_block is {first_block!r}; it must be a whole number, at least 0"
            )
        if i == 0:
            dtype = tensor.dtype
        elif tensor.dtype != dtype:
            raise TypeError(
                f"{operation}: segments[{i}].tensor is {tensor.dtype} and segments[0].tensor {dtype}; all must be of "
                "one dtype"
            )
        addresses.append((tensor.data_ptr(), tensor.numel(), first_block))
    return core_dtype(dtype, f"{operation}: segments[0].tensor"), addresses


def _stream_of(device: torch.device, stream: AnyStream | None) -> _C.Stream | None:
    if stream is None and not on_host(device):
        stream = compute_stream(device)
    assert stream is None or isinstance(stream, _C.Stream)
    return stream
