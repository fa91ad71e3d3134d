"""Holds rank processes at a gate until the test opens it, and polls for a state with a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from shardcomm import launch

T = TypeVar("T")

DEADLINE_S = 60.0


class Gate:
    """A pipe in the file system: who is at it goes on once it has been opened, or its maker has died."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        os.mkfifo(self.path)
        self._writer: int | None = os.open(self.path, os.O_RDWR)

    def open(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None


def wait_at(gate: Path) -> None:
    """Returns at once where the gate was opened before."""
    with suppress(OSError), os.fdopen(os.open(gate, os.O_RDONLY | os.O_NONBLOCK)) as pipe:
        os.set_blocking(pipe.fileno(), True)
        pipe.read()


def until(look: Callable[[], T], what: str) -> T:
    """The first value of look() that is true."""
    end = time.monotonic() + DEADLINE_S
    while not (value := look()):
        assert time.monotonic() < end, f"it never came to that: {what}"
        time.sleep(0.005)
    return value


@contextmanager
def launched(
    fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], gate: Gate
) -> Iterator[list[Any]]:
    """Runs launch(fn, ranks, args) while the body looks on; opens the gate after it. The list then has the results."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.extend(launch(fn, ranks, args, timeout_s=DEADLINE_S))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        gate.open()
        thread.join()
    if errors:
        raise errors[0]
