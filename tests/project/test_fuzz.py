"""Whatever bytes are where shardcomm reads: what it makes of them is right, or an error says which they are.

A hundred examples each in the suite, 20,000 in `make fuzz`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import pickle
import re
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

from shardcomm import _C, CommError, Communicator, get_library_dir
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.manifest import CheckpointError, DamagedError, FileEntry, Manifest
from shardcomm.checkpoint.unpickling import check_unpickling
from shardcomm.cli.bench import compare
from shardcomm.cli.bench.options import layers
from shardcomm.cli.train.progress import Progress
from shardcomm.meeting.exchange import Exchange
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
    exchange = Exchange(store, "here", 0, 2, 0.2)
    store.set("here/0/1", content.decode("latin-1"))
    with pytest.raises(CommError, match=r"here/0/1|no word of rank 1"):
        exchange(b"payload")


@given(address=st.text(max_size=30) | st.from_regex(r"-?[0-9]{1,30}:-?[0-9]{1,30}", fullmatch=True))
def test_addresses_of_groups(address: str) -> None:
    with pytest.raises((ValueError, CommError)):
        _C.ShmMember(address, 0, 2)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(get_library_dir()) / "libshardcomm.so.0"))


class Piece(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("param_begin", "shard_begin", "count")]


INVALID_ARGUMENT = 2
LAYOUT = b"""{"shardcomm_layout": 1, "world_size": 2, "align_elements": 8, "shard_elements": 24,
"params": [[4, 6, 1, 24], [5, 4, 1, 0]]}"""
SCHEDULE = b"""{"shardcomm_schedule": 1, "num_slots": 2, "slot_of": [0, 1], "triggers": [
{"phase": "pre_forward", "unit": 1, "actions": [["gather", 1, 1], ["wait_gather", 1, 1]]},
{"phase": "end_of_backward", "unit": 0, "actions": [["reduce", 0, -1]]}]}"""


def with_other_numbers(valid: bytes) -> st.SearchStrategy[bytes]:
    """`valid`, damaged or with a number in the place of another."""
    places = [number.span() for number in re.finditer(rb"\b\d+\b", valid)]
    numbers = st.integers(-3, 70) | st.integers(-(2**70), 2**70)
    return damaged(valid) | st.tuples(st.sampled_from(places), numbers).map(
        lambda parts: b"%b%d%b" % (valid[: parts[0][0]], parts[1], valid[parts[0][1] :])
    )


@given(text=with_other_numbers(LAYOUT))
def test_layouts_that_c_programs_read(library: ctypes.CDLL, text: bytes) -> None:
    layout = ctypes.c_void_p()
    status = library.shc_layout_deserialize(text, ctypes.byref(layout))
    assert status == (0 if layout else INVALID_ARGUMENT)
    if not layout:
        return
    elements, ranks, piece = ctypes.c_int64(), ctypes.c_int(), Piece()
    assert library.shc_layout_shard_elements(layout, ctypes.byref(elements)) == 0
    assert library.shc_layout_world_size(layout, ctypes.byref(ranks)) == 0
    for param in range(2):
        for rank in (0, ranks.value - 1):
            args = ctypes.c_size_t(param), rank, ctypes.byref(piece)
            if library.shc_layout_piece(layout, *args) == 0:  # else there is no such parameter
                assert 0 <= piece.shard_begin <= piece.shard_begin + piece.count <= elements.value
    library.shc_layout_destroy(layout)


@given(text=with_other_numbers(SCHEDULE))
def test_schedules_that_c_programs_read(library: ctypes.CDLL, text: bytes) -> None:
    schedule = ctypes.c_void_p()
    status = library.shc_schedule_parse(text, ctypes.byref(schedule))
    assert status == (0 if schedule else INVALID_ARGUMENT)
    library.shc_schedule_destroy(schedule)


def test_texts_of_c_programs_are_right_to_begin_with(library: ctypes.CDLL) -> None:
    handle = ctypes.c_void_p()
    assert library.shc_layout_deserialize(LAYOUT, ctypes.byref(handle)) == 0
    library.shc_layout_destroy(handle)
    assert library.shc_schedule_parse(SCHEDULE, ctypes.byref(handle)) == 0
    library.shc_schedule_destroy(handle)
