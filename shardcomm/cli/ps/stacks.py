"""Asks processes for their Python stacks, by a signal to those, and only those, that have said how.

A process that has called `enable_stack_dumps` has memory open whose label names the signal. Its stacks, and a line that
ends them, come into that memory.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from shardcomm import _C
from shardcomm.process import processes
from shardcomm.process.stack_dumps import LABEL

PATIENCE_S = 2.0
_PAUSE_S = 0.005


@dataclass(frozen=True)
class Stacks:
    """The stacks of all threads of a process, as faulthandler writes them; or a `reason` why there are none."""

    text: str | None
    reason: str = ""


def ask(pids: Iterable[int]) -> dict[int, Stacks]:
    """The stacks of each process. All are asked at once, and have `PATIENCE_S` seconds to answer."""
    end = time.monotonic() + PATIENCE_S
    answers: dict[int, Stacks] = {}
    memories: dict[int, int] = {}
    try:
        for pid in sorted(set(pids)):
            try:
                memories[pid] = _send(pid, end)
            except _NoStacksError as error:
                answers[pid] = Stacks(None, str(error))
        for pid, memory in memories.items():
            answers[pid] = _collect(memory, end)
    finally:
        for memory in memories.values():
            os.close(memory)
    return answers


class _NoStacksError(Exception):
    """A process shows no stacks; the message is the reason."""


def _send(pid: int, end: float) -> int:
    """Sends the signal; returns the memory, emptied, into which the answer comes. It is locked until it is closed."""
    try:
        process = os.pidfd_open(pid)  # first, so that all that follows is about this process
    except ProcessLookupError:
        raise _NoStacksError("it has ended") from None
    try:
        number, memory = _memory(pid)
        try:
            _lock(memory, end)
            os.ftruncate(memory, 0)
            signal.pidfd_send_signal(process, number)
        except BaseException:
            os.close(memory)
            raise
    except ProcessLookupError:
        raise _NoStacksError("it has ended") from None
    except PermissionError:
        raise _NoStacksError("it is not this user's") from None
    finally:
        os.close(process)
    return memory


def _memory(pid: int) -> tuple[int, int]:
    """The signal for which the process waits, and its memory, opened."""
    for label, fd in processes.memory_files(pid):
        number = label.removeprefix(LABEL)
        if label.startswith(LABEL) and number.isdigit() and processes.handles(pid, int(number)):
            memory = processes.open_of(pid, fd, os.O_RDWR)
            if memory is not None:
                return int(number), memory
    raise _NoStacksError("it has not called shardcomm.enable_stack_dumps()")


def _lock(memory: int, end: float) -> None:
    """Locks the memory against others who ask the same process."""
    while True:
        try:
            return fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise _NoStacksError("somebody else has asked it and not read the answer") from None
            time.sleep(_PAUSE_S)


def _collect(memory: int, end: float) -> Stacks:
    while True:
        content = os.pread(memory, os.fstat(memory).st_size, 0)
        if content.endswith(_C.end_of_stacks):
            text = content.removesuffix(_C.end_of_stacks).decode(errors="replace")
            return (
                Stacks(text) if text else Stacks(None, "it was writing them elsewhere; ask again")
            )
        if time.monotonic() > end:
            return Stacks(None, f"it has not answered within {PATIENCE_S:g} s")
        time.sleep(_PAUSE_S)
