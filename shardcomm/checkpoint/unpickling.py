"""What loading a checkpoint would run, looked at beforehand and without running it.

DCP unpickles a checkpoint's `.metadata`, and in the other files what is no tensor (an optimizer's groups, for example).
A pickle can name any function to be called. So each name is compared with those that DCP itself writes, and the rest is
read by torch's unpickler of plain values (`torch.load` with `weights_only`). DCP reads tensors by that one anyway.
"""

from __future__ import annotations

import io
import operator
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcomm.checkpoint.manifest import CheckpointError

# What DCP's metadata are made of: values, of which a pickle gives the arguments, and records, of which it gives the
# attributes. The names of dtypes are asked of torch.
_VALUES = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # what Python 3.13 calls it
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
    """Raises unless loading from `folder`, which consists of `files`, runs nothing but DCP and torch.

    Raises:
        CheckpointError: it would, or what is to be unpickled is no pickle; the message names the file, and the class.
        OSError: a file cannot be read.
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
    """Stands for a value, whatever it is made of."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"it changes a {type(self).__name__}")


class _Record(_Value):
    """Has the attributes of what it stands for, and no others: nothing by which that could become something else.

    To set attributes of the class itself, a pickle would call `__setstate__` without an instance, and so is refused.
    """

    def __init__(self) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and not any(str(name).startswith("__") for name in state):
            vars(self).update(state)
        elif type(self).__name__ != "TensorProperties" or len(state) != 5:  # type: ignore[arg-type]
            super().__setstate__(state)


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
    with path.open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
            return [
                _Stored(
                    index.fqn,
                    info.relative_path,
                    info.offset,
                    info.length,
                    hasattr(info, "transform_descriptors"),
                    type(metadata.state_dict_metadata[index.fqn]).__name__
                    == "TensorStorageMetadata",
                )
                for index, info in dict.items(metadata.storage_data)
            ]
        except OSError:
            raise
        except Exception as error:  # a pickle of anybody's can raise anything
            raise CheckpointError(
                f"{path}: refused as DCP's metadata: {str(error) or type(error).__name__}"
            ) from error


def _check_values(path: Path, stored: _Stored) -> None:
    if stored.transformed:
        raise CheckpointError(
            f"{path}: refused: {stored.key!r} is no tensor, and behind a transform, through which nothing is read here"
        )
    with path.open("rb") as file:
        file.seek(stored.offset)
        values = io.BytesIO(file.read(stored.length))
    try:
        torch.load(values, map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch says it among paragraphs of advice
        raise CheckpointError(
            f"{path}: refused: {stored.key!r} names {named[1]}, which is no plain value to torch; if you trust it, "
            "tell torch.serialization.add_safe_globals"
            if named
            else f"{path}: refused: {stored.key!r} is not what torch saves"
        ) from error
