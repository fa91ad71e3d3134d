"""The front door: one function that finds the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardcomm.comm import rendezvous
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.words import DEADLINE_S, CtaPolicy, Sums, Transport

if TYPE_CHECKING:
    from mpi4py import MPI


def connect(
    *,
    mpi: MPI.Intracomm | None = None,
    deadline_s: float = DEADLINE_S,
    transport: Transport = "auto",
    device: torch.device | str | None = None,
    cta_policy: CtaPolicy = "default",
    sums: Sums = "fast",
) -> Communicator:
    """Joins the other ranks of this program; collective.

    Without `mpi` it is [`Communicator.from_env`][shardcomm.Communicator.from_env], for the ranks that torchrun, mpirun
    or srun started. With it the ranks are those of an MPI communicator, and find each other through MPI alone.

    Args:
        mpi: A communicator of mpi4py, such as `MPI.COMM_WORLD`. All its ranks call this, and are in no other collective
            of it meanwhile. None: the launcher tells who the ranks are.
        deadline_s: As in `from_env`.
        transport: As in `from_env`.
        device: As in `from_env`.
        cta_policy: As in `from_env`.
        sums: As in `from_env`.

    Returns:
        The communicator of this rank.

    Raises:
        TypeError: `mpi` is no communicator of mpi4py.
        ValueError: `mpi` is an intercommunicator or MPI.COMM_NULL, or MPI does not run; or as `from_env`.
        CommError: A rank did not come in time, died, or gave other arguments.
        CudaError: There is no such GPU.

    Example:
        ```py
        from mpi4py import MPI
        import numpy as np

        comm = shardcomm.connect(mpi=MPI.COMM_WORLD)  # mpirun -n 2 python program.py
        gradient = np.ones(1000, dtype=np.float32)
        comm.all_reduce(gradient)
        ```
    """
    if mpi is None:
        return rendezvous.from_env(deadline_s, transport, device, cta_policy, sums)
    return rendezvous.from_mpi(mpi, deadline_s, transport, device, cta_policy, sums)
