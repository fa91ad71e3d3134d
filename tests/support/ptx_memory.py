"""The memory that a played GPU may touch: buffers of this process at their real addresses, and nothing else."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from torch import Tensor

Lanes = np.ndarray[Any, Any]
"""A value of each thread."""

_ALIGN = 16  # storage is seen as elements of any size


class MemoryFault(Exception):
    """An access that a GPU traps, or worse, does not."""


@dataclass(frozen=True)
class Region:
    """The addresses from `begin` to before `end`. `storage` begins at `base`, which is `begin` rounded down to 16."""

    begin: int
    end: int
    base: int
    storage: Lanes
    writable: bool

    @staticmethod
    def of_tensor(tensor: Tensor, writable: bool) -> Region:
        assert tensor.is_contiguous()
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        base = begin // _ALIGN * _ALIGN
        # Of the bytes around the tensor none is touched.
        rounded = (ctypes.c_uint8 * (-(-(end - base) // _ALIGN) * _ALIGN)).from_address(base)
        return Region(begin, end, base, np.ctypeslib.as_array(rounded), writable)

    @staticmethod
    def holding(begin: int, content: bytes) -> Region:
        """Bytes that are only read, at an address that is a multiple of 16."""
        padded = np.frombuffer(content + bytes(-len(content) % _ALIGN), np.uint8)
        return Region(begin, begin + len(content), begin, padded, writable=False)

    @staticmethod
    def of_block(nbytes: int) -> Region:
        """A block's own memory, which begins at 0 and has anything in it."""
        rounded = -(-nbytes // _ALIGN) * _ALIGN
        return Region(0, nbytes, 0, np.full(rounded, 0xA5, np.uint8), writable=True)


class Memory:
    """Regions that do not overlap. An access of anything else raises MemoryFault, as does one that is misaligned."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._begins: list[int] = []

    def add(self, region: Region) -> None:
        if region.begin == region.end:
            return
        at = bisect_right(self._begins, region.begin)
        before, after = self._regions[:at], self._regions[at:]
        assert not before or before[-1].end <= region.begin, "regions overlap"
        assert not after or region.end <= after[0].begin, "regions overlap"
        self._regions.insert(at, region)
        self._begins.insert(at, region.begin)

    @property
    def only_read(self) -> Memory:
        """Without what may be written."""
        memory = Memory()
        for region in self._regions:
            if not region.writable:
                memory.add(region)
        return memory

    @contextmanager
    def readable_too(self, *tensors: Tensor) -> Iterator[None]:
        """For a while these may be read. One that is in it already stays as it is."""
        before = self._regions.copy(), self._begins.copy()
        for tensor in tensors:
            if tensor.data_ptr() not in self._begins:
                self.add(Region.of_tensor(tensor, writable=False))
        try:
            yield
        finally:
            self._regions, self._begins = before

    def load(self, addresses: Lanes, dtype: DTypeLike, count: int) -> Lanes:
        """`count` elements at each address: of shape (addresses, count)."""
        values = np.empty((len(addresses), count), dtype)
        for region, threads in self._accessed(addresses, values.itemsize * count, writes=False):
            values[threads] = region.storage.view(dtype)[
                _index(region, addresses[threads], values.itemsize, count)
            ]
        return values

    def store(self, addresses: Lanes, values: Lanes) -> None:
        """Stores a row of `values` at each address: of rows for the same address, the last."""
        count = values.shape[1]
        for region, threads in self._accessed(addresses, values.itemsize * count, writes=True):
            index = _index(region, addresses[threads], values.itemsize, count)
            region.storage.view(values.dtype)[index] = values[threads]

    def _accessed(
        self, addresses: Lanes, nbytes: int, writes: bool
    ) -> Iterator[tuple[Region, slice | Lanes]]:
        if len(addresses) == 0:
            return
        if (addresses % np.uint64(nbytes)).any():
            address = int(addresses[np.flatnonzero(addresses % np.uint64(nbytes))[0]])
            raise MemoryFault(f"{address:#x} is not aligned to {nbytes} bytes")
        low, high = int(addresses.min()), int(addresses.max())
        region = self._region_at(low, nbytes, writes)
        if high + nbytes <= region.end:
            yield region, slice(None)
            return
        of_thread = np.searchsorted(np.array(self._begins, np.uint64), addresses, "right")
        for number in np.unique(of_thread):
            threads = np.flatnonzero(of_thread == number)
            region = self._region_at(int(addresses[threads].min()), nbytes, writes)
            self._region_at(int(addresses[threads].max()), nbytes, writes)
            yield region, threads

    def _region_at(self, address: int, nbytes: int, writes: bool) -> Region:
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address + nbytes > self._regions[at].end:
            what = "stored to" if writes else "loaded from"
            raise MemoryFault(f"{nbytes} bytes are {what} {address:#x}, where there is no buffer")
        if writes and not self._regions[at].writable:
            raise MemoryFault(f"{nbytes} bytes are stored to {address:#x}, which is only read")
        return self._regions[at]


def _index(region: Region, addresses: Lanes, itemsize: int, count: int) -> Lanes:
    first = (addresses - np.uint64(region.base)).astype(np.int64) // itemsize
    return first[:, None] + np.arange(count)
