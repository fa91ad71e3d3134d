"""`launch`: N ranks as processes of this host."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardcomm import Communicator, RankError, launch
from support import interpreters
from support.listeners import listening

RANKS = 3


def rank_and_double(value: int) -> tuple[int, int]:
    return int(os.environ["RANK"]), 2 * value


def test_results_come_in_rank_order() -> None:
    assert launch(rank_and_double, RANKS, (21,), timeout_s=60) == [(r, 42) for r in range(RANKS)]


def sum_both_ways() -> tuple[list[float], list[float]]:
    theirs = torch.tensor([1.0, float(os.environ["RANK"])])
    ours = theirs.clone()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with Communicator.from_env(deadline_s=30) as comm:
        dist.all_reduce(theirs)
        comm.all_reduce(ours)
    dist.destroy_process_group()
    return theirs.tolist(), ours.tolist()


def test_torch_distributed_and_communicator_both_find_the_ranks() -> None:
    for theirs, ours in launch(sum_both_ways, RANKS, timeout_s=60):
        assert theirs == ours == [3.0, 3.0]


def test_ranks_share_the_cores() -> None:
    cores = os.cpu_count() or 1
    assert launch(torch.get_num_threads, 2, timeout_s=60) == [max(1, cores // 2)] * 2


def fork_and_come_back(raising: bool) -> str:
    """So does the child, before its parent."""
    child = os.fork()
    if child == 0:
        if raising:
            raise LookupError("in the child")
        return "the child's"
    _, status = os.waitpid(child, 0)
    return f"the rank's; its child ended with {os.waitstatus_to_exitcode(status)}"


@pytest.mark.parametrize("raising", [False, True])
def test_a_forked_child_that_comes_back_is_not_the_rank(raising: bool) -> None:
    said = f"the rank's; its child ended with {int(raising)}"
    assert launch(fork_and_come_back, 2, (raising,), timeout_s=60) == [said] * 2


def return_much() -> bytes:
    return bytes(range(256)) * 40_000


def test_a_result_is_as_long_as_one_likes() -> None:
    assert launch(return_much, 2, timeout_s=60) == [return_much()] * 2


class ReadNowhere:
    """Pickled, it makes an error."""

    def __reduce__(self) -> object:
        return int, ("no number",)


def return_what_cannot_be_read() -> ReadNowhere:
    return ReadNowhere()


def test_a_result_that_cannot_be_unpickled_names_its_rank() -> None:
    said = "rank 0 returned what cannot be unpickled here: ValueError: invalid literal"
    with pytest.raises(RankError, match=said):
        launch(return_what_cannot_be_read, 1, timeout_s=60)


def addresses_of_gloo_and_of_the_store() -> list[str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    addresses = [*listening(), *listening(int(os.environ["MASTER_PORT"]))]
    dist.barrier()
    dist.destroy_process_group()
    return addresses


def test_only_this_host_can_connect() -> None:
    for addresses in launch(addresses_of_gloo_and_of_the_store, 2, timeout_s=60):
        assert len(addresses) >= 2
        assert set(addresses) == {"127.0.0.1"}


FUNCTION = "def function(): pass"
STDIN = "__file__ = '<stdin>'"  # as Python sets it for a program that it reads there


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ([FUNCTION], "TypeError: launch: fn is <function function at "),
        ([STDIN, FUNCTION], "TypeError: launch: fn is <function function at "),
        ([STDIN, "from os import getpid as function"], "RuntimeError: launch: the program's file is '"),
    ],
)  # fmt: skip
def test_a_program_that_ranks_cannot_import_is_refused(program: list[str], said: str) -> None:
    lines = [*program, "import shardcomm", "shardcomm.launch(function, 2, timeout_s=60)"]
    ran = interpreters.run("\n".join(lines))
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    assert ran.stderr.splitlines()[-1].startswith(said)


def test_a_call_that_is_not_under_the_guard_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, shardcomm\nshardcomm.launch(os.getpid, 2, timeout_s=60)\n")
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 1
    assert 'put the call of launch under `if __name__ == "__main__":`' in ran.stderr
    assert "RankError: rank 0 ended with exit status 1 before it called fn; stderr" in ran.stderr


def test_a_rank_that_cannot_read_its_arguments_has_not_called_the_function() -> None:
    with pytest.raises(RankError, match=r"^rank 0 ended with exit status 1 before it called fn"):
        launch(abs, 1, (ReadNowhere(),), timeout_s=60)


def test_a_daemonic_process_is_refused() -> None:
    with (
        multiprocessing.get_context("forkserver").Pool(1) as pool,
        pytest.raises(RuntimeError, match="launch: this process is a daemonic one"),
    ):
        pool.apply(launch, (abs, 1, (1,)))


def launch_in_a_child(tell: Connection) -> None:
    try:
        launch(abs, 1, (1,), timeout_s=60)
    except RuntimeError as error:
        tell.send(str(error))


def test_a_forked_child_of_a_launcher_is_refused() -> None:
    assert launch(abs, 1, (-1,), timeout_s=60) == [1]
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    child = context.Process(target=launch_in_a_child, args=(tell,))
    child.start()
    tell.close()
    try:
        assert told.recv().startswith("launch: this process was forked from one that has called")
    finally:
        child.join(60)
    assert child.exitcode == 0


def launch_with_sockets_in(folder: Path) -> None:
    tempfile.tempdir = str(folder)
    launch(rank_and_double, 1, (1,), timeout_s=60)


@pytest.mark.skipif(
    hasattr(multiprocessing.util, "_get_base_temp_dir"), reason="this Python then takes /tmp"
)
def test_a_long_path_of_temporary_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    with pytest.raises(
        RankError, match=r"OSError: launch: .* set TMPDIR to a folder with a shorter"
    ):
        launch(launch_with_sockets_in, 1, (folder,), timeout_s=60)
