"""The `nccl` transport: where NCCL is found, and how ranks meet.

NCCL is loaded at run time: the copy that is already in the process (torch's), else that of an `nvidia-nccl` wheel,
else the system's. What it is too old for is left out, and the communicator's receipts say so.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from shardcomm import _C
from shardcomm.communicator import DEADLINE_S

if TYPE_CHECKING:
    from shardcomm.rendezvous import Exchange


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
    exchange: Exchange, rank: int, size: int, device: int, deadline_s: float = DEADLINE_S
) -> _C.Communicator:
    """The `size` ranks that `exchange` reaches (see `shardcomm.rendezvous`), connected by NCCL; collective.

    Raises:
        ValueError: `rank` or `device` is none of those there are.
        CommError: a rank did not come within `deadline_s` seconds, or rank 0 could not make an id: it says why.
        CudaError: there is no NCCL or no CUDA device here.
    """
    if not 0 <= rank < size:
        raise ValueError(f"connect: rank is {rank}; it must be 0 to size - 1 = {size - 1}")
    status()  # loads the NCCL that is to be used
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
            raise _C.CommError(
                f"rank {rank} of {size}: rank 0 could not make NCCL's id: {unique_id[7:].decode()}"
            )
    return _C.make_nccl(unique_id, rank, size, device, deadline_s)


def borrow(comm_ptr: int, device: int, deadline_s: float = DEADLINE_S) -> _C.Communicator:
    """The ranks of somebody else's ncclComm_t, by its address; collective.

    It is split twice, must be idle meanwhile, and stays its owner's. It must come from the NCCL that `status` names,
    which is the case when that NCCL was in the process before this one looked for it.

    Raises:
        ValueError: `comm_ptr` is 0, or belongs to another device.
        CommError: a rank did not come within `deadline_s` seconds.
        CudaError: there is no NCCL or no CUDA device here.
    """
    status()
    return _C.borrow_nccl(comm_ptr, device, deadline_s)
