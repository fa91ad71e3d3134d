"""`manifest.json`: which files a checkpoint is made of, how long each is, and its checksum::

    {"format": 1, "step": 200, "ranks": 2, "files": {"__0_0.distcp": {"bytes": 8134, "crc32": "9f1c03ab"}, ...}}

It is written last and read first. CRC-32 (zlib's, several GB/s a core) finds every flipped bit, and all but one in 4
billion cases of other damage. It is no signature: whoever can write files can write their checksums.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1

_CHUNK_BYTES = 1 << 20
# The errors of a disk that has lost a file, or part of it. Other errors say nothing about the file.
_LOST = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.EUCLEAN)


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. The message says which rank failed, which file it was, and why."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was saved. The message names the file."""


@dataclass(frozen=True)
class FileEntry:
    """What a manifest says of a file: its length, and its CRC-32 as 8 hexadecimal digits."""

    bytes: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """The entry of the file at `path`, which is read."""
        crc32 = length = 0
        buffer = bytearray(_CHUNK_BYTES)
        with _naming(path), path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc32 = zlib.crc32(memoryview(buffer)[:count], crc32)
                length += count
        return cls(length, f"{crc32:08x}")


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint; see the module.

    Attributes:
        step: The step of the checkpoint.
        ranks: How many ranks saved it.
        files: The files by their names in the checkpoint's folder, with / between folders.
    """

    step: int
    ranks: int
    files: dict[str, FileEntry]

    def write(self, folder: Path) -> None:
        """Writes the manifest into `folder`, and syncs it to the disk."""
        path = folder / MANIFEST
        with _naming(path), path.open("w") as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path, step: int) -> Manifest:
        """Reads the manifest of the checkpoint of `step`.

        Raises:
            DamagedError: There is none, or it is not a manifest of that step.
            OSError: It could not be read, for another reason.
        """
        path = folder / MANIFEST
        with _damage(path, "; without it nothing tells whether the checkpoint is whole"):
            text = path.read_bytes()
        try:
            manifest = cls._parsed(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{path}: not a manifest: {error}") from error
        if manifest.step != step:
            raise DamagedError(f"{path}: it is of step {manifest.step}, in the folder of {step}")
        return manifest

    @classmethod
    def _parsed(cls, value: Any) -> Manifest:
        """The manifest that `value` describes; ValueError if it describes none."""
        match value:
            case {"format": int(number)} if number != FORMAT:
                raise ValueError(f"its format is {number}; this version reads {FORMAT}")
            case {"format": int(), "step": int(step), "ranks": int(ranks), "files": dict(files)}:
                return cls(step, ranks, {name: _entry(name, each) for name, each in files.items()})
        raise ValueError("it must have 'format', 'step', 'ranks' and 'files'")

    def verify(self, folder: Path, names: Iterable[str]) -> None:
        """Reads these files, and compares them with the manifest.

        Raises:
            DamagedError: A file is not in the manifest, or differs from its entry there.
            OSError: A file could not be read, for another reason than damage.
        """
        for name in names:
            path = folder / name
            if name not in self.files:
                raise DamagedError(f"{path}: it is not in {MANIFEST}")
            wanted = self.files[name]
            with _damage(path):
                found = FileEntry.of(path)
            if found.bytes != wanted.bytes:
                raise DamagedError(f"{path}: it has {found.bytes} bytes; {wanted.bytes} were saved")
            if found != wanted:
                raise DamagedError(
                    f"{path}: its checksum is {found.crc32}; {wanted.crc32} was saved"
                )

    def verify_share(self, folder: Path, rank: int, ranks: int) -> None:
        """Verifies that `folder` has exactly these files, and reads one in `ranks` of them; errors as `verify`."""
        with _damage(folder):
            there = files_in(folder)
        for name in sorted(self.files.keys() ^ (set(there) - {MANIFEST})):
            state = "it is not there" if name in self.files else f"it is not in {MANIFEST}"
            raise DamagedError(f"{folder / name}: {state}")
        self.verify(folder, sorted(self.files)[rank::ranks])


def files_in(folder: Path) -> list[str]:
    """The names of all files in `folder` and below, sorted."""
    found = []
    for where, _, names in os.walk(folder, onerror=_raise):
        found += [(Path(where) / name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def sync_folders(folder: Path) -> None:
    """Syncs the entries of `folder`, and of the folders below it, to the disk."""
    for where, _, _ in os.walk(folder, onerror=_raise):
        sync(Path(where))


def sync(path: Path) -> None:
    """Syncs the content of a file to the disk, or the entries of a folder, but not the files in that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(name: str, value: Any) -> FileEntry:
    match value:
        case {"bytes": int(length), "crc32": str(crc32)}:
            return FileEntry(length, crc32)
    raise ValueError(f"{name!r} must have 'bytes' and 'crc32'")


@contextmanager
def _damage(path: Path, meaning: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise DamagedError(f"{error.filename or path}: {error.strerror}{meaning}") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A context in which an OSError names the file, also where it comes from a file that was opened already."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _raise(error: OSError) -> None:
    raise error
