"""The collectives that the C library has and Python's communicators do not, beside torch's Gloo: the same bits."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardcomm
from shardcomm import launch

RANKS = 3
ELEMENTS = (
    1,
    1000,
    300_001,
)  # which go with the call, in one chunk of the staging areas, in several

# The numbers of shardcomm.h.
SHM = 0
DTYPES = {
    torch.bool: 0,
    torch.uint8: 0,
    torch.int8: 7,
    torch.int32: 1,
    torch.int64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.float32: 5,
    torch.float64: 6,
}
OPS = {"SUM": 0, "MAX": 2, "MIN": 3, "PRODUCT": 4, "BAND": 5, "BOR": 6, "BXOR": 7}


class CLibrary:
    """One rank of a group, through ctypes."""

    def __init__(self, rank: int, size: int) -> None:
        self._c = ctypes.CDLL(str(Path(shardcomm.get_library_dir()) / "libshardcomm.so.0"))
        self._c.shc_last_error_text.restype = ctypes.c_char_p
        unique_id = ctypes.create_string_buffer(512)
        if rank == 0:
            self._ok(self._c.shc_get_unique_id(SHM, size, unique_id))
        shared: list[Any] = [unique_id.raw]
        dist.broadcast_object_list(shared)
        self._comm = ctypes.c_void_p()
        name = ctypes.create_string_buffer(shared[0], 512)
        self._ok(self._c.shc_comm_init_rank(ctypes.byref(self._comm), size, name, rank, None))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls shc_NAME; tensors give their addresses, lists their numbers, and integers are of 64 bits."""
        given = [self._argument(argument) for argument in arguments]
        self._ok(getattr(self._c, f"shc_{name}")(self._comm, *given, None))

    def close(self) -> None:
        self._c.shc_comm_destroy(self._comm)

    @staticmethod
    def _argument(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        if isinstance(argument, list):
            return (ctypes.c_int64 * len(argument))(*argument)
        return ctypes.c_int64(argument) if isinstance(argument, int) else argument

    def _ok(self, status: int) -> None:
        assert status == 0, self._c.shc_last_error_text().decode()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def some(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    """Any bits for integers, which wrap; for floats numbers whose sums and products of three ranks 16 bits hold."""
    if dtype.is_floating_point:
        return torch.randint(-6, 7, (count,), generator=generator).to(dtype)
    raw = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return raw > 0 if dtype is torch.bool else raw.to(dtype)


def same_reductions(seed: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    library = CLibrary(rank, size)
    generator = torch.Generator().manual_seed(seed + rank)
    roots = torch.Generator().manual_seed(seed)
    for dtype, number in DTYPES.items():
        for name, op in OPS.items():
            if dtype.is_floating_point and name.startswith("B"):
                continue
            gloo = getattr(dist.ReduceOp, name)
            for count in ELEMENTS if dtype in (torch.int8, torch.float32) else ELEMENTS[:2]:
                root = int(torch.randint(size, (), generator=roots))
                send = some(dtype, count, generator)
                expected = send.clone()
                dist.all_reduce(expected, gloo)
                result = send.clone()
                library.call("all_reduce", result, number, count, op, 0)
                assert torch.equal(bits_of(result), bits_of(expected)), (dtype, name, count)
                result = torch.empty_like(send)
                library.call("reduce", send, result, number, count, op, root, 0)
                if rank == root:
                    assert torch.equal(bits_of(result), bits_of(expected)), (dtype, name, count)
    library.close()
    dist.destroy_process_group()


def same_exchanges(seed: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    library = CLibrary(rank, size)
    generator = torch.Generator().manual_seed(seed + rank)
    shared = torch.Generator().manual_seed(seed)
    for most in ELEMENTS:
        counts = torch.randint(most + 1, (size, size), generator=shared)
        counts[1, 2] = 0
        send_counts, recv_counts = counts[rank].tolist(), counts[:, rank].tolist()
        send = some(torch.int32, sum(send_counts), generator)
        expected = send.new_empty(sum(recv_counts))
        dist.all_to_all_single(expected, send, recv_counts, send_counts)
        result = torch.empty_like(expected)
        library.call("all_to_all", send, send_counts, result, recv_counts, DTYPES[send.dtype], 0)
        assert torch.equal(result, expected), most

        root = int(torch.randint(size, (), generator=shared))
        own = some(torch.float64, most, generator)
        full = own.new_empty(size, most)
        parts = list(own.new_empty(size, most))
        dist.gather(own, parts if rank == root else None, root)
        library.call("gather", own, full, DTYPES[own.dtype], most, root, 0)
        if rank == root:
            assert torch.equal(full, torch.stack(parts)), most
        theirs = torch.empty_like(own)
        dist.scatter(theirs, [2 * part for part in parts] if rank == root else None, root)
        part = torch.empty_like(own)
        library.call("scatter", 2 * full, part, DTYPES[own.dtype], most, root, 0)
        assert torch.equal(part, theirs), most
    library.close()
    dist.destroy_process_group()


def test_reductions_have_gloos_bits(seed: int) -> None:
    launch(same_reductions, RANKS, (seed,), timeout_s=120)


def test_exchanges_move_what_gloo_moves(seed: int) -> None:
    launch(same_exchanges, RANKS, (seed,), timeout_s=120)
