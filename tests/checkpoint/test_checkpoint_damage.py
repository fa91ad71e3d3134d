"""What is damaged is never loaded, nor code run that a checkpoint names; the newest whole checkpoint is found."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardcomm import Communicator, fully_shard
from shardcomm.checkpoint.checkpoints import CheckpointError, Checkpoints, complete_steps
from shardcomm.checkpoint.manifest import DamagedError, Manifest
from support.nets import make
from support.thread_ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def alone(directory: Path) -> Checkpoints:
    return Checkpoints(directory, Communicator.local_group(1)[0])


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.arange(12.0) + step, "groups": [{"lr": 0.1, "step": step}]}


def save(directory: Path, *steps: int) -> None:
    checkpoints = alone(directory)
    for step in steps:
        with checkpoints.save(step) as path:
            dcp.save(state(step), checkpoint_id=path)
            (path / "below").mkdir()
            (path / "below/empty").touch()


def load(directory: Path, step: int) -> None:
    found = state(0)
    with alone(directory).load(step) as path:
        dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["weight"], state(step)["weight"])
    assert found["groups"] == state(step)["groups"]


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


# Of a checkpoint's folder; each with the file that it damages, and what is said of that.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "longer": (
        lambda f: (f / ".metadata").open("ab").write(b"x"),
        r"/\.metadata: it has \d+ bytes; \d+ were saved",
    ),
    "cut": (
        lambda f: os.truncate(f / "__0_0.distcp", 100),
        r"/__0_0\.distcp: it has 100 bytes; \d+ were saved",
    ),
    "missing": (lambda f: (f / "below/empty").unlink(), r"/below/empty: it is not there"),
    "not listed": (lambda f: (f / "below/more").touch(), r"/below/more: it is not in manifest\."),
    "a folder": (
        lambda f: ((f / ".metadata").unlink(), (f / ".metadata").mkdir()),
        r"/\.metadata: it is not there",
    ),
    "no manifest": (
        lambda f: (f / "manifest.json").unlink(),
        r"/manifest\.json: No such file or directory; without it nothing tells",
    ),
    "no JSON": (
        lambda f: (f / "manifest.json").write_text("{"),
        r"/manifest\.json: not a manifest: ",
    ),
    "deep": (
        lambda f: (f / "manifest.json").write_text("[" * 99999),
        r"/manifest\.json: not a manifest: ",
    ),
    "another format": (
        lambda f: (f / "manifest.json").write_text('{"format": 2}'),
        r"/manifest\.json: not a manifest: its format is 2; this version reads 1",
    ),
    "another step's": (
        lambda f: shutil.copy(f.with_name("step-00000001") / "manifest.json", f),
        r"/manifest\.json: it is of step 1, in the folder of 2",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_damaged_checkpoint_is_passed_over_aloud(kind: str, ranks: int, tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage, said = DAMAGE[kind]
    damage(tmp_path / "step-00000002")
    said = "step-00000002" + said
    with pytest.raises(CheckpointError, match=rf"of step 2 was not loaded: .*{said}"):
        load(tmp_path, 2)

    def body(comm: Communicator) -> int | None:
        checkpoints = Checkpoints(tmp_path, comm)
        step = checkpoints.latest()
        assert checkpoints.latest() == step  # and is not said again
        return step

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        assert run_threads(body, ranks) == [1] * ranks
    [warning] = [str(each.message) for each in warned if each.category is RuntimeWarning]
    assert re.search(rf"of step 2 is damaged, and the one before it is taken: .*{said}", warning)
    load(tmp_path, 1)


def test_every_flipped_bit_is_found(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    save(tmp_path, 1, 2)
    folder = tmp_path / "step-00000002"
    for file in (folder / ".metadata", folder / "__0_0.distcp"):
        bits = 8 * file.stat().st_size
        for bit in (0, bits - 1, *choose.choices(range(bits), k=30)):
            flip(file, bit)
            with pytest.raises(CheckpointError, match=rf"{file.name}: its checksum is "):
                load(tmp_path, 2)
            flip(file, bit)
    load(tmp_path, 2)


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_where_none_is_whole_all_are_told(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}/.metadata", 77)

    def body(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        with pytest.raises(CheckpointError, match=r"^no checkpoint is whole: .*2/\.meta.*1/\.meta"):
            checkpoints.latest()
        with pytest.raises(CheckpointError, match="its checksum is"), checkpoints.load(1):
            pass

    run_threads(body, 2)


def test_a_damaged_checkpoint_makes_way_for_one_of_its_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    file = tmp_path / "step-00000002/.metadata"
    for _ in range(2):  # the second time there is one set aside already
        flip(file, 77)
        checkpoints = alone(tmp_path)
        with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
            assert checkpoints.latest() == 1
        assert complete_steps(tmp_path) == [1, 2]  # looking changes nothing
        with checkpoints.save(2) as path:
            dcp.save(state(2), checkpoint_id=path)
        assert checkpoints.latest() == 2
        load(tmp_path, 2)
    names = ["step-00000001", "step-00000002", "step-00000002.damaged"]
    assert sorted(os.listdir(tmp_path)) == names


def test_what_a_load_finds_damaged_makes_way_too(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002/.metadata", 77)

    def body(comm: Communicator) -> int | None:
        checkpoints = Checkpoints(tmp_path, comm)
        with pytest.raises(CheckpointError, match="its checksum is"), checkpoints.load(2):
            pass
        with checkpoints.load(1):
            pass
        save_alone(checkpoints, 2)
        return checkpoints.latest()

    assert run_threads(body, 2) == [2, 2]
    load(tmp_path, 2)


def test_the_manifest_is_what_an_independent_reader_computes(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        with Checkpoints(tmp_path, comm).save(7) as path:
            (path / f"of-{comm.rank}").write_bytes(os.urandom(comm.rank * 5_000_000))

    run_threads(body, 3)
    folder = tmp_path / "step-00000007"
    files = {
        f"of-{rank}": {
            "bytes": rank * 5_000_000,
            "crc32": f"{zlib.crc32((folder / f'of-{rank}').read_bytes()):08x}",
        }
        for rank in range(3)
    }
    wanted = {"format": 1, "step": 7, "ranks": 3, "files": files}
    assert json.loads((folder / "manifest.json").read_text()) == wanted


def test_the_name_of_the_manifest_is_taken(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"manifest\.json: the name is taken"),
        alone(tmp_path).save(1) as path,
    ):
        (path / "manifest.json").touch()


@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(
                st.sampled_from(["format", "step", "ranks", "files", "bytes", "crc32"]), inner
            ),
        ).map(lambda value: json.dumps(value).encode()),
    )
)  # fmt: skip
def test_whatever_stands_in_a_manifest_is_damage_or_a_manifest(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(content)
    with suppress(DamagedError):
        Manifest.read(folder, 1).verify_share(folder, 0, 1)


# What a checkpoint names.


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
            (Own(), r"'more' names test_checkpoint_damage\.Own, which is no plain value to torch; if y"),
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


@contextmanager
def files_limited(length: int) -> Iterator[None]:
    """The kernel refuses to let a file of this process grow further, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_full_disk_is_a_sentence_on_every_rank(ranks: int, tmp_path: Path) -> None:
    checkpoints = run_threads(lambda comm: Checkpoints(tmp_path, comm), ranks)

    def body(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as caught:  # noqa: PT012, SIM117
            with checkpoints[comm.rank].save(2) as path:
                if comm.rank == 0:
                    large = {"weight": torch.zeros(10_000)}
                    dcp.save(large, checkpoint_id=path, no_dist=True)
        return str(caught.value)

    folder = tmp_path / "step-00000002.partial"
    wanted = f"the checkpoint of step 2 was not saved: rank 0: {folder}: File too large"
    with files_limited(1000):
        said = run_threads(body, ranks)
    assert said == [wanted] * ranks
    assert os.listdir(folder) == ["__0_0.distcp"]  # nothing is left of what found out why
    run_threads(lambda comm: save_alone(checkpoints[comm.rank], 2), ranks)


def save_alone(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step) as path:
        if checkpoints.comm.rank == 0:
            dcp.save(state(step), checkpoint_id=path, no_dist=True)
