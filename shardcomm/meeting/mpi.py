"""How the ranks of an MPI program show each other a few bytes at set-up: by MPI's own collectives."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from shardcomm._C import CommError
from shardcomm.meeting.exchange import Exchange

T = TypeVar("T")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 0.01  # between looks at a request


# Requests that ended without all ranks, for as long as the process lives: MPI may still write to their buffers.
_abandoned: list[Any] = []


class MpiExchange(Exchange):
    """An exchange over an intracommunicator of mpi4py. No other collective of it may be under way meanwhile."""

    def __init__(self, comm: Any, deadline_s: float) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), deadline_s)
        self._comm = comm

    def __call__(self, payload: bytes) -> list[bytes]:
        """See `Exchange`."""
        lengths = np.empty(self.size, dtype=np.int32)
        self._finish(self._comm.Iallgather(np.array([len(payload)], dtype=np.int32), lengths))
        ends = np.cumsum(lengths)
        everybody = np.empty(ends[-1], dtype=np.uint8)
        own = np.frombuffer(payload, dtype=np.uint8)
        self._finish(self._comm.Iallgatherv(own, [everybody, lengths.tolist()]))
        return [part.tobytes() for part in np.split(everybody, ends[:-1])]

    def _finish(self, request: Any) -> None:
        try:
            self._wait_for(request)
        except BaseException:
            _abandoned.append(request)
            raise

    def _wait_for(self, request: Any) -> None:
        end = time.monotonic() + self.deadline_s
        pause_s = _SHORTEST_PAUSE_S
        while not request.Test():
            if trouble := self.trouble():
                raise trouble
            if time.monotonic() >= end:
                raise self._late("they are not in the same call of shardcomm")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def wait_for(self, fn: Callable[[], T], over: threading.Event | None = None) -> T:
        """Calls fn() in this thread: MPI may allow calls from one thread alone. Gloo has a deadline of its own."""
        return fn()

    def _tell(self, error: CommError) -> None:
        """Does nothing: the other ranks are in a collective, and hear of it at their deadline."""


def check_mpi(operation: str, comm: Any) -> None:
    """Checks that `comm` is an intracommunicator of mpi4py with this process in it.

    Raises:
        TypeError: It is no communicator of mpi4py.
        ValueError: It is an intercommunicator, or has no group; or MPI does not run.
    """
    if not all(hasattr(comm, name) for name in ("Get_rank", "Iallgather", "Iallgatherv")):
        raise TypeError(
            f"{operation}: mpi is a {type(comm).__name__}; it must be a communicator of mpi4py, MPI.COMM_WORLD for one"
        )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and (mpi.Is_finalized() or not mpi.Is_initialized()):
        state = "has ended" if mpi.Is_finalized() else "has not been started"
        raise ValueError(f"{operation}: MPI {state}; call this between MPI.Init and MPI.Finalize")
    if not comm or comm.Is_inter():
        raise ValueError(
            f"{operation}: mpi is {'an intercommunicator' if comm else 'MPI.COMM_NULL'}; it must be a communicator "
            "of one group that this process is in"
        )
