"""Which NCCL is loaded, and which is refused: against libraries made here, one process each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardcomm import _C
from shardcomm.comm.nccl import library_paths

ROOT = Path(__file__).parents[2]
REQUIRED = [
    "GetUniqueId",
    "CommInitRankConfig",
    "CommDestroy",
    "CommAbort",
    "CommGetAsyncError",
    "GetErrorString",
    "GetLastError",
    "GroupStart",
    "GroupEnd",
    "AllGather",
    "ReduceScatter",
    "AllReduce",
    "Broadcast",
    "Reduce",
    "Send",
    "Recv",
]
BUFFERS = ["MemAlloc", "MemFree", "CommRegister", "CommDeregister"]
WINDOWS = ["CommWindowRegister", "CommWindowDeregister"]

# Without torch, which may bring an NCCL of its own into the process.
LOOK = f"""
import ctypes, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_C", {_C.__file__!r})
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
present, *rounds = json.loads(sys.argv[1])
held = [ctypes.CDLL(path) for path in present]
for paths in rounds:
    status = core.nccl_status(paths)
    print(json.dumps([status.available, status.path, status.version, status.reason, status.missing]))
"""


def look(system: Path, *rounds: list[Path], present: list[Path] = []) -> list[dict[str, Any]]:  # noqa: B006
    """nccl_status of a fresh process, once for each list of paths; `system` is on the loader's path."""
    arguments = json.dumps([[str(path) for path in paths] for paths in (present, *rounds)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK, arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(system.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = ("available", "path", "version", "reason", "missing")
    return [dict(zip(names, json.loads(line), strict=True)) for line in done.stdout.splitlines()]


def make(folder: Path, version: int, names: list[str]) -> Path:
    """A libnccl.so.2 of this version that has these functions and does nothing."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    folder.mkdir()
    source = folder / "fake.cpp"
    functions = "".join(f"void nccl{name}() {{}}\n" for name in names)
    source.write_text(
        f'extern "C" {{\nint ncclGetVersion(int* v) {{ *v = {version}; return 0; }}\n{functions}}}\n'
    )
    library = folder / "libnccl.so.2"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source],
        check=True,
        timeout=60,
    )
    return library


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Stands for the system's where that must not be found."""
    return make(tmp_path / "old", 21705, REQUIRED)


def test_path_that_is_given_comes_before_the_systems(tmp_path: Path) -> None:
    system = make(tmp_path / "system", 22005, REQUIRED + BUFFERS)
    given = make(tmp_path / "given", 22703, REQUIRED + BUFFERS + WINDOWS)
    (status,) = look(system, [given])
    assert status == {
        "available": True,
        "path": str(given),
        "version": 22703,
        "reason": "",
        "missing": [],
    }


def test_system_is_asked_when_no_given_path_can_be_used(tmp_path: Path, old: Path) -> None:
    system = make(tmp_path / "system", 22005, REQUIRED + BUFFERS)
    (status,) = look(system, [tmp_path / "nowhere" / "libnccl.so.2", old])
    assert (status["available"], status["path"]) == (True, str(system))


def test_copy_in_the_process_comes_first(tmp_path: Path) -> None:
    present = make(tmp_path / "present", 22005, REQUIRED + BUFFERS)
    given = make(tmp_path / "given", 22703, REQUIRED + BUFFERS + WINDOWS)
    (status,) = look(given, [given], present=[present])
    assert (status["path"], status["version"]) == (str(present), 22005)


def test_no_second_copy_is_loaded_beside_one_that_is_too_old(tmp_path: Path, old: Path) -> None:
    given = make(tmp_path / "given", 22703, REQUIRED)
    (status,) = look(given, [given], present=[old])
    assert not status["available"]
    assert status["reason"] == f"{old} is NCCL 2.17.5; 2.18 or newer is accepted"


@pytest.mark.parametrize(
    ("version", "names", "missing"),
    [
        (21801, [], [*(f"nccl{n} (2.19)" for n in BUFFERS), *(f"nccl{n} (2.27)" for n in WINDOWS)]),
        (22105, BUFFERS, [f"nccl{n} (2.27)" for n in WINDOWS]),
        (23203, BUFFERS + WINDOWS, []),
    ],
)
def test_what_a_version_lacks_is_told_with_the_version_that_brought_it(
    tmp_path: Path, old: Path, version: int, names: list[str], missing: list[str]
) -> None:
    (status,) = look(old, [make(tmp_path / "given", version, REQUIRED + names)])
    assert (status["available"], status["version"]) == (True, version)
    assert status["missing"] == missing


def test_old_version_is_refused(tmp_path: Path, old: Path) -> None:
    ancient = make(tmp_path / "ancient", 2708, REQUIRED)
    (status,) = look(old, [ancient])
    assert not status["available"]
    assert status["reason"].startswith(f"{ancient} is NCCL 2.7.8; 2.18 or newer is accepted; ")


def test_library_without_a_needed_function_is_refused(tmp_path: Path, old: Path) -> None:
    given = make(tmp_path / "given", 22703, [n for n in REQUIRED if n not in ("Send", "Recv")])
    (status,) = look(old, [given])
    assert not status["available"]
    assert f"{given} (NCCL 2.27.3) lacks ncclSend, ncclRecv" in status["reason"]


def test_what_is_no_library_or_not_nccl_is_refused(tmp_path: Path, old: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    (status,) = look(old, [text, Path("libm.so.6")])
    assert not status["available"]
    assert str(text) in status["reason"]
    assert "libm.so.6 is not NCCL: it has no ncclGetVersion" in status["reason"]


def test_failed_load_is_tried_again_and_a_loaded_library_stays(tmp_path: Path, old: Path) -> None:
    first = make(tmp_path / "first", 22703, REQUIRED)
    second = make(tmp_path / "second", 22805, REQUIRED)
    statuses = look(old, [], [first], [second])
    assert [status["available"] for status in statuses] == [False, True, True]
    assert statuses[1]["path"] == statuses[2]["path"] == str(first)


needs_wheel = pytest.mark.skipif(not library_paths(), reason="no nvidia-nccl wheel here")


@needs_wheel
def test_wheels_nccl_is_found_and_lacks_nothing(old: Path) -> None:
    path = library_paths()[0]
    (status,) = look(old, [Path(path)])
    assert status["available"], status["reason"]
    assert status["path"] == path
    assert status["version"] >= 21800
    assert status["version"] < 22700 or not status["missing"]


@needs_wheel
def test_what_is_declared_of_nccl_is_what_its_own_header_says(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc here, which has CUDA's headers")
    headers = [
        Path(library_paths()[0]).parents[1] / "include",
        ROOT / "csrc",
        ROOT / "csrc/include",
    ]
    command = [nvcc, "-std=c++17", "-c", "-o", tmp_path / "nothing.o"]
    done = subprocess.run(
        [*command, *(f"-I{each}" for each in headers), ROOT / "tests/cpp/cuda/nccl_header.cpp"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
