"""The Triton executor of a CopyPlan: for GPUs that the compiled extension does not serve.

It is one launch, whatever the number of tensors. Each program copies one tile: in whole vectors where both sides are
aligned, and then the rest of every row element by element.

    row 0   [ 16 bytes ][ 16 bytes ][ 16 bytes ] . . .
    row 1   [ 16 bytes ][ 16 bytes ][ 16 bytes ] . . .
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcomm import _C
from shardcomm.stream.streams import TorchStream

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("shardcomm.copy.triton needs Triton: pip install triton") from error

# bfloat16 is converted to and from its bits, as the core does it: a NaN keeps its payload.
TRITON_FLOATS = {_C.DType.f32: tl.float32, _C.DType.f16: tl.float16, _C.DType.bf16: tl.uint16}
_BITS = {
    _C.DType.u8: tl.uint8,
    _C.DType.f16: tl.uint16,
    _C.DType.bf16: tl.uint16,
    _C.DType.i32: tl.uint32,
    _C.DType.f32: tl.uint32,
    _C.DType.i64: tl.uint64,
    _C.DType.f64: tl.uint64,
}


class TritonCopy:
    """Runs a plan on addresses of one device. It writes what the core's executor writes, bit for bit.

    The first run for a pair of dtypes compiles, which takes seconds.

    Raises:
        TypeError: The device is the CPU, or Triton's interpreter is on.
        ValueError: By `run`: a scale or an accumulation for dtypes without conversion.
    """

    def __init__(
        self,
        plan: _C.CopyPlan,
        sources: Sequence[int],
        destinations: Sequence[int],
        device: torch.device,
    ) -> None:
        check_device(device)
        self._device = device
        self._dtypes = plan.src_dtype, plan.dst_dtype
        # The address table is [0, sources, destinations]: the source ZEROS (-1) becomes its row 0.
        shift = torch.tensor([1, 1 + plan.num_sources, 0, 0, 0, 0, 0, 0])
        tiles = torch.tensor(plan.tiles, dtype=torch.int64).reshape(-1, 8) + shift
        self._grid = (len(tiles),)
        self._tile_table = Table(tiles, device)
        self.set_operands(sources, destinations)

    def set_operands(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Sets the addresses for later runs; a run that is queued already uses those that were set before it."""
        # The kernel's integers are signed, and some GPUs have addresses past 2^63.
        addresses = [signed(address) for address in (0, *sources, *destinations)]
        self._address_table = Table(torch.tensor(addresses, dtype=torch.int64), self._device)

    def run(
        self,
        scale: float = 1.0,
        accumulate: bool = False,
        nonfinite: int = 0,
        stream: TorchStream | None = None,
    ) -> None:
        """Queues the copy on `stream`, or on the current stream if it is None."""
        launch = self._launch(ctypes.c_float(scale).value, accumulate, nonfinite)
        if self._grid == (0,):
            return
        with torch.accelerator.device_index(self._device.index):
            stream.enqueue(launch) if stream is not None else launch()

    def _launch(self, scale: float, accumulate: bool, nonfinite: int) -> Callable[[], object]:
        src_dtype, dst_dtype = self._dtypes
        computes = scale != 1.0 or accumulate or nonfinite != 0
        plain = src_dtype == dst_dtype and not computes
        if not plain and dst_dtype not in TRITON_FLOATS:
            raise ValueError(
                "scale, accumulate and nonfinite need float32, bfloat16 or float16, not "
                f"{dst_dtype.name}"
            )
        types = _BITS if plain else TRITON_FLOATS
        src, dst = types[src_dtype], types[dst_dtype]
        return lambda: _copy_tile[self._grid](
            self._tile_table.on_current_stream(),
            self._address_table.on_current_stream(),
            scale,
            signed(nonfinite),
            SRC=src,
            DST=dst,
            PLAIN=plain,
            ACCUMULATE=accumulate,
            WATCHED=nonfinite != 0,
            VECTOR=128 // min(src.primitive_bitwidth, dst.primitive_bitwidth),
            BLOCK=2048,  # elements of one step: two vectors of a 16-bit dtype for each thread
            enable_fp_fusion=False,  # the product is rounded before it is added
        )


def signed(address: int) -> int:
    """`address` as a kernel's integer of 64 bits."""
    return ctypes.c_int64(address).value


def check_device(device: torch.device) -> None:
    """TypeError unless `device` is one for which Triton compiles."""
    if device.type == "cpu":
        raise TypeError("the copy is on the CPU; Triton compiles for GPUs")
    if not isinstance(_copy_tile, triton.JITFunction):
        # On a GPU's addresses the interpreter would end the process.
        raise TypeError(
            f"the copy is on {device}, and TRITON_INTERPRET was set when shardcomm.copy.triton was imported; unset it"
        )


class Table:
    """Integers that a kernel reads.

    Each stream of a GPU has its own copy. On the stream that made it, the copy comes before the kernels that read it,
    and its memory is used again only after them.
    """

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self._device = device
        self._host = rows.pin_memory()
        self._stream: torch.Stream | None = None
        self._copy: Tensor | None = None

    def on_current_stream(self) -> Tensor:
        """The rows where the kernels of the current stream can read them."""
        stream = torch.accelerator.current_stream()
        if self._copy is None or self._stream != stream:
            self._copy = self._host.to(self._device, non_blocking=True)
            self._stream = stream
        return self._copy


# Triton would compile a kernel for each alignment of the flag's address, if it specialised on that.
@triton.jit(do_not_specialize=["nonfinite"])
def _copy_tile(
    tiles,
    addresses,
    scale,
    nonfinite,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    PLAIN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WATCHED: tl.constexpr,
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
                value = to_float32(value) * tl.full([1, 1], scale, tl.float32)
                if ACCUMULATE:
                    value = to_float32(tl.load(dst_elements, mask=inside)) + value
                value = tl.where(has_source, round_to(value, DST), 0)
            if WATCHED:
                is_finite = tl.abs(to_float32(value)) < float("inf")
                flag = nonfinite.to(tl.int64).to(tl.pointer_type(tl.int32))
                tl.store(flag + 0 * col, 1, mask=inside & (is_finite == 0))
            tl.store(dst_elements, value, mask=inside)


@triton.jit
def to_float32(x):
    """The value of an element of TRITON_FLOATS."""
    if x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """A float32, rounded to a type of TRITON_FLOATS."""
    if tl.uint16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        to_nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (bits >> 16) | 0x40, to_nearest_even).to(tl.uint16)
    return x.to(DTYPE)
