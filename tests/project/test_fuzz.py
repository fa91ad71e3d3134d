"""Whatever bytes are where shardcomm reads: what it makes of them is right, or an error says which they are.

A hundred examples each in the suite, 20,000 in `make fuzz`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.distributed.checkpoint import CheckpointException

from shardcomm import _C, CommError, Communicator
from shardcomm.checkpoint.checkpoints import CheckpointError, Checkpoints
from shardcomm.checkpoint.manifest import DamagedError, FileEntry, Manifest
from shardcomm.checkpoint.unpickling import check_unpickling
from shardcomm.cli.bench import compare
from shardcomm.cli.bench.options import layers
from shardcomm.cli.train.progress import Progress
from shardcomm.meeting.exchange import StoreExchange
from shardcomm.trace.timeline import RankTimeline, Span, Timeline

_numbers = itertools.count()


def damaged(valid: bytes) -> st.SearchStrategy[bytes]:
    """Bytes that are anything, or `valid` with a piece cut out, put in twice, or written over."""
    place = st.integers(0, len(valid))

    def changed(parts: tuple[int, int, bytes]) -> bytes:
        begin, end, new = parts
        return valid[:begin] + new + valid[end:]

    return st.binary(max_size=200) | st.tuples(place, place, st.binary(max_size=20)).map(changed)


@contextmanager
def raises_about(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """What is done in here succeeds, or raises one of these, which names `path`."""
    try:
        yield
    except kinds as error:
        if str(path) not in str(error):
            raise


def file_with(directory: Path, content: bytes) -> Path:
    """A new file: hypothesis runs many examples in one folder."""
    path = directory / f"{next(_numbers)}.json"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


FIGURE = {"time_s": 1e-5, "spread": {"p10_s": 0.9e-5, "p90_s": 1.1e-5}}
ROW = {"layer": None, "size_bytes": 1024, "out_of_place": FIGURE, "in_place": FIGURE}
SECTION = {"operation": "all_gather", "transport": "shm", "device": "cpu", "dtype": "float",
           "redop": "none", "root": -1, "rows": [ROW]}  # fmt: skip
SPAN = {"name": "step 1", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 5.5, "args": {}}
TRACE = {"otherData": {"clock": "c", "receipts": {"0": {"gather": "w"}}}, "traceEvents": [SPAN]}


def read_trace(path: Path) -> None:
    timeline = Timeline.load(path)
    assert all(figures.total_s >= 0 for figures in timeline.figures())


def read_result(path: Path) -> None:
    run = compare.read(str(path))
    if run.figures:
        compare.screen(compare.compare(run, run), 0.1).encode()


def read_shapes(path: Path) -> None:
    for layer in layers(str(path)):
        assert all(size >= 0 for shape in layer.shapes.values() for size in shape)


def read_progress(path: Path) -> None:
    checkpoint = path.with_suffix("")
    checkpoint.mkdir()
    path = path.rename(checkpoint / "progress.json")
    assert Progress.read(checkpoint).ranks >= 1


READERS: dict[str, tuple[Callable[[Path], None], Any]] = {
    "trace": (read_trace, TRACE),
    "result": (read_result, {"ranks": 2, "sections": [SECTION]}),
    "shapes": (read_shapes, {"weight": [768, 768], "bias": [768]}),
    "progress": (read_progress, {"ranks": 2, "losses": [2.5, 1.25], "run": {"seed": 0}}),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_files_that_commands_read(name: str, data: st.DataObject, folder: Path) -> None:
    read, valid = READERS[name]
    path = file_with(folder, data.draw(damaged(json.dumps(valid).encode())))
    with raises_about(path.with_suffix(""), ValueError, argparse.ArgumentTypeError):
        read(path)


def test_what_is_fuzzed_is_right_to_begin_with(folder: Path) -> None:
    for read, valid in READERS.values():
        read(file_with(folder, json.dumps(valid).encode()))
    timeline = Timeline((RankTimeline(0, (Span("step", "step 1", 0.0, 2.0, 0),), {}),), "a clock")
    timeline.save(folder / "trace.json")
    read_trace(folder / "trace.json")


MANIFEST = json.dumps(
    {"format": 1, "step": 7, "ranks": 2, "files": {"part": {"bytes": 3, "crc32": "352441c2"}}}
).encode()  # zlib.crc32(b"abc")


@given(content=damaged(MANIFEST))
def test_manifests(content: bytes, folder: Path) -> None:
    """A manifest that is believed is of its step, and of exactly the files that are there."""
    checkpoint = folder / str(next(_numbers))
    checkpoint.mkdir()
    (checkpoint / "part").write_bytes(b"abc")
    (checkpoint / "manifest.json").write_bytes(content)
    with raises_about(checkpoint, DamagedError):
        manifest = Manifest.read(checkpoint, 7)
        manifest.verify_share(checkpoint, 0, 1)
        assert manifest.files == {"part": FileEntry(3, "352441c2")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by DCP."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(directory, Communicator.local_group(1)[0])
    with checkpoints.save(1) as path:
        dcp.save({"w": torch.arange(4.0), "groups": [{"lr": 0.1}]}, checkpoint_id=path)
    return directory / "step-00000001"


RAN: list[str] = []


def canary(*args: object) -> str:
    """What a pickle of somebody else's would have called."""
    RAN.append(repr(args))
    return "ran"


class _Calls:
    def __reduce__(self) -> tuple[Callable[..., str], tuple[str]]:
        return canary, ("here",)


@pytest.mark.filterwarnings("ignore")
@given(data=st.data())
def test_metadata_never_run_anything(data: st.DataObject, saved: Path, folder: Path) -> None:
    valid = (saved / ".metadata").read_bytes()
    call = pickle.dumps(_Calls(), protocol=2)[2:-1]  # without its header and its end
    place = data.draw(st.integers(0, len(valid)))
    content = data.draw(damaged(valid) | st.just(valid[:place] + call + valid[place:]))
    checkpoint = folder / str(next(_numbers))
    checkpoint.mkdir()
    names = {path.name for path in saved.iterdir()}
    for name in names - {".metadata"}:
        (checkpoint / name).hardlink_to(saved / name)
    (checkpoint / ".metadata").write_bytes(content)
    with raises_about(checkpoint, CheckpointError):
        check_unpickling(checkpoint, frozenset(names))
        # Of what DCP makes of it; it says so, or loads.
        with suppress(Exception, CheckpointException):
            dcp.load({"w": torch.zeros(4), "groups": [{"lr": 0.0}]}, checkpoint_id=checkpoint)
    assert not RAN


@given(content=st.binary(max_size=200))
def test_what_a_stranger_writes_into_the_store(content: bytes) -> None:
    store = HashStore()
    exchange = StoreExchange(store, "here", 0, 2, 0.2)
    store.set("here/0/1", content.decode("latin-1"))
    with pytest.raises(CommError, match=r"here/0/1|no word of rank 1"):
        exchange(b"payload")


@given(address=st.text(max_size=30) | st.from_regex(r"-?[0-9]{1,30}:-?[0-9]{1,30}", fullmatch=True))
def test_addresses_of_groups(address: str) -> None:
    with pytest.raises((ValueError, CommError)):
        _C.ShmMember(address, 0, 2)
