"""Ranks of `launch` that say who they are and wait, and whether they have ended."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_for_ever() -> None:
    threading.Event().wait()


def say_who(folder: Path) -> None:
    name = f"rank {os.environ['RANK']}"
    (folder / f".{name}").write_text(f"{os.getpid()} {os.getppid()}")
    (folder / f".{name}").rename(folder / name)  # whole


def wait_with_the_interpreter(folder: Path) -> None:
    say_who(folder)
    ctypes.PyDLL(None).pause()  # unlike a CDLL, it does not let go of the interpreter


def wait_without_the_interpreter(folder: Path) -> None:
    say_who(folder)
    wait_for_ever()


def return_and_never_end(folder: Path) -> None:
    say_who(folder)
    threading.Thread(target=wait_for_ever).start()


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
