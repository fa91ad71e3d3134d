"""The `nccl` transport: where NCCL is found, and how ranks meet.

NCCL is loaded at run time: the copy that is already in the process (torch's), else that of an `nvidia-nccl` wheel,
else the system's. What it is too old for is left out, and the communicator's receipts say so.
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shardcomm import _C

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

DEADLINE_S = 300.0


def library_paths() -> list[str]:
    """Paths of libnccl.so.2 in the installed `nvidia-nccl` wheels (cu12 and cu13 share one package)."""
    # Found, not imported: `nvidia` is a namespace that any number of wheels fill.
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    paths = [Path(root) / "nccl" / "lib" / "libnccl.so.2" for root in roots]
    return [str(path) for path in paths if path.exists()]


def status() -> _C.NcclStatus:
    """The NCCL of this process, which this loads; `available` and `reason` tell whether there is one."""
    return _C.nccl_status(library_paths())


def connect(
    store: Store, rank: int, size: int, device: int, deadline_s: float = DEADLINE_S
) -> _C.Communicator:
    """The `size` ranks that share `store`, connected by NCCL; collective.

    Rank 0 makes the group's id and leaves it in the store until all have read it. Groups that meet in one store at
    the same time need a `PrefixStore` each.

    Raises:
        ValueError: `rank` or `device` is none of those there are.
        CommError: a rank did not come within `deadline_s` seconds, or rank 0 could not make an id: it says why.
        RuntimeError: there is no NCCL or no CUDA device here.
    """
    if not 0 <= rank < size:
        raise ValueError(f"connect: rank is {rank}; it must be 0 to size - 1 = {size - 1}")
    status()  # loads the NCCL that is to be used
    unique_id = _share_id(store, rank, size, deadline_s)
    return _C.make_nccl(unique_id, rank, size, device, deadline_s)


def borrow(comm_ptr: int, device: int, deadline_s: float = DEADLINE_S) -> _C.Communicator:
    """The ranks of somebody else's ncclComm_t, by its address; collective.

    It is split twice, must be idle meanwhile, and stays its owner's. It must come from the NCCL that `status` names,
    which is the case when that NCCL was in the process before this one looked for it.

    Raises:
        ValueError: `comm_ptr` is 0, or belongs to another device.
        CommError: a rank did not come within `deadline_s` seconds.
        RuntimeError: there is no NCCL or no CUDA device here.
    """
    status()
    return _C.borrow_nccl(comm_ptr, device, deadline_s)


def _share_id(store: Store, rank: int, size: int, deadline_s: float) -> bytes:
    """Rank 0's new id on every rank, or its error: as it is on rank 0, as CommError on the others."""
    # Each rank counts its groups in the store, so that one which serves several, one after the other, is never read
    # too early.
    key = f"shardcomm/nccl/{store.add(f'shardcomm/nccl/groups of rank {rank}', 1)}"
    if rank == 0:
        try:
            unique_id = _C.nccl_unique_id()
        except Exception as error:
            store.set(key, f"error: {error}")
            _leave(store, key, size)
            raise
        store.set(key, f"id: {unique_id.hex()}")
        _leave(store, key, size)
        return unique_id
    try:
        store.wait([key], timedelta(seconds=deadline_s))
    except RuntimeError as error:
        raise _C.CommError(
            f"rank {rank} of {size}: rank 0 did not send NCCL's id within {deadline_s:g} s: {error}"
        ) from error
    kind, _, text = store.get(key).decode().partition(": ")
    _leave(store, key, size)
    if kind == "error":
        raise _C.CommError(f"rank {rank} of {size}: rank 0 could not make NCCL's id: {text}")
    return bytes.fromhex(text)


def _leave(store: Store, key: str, size: int) -> None:
    """Whoever is the last to have read the key deletes it."""
    if store.add(f"{key}/readers", 1) == size:
        store.delete_key(key)
        store.delete_key(f"{key}/readers")
