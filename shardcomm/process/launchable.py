"""What a process, and the program that it runs, must be for `launch`: children allowed, and importable by the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import process, spawn
from typing import Any


def check_launchable(fn: Callable[..., Any]) -> None:
    """Checks that this process may start ranks, and that they can import `fn`, and the program before it.

    Raises:
        RuntimeError: The process is daemonic or still imports the program, or the program's file is not there.
        TypeError: `fn` is of a program that ranks cannot import.
    """
    this = process.current_process()
    if getattr(this, "_inheriting", False):
        raise RuntimeError(
            "launch: this process still imports the program, as each rank of launch does before it calls fn; put the "
            'call of launch under `if __name__ == "__main__":`, so that an import does not launch ranks again'
        )
    if this.daemon:
        raise RuntimeError(
            "launch: this process is a daemonic one of multiprocessing, which may start no other; start it with "
            "daemon=False (the workers of a Pool are always daemonic)"
        )
    program = spawn.get_preparation_data("rank")
    name, path = program.get("init_main_from_name"), program.get("init_main_from_path")
    is_there = path is not None and os.path.exists(path)
    # Ranks do not import a `__main__.py`, which most often runs without asking for its name.
    imported = is_there or (name is not None and name.rpartition(".")[2] != "__main__")
    if getattr(fn, "__module__", None) == "__main__" and not imported:
        raise TypeError(
            f"launch: fn is {fn!r} of a program that ranks cannot import, such as one of `python -c`, of standard "
            "input, of a notebook, or a `__main__.py`; put it in a module that they can import"
        )
    if path is not None and not is_there:
        raise RuntimeError(
            f"launch: the program's file is {path!r}, which is not there; ranks import the program, so it must be a "
            "file, and not standard input"
        )
