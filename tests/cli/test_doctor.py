"""`shardcomm doctor`: what it finds here, and that what is broken is found, named, and ends in exit status 1."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcomm import _C, Communicator, CopyPlan
from shardcomm.cli.doctor import command, self_test
from shardcomm.cli.doctor.memory import cgroup_limit
from shardcomm.cli.doctor.screen import screen
from shardcomm.cli.doctor.self_test import Outcome, between_processes, between_threads
from shardcomm.comm.core import CoreCommunicator
from support.commands import command as run

COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What it writes."""
    done = run("doctor", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def in_process(*args: str) -> int:
    """The exit status of `shardcomm doctor`, run in this process, where it can be patched."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", *args])
    status: int = parsed.run(parsed)
    return status


def test_what_cannot_be_used_has_a_reason_and_a_remedy(found: dict[str, Any]) -> None:
    assert found["versions"]["torch"] == torch.__version__
    assert found["cuda"]["built"] is _C.cuda_built
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    assert found["transports"]["shm"]["usable"]
    parts = [
        found["cuda"],
        found["nccl"],
        found["triton"],
        found["backend"],
        *found["transports"].values(),
    ]
    for part in parts:
        assert part["usable"] is not bool(part["reason"])
        assert part["usable"] is not bool(part["remedy"])


def test_every_usable_transport_is_tested_on_every_collective_in_both_kinds_of_memory(
    found: dict[str, Any],
) -> None:
    tests = {test["name"]: test for test in found["self_test"]}
    usable = {name for name, state in found["transports"].items() if state["usable"]}
    assert {"shm", "local", "c10d:gloo"} <= usable
    assert usable - tests.keys() <= {"nccl"}  # which takes a GPU for each rank
    assert "copies" in tests
    for name, test in tests.items():
        assert test["errors"] == []
        if not name.startswith("copies"):
            tried = {(path["operation"], path["memory"]) for path in test["paths"]}
            assert tried == {(each, of) for each in COLLECTIVES for of in ("allocate", "ordinary")}


def test_paths_are_those_of_the_receipts(found: dict[str, Any]) -> None:
    shm = next(test for test in found["self_test"] if test["name"] == "shm")
    gathers = {p["memory"]: p for p in shm["paths"] if p["operation"] == "all_gather"}
    assert (gathers["allocate"]["taken"], gathers["allocate"]["reason"]) == ("window", "")
    assert gathers["ordinary"]["taken"] == "staged"
    assert "recv is not communication memory" in gathers["ordinary"]["reason"]


def test_screen_shows_every_transport_limit_and_path(found: dict[str, Any]) -> None:
    shown = screen(found)
    for name in (*found["transports"], *found["shared_memory"], *COLLECTIVES):
        assert name in shown
    assert "Self-test: passed" in shown
    assert len(shown.splitlines()) <= 50
    assert max(map(len, shown.splitlines())) <= 120


def between_processes_with_a_wrong_element(name: str) -> Outcome:
    """Where rank 1's all_gather of the compiled core ends in one wrong element."""
    all_gather = CoreCommunicator.all_gather

    def wrong(comm: CoreCommunicator, recv: torch.Tensor, send: torch.Tensor) -> None:
        all_gather(comm, recv, send)
        comm.barrier()  # before that, another rank may still write into a shared window
        if comm.rank == 1:
            recv[-1] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoreCommunicator, "all_gather", wrong)
        return between_processes(name)


def test_wrong_element_is_reported_and_exit_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "between_processes", between_processes_with_a_wrong_element)
    assert in_process() == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "c10d:gloo  right" in out  # the others are tested all the same
    # Which rank sees it first in a window that both share, and for which dtype, is open.
    assert re.fullmatch(
        r"shardcomm doctor: the self-test of shm failed: rank \d: all_gather of torch\.\w+ in "
        r"(allocate|ordinary) memory: 1 of \d+ elements are wrong\n",
        err,
    )


def between_processes_with_a_death(name: str) -> Outcome:
    """Where rank 1 is killed once it is connected."""
    with Communicator.from_env(deadline_s=30, transport="shm") as comm:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self_test.collectives(comm)


def test_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "between_processes", between_processes_with_a_death)
    shm = self_test.self_test(["shm"])[-1]
    assert shm["name"] == "shm"
    assert shm["errors"] == ["rank 1 was killed by SIGKILL"]


def between_processes_without_end(name: str) -> Outcome:
    """Where nothing ever comes."""
    threading.Event().wait()
    raise AssertionError


def test_transport_that_hangs_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "between_processes", between_processes_without_end)
    monkeypatch.setattr(self_test, "DEADLINE_S", 1.0)
    shm = self_test.self_test(["shm"])[-1]
    assert "still ran after" in shm["errors"][0]


def test_cause_comes_before_what_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(comm: CoreCommunicator, *args: object) -> None:
        if comm.rank == 1:
            raise RuntimeError("out of order")
        comm.barrier()

    monkeypatch.setattr(CoreCommunicator, "reduce_scatter", broken)
    first, second = between_threads("cpu").errors
    assert first == "rank 1: RuntimeError: out of order"
    assert second.startswith("rank 0: CommError: ")


def test_copies_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test.copies("cpu").errors == []
    monkeypatch.setattr(CopyPlan, "run", lambda *args, **options: None)
    pack, unpack = self_test.copies("cpu").errors
    assert pack.startswith("pack from float32 to bfloat16 on cpu: ")
    assert unpack.startswith("unpack to float32, scaled and added on cpu: ")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "4000"}, 4000),
        ("0::/seen/from/outside\n", {"memory.max": "3000"}, 3000),
        ("2:cpu:/\n4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "7000"}, 7000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_cgroup_limit_is_the_smallest_of_all_around(
    membership: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, limit in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit + "\n")
    (tmp_path / "membership").write_text(membership)
    assert cgroup_limit(tmp_path / "membership", tmp_path) == expected


def test_file_that_cannot_be_written_is_refused_before_the_tests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        in_process("--json", "/nowhere/x.json")
    assert "--json is '/nowhere/x.json'; it must be a file that can be written" in (
        capsys.readouterr().err
    )
