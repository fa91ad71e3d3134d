"""Python stacks on request: `kill -USR1 PID` prints them, `shardcomm ps --stacks` reads them.

Both signals' handlers are faulthandler's, which runs in C, whatever the main thread is in::

    SIGUSR1 (or another)    all threads' stacks to stderr, then what the ranks are in: as soon as the main thread runs
                            Python, or looks up from a wait of ours
    a real-time signal      all threads' stacks, and a line that ends them, into memory that `ps` opens. No program
                            uses this one: a SIGUSR1 handler of its own is never called because somebody looks
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

from shardcomm import _C
from shardcomm.comm import pending

LABEL = "shardcomm-stacks-"
"""How /proc/PID/fd shows the memory; then comes the signal's number."""

_STDERR = 2
_printing: set[int] = set()
_answers: list[int] = []  # the memory's descriptor, once there is one


def enable_stack_dumps(on: int | None = signal.SIGUSR1) -> None:
    """Has this process tell where it is: to stderr on signal `on` (None: on no signal), and to `shardcomm ps --stacks`.

    It then goes on where it was: system calls are restarted, but for the few that a signal always ends (signal(7): poll
    and its like), as for any signal. The ranks of `launch` and of `shardcomm train` have called this; where SIGUSR1 had
    a handler already, with `on=None`.

    Raises:
        RuntimeError: `on` has a handler, which stays, or this is not the main thread.
        ValueError: there is no such signal, or none that a process can handle.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "enable_stack_dumps: call it from the main thread, which handles signals"
        )
    if on is not None and on not in _printing:
        _print_on(on)
    if not _answers:
        _answer()


def enable_where_free() -> None:
    """For our own commands: as `enable_stack_dumps`, with a SIGUSR1 handler that is there left as it is."""
    taken = _C.has_handler(signal.SIGUSR1)
    enable_stack_dumps(None if taken else signal.SIGUSR1)


def _print_on(number: int) -> None:
    if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        raise ValueError(
            f"enable_stack_dumps: on is {number!r}; it must be a signal that a process can handle, or None"
        )
    if _C.has_handler(number):
        raise RuntimeError(
            f"enable_stack_dumps: {signal.Signals(number).name} has a handler, which stays; give another signal, such "
            "as on=signal.SIGUSR2, or on=None for `shardcomm ps --stacks` alone"
        )
    signal.signal(number, _print_pending)
    _C.dump_then(number, partial(faulthandler.register, number, file=_STDERR))
    _printing.add(number)


def _print_pending(number: int, frame: object) -> None:
    text = pending.report() or "in no group of several ranks\n"
    os.write(_STDERR, f"shardcomm, process {os.getpid()}:\n{text}".encode())


def _answer() -> None:
    free = (n for n in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1) if not _C.has_handler(n))
    number = next(free, None)
    if number is None:
        raise RuntimeError("enable_stack_dumps: every real-time signal has a handler")
    fd = _memory(number)
    _C.dump_then(number, partial(faulthandler.register, number, file=fd), fd)
    os.register_at_fork(after_in_child=_in_child(number, fd))
    _answers.append(fd)


def _in_child(number: int, fd: int) -> Callable[[], None]:
    def replace() -> None:
        """A child has memory of its own, under the descriptor that the handlers know."""
        own = _memory(number)
        os.dup2(own, fd, inheritable=False)
        os.close(own)

    return replace


def _memory(number: int) -> int:
    fd = os.memfd_create(f"{LABEL}{number}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # who reads it empties it
    return fd
