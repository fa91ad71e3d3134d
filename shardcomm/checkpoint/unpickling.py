"""Checks what loading a checkpoint would run, without running it.

DCP unpickles a checkpoint's `.metadata`, and those entries of the other files that are no tensors (an optimizer's
groups, for example). A pickle can name any function to be called. So each name in the metadata is compared with the
names that DCP itself writes there, and the entries are read by torch's unpickler of plain values (`torch.load` with
`weights_only`). DCP reads tensors by that unpickler anyway.
"""

from __future__ import annotations

import io
import operator
import pickle
import pickletools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcomm.checkpoint.manifest import CheckpointError

# The classes of which DCP's metadata consist: values, for which a pickle gives the arguments, and records, for which it
# gives the attributes. The names of dtypes are looked up in torch.
_VALUES = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its module in Python 3.13
}
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


def check_unpickling(folder: Path, files: frozenset[str]) -> None:
    """Checks that loading from `folder`, which consists of `files`, runs nothing but DCP and torch.

    Raises:
        CheckpointError: Loading would run something else, or a file is no pickle; the message names the file, and the
            class.
        OSError: A file cannot be read.
    """
    for metadata in sorted(files):
        if not metadata.rpartition("/")[2].endswith(".metadata"):
            continue
        path = folder / metadata
        for stored in _stored(path):
            if stored.file not in files:
                raise CheckpointError(
                    f"{path}: refused: {stored.key!r} is in {stored.file!r}, no file of the checkpoint"
                )
            if not stored.is_tensor:
                _check_values(folder / stored.file, stored)


class _Value:
    """Stands for a value, whatever its arguments are."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes a {type(self).__name__}")


class _Record(_Value):
    """Stands for a record, and takes its attributes, but no names with two underscores, which could change its nature.

    To set attributes of the class itself, a pickle would call `__setstate__` without an instance, which is refused.
    """

    def __init__(self) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and not any(str(name).startswith("__") for name in state):
            vars(self).update(state)
        elif type(self).__name__ == "TensorProperties" and isinstance(state, tuple):
            _check_properties(state)
        else:
            super().__setstate__(state)


def _check_properties(written: tuple[object, ...]) -> None:
    """Checks that the installed torch reads these properties of a tensor: torch's releases only ever add some."""
    from torch.distributed.checkpoint.metadata import TensorProperties  # noqa: PLC0415  # loads DCP

    known = len(TensorProperties().__getstate__())  # type: ignore[no-untyped-call]
    if len(written) > known:
        raise pickle.UnpicklingError(
            f"a newer torch wrote it, with {len(written)} properties of a tensor; "
            f"torch {torch.__version__} reads {known}"
        )
    if len(written) < 5:  # as many as torch's first release with DCP had
        raise pickle.UnpicklingError(f"a tensor has {len(written)} properties")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if name in _VALUES.get(module, ()):
            return type(name, (_Value,), {})
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return _Value()
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is none of the classes that DCP's metadata are made of"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


@dataclass(frozen=True)
class _Stored:
    """What DCP's metadata say of a value, or of a part of a tensor."""

    key: str
    file: str
    offset: int
    length: int
    transformed: bool
    is_tensor: bool

    def __post_init__(self) -> None:
        of_strings = isinstance(self.key, str) and isinstance(self.file, str)
        if not (of_strings and min(operator.index(self.offset), operator.index(self.length)) >= 0):
            raise ValueError(f"{self.key!r} is nowhere: {self}")


def _stored(path: Path) -> list[_Stored]:
    pickled = path.read_bytes()
    try:
        _check_memo(pickled)
        metadata = _Unpickler(io.BytesIO(pickled)).load()
        return [
            _Stored(
                index.fqn,
                info.relative_path,
                info.offset,
                info.length,
                hasattr(info, "transform_descriptors"),
                type(metadata.state_dict_metadata[index.fqn]).__name__ == "TensorStorageMetadata",
            )
            for index, info in dict.items(metadata.storage_data)
        ]
    except Exception as error:  # a pickle can raise anything
        raise CheckpointError(
            f"{path}: refused as DCP's metadata: {str(error) or type(error).__name__}"
        ) from error


def _check_memo(pickled: bytes) -> None:
    """Checks that unpickling takes no more memory than a pickle of this length can ask for in earnest.

    A pickle numbers the objects that it comes back to. Python's unpickler has an array of them, as long as twice the
    highest number: five damaged bytes make it fill 64 GiB.
    """
    for opcode, number, _ in pickletools.genops(pickled):
        numbers = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if numbers and isinstance(number, int) and number >= len(pickled):
            raise pickle.UnpicklingError(
                f"it numbers an object {number}, and is {len(pickled)} bytes long"
            )


def _check_values(path: Path, stored: _Stored) -> None:
    if stored.transformed:
        raise CheckpointError(
            f"{path}: refused: {stored.key!r} is no tensor, and is stored with a transform, which cannot be checked"
        )
    with path.open("rb") as file:
        file.seek(stored.offset)
        values = io.BytesIO(file.read(stored.length))
    try:
        torch.load(values, map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch's text has paragraphs of advice
        raise CheckpointError(
            f"{path}: refused: {stored.key!r} names {named[1]}, which is no plain value to torch; if you trust it, "
            "tell torch.serialization.add_safe_globals"
            if named
            else f"{path}: refused: {stored.key!r} is not what torch saves"
        ) from error
