"""Ranks of one host that are of other users or user namespaces cannot share memory: all take c10d, and say why."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, Communicator, launch
from support.listeners import listening

NOBODY = 65534


def sum_and_receipts(transport: Any) -> tuple[str, list[str], float, list[str]]:
    """The transport, warnings, a sum, and the reasons of the receipts; or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            comm = Communicator.from_env(transport=transport, deadline_s=60, device="cpu")
        except CommError as error:
            return str(error), [], 0.0, []
    with comm:
        x = torch.ones(3)
        comm.all_reduce(x)
        reasons = [receipt.reason for receipt in comm.receipts()]
        return comm.transport, [str(each.message) for each in caught], float(x.sum()), reasons


def check_all_fell_back(outcomes: list[tuple[str, list[str], float, list[str]]]) -> None:
    for transport, warned, total, reasons in outcomes:
        assert (transport, total) == ("c10d", 6.0)
        for said in (*warned, *reasons):
            assert "not all ranks can share memory (rank 1: " in said
            assert "rank 0: " not in said
        assert warned
        assert reasons


def as_nobody(transport: Any) -> tuple[str, list[str], float, list[str]]:
    if os.environ["RANK"] == "1":
        codecs.lookup("idna")  # sockets load it, perhaps from where nobody but root may read
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return sum_and_receipts(transport)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_rank_of_another_user_makes_all_take_c10d_and_say_why() -> None:
    check_all_fell_back(launch(as_nobody, 2, ("auto",), timeout_s=60))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_rank_of_another_user_is_an_error_on_all_that_asked_for_shm() -> None:
    for said, *_ in launch(as_nobody, 2, ("shm",), timeout_s=60):
        assert said.startswith("transport is 'shm', but not all ranks can share memory (rank 1: ")
        assert said.endswith("; use 'c10d' or 'auto'")


def can_unshare() -> bool:
    if not shutil.which("unshare"):
        return False
    return (
        subprocess.run(["unshare", "-U", "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not can_unshare(), reason="no user namespaces here (unshare -U)")
def test_rank_in_another_user_namespace_makes_all_take_c10d_and_say_why(tmp_path: Path) -> None:
    """Started by hand: rank 0 keeps the store, for this host alone."""
    with socket.socket() as reserved:
        # No other program gets the port meanwhile; rank 0 listens at it all the same.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [*begin, sys.executable, __file__, str(tmp_path / str(rank))],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)},
            )
            for rank, begin in enumerate([[], ["unshare", "-U"]])
        ]  # fmt: skip
        try:
            for process in ranks:
                assert process.wait(120) == 0
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    outcomes = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    check_all_fell_back([outcome for several, _ in outcomes for outcome in several])
    assert outcomes[0][1] == ["127.0.0.1"]


def started_by_hand(result: Path) -> None:
    outcomes = [sum_and_receipts("auto") for _ in range(5)]  # one group after the other
    addresses = listening(int(os.environ["MASTER_PORT"]))
    result.write_text(json.dumps([outcomes, addresses]))
    dist.init_process_group("gloo")  # over the same port
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    started_by_hand(Path(sys.argv[1]))
