"""No code is run that a checkpoint names, and what it names beside plain values is refused unread."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardcomm import Communicator, fully_shard
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.manifest import CheckpointError
from support.nets import make
from support.small_checkpoints import alone, load, save, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


class Own:
    """A class of the program's."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None  # type: ignore[assignment]


def sealed_again(folder: Path) -> None:
    """As somebody does who means harm."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def with_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(change(pickle.loads(file.read_bytes()))))
    sealed_again(folder)


def in_planner_data(thing: object) -> Callable[[Any], Any]:
    def change(metadata: Any) -> Any:
        metadata.planner_data = thing
        return metadata

    return change


METADATA = b"ctorch.distributed.checkpoint.metadata\n"


def setting(made: bytes, attribute: bytes, value: bytes) -> bytes:
    """A pickle that makes something and then sets an attribute of it, as objects with slots have theirs set."""
    return made + b"N}X" + len(attribute).to_bytes(4, "little") + attribute + value + b"s\x86b."


def with_properties(count: int) -> bytes:
    """A pickle that makes a tensor's properties of `count` values: 5 in torch 2.11, 6 in 2.15."""
    return METADATA + b"TensorProperties\n)\x81(" + b"I0\n" * count + b"tb."


def test_metadata_that_name_anything_else_are_refused_unread(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder, made = tmp_path / "step-00000001", tmp_path / "made"
    metadata = (folder / ".metadata").read_bytes()
    refused = r"of step 1 was not loaded: /.*/step-00000001/\.metadata: refused"
    for thing, named in (
        (Evil(made), r"posix\.mkdir"),
        (os.system, r"posix\.system"),
        (eval, r"builtins\.eval"),
        (torch.hub.load, r"torch\.hub\.load"),
        (torch.load, r"torch\.serialization\.load"),
        (OrderedDict(), r"collections\.OrderedDict"),
    ):
        with_metadata(folder, in_planner_data(thing))
        with pytest.raises(CheckpointError, match=rf"{refused} .*names {named}, which is no"):
            load(tmp_path, 1)
        (folder / ".metadata").write_bytes(metadata)
    for content, said in (
        (b"", "pickle exhausted before seeing STOP"),
        (b"no pickle", ""),
        (setting(METADATA + b"Metadata\n", b"version", b"I1\n"), "missing 1 required posit"),
        (
            setting(
                METADATA + b"TensorStorageMetadata\n)\x81",
                b"__class__",
                METADATA + b"BytesStorageMetadata\n",
            ),
            "it changes a TensorStorageMetadata",
        ),
        (setting(b"ctorch\nSize\n)\x81", b"a", b"I1\n"), "it changes a Size"),
        (METADATA + b"Metadata\n(I1\ntR.", "takes 1 positional argument but 2 were given"),
        (pickle.dumps({"a": 1}), "'dict' object has no attribute 'storage_data'"),
        (pickle.dumps(torch.Size((2, 3))), "'Size' object has no attribute 'storage_data'"),
        (b"Pname\n.", "it refers to something outside"),
        (
            with_properties(9),
            "a newer torch wrote it, with 9 properties of a tensor; torch .* reads ",
        ),
        (with_properties(4), "a tensor has 4 properties"),
    ):
        (folder / ".metadata").write_bytes(content)
        sealed_again(folder)
        with pytest.raises(CheckpointError, match=f"{refused} as DCP's metadata: .*{said}"):
            load(tmp_path, 1)
    assert not made.exists()
    (folder / ".metadata").write_bytes(metadata)
    sealed_again(folder)
    load(tmp_path, 1)


def test_metadata_of_every_rank_are_looked_at(tmp_path: Path) -> None:
    with alone(tmp_path).save(1) as path:
        dcp.save(state(1), checkpoint_id=path)
        (path / "__0.metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"__0\.metadata: refused .*names posix\.mkdir"):
        load(tmp_path, 1)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p2147483647\n"], ids=["binary", "text"])
def test_metadata_that_would_take_all_memory_are_refused(put: bytes, tmp_path: Path) -> None:
    """Unpickling them would fill 32 GiB, 8 bytes for each number below that of an object."""
    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[:-1] + put + content[-1:])
    sealed_again(folder)
    with pytest.raises(
        CheckpointError, match=r"\.metadata: refused .* it numbers an object 2147483647"
    ):
        load(tmp_path, 1)


def test_metadata_of_no_place_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name, value in (("offset", -1), ("length", "1"), ("relative_path", None)):

        def changed(metadata: Any) -> Any:
            info = metadata.storage_data[MetadataIndex("groups.0.lr")]
            setattr(info, name, value)  # noqa: B023
            return metadata

        content = (tmp_path / "step-00000001/.metadata").read_bytes()
        with_metadata(tmp_path / "step-00000001", changed)
        with pytest.raises(CheckpointError, match=r"\.metadata: refused as DCP's metadata: "):
            load(tmp_path, 1)
        (tmp_path / "step-00000001/.metadata").write_bytes(content)


@pytest.mark.parametrize("place", ["/etc/passwd", "../other", "elsewhere"])
def test_metadata_that_point_out_of_the_checkpoint_are_refused(place: str, tmp_path: Path) -> None:
    save(tmp_path, 1)

    def moved(metadata: Any) -> Any:
        metadata.storage_data[MetadataIndex("weight", [0])].relative_path = place
        return metadata

    with_metadata(tmp_path / "step-00000001", moved)
    said = rf"refused: 'weight' is in '{place}', no file of the checkpoint"
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, 1)


def test_values_that_name_code_are_refused_unread(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for step, (value, said) in enumerate(
        (
            (Evil(made), r"'more' names posix\.mkdir"),
            (Own(), r"'more' names test_unpickling\.Own, which is no plain value to torch; if y"),
            (make, r"'more' names support\.nets\.make"),
        )
    ):  # fmt: skip
        with alone(tmp_path).save(step) as path:
            dcp.save({**state(step), "more": value}, checkpoint_id=path)
        with (
            pytest.raises(CheckpointError, match=rf"__0_0\.distcp: refused: {said}"),
            alone(tmp_path).load(step),
        ):
            pass
    assert not made.exists()
    found = {**state(0), "more": None}
    with torch.serialization.safe_globals([Own]), alone(tmp_path).load(1) as path:
        dcp.load(found, checkpoint_id=path)
    assert found["more"] == Own()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_values_that_are_not_what_torch_saves_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    with (folder / ".metadata").open("rb") as file:
        stored = pickle.load(file).storage_data[MetadataIndex("groups.0.lr")]
    content = bytearray((folder / stored.relative_path).read_bytes())
    for other in (b"", pickle.dumps(Evil(tmp_path / "made")), os.urandom(stored.length)):
        patch = other[: stored.length].ljust(stored.length, b"\0")
        content[stored.offset : stored.offset + stored.length] = patch
        (folder / stored.relative_path).write_bytes(content)
        sealed_again(folder)
        with pytest.raises(CheckpointError, match=r"distcp: refused: 'groups\.0\.lr' "):
            load(tmp_path, 1)
    assert not (tmp_path / "made").exists()


def test_what_a_model_and_optimizers_save_is_not_refused(tmp_path: Path) -> None:
    comm = Communicator.local_group(1)[0]
    for step, kind in enumerate(
        (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD, torch.optim.NAdam)
    ):
        model = make()
        engine = fully_shard(model, comm)
        optimizer = kind(model.parameters(), lr=torch.tensor(0.1) if step == 0 else 0.1)
        objects = {
            "model": engine,
            "optimizer": engine.optimizer_state(optimizer),
            "more": {"size": torch.Size((2, 3)), "dtype": torch.bfloat16, "rng": torch.get_rng_state(),
                     "set": {1, 2}, "ordered": OrderedDict(a=1), "none": None, "bytes": b"1"},
        }  # fmt: skip
        with Checkpoints(tmp_path, comm).save(step) as path:
            dcp.save(objects, checkpoint_id=path)
        with Checkpoints(tmp_path, comm).load(step) as path:
            dcp.load(objects, checkpoint_id=path)
