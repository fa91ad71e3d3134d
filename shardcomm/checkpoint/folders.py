"""The folders in a directory of checkpoints. The name says what a folder is, and a rename makes it another::

DIR/step-00000100                     complete
DIR/step-00000200                     complete, the newest
DIR/step-00000300.5f3a09c2.partial    being written, or left by a save that was killed
DIR/step-00000150.damaged             was complete, and is no longer what was saved

A checkpoint at a path of its own, a folder or a file, is replaced by the next one at that path::

    DIR/last.ckpt                         complete
    DIR/last.ckpt.5f3a09c2.partial        as above
    DIR/last.ckpt.81d2c6f0.replaced       complete: it was DIR/last.ckpt until the newer one, which is complete as well,
                                          was about to get this name
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardcomm.checkpoint.manifest import MANIFEST, sync

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_BESIDE = re.compile(r"\.[0-9a-f]{8}\.(partial|replaced)$")
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
    step = _BESIDE.sub("", folder.name)  # or the name of a checkpoint that has one of its own
    return folder.with_name(f"{step}.{secrets.token_hex(4)}{_PARTIAL}")


def partial_folders(directory: Path) -> list[Path]:
    """What saves and removals that did not end have left, or are about to write or delete."""
    return [path for path in directory.glob(f"step-*{_PARTIAL}") if path.is_dir()]


def remove(folder: Path) -> None:
    """Deletes a checkpoint, complete or partial. It loses its name first, so that nobody takes what is left for it.

    Whether a save of another run becomes a checkpoint, or is removed, depends on whose rename comes first.
    """
    without_name = partial_folder(folder)
    with suppress(FileNotFoundError):  # another run has renamed or removed it
        folder.rename(without_name)
        # Otherwise the disk may have removed some of the files when the machine fails, and not yet the name.
        sync(folder.parent)
        if without_name.is_dir() and not without_name.is_symlink():
            shutil.rmtree(without_name)
        else:
            without_name.unlink()


def begin(path: Path) -> Path:
    """Begins a save to `path`: makes the folder that it is in, and removes what saves that were killed have left.

    Returns:
        The partial folder, or file, to write; `replace` then gives it the name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if (before := at(path)) != path:
        before.rename(path)
    for left in list(_beside(path)):
        remove(left)
    return partial_folder(path)


def replace(path: Path, partial: Path) -> None:
    """Gives `partial` the name `path`, and then removes what had it before.

    The files in `partial` must be on the disk. Whenever this process is killed, `at(path)` is one of the two.
    """
    sync(partial)
    if partial.is_file() and not path.is_dir():
        partial.replace(path)  # at once
        sync(path.parent)
        return
    replaced = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_REPLACED}")
    with suppress(FileNotFoundError):  # nothing was at `path`
        path.rename(replaced)
    partial.rename(path)
    sync(path.parent)
    remove(replaced)


def at(path: Path) -> Path:
    """Where the checkpoint of `path` is: there or, if a `replace` was killed or is under way, where that has put it."""
    aside = [] if path.exists() else [p for p in _beside(path) if p.suffix == _REPLACED]
    return aside[0] if aside else path


def set_aside(damaged: Path) -> None:
    """Renames a damaged checkpoint, so that it no longer counts as one; its files stay for somebody to look at."""
    aside = damaged.with_name(damaged.name + _DAMAGED)
    if damaged.exists():
        if aside.exists():
            shutil.rmtree(aside)
        damaged.rename(aside)


def last_changed(folder: Path) -> tuple[int | None, int | None]:
    """When a checkpoint's folder and its manifest were last changed; another checkpoint of the same step differs in it.

    Numbers of inodes are left out: over some network file systems the same folder gets another one after a while.
    """
    return _changed(folder), _changed(folder / MANIFEST)


def check_directory(given: str | os.PathLike[str]) -> Path:
    """Makes the directory if it is not there; ValueError if it has no name, cannot be made, or cannot be written to."""
    if not os.fspath(given):
        raise ValueError("'': a folder's name is not empty; the current folder is '.'")
    directory = Path(given)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"{str(directory)!r} is a file; it must be a folder") from None
    except OSError as error:
        raise ValueError(f"{directory}: no such folder can be made: {error.strerror}") from error
    except ValueError as error:  # the name has a null byte
        raise ValueError(f"{str(directory)!r}: no such folder can be made: {error}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: the folder cannot be written to")
    return directory


def _changed(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def _beside(path: Path) -> Iterator[Path]:
    """What saves to `path` have named `.partial` and `.replaced`."""
    for ending in (_PARTIAL, _REPLACED):
        for other in path.parent.glob(f"*{ending}"):
            if other != path and _BESIDE.sub("", other.name) == path.name:
                yield other
