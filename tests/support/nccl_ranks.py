"""A rank of the nccl transport on a GPU that it may share, and its collectives on tensors of the current stream."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shardcomm import _C, Stream
from shardcomm.arguments.dtype import core_dtype
from shardcomm.comm import nccl
from shardcomm.comm.operands import RED_OPS
from shardcomm.meeting.exchange import StoreExchange


def take_gpu() -> int:
    """This rank's GPU, made the current one: of its own as far as there are so many."""
    rank, devices = int(os.environ["RANK"]), torch.cuda.device_count()
    if shares_gpu():
        _let_ranks_share(rank)
    torch.cuda.set_device(rank % devices)
    return rank % devices


def shares_gpu() -> bool:
    """Whether this launch has more ranks than there are GPUs."""
    return torch.cuda.device_count() < int(os.environ["WORLD_SIZE"])


def _let_ranks_share(rank: int) -> None:
    """Lets NCCL put several ranks on a GPU; before it reads its environment."""
    if nccl.status().version >= 23003:
        os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="4", NCCL_NVLS_ENABLE="0")
    else:  # they look like different hosts to it
        os.environ.update(
            NCCL_HOSTID=f"shardcomm-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_MNNVL_ENABLE="0"
        )


def connect(deadline_s: float = 30.0) -> _C.Communicator:
    """The launched ranks, as one nccl communicator."""
    device = take_gpu()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://"))
    exchange = StoreExchange(store, "test", rank, size, deadline_s)
    return nccl.connect(exchange, rank, size, device, deadline_s)


def current_stream() -> _C.Stream:
    stream = torch.cuda.current_stream()
    return Stream.from_cuda(stream.device_index, stream.cuda_stream)


def all_gather(
    comm: _C.Communicator,
    recv: torch.Tensor,
    send: torch.Tensor,
    counts: tuple[int, ...] | None = None,
) -> None:
    dtypes, parts = (core_dtype(send.dtype), core_dtype(recv.dtype)), counts or send.numel()
    comm.all_gather(
        send.data_ptr(), dtypes[0], recv.data_ptr(), dtypes[1], parts, 0, current_stream()
    )


def reduce_scatter(
    comm: _C.Communicator,
    recv: torch.Tensor,
    send: torch.Tensor,
    op: str = "sum",
    scale: float = 1.0,
    accumulate: bool = False,
    counts: tuple[int, ...] | None = None,
) -> None:
    comm.reduce_scatter(
        send.data_ptr(), core_dtype(send.dtype), recv.data_ptr(), core_dtype(recv.dtype), scale,
        accumulate, counts or recv.numel(), RED_OPS[op], 0, current_stream(),
    )  # fmt: skip


def all_reduce(comm: _C.Communicator, buffer: torch.Tensor, op: str = "sum") -> None:
    comm.all_reduce(
        buffer.data_ptr(),
        core_dtype(buffer.dtype),
        buffer.numel(),
        RED_OPS[op],
        stream=current_stream(),
    )


def allocate(comm: _C.Communicator, numel: int, dtype: torch.dtype, use: _C.Use) -> torch.Tensor:
    memory = comm.allocate(numel * dtype.itemsize, use)
    return torch.as_tensor(memory, device="cuda").view(dtype)


def receipt(comm: _C.Communicator, operation: str) -> tuple[str, int, str, str, str]:
    """The last one of `operation`: its name, its number, the path requested, the path taken, and why not the first."""
    (found,) = [each for each in comm.receipts() if each[0] == operation]
    return found
