"""The folders in a directory of checkpoints. The name says what a folder is, and a rename makes it another::

DIR/step-00000100                     complete
DIR/step-00000200                     complete, the newest
DIR/step-00000300.5f3a09c2.partial    being written, or left by a save that was killed
DIR/step-00000150.damaged             was complete, and is no longer what was saved
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from shardcomm.checkpoint.manifest import sync

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


def partial_folder(folder: Path) -> Path:
    """A folder that is not there yet, in which the files of the checkpoint at `folder` are written, or deleted."""
    step = folder.name.partition(".")[0]
    return folder.with_name(f"{step}.{secrets.token_hex(4)}{_PARTIAL}")


def partial_folders(directory: Path) -> list[Path]:
    """What saves and removals that did not end have left, or are about to write or delete."""
    return [path for path in directory.glob(f"step-*{_PARTIAL}") if path.is_dir()]


def remove(folder: Path) -> None:
    """Deletes a folder, complete or partial. It loses its name first, so that nobody takes what is left for the whole.

    Whether a save of another run becomes a checkpoint, or is removed, depends on whose rename comes first.
    """
    without_name = partial_folder(folder)
    with suppress(FileNotFoundError):  # another run has renamed or removed it
        folder.rename(without_name)
        # Otherwise the disk may have removed some of the files when the machine fails, and not yet the name.
        sync(folder.parent)
        shutil.rmtree(without_name)


def set_aside(damaged: Path) -> None:
    """Renames a damaged checkpoint, so that it no longer counts as one; its files stay for somebody to look at."""
    aside = damaged.with_name(damaged.name + _DAMAGED)
    if damaged.exists():
        if aside.exists():
            shutil.rmtree(aside)
        damaged.rename(aside)


def check_directory(given: str | os.PathLike[str]) -> Path:
    """Makes the directory if it is not there; ValueError if it has no name, cannot be made, or cannot be written to."""
    if not os.fspath(given):
        raise ValueError("'': a folder's name is not empty; the current folder is '.'")
    directory = Path(given)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory}: no such folder can be made: {error.strerror}") from error
    except ValueError as error:  # the name has a null byte
        raise ValueError(f"{str(directory)!r}: no such folder can be made: {error}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: the folder cannot be written to")
    return directory
