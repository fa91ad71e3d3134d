"""The folders in a directory of checkpoints. The name says what a folder is, and a rename makes it another::

DIR/step-00000100            complete
DIR/step-00000200            complete, the newest
DIR/step-00000300.partial    being written, or left by a save that was killed
DIR/step-00000150.damaged    was complete, and is no longer what was saved
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_DAMAGED = ".damaged"


def checkpoint_folder(directory: Path, step: int) -> Path:
    """The folder of the complete checkpoint of `step`."""
    return directory / f"step-{step:08d}"


def complete_steps(directory: Path) -> list[int]:
    """The steps of which there are complete checkpoints, in order."""
    names = (_COMPLETE.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


def partial_folder(complete: Path) -> Path:
    """The folder in which the checkpoint `complete` is written, and in which its files are deleted."""
    return complete.with_name(complete.name + _PARTIAL)


def partial_folders(directory: Path) -> Iterator[Path]:
    """What saves and removals that did not end have left."""
    return directory.glob(f"step-*{_PARTIAL}")


def set_aside(damaged: Path) -> None:
    """Renames a damaged checkpoint, so that it no longer counts as one; its files stay for somebody to look at."""
    aside = damaged.with_name(damaged.name + _DAMAGED)
    if damaged.exists():
        if aside.exists():
            shutil.rmtree(aside)
        damaged.rename(aside)


def check_directory(directory: Path) -> None:
    """Makes `directory` if it is not there; ValueError if it cannot be made, or cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory}: no such folder can be made: {error.strerror}") from error
    except ValueError as error:  # the name has a null byte
        raise ValueError(f"{str(directory)!r}: no such folder can be made: {error}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: the folder cannot be written to")
