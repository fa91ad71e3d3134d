"""The Triton executor of a CopyPlan: for GPUs that the compiled extension does not serve.

One launch whatever the number of tensors. Each program copies one tile: in whole vectors where both
sides are aligned to them, then what is left of every row element by element.

    row 0   [ 16 bytes ][ 16 bytes ][ 16 bytes ] . . .
    row 1   [ 16 bytes ][ 16 bytes ][ 16 bytes ] . . .

With TRITON_INTERPRET=1 in the environment at the import, Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.copy_plan import CopyPlan
from shardcomm.dtype import wire_dtype

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("shardcomm.copy_triton needs Triton: pip install triton") from error

# bfloat16 is converted to and from its bits: Triton's interpreter would truncate it.
_FLOATS = {_C.DType.f32: tl.float32, _C.DType.f16: tl.float16, _C.DType.bf16: tl.uint16}
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


class TritonCopy:
    """A plan with its tensors, which it keeps alive. Writes what `CopyPlan.run` does, bit for bit.

    All operands lie on one GPU. The first run for a pair of dtypes compiles, which takes seconds.
    Raises as `CopyPlan.run` does.
    """

    def __init__(
        self,
        plan: CopyPlan,
        sources: Sequence[Tensor | None],
        destinations: Sequence[Tensor],
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        core = plan.core
        self.plan = plan
        self.destinations = tuple(destinations)
        self._device = _device_of(destinations)
        self._written = self._addresses("destinations", destinations)
        self._scale = ctypes.c_float(scale).value
        plain = plan.src_dtype == plan.dst_dtype and self._scale == 1.0 and not accumulate
        if not plain and core.dst_dtype not in _FLOATS:
            raise ValueError(
                f"scale and accumulate need float32, bfloat16 or float16, not {plan.dst_dtype}"
            )
        src_bytes, dst_bytes = (
            dtype.itemsize // wire_dtype(dtype)[1] for dtype in (plan.src_dtype, plan.dst_dtype)
        )
        self._constants = {
            "SRC": _BITS[src_bytes] if plain else _FLOATS[core.src_dtype],
            "DST": _BITS[dst_bytes] if plain else _FLOATS[core.dst_dtype],
            "PLAIN": plain,
            "ACCUMULATE": accumulate,
            "VECTOR": 16 // min(src_bytes, dst_bytes),
            "BLOCK": 2048,  # elements of one step: two vectors of a 16-bit dtype for each thread
        }
        # The address table is [0, sources, destinations]: the source ZEROS (-1) becomes its row 0.
        shift = torch.tensor([1, 1 + core.num_sources, 0, 0, 0, 0, 0, 0])
        tiles = torch.tensor(core.tiles, dtype=torch.int64).reshape(-1, 8) + shift
        self._grid = (len(tiles),)
        self._tile_table = _Table(tiles, self._device)
        self.set_sources(sources)

    def set_sources(self, sources: Sequence[Tensor | None]) -> None:
        """Later runs read these; a run that is queued already reads the ones before."""
        addresses = [0, *self._addresses("sources", sources), *self._written]
        self._address_table = _Table(torch.tensor(addresses, dtype=torch.int64), self._device)
        self.sources = tuple(sources)

    def run(self, stream: torch.Stream | None = None) -> None:
        """Queues the copy on `stream`, or on the current one. Keep queued sources alive."""
        if self._grid == (0,):
            return
        with torch.accelerator.device_index(self._device.index), stream or nullcontext():
            _copy_tile[self._grid](
                self._tile_table.on_current_stream(),
                self._address_table.on_current_stream(),
                self._scale,
                **self._constants,
                enable_fp_fusion=False,  # the product is rounded before it is added
            )

    def _addresses(self, role: str, tensors: Sequence[Tensor | None]) -> list[int]:
        plan, written = self.plan, role == "destinations"
        dtype = plan.dst_dtype if written else plan.src_dtype
        extents = plan.core.dst_extents if written else plan.core.src_extents
        if len(tensors) != len(extents):
            raise ValueError(f"{role} has {len(tensors)} tensors, the plan has {len(extents)}")
        addresses = []
        for i, (tensor, extent) in enumerate(zip(tensors, extents, strict=True)):
            if tensor is None and not written:
                addresses.append(0)
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{role}[{i}] is a {type(tensor).__name__}, it must be a tensor")
            if tensor.dtype != dtype or tensor.device != self._device:
                raise TypeError(
                    f"{role}[{i}] is {tensor.dtype} on {tensor.device}, this copy takes {dtype} on "
                    f"{self._device}"
                )
            needed = extent // wire_dtype(dtype)[1]
            if not tensor.is_contiguous() or tensor.numel() < needed:
                raise ValueError(
                    f"{role}[{i}] has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
                    f"the plan needs {needed} contiguous elements"
                )
            # Signed, as the kernel's integers: some GPUs have addresses past 2^63.
            addresses.append(ctypes.c_int64(tensor.data_ptr()).value)
        return addresses


def _device_of(destinations: Sequence[Tensor]) -> torch.device:
    if not destinations or not isinstance(destinations[0], Tensor):
        return torch.device("cpu")
    device = destinations[0].device
    interpreted = not isinstance(_copy_tile, triton.JITFunction)
    if interpreted != (device.type == "cpu"):
        # Interpreted on a GPU's addresses, the copy would end the process.
        needed = "unset" if interpreted else "1"
        raise TypeError(
            f"destinations[0] is on {device}, for which TRITON_INTERPRET must be {needed} when "
            "shardcomm.copy_triton is imported: Triton compiles for GPUs, interprets on the CPU"
        )
    return device


class _Table:
    """Integers that the kernel reads.

    A copy on a GPU belongs to the stream that made it: there it comes before the kernels that read
    it, and its memory is used again only after them. Another stream makes its own.
    """

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self._device = device
        self._host = rows if device.type == "cpu" else rows.pin_memory()
        self._stream: torch.Stream | None = None
        self._copy: Tensor | None = None

    def on_current_stream(self) -> Tensor:
        if self._device.type == "cpu":
            return self._host
        stream = torch.accelerator.current_stream()
        if self._copy is None or self._stream != stream:
            self._copy = self._host.to(self._device, non_blocking=True)
            self._stream = stream
        return self._copy


@triton.jit
def _copy_tile(
    tiles,
    addresses,
    scale,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    PLAIN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    operand = tl.load(addresses + tl.load(tile))
    src = operand + tl.load(tile + 2) * (SRC.primitive_bitwidth // 8)
    src_pitch = tl.load(tile + 3)
    dst = tl.load(addresses + tl.load(tile + 1)) + tl.load(tile + 4) * (DST.primitive_bitwidth // 8)
    dst_pitch = tl.load(tile + 5)
    rows = tl.load(tile + 6).to(tl.int32)
    cols = tl.load(tile + 7).to(tl.int32)
    has_source = operand != 0
    if ACCUMULATE:
        rows = tl.where(has_source, rows, 0)
    aligned = (src | dst) % 16 == 0
    aligned &= (rows == 1) | ((src_pitch | dst_pitch) % VECTOR == 0)
    whole = tl.where(aligned, cols // VECTOR * VECTOR, 0)

    for UNIT in tl.static_range(VECTOR, 0, 1 - VECTOR):  # VECTOR, then 1
        src_row = src.to(tl.pointer_type(SRC))
        dst_row = dst.to(tl.pointer_type(DST))
        if UNIT == 1:
            src_row += whole
            dst_row += whole
            units = cols - whole
        else:
            src_row = tl.multiple_of(src_row, 16)
            dst_row = tl.multiple_of(dst_row, 16)
            units = whole // VECTOR
        end = rows * units
        read_end = tl.where(has_source, end, 0)
        for begin in range(0, end, BLOCK // UNIT):
            unit = begin + tl.arange(0, BLOCK // UNIT)[:, None]
            inside = unit < end
            row = unit // units
            col = (unit - row * units) * UNIT + tl.arange(0, UNIT)[None, :]
            # Dividing and multiplying by UNIT shows the compiler that rows are aligned.
            value = tl.load(
                src_row + (row * (src_pitch // UNIT) * UNIT + col), mask=unit < read_end, other=0
            )
            dst_elements = dst_row + (row * (dst_pitch // UNIT) * UNIT + col)
            if not PLAIN:
                value = _to_float32(value) * tl.full([1, 1], scale, tl.float32)
                if ACCUMULATE:
                    value = _to_float32(tl.load(dst_elements, mask=inside)) + value
                value = tl.where(has_source, _round(value, DST), 0)
            tl.store(dst_elements, value, mask=inside)


@triton.jit
def _to_float32(x):
    if x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    if DTYPE == tl.uint16:
        bits = x.to(tl.uint32, bitcast=True)
        to_nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (bits >> 16) | 0x40, to_nearest_even).to(tl.uint16)
    return x.to(DTYPE)
