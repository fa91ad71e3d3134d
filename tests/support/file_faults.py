"""Counts the operations on files below a folder. The n-th fails, falls short, or is this process's last.

Counted are the functions of `os`, and `io.open` with what it gives. Whatever Python code does to files goes through
them: pathlib and shutil too, and torch.save and torch.load when they are given open files.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# By the position of their path; the rest of the arguments is passed on.
_FUNCTIONS = (
    "open",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "scandir",
    "listdir",
)


class Faults:
    """Operations below `folder`, and `act(operation, path)` before the n-th of them, from 1.

    Attributes:
        log: the operations, each with its path.
    """

    def __init__(self, folder: Path, n: int, act: Callable[[str, str], None]) -> None:
        self.log: list[tuple[str, str]] = []
        self._folder = os.path.realpath(folder)
        self._n, self._act = n, act
        self._lock = threading.Lock()
        self._open = io.open

    @property
    def reached(self) -> bool:
        """Whether there was an n-th."""
        return len(self.log) >= self._n

    @contextmanager
    def __call__(self) -> Iterator[Faults]:
        functions = {name: self._counted(name) for name in _FUNCTIONS}
        with (
            mock.patch.object(io, "open", self._open_counted),
            mock.patch.multiple(os, **functions),
        ):
            yield self

    def point(self, operation: str, path: object, dir_fd: int | None = None) -> None:
        """Here an operation begins."""
        where = _path(path, dir_fd)
        if where != self._folder and not where.startswith(self._folder + os.sep):
            return
        with self._lock:
            self.log.append((operation, where))
            now = len(self.log) == self._n
        if now:
            self._act(operation, where)

    def _counted(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def counted(path: Any = ".", *args: Any, **options: Any) -> Any:
            self.point(name, path, options.get("dir_fd"))
            return function(path, *args, **options)

        # shutil.rmtree asks os whether these may have a dir_fd, or be given a descriptor.
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in supported:
                supported.add(counted)
        return counted

    def _open_counted(
        self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any
    ) -> Any:
        if isinstance(file, int):
            return self._open(file, mode, buffering, *args, **options)
        self.point("open", file)
        raw = _Raw(os.fspath(file), mode.replace("b", "").replace("t", ""), self)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)


class _Raw(io.FileIO):
    def __init__(self, path: str, mode: str, faults: Faults) -> None:
        super().__init__(path, mode)
        self._faults = faults

    def write(self, data: Any, /) -> int:
        try:
            self._faults.point("write", self.name)
        except ShortWriteError:
            return super().write(memoryview(data).cast("B")[:1])
        return super().write(data)

    def readinto(self, buffer: Any, /) -> int | None:
        self._faults.point("read", self.name)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._faults.point("read", self.name)
        return super().readall()


class ShortWriteError(Exception):
    """Raised by `act`, to have a write take one byte only; not seen by who writes."""


def _path(path: object, dir_fd: int | None) -> str:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    given = os.fsdecode(path)  # type: ignore[arg-type]
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), given) if dir_fd else given
