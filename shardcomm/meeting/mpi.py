"""The Store over which the ranks of an MPI program meet: where it is they tell each other by MPI's own collectives."""

from __future__ import annotations

import functools
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardcomm.meeting.background import Background
from shardcomm.meeting.comm_error import comm_error, from_bytes, to_bytes
from shardcomm.meeting.exchange import gave_up, late
from shardcomm.meeting.store import first_line, serve_on_loopback

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 0.01  # between looks at a request

# Of requests that ended without all ranks, for as long as the process lives: MPI may still write to their buffers.
_abandoned: list[Any] = []

# The stores of this process, by whether they listen on the loopback interface alone. Other ranks use them after this
# one has its communicator, so they are kept until the process ends.
_kept: dict[bool, TCPStore] = {}


def mpi_store(comm: Any, host: str, deadline_s: float) -> tuple[Store, list[str]]:
    """A store that all ranks of `comm`, an intracommunicator of mpi4py, have reached; collective.

    Rank 0 keeps the store. If one rank cannot have it, all ranks raise.

    Args:
        comm: The ranks.
        host: The identity of this rank's host.
        deadline_s: How long a rank waits for another one, in seconds.

    Returns:
        The store, and the host of each rank.
    """
    with _duplicate(comm, deadline_s) as exchange:
        hosts = [each.decode() for each in exchange(host.encode())]
        address = b""
        with exchange.together():
            if exchange.rank == 0:
                port = _kept_port(len(set(hosts)) == 1)
                address = json.dumps([socket.gethostname(), port, secrets.token_hex(8)]).encode()
        name, port, prefix = json.loads(exchange(address)[0])
        with exchange.together():
            store = _reached("127.0.0.1" if host == hosts[0] else name, port, exchange)
    return PrefixStore(prefix, store), hosts


class _MpiExchange:
    """An all-gather of bytes over a communicator that is nobody else's."""

    def __init__(self, comm: Any, deadline_s: float) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.deadline_s = deadline_s
        self._comm = comm

    def __call__(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order; collective."""
        lengths = np.empty(self.size, dtype=np.int32)
        self._finish(self._comm.Iallgather(np.array([len(payload)], dtype=np.int32), lengths))
        ends = np.cumsum(lengths)
        everybody = np.empty(ends[-1], dtype=np.uint8)
        own = np.frombuffer(payload, dtype=np.uint8)
        self._finish(self._comm.Iallgatherv(own, [everybody, lengths.tolist()]))
        return [part.tobytes() for part in np.split(everybody, ends[:-1])]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context at whose end all ranks raise, if one has raised in it; collective."""
        try:
            yield
        except BaseException as error:
            self(to_bytes(gave_up(error, self.rank, self.size)))
            raise
        for word in filter(None, self(b"")):
            raise from_bytes(word)

    def _finish(self, request: Any) -> None:
        try:
            _wait_for(request, self.rank, self.size, self.deadline_s)
        except BaseException:
            _abandoned.append((self._comm, request))
            raise


@contextmanager
def _duplicate(comm: Any, deadline_s: float) -> Iterator[_MpiExchange]:
    """An exchange over a duplicate of `comm`, so that no message of ours is ever for a receive of the caller's."""
    key = _key_of_duplicate(comm.Create_keyval)
    # MPI begins no collective twice: where a rank came late to the last call, this one waits on for the same duplicate.
    own, request = comm.Get_attr(key) or comm.Idup()
    comm.Set_attr(key, (own, request))
    _wait_for(request, comm.Get_rank(), comm.Get_size(), deadline_s)
    comm.Delete_attr(key)
    before = len(_abandoned)
    try:
        yield _MpiExchange(own, deadline_s)
    finally:
        if len(_abandoned) == before:
            own.Free()


@functools.cache
def _key_of_duplicate(create_key: Callable[[], int]) -> int:
    """The key of the attribute in which a communicator keeps its duplicate, while not all ranks have come for it."""
    return create_key()


def _wait_for(request: Any, rank: int, size: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    pause_s = _SHORTEST_PAUSE_S
    while not request.Test():
        if time.monotonic() >= end:
            raise late("they are not in the same call of shardcomm", rank, size, deadline_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _kept_port(on_loopback: bool) -> int:
    """The port of this process's store."""
    if on_loopback not in _kept:
        _kept[on_loopback] = (
            serve_on_loopback()
            if on_loopback
            else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
    return _kept[on_loopback].port


def _reached(name: str, port: int, exchange: _MpiExchange) -> Store:
    """Rank 0's store, which is there already.

    Raises:
        CommError: It was not reached in half the deadline, so that the others hear of it in the rest.
    """
    within_s = exchange.deadline_s / 2

    def connect() -> Store:
        # First without torch, whose attempts to connect outlive the deadline where a name is not known.
        socket.create_connection((name, port), within_s).close()
        timeout = timedelta(seconds=exchange.deadline_s)
        return TCPStore(name, port, timeout=timeout, wait_for_workers=False)

    begun = Background(connect)
    try:
        if not begun.ended(within_s):
            raise TimeoutError("no answer")
        return begun.result()
    except (OSError, RuntimeError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        raise comm_error(
            "backend",
            f"rank {exchange.rank} of {exchange.size}: no rendezvous: rank 0 keeps the store at {name}:{port}, which "
            f"was not reached within {within_s:g} s: {said or first_line(error)}; each host must reach that of rank 0 "
            "by this name",
            rank=0,
            reporter=exchange.rank,
        ) from error


def check_mpi(operation: str, comm: Any) -> None:
    """Checks that `comm` is an intracommunicator of mpi4py with this process in it.

    Raises:
        TypeError: It is no communicator of mpi4py.
        ValueError: It is an intercommunicator, or has no group; or MPI does not run.
    """
    if not all(hasattr(comm, name) for name in ("Get_rank", "Idup", "Iallgatherv")):
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
