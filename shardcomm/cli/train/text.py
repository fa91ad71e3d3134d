"""The text to train on: by default the Python sources of the interpreter's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

MAX_BYTES = 32 << 20
# Folders that are not the library itself: installed packages, and test data with bytes that are no text.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus:
    """A text, and random windows of it. A window depends only on the seed, the step and the rank."""

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) < context + 2:
            raise ValueError(
                f"the text has {len(text)} bytes; with --context {context} it must have at least {context + 2}"
            )
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def batch(
        self, seed: int, step: int, rank: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of a step: `size` windows, and the same windows one byte further.

        Returns:
            Two int64 tensors of shape (size, context).
        """
        generator = torch.Generator().manual_seed(hash((seed, step, rank)) & 0x7FFFFFFFFFFFFFFF)
        last = len(self.bytes) - self.context - 1
        starts = torch.randint(0, last + 1, (size,), generator=generator)
        windows = self.bytes[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def read_text(path: str | None) -> bytes:
    """Reads a text of at most `MAX_BYTES`.

    Files are read in sorted order, so that every rank and every run has the same text.

    Args:
        path: A file, or a folder, of which all files are read that are not hidden. None: the standard library.

    Raises:
        ValueError: There is no such path, or no text in it.
    """
    if path is None:
        files = _files(Path(sysconfig.get_path("stdlib")), "*.py", _SKIPPED.__contains__)
    elif path and Path(path).is_dir():
        files = _files(Path(path), "*", lambda part: part.startswith("."))
    elif Path(path).is_file():
        files = [Path(path)]
    else:
        there_is = (
            "neither a file nor a folder"
            if path and Path(path).exists()
            else "no such file or folder"
        )
        raise ValueError(f"--text is {path!r}; there is {there_is}")
    text = bytearray()
    for file in files:
        with file.open("rb") as opened:
            text += opened.read(MAX_BYTES - len(text))
    if not text:
        raise ValueError(f"--text is {path!r}; there is no text in it")
    return bytes(text)


def _files(folder: Path, pattern: str, skipped: Callable[[str], bool]) -> list[Path]:
    """The files below `folder`, sorted, without those with a name, or in a folder with a name, that is `skipped`."""
    return sorted(
        file
        for file in folder.rglob(pattern)
        if file.is_file() and not any(map(skipped, file.relative_to(folder).parts))
    )
