"""Two hosts of two ranks each, which are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardcomm import Communicator
from support.thread_ranks import run_threads

RANKS, HOST = 4, 2

T = TypeVar("T")


def on_two_hosts(fn: Callable[[Communicator, Communicator], T]) -> list[T]:
    """fn(comm, host) of each of 4 thread ranks."""
    groups = [Communicator.local_group(HOST, deadline_s=60) for _ in range(RANKS // HOST)]
    hosts = [each for group in groups for each in group]

    def body(comm: Communicator) -> T:
        try:
            return fn(comm, hosts[comm.rank])
        except BaseException as error:
            hosts[comm.rank].abort(f"{type(error).__name__}: {error}")
            raise

    return run_threads(body, RANKS)
