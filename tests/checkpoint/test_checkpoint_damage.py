"""What is damaged is never loaded; the newest whole checkpoint is found."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from shardcomm import Communicator
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.folders import complete_steps
from shardcomm.checkpoint.manifest import CheckpointError, DamagedError, Manifest
from support.small_checkpoints import alone, load, save, state
from support.thread_ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    names = ["step-00000001", "step-00000002", "step-00000002.damaged", "writer.json"]
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


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_what_was_found_damaged_is_looked_at_again_once_it_has_been_saved_anew(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002/.metadata", 77)
    os.utime(tmp_path / "step-00000002/manifest.json", (0, 0))  # long before it is saved anew

    def body(comm: Communicator) -> None:
        saving, late, reading = (Checkpoints(tmp_path, comm) for _ in range(3))
        for checkpoints in (saving, late, reading):
            assert checkpoints.latest() == 1
        save_alone(saving, 2)
        assert reading.latest() == 2
        with pytest.raises(ValueError, match="step is 2, of which there is a checkpoint: /"):
            save_alone(late, 2)
        save_alone(late, 3)

    run_threads(body, 2)
    assert complete_steps(tmp_path) == [2, 3]
    load(tmp_path, 2)


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_a_load_that_could_not_read_leaves_no_older_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002/.metadata", 77)
    os.utime(tmp_path / "step-00000002/manifest.json", (0, 0))
    late, saving = alone(tmp_path), alone(tmp_path)
    for checkpoints in (late, saving):
        assert checkpoints.latest() == 1
    save_alone(saving, 2)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "verify_share", fail)
        with pytest.raises(CheckpointError, match="Too many open"), late.load(2):
            pass
    save_alone(late, 3)
    load(tmp_path, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_another_program_removes_meanwhile_is_not_damaged(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = alone(tmp_path, keep=1)
    save_alone(other, 1)
    verify_share = Manifest.verify_share

    def save_and_verify(self: Manifest, folder: Path, rank: int, ranks: int) -> None:
        if rank == 0 and self.step == 1:
            save_alone(other, 2)
        verify_share(self, folder, rank, ranks)

    monkeypatch.setattr(Manifest, "verify_share", save_and_verify)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the checkpoint of step")
        assert run_threads(lambda comm: Checkpoints(tmp_path, comm).latest(), ranks) == [2] * ranks


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

    with files_limited(1000):
        said = run_threads(body, ranks)
    [folder] = tmp_path.glob("step-00000002.*.partial")
    wanted = f"the checkpoint of step 2 was not saved: rank 0: {folder}: File too large"
    assert said == [wanted] * ranks
    assert os.listdir(folder) == ["__0_0.distcp"]  # nothing is left of what found out why
    run_threads(lambda comm: save_alone(checkpoints[comm.rank], 2), ranks)


def save_alone(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step) as path:
        if checkpoints.comm.rank == 0:
            dcp.save(state(step), checkpoint_id=path, no_dist=True)
