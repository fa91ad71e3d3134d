"""N ranks as local processes, with the environment that torchrun would give them.

The launcher's process keeps the rendezvous store and watches the ranks. The ranks come from a fork server that has
loaded torch, so that a rank starts in milliseconds. Whatever happens to a rank or to the launcher, no rank is left::

    launcher ──► fork server ──► ranks
             │               the kernel kills a rank when the server ends, also one that is stopped
             the server ends when the launcher does; see `shardcomm.process.fork_server`

A rank that is not stopped also ends by itself, when the pipe between it and the launcher closes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import current_process
from multiprocessing.util import get_temp_dir
from typing import Any, TypeVar

from shardcomm.arguments.checks import check_list, check_seconds, check_type
from shardcomm.arguments.scalars import is_whole
from shardcomm.meeting.store import serve_on_loopback
from shardcomm.process.failures import (
    Failure,
    Order,
    ended,
    ended_before_the_call,
    ended_with_its_server,
    first_cause,
)
from shardcomm.process.launchable import check_launchable
from shardcomm.process.rank import Outcome, run_rank

T = TypeVar("T")

# How long the other ranks have to notice a failure and to say what they saw, before they are killed.
GRACE_S = 5.0
# How long ranks that have returned may take to end, before they are killed.
FINISH_S = 5.0
_SERVER_END_S = 1.0  # how long the fork server may take to end after its descriptors are closed


class RankError(RuntimeError):
    """A rank of `launch` failed. The message says which one and how, and then what became of the others."""


def launch(
    fn: Callable[..., T], ranks: int, args: Sequence[Any] = (), *, timeout_s: float | None = None
) -> list[T]:
    """Runs a function in new processes of this host, which are the ranks of a group.

    In the function, both `Communicator.from_env()` and `torch.distributed.init_process_group()` find the other ranks. A
    process that the function forks is no rank: it ends when it comes back from the function, and its result is dropped.
    A rank may launch ranks of its own. When all ranks have returned, each ends as a program does: it waits for its
    threads, runs its `atexit` functions, and ends the processes that it started by multiprocessing. A rank that takes
    longer than 5 s for that, or than `timeout_s` for the whole, is killed. Whatever happens, no rank is left. What a
    rank has started by `os.fork` or `subprocess` may outlive it, as after any program.

    Args:
        fn: The function. It must be one of a module, since it is pickled by its name.
        ranks: How many processes, at least 1.
        args: The arguments of `fn` on every rank; they are pickled.
        timeout_s: How long the whole may take, in seconds. None: any time. How long one rank waits for another in a
            collective is the communicator's own `deadline_s`.

    Returns:
        The results of the ranks, in order; they are pickled.

    Raises:
        TypeError: `fn` is no function, `args` is no list, or they cannot be pickled; or `fn` is of a program that ranks
            cannot import, such as one of `python -c` or of a notebook.
        ValueError: `ranks` or `timeout_s` is out of its range.
        RuntimeError: This process may start no ranks: it still imports the program, because the call is not under
            `if __name__ == "__main__":`; or it is a daemonic one of multiprocessing; or it was forked from a process
            that has called `launch`; or the program's file is not there.
        OSError: The folder for temporary files has too long a path for a socket, and this Python takes no other.
        RankError: A rank raised or was killed. The message begins with the first cause, before what followed from it.
        TimeoutError: Ranks still ran after `timeout_s`, and were killed.

    Example:
        ```py
        def train(steps):
            with shardcomm.Communicator.from_env() as comm:
                ...
            return loss

        if __name__ == "__main__":
            losses = shardcomm.launch(train, ranks=4, args=(100,))
        ```
    """
    check_type("launch", "fn", fn, Callable, "a function of a module")
    if not is_whole(ranks, 1):
        raise ValueError(f"launch: ranks is {ranks!r}; it must be a whole number of at least 1")
    check_list("launch", "args", args)
    if timeout_s is not None:
        check_seconds("launch", "timeout_s", timeout_s)
    check_launchable(fn)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardcomm", "shardcomm.process.fork_server"])
    _start_fork_server()
    store = serve_on_loopback()
    secret = secrets.token_hex(16)
    group = _Ranks(ranks)
    try:
        for rank in range(ranks):
            group.start(context, rank, (store.port, secret), fn, args)
        begun = time.monotonic()
        results = group.results(timeout_s)
        left_s = FINISH_S if timeout_s is None else begun + timeout_s - time.monotonic()
        group.let_finish(min(FINISH_S, left_s))
        return results
    finally:
        group.end()


def _start_fork_server() -> None:
    """Starts the fork server, unless it runs, with SIGINT blocked.

    The ranks inherit that, so that Ctrl-C reaches the launcher alone, however early it comes.
    """
    resource_tracker.ensure_running()  # here, since starting it unblocks SIGINT
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        # A folder of its own, which is removed with it. A rank has its launcher's folder until then.
        current_process()._config["tempdir"] = None  # type: ignore[attr-defined]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    except ChildProcessError:
        raise RuntimeError(
            "launch: this process was forked from one that has called launch, whose fork server is no child of this "
            "one; call launch there, or start this process anew, as subprocess and the start method 'spawn' do"
        ) from None
    except OSError as error:
        if str(error) != "AF_UNIX path too long":
            raise
        raise OSError(
            f"launch: the folder for temporary files is {tempfile.gettempdir()!r}, in which the path of a socket is "
            "longer than the 107 characters that it may have; set TMPDIR to a folder with a shorter path, such as /tmp"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _signal_that_killed_the_fork_server() -> int | None:
    """None if it still runs, or has ended otherwise."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:  # another thread is about to start a new one
        return None
    with suppress(OSError):
        end = os.pidfd_open(server)
        try:
            wait([end], _SERVER_END_S)
            # It stays for multiprocessing to collect.
            status = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        finally:
            os.close(end)
        if status is not None and status.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return status.si_status
    return None


class _Ranks:
    """The processes of one launch."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.processes: list[ForkServerProcess] = []
        self.outcomes: list[Outcome] = []
        # A rank reads the other end of its lifeline, and so learns that the launch is over, or the launcher gone.
        self.lifelines: list[Connection] = []

    def start(
        self,
        context: multiprocessing.context.ForkServerContext,
        rank: int,
        meeting: tuple[int, str],
        fn: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:
        outcome, tell = context.Pipe(duplex=False)
        watched, lifeline = context.Pipe(duplex=False)
        self.lifelines.append(lifeline)  # first, for a Ctrl-C while the process starts
        process = context.Process(
            target=run_rank,
            args=(rank, self.ranks, meeting, fn, tuple(args), tell, watched, get_temp_dir()),
            name=f"rank {rank}",
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"launch: fn and args must be what pickle can send to another process: {error}"
            ) from error
        except (EOFError, ConnectionError) as error:
            if self._killed_server is None:
                raise
            failure = ended_with_its_server(self._killed_server)
            raise RankError(first_cause({rank: failure})) from error
        tell.close()
        watched.close()
        self.processes.append(process)
        self.outcomes.append(Outcome(outcome))

    def results(self, timeout_s: float | None) -> list[Any]:
        """Waits for all ranks; raises the first cause when a rank has failed."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        pending = set(range(self.ranks))
        while pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            pipes = [self.outcomes[rank].pipe for rank in pending]
            ready = wait([*pipes, *(self.processes[rank].sentinel for rank in pending)], left)
            if not ready:
                break
            for rank in sorted(pending):
                outcome = self.outcomes[rank]
                if outcome.pipe.poll():
                    if outcome.read() and not outcome.whole:
                        continue
                # A rank may have ended while a process that it forked keeps its pipe open.
                elif self.processes[rank].sentinel not in ready:
                    continue
                ok, value = self._outcome(rank)
                pending.remove(rank)
                if ok:
                    results[rank] = value
                else:
                    if not failures:
                        grace_end = time.monotonic() + GRACE_S
                        end = grace_end if end is None else min(end, grace_end)
                    failures[rank] = value
        if failures:
            raise RankError(first_cause(failures))
        if pending:
            raise TimeoutError(
                f"launch: ranks {sorted(pending)} of {self.ranks} still ran after {timeout_s:g} s"
            )
        return [results[rank] for rank in range(self.ranks)]

    def _outcome(self, rank: int) -> tuple[bool, Any]:
        if not self.outcomes[rank].whole:
            return False, self._end_of(rank)
        try:
            ok, value = self.outcomes[rank].value()
        except Exception as error:
            said = f"returned what cannot be unpickled here: {type(error).__name__}: {error}"
            return False, Failure(Order.OWN, said)
        return bool(ok), value

    @cached_property
    def _killed_server(self) -> int | None:
        return _signal_that_killed_the_fork_server()

    def _end_of(self, rank: int) -> Failure:
        """How a process has ended that left no result."""
        process = self.processes[rank]
        process.join(GRACE_S)
        # Then nobody knows the rank's own status, and multiprocessing says 255.
        if process.exitcode == 255 and self._killed_server is not None:
            return ended_with_its_server(self._killed_server)
        if not self.outcomes[rank].begun:
            return ended_before_the_call(process.exitcode)
        return ended(process.exitcode)

    def let_finish(self, within_s: float) -> None:
        """Waits for the ranks, which have returned, to end."""
        end = time.monotonic() + within_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))

    def end(self) -> None:
        """Kills the ranks that still run."""
        for lifeline in self.lifelines:
            with suppress(BrokenPipeError):  # that rank has ended
                lifeline.send_bytes(b"over")
            lifeline.close()
        for process in self.processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for outcome in self.outcomes:
            outcome.pipe.close()
