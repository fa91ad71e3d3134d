"""Python stacks on request: `kill -USR1 PID` prints them, `shardcomm ps --stacks` reads them.

Both signals are handled by faulthandler, which runs in C, whatever the main thread is in::

    SIGUSR1 (or another)    writes all threads' stacks to stderr, and then what the ranks are in: as soon as the main
                            thread runs Python, or wakes up in a wait of shardcomm's
    a real-time signal      writes all threads' stacks, and a line that ends them, into memory that `ps` opens. No
                            program uses this signal, so that `ps` never calls a SIGUSR1 handler of the program's own
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
from shardcomm.process import own_groups

LABEL = "shardcomm-stacks-"
"""The name of that memory in /proc/PID/fd, before the signal's number."""

_STDERR = 2
_printing: set[int] = set()
_answers: list[int] = []  # the memory's descriptor, if there is one


def enable_stack_dumps(on: int | None = signal.SIGUSR1) -> None:
    """Lets this process show its threads' stacks: on stderr when it gets a signal, and to `shardcomm ps --stacks`.

    The process then goes on where it was. Its system calls are restarted, except for the few that every signal ends
    (see signal(7): poll and the like). The ranks of `launch` and of `shardcomm train` have called it already, with
    `on=None` where SIGUSR1 had a handler.

    Args:
        on: The signal on which stacks, and what the ranks are in, go to stderr. None: no signal.

    Raises:
        RuntimeError: `on` has a handler already, which stays; or this is not the main thread; or every real-time signal
            has a handler.
        ValueError: There is no such signal, or a process cannot handle it.

    Example:
        ```py
        shardcomm.enable_stack_dumps()  # then: kill -USR1 PID, or shardcomm ps --stacks
        ```
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
    """Calls `enable_stack_dumps` for shardcomm's own commands; a SIGUSR1 handler that is there stays."""
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
    text = own_groups.report() or "in no group of several ranks\n"
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
    known = os.fstat(fd).st_ino

    def replace() -> None:
        """Gives a child memory of its own, under the descriptor that the handlers know."""
        nonlocal known
        # Daemons close all that they have inherited: the descriptor may be none, or one of the program's own.
        try:
            is_ours = os.fstat(fd).st_ino == known
        except OSError:
            return
        if not is_ours:
            return
        own = _memory(number)
        known = os.fstat(own).st_ino
        os.dup2(own, fd, inheritable=False)
        os.close(own)

    return replace


def _memory(number: int) -> int:
    fd = os.memfd_create(f"{LABEL}{number}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # `ps` empties it when it has read it
    return fd
