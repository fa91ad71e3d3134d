"""A rank of the nccl transport on a GPU that it may share."""

from __future__ import annotations

import os

import torch

from shardcomm import Communicator
from shardcomm.comm import nccl


def take_gpu() -> torch.device:
    """This rank's GPU, made the current one: of its own as far as there are so many."""
    rank, devices = int(os.environ["RANK"]), torch.cuda.device_count()
    if shares_gpu():
        _let_ranks_share(rank)
    gpu = torch.device("cuda", rank % devices)
    torch.cuda.set_device(gpu)
    return gpu


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


def connect(deadline_s: float = 30.0) -> Communicator:
    """The launched ranks over nccl."""
    return Communicator.from_env(transport="nccl", device=take_gpu(), deadline_s=deadline_s)
