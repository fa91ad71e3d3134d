"""The device of a rank, and what may be asked for on it: a transport, a `cta_policy`, sums."""

from __future__ import annotations

import warnings
from typing import get_args

import torch

from shardcomm.comm import nccl
from shardcomm.comm.core import core_device
from shardcomm.comm.words import CtaPolicy, Sums, Transport
from shardcomm.meeting.launchers import Launched


def check_transport(transport: str) -> None:
    """ValueError unless `transport` is the name of one."""
    if transport not in get_args(Transport):
        accepted = ", ".join(map(repr, get_args(Transport)))
        raise ValueError(f"transport is {transport!r}; accepted: {accepted}")


def check_sums(
    operation: str, sums: str, device: torch.device, transport: Transport = "auto"
) -> None:
    """ValueError unless ranks on this device, over this transport, can sum so."""
    if sums not in get_args(Sums):
        raise ValueError(f"{operation}: sums is {sums!r}; accepted: 'fast', 'exact'")
    if sums == "exact" and (device.type != "cpu" or transport in ("c10d", "hosts", "nccl")):
        raise ValueError(
            f"{operation}: sums is 'exact', but transport is {transport!r} and device is {device}; exact sums are "
            "those of 'shm', or of 'local' on 'cpu'"
        )


def checked_device(
    operation: str,
    own: Launched,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
    sums: Sums,
) -> torch.device:
    """This rank's device.

    Raises:
        ValueError: `device`, or another argument of `operation`, is none of the accepted.
        CudaError: There is no such GPU.
    """
    check_transport(transport)
    nccl.check_cta_policy(cta_policy)
    if device is None:
        device = _own_device(operation, own, transport)
    elif str(device) == "cuda":
        device = own_gpu(own, torch.cuda.device_count())
    where = core_device(operation, device)
    check_sums(operation, sums, where, transport)
    return where


def take(device: torch.device) -> None:
    """Makes a GPU this process's current one, as `torch.distributed.init_device_mesh` does.

    Else what a program does without naming a device, such as `torch.cuda.synchronize()`, would be done on GPU 0, where
    each process of the host would have a context.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _own_device(operation: str, own: Launched, transport: Transport) -> torch.device:
    """This rank's GPU if "nccl" is asked for, or if NCCL is there and each rank of the host has a GPU; else the CPU."""
    gpus = torch.cuda.device_count()
    if transport == "nccl":
        return own_gpu(own, gpus)
    if transport == "auto" and gpus > 0:
        reason = _why_not_on_gpus(own.local_size or 1 + (own.local_rank or 0), gpus)
        if reason is None:
            return own_gpu(own, gpus)
        is_first = own.local_rank == 0 or own.rank == 0  # of its host, if the launcher tells
        if is_first:
            warnings.warn(
                f"{operation}: the ranks work on CPUs, since {reason}; device='cpu' says that this is meant",
                RuntimeWarning,
                stacklevel=5,
            )
    return torch.device("cpu")


def _why_not_on_gpus(ranks_here: int, gpus: int) -> str | None:
    """Why ranks that did not name a device leave the GPUs of their host alone; None if they need not."""
    nccl_here = nccl.status()
    if not nccl_here.available:
        return nccl_here.reason
    if gpus < ranks_here:
        each = "give device='cuda' if the launcher shows each rank a GPU of its own"
        return f"this host has {ranks_here} of them, and sees {gpus} GPU{'s'[: gpus > 1]} ({each})"
    return None


def own_gpu(own: Launched, gpus: int) -> torch.device:
    """This rank's GPU, by its rank on this host. The launcher may show each rank its own GPU only, which is 0 then."""
    return torch.device("cuda", (own.local_rank or 0) % max(1, gpus))
