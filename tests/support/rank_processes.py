"""Ranks as processes of a test: started, heard, and killed by it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

from shardcomm import _C
from shardcomm.comm.core import CoreCommunicator


def join(
    rank: int, ranks: int, address: str, meeting: str, backend: str = "gloo"
) -> CoreCommunicator:
    """This process among the ranks, for the communicator and for torch."""
    torch.set_num_threads(1)
    # What Gloo does not notice ends with its timeout, which is half an hour by default.
    timeout = timedelta(seconds=10)
    dist.init_process_group(
        backend, f"file://{meeting}", timeout=timeout, world_size=ranks, rank=rank
    )
    return CoreCommunicator(_C.make_shm(address, rank, ranks, 60.0))


@contextmanager
def processes(
    target: Callable[..., None], ranks: int, meeting: Path, *args: object
) -> Iterator[tuple[list[ForkServerProcess], list[Connection]]]:
    """target(rank, tell, ranks, address, meeting, *args) in each; they, and what they tell. None is left afterwards."""
    context = get_context("forkserver")
    session = _C.ShmSession(ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        context.Process(
            target=target, args=(rank, tell, ranks, session.address, str(meeting), *args)
        )
        for rank, (_, tell) in enumerate(pipes)
    ]
    try:
        for process in started:
            process.start()
        for _, tell in pipes:
            tell.close()
        yield started, [listen for listen, _ in pipes]
    finally:
        for process in started:
            process.kill()
            process.join(10)
            process.close()
        del session


def kill(process: ForkServerProcess) -> int:
    """Its pid."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    return process.pid


def heard(ear: Connection, *context: object) -> str:
    assert ear.poll(60), context
    said: str = ear.recv()
    return said
