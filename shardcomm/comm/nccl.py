"""The `nccl` transport: where NCCL is found, and how ranks meet.

NCCL is loaded at run time: the copy that is already in the process (torch's), else that of an `nvidia-nccl` wheel,
else the system's. Features for which that NCCL is too old are left out, and the communicator's receipts say so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from shardcomm import _C
from shardcomm.comm.words import DEADLINE_S, CtaPolicy
from shardcomm.meeting.comm_error import comm_error


def library_paths() -> list[str]:
    """The paths of libnccl.so.2 in the installed `nvidia-nccl` wheels (cu12 and cu13 share one package)."""
    # `nvidia` is a namespace package that any number of wheels fill; to find it does not import them.
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    paths = [Path(root) / "nccl" / "lib" / "libnccl.so.2" for root in roots]
    return [str(path) for path in paths if path.exists()]


def status() -> _C.NcclStatus:
    """Loads this process's NCCL; `available` and `reason` of the result tell whether there is one."""
    return _C.nccl_status(library_paths())


def check_cta_policy(cta_policy: str) -> None:
    """ValueError unless `cta_policy` is one of the names."""
    if cta_policy not in get_args(CtaPolicy):
        accepted = ", ".join(map(repr, get_args(CtaPolicy)))
        raise ValueError(f"cta_policy is {cta_policy!r}; accepted: {accepted}")


def connect(
    exchange: Callable[[bytes], list[bytes]],
    rank: int,
    size: int,
    device: int,
    deadline_s: float = DEADLINE_S,
    cta_policy: CtaPolicy = "default",
) -> _C.Communicator:
    """Connects the `size` ranks that `exchange` reaches by NCCL; collective.

    Args:
        exchange: Shows bytes to all ranks, and returns all ranks' bytes; see `shardcomm.meeting.exchange`.
        rank: This rank.
        size: How many ranks there are.
        device: The number of this rank's GPU.
        deadline_s: How long a rank waits for another one, in seconds.
        cta_policy: See `Communicator.from_env`.

    Raises:
        ValueError: There is no such `rank` or `device`, or this NCCL does not have the `cta_policy`.
        CommError: A rank did not come within `deadline_s`, or rank 0 could not make an id; the error says why.
        CudaError: There is no NCCL or no CUDA device here.
    """
    if not 0 <= rank < size:
        raise ValueError(f"connect: rank is {rank}; it must be 0 to size - 1 = {size - 1}")
    check_cta_policy(cta_policy)
    status()  # loads NCCL
    if rank == 0:
        try:
            unique_id = _C.nccl_unique_id()
        except Exception as error:
            exchange(f"error: {error}".encode())
            raise
        exchange(unique_id)
    else:
        unique_id = exchange(b"")[0]
        if unique_id.startswith(b"error: "):
            raise comm_error(
                "backend",
                f"rank {rank} of {size}: rank 0 could not make NCCL's id: {unique_id[7:].decode()}",
                rank=0,
                reporter=0,
            )
    policy = getattr(_C.CtaPolicy, cta_policy)
    return _C.make_nccl(unique_id, rank, size, device, deadline_s, policy)
