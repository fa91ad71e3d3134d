"""What runs in a process that `launch` has started as a rank, and what the rank sends to the launcher."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch

from shardcomm.meeting.launchers import forget
from shardcomm.meeting.store import SECRET
from shardcomm.process.failures import raised
from shardcomm.process.parent import signal_at_its_end
from shardcomm.process.stack_dumps import enable_where_free

_CHUNK_BYTES = 1 << 20


class Outcome:
    """What a rank sends: a byte when it begins, and later a length in 8 bytes, and a pickle.

    It is read as it comes, since a rank may stop in the middle.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._received = bytearray()

    @staticmethod
    def begin(tell: Connection) -> None:
        """Says that the rank has imported what it needs, and is about to call its function."""
        with suppress(BrokenPipeError):  # the launcher is gone, and ends this rank
            os.write(tell.fileno(), b"b")

    @staticmethod
    def send(tell: Connection, outcome: bytes) -> None:
        """Writes `outcome` to the pipe; waits until all of it is there."""
        with open(tell.fileno(), "wb", closefd=False) as pipe:
            pipe.write(len(outcome).to_bytes(8))
            pipe.write(outcome)

    def read(self) -> bool:
        """Takes the bytes that have come; False at the end of the pipe."""
        received = os.read(self.pipe.fileno(), _CHUNK_BYTES)
        self._received += received
        return bool(received)

    @property
    def begun(self) -> bool:
        """Whether the rank was about to call its function."""
        return bool(self._received)

    @property
    def whole(self) -> bool:
        """Whether all bytes have come."""
        there = len(self._received)
        return there >= 9 and there == 9 + int.from_bytes(self._received[1:9])

    def value(self) -> Any:
        """The object that was sent. It may raise anything, as unpickling does."""
        return pickle.loads(memoryview(self._received)[9:])


def run_rank(
    rank: int,
    ranks: int,
    meeting: tuple[int, str],  # the store's port, and the run's secret
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    tell: Connection,
    watched: Connection,
    temp_dir: str,
) -> None:
    """Calls fn(*args) as this rank, and sends what it returns or raises through `tell`.

    `watched` closes when the launch is over or the launcher gone; `temp_dir` is the folder of the fork server's socket.
    """
    _die_with_launcher(watched)
    Outcome.begin(tell)
    # Ctrl-C reaches the whole terminal; the launcher decides for all ranks. (Blocked already, unless the fork server
    # was started by someone else.)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enable_where_free()
    threading.Thread(target=_end_with_launcher, args=(watched, temp_dir), daemon=True).start()
    forget(os.environ)  # the environment of the launcher that started this launcher
    port, os.environ[SECRET] = meeting
    # All ranks are on this host, so that the connections of torch's Gloo need no other interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the launcher's store, as under torchrun
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    pid = os.getpid()
    try:
        # By value. Torch's own pickling would share the tensors' memory, which ends with this process.
        outcome = pickle.dumps((True, fn(*args)))
    except BaseException as error:
        if os.getpid() != pid:
            raise
        outcome = pickle.dumps((False, raised(error)))
    if os.getpid() == pid:  # not a process that fn forked, which came back from it too
        Outcome.send(tell, outcome)
        # As an interpreter ends. Multiprocessing goes on from here, and leaves the atexit functions out.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _die_with_launcher(watched: Connection) -> None:
    """Makes the kernel kill this rank when the fork server ends, and the fork server end when the launcher does."""
    signal_at_its_end(signal.SIGKILL)
    # The server ends when nobody can write to its pipe any more: the launcher, and all processes that were forked. This
    # rank gives up its end of the pipe, since it may be stopped and would keep the server.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, forkserver._forkserver._forkserver_alive_fd, inheritable=False)  # type: ignore[attr-defined]
    os.close(null)
    if watched.poll(0):  # the server and the launcher ended before the signal was set
        os._exit(1)


def _end_with_launcher(watched: Connection, temp_dir: str) -> None:
    """Ends this rank with the launch; removes the fork server's socket if the launcher was killed and cannot do so."""
    try:
        watched.recv_bytes()
    except (EOFError, OSError):
        shutil.rmtree(temp_dir, ignore_errors=True)
    os._exit(1)
