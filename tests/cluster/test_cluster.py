"""What runs on a cluster: functions and commands as ranks of several hosts, their results, and kills."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import shardcomm.cluster
from shardcomm import CommError, Communicator, RankError
from shardcomm.cluster import Cluster, due_kills, link_bytes
from shardcomm.cluster.due_kills import DueKills
from shardcomm.cluster.kills import parse_kill
from shardcomm.cluster.links import LinkBytes
from shardcomm.cluster.on_host import OnHost
from shardcomm.cluster.pids import rank_of

HOSTS, RANKS_A_HOST = 2, 2
TIMEOUT_S = 120.0
COMM_DEADLINE_S = 8.0
WAS_DEAD = "did not happen: host1 had been killed before"
NUMEL = 1 << 21  # float32 of all ranks: 8 MiB


class Told(NamedTuple):
    rank: int
    host: str
    transport: str
    total: float
    received_bytes: int


def gathers(factor: int) -> Told:
    torch.set_num_threads(1)
    with Communicator.from_env() as comm:
        full = comm.allocate(NUMEL, use="gather")
        own = torch.full((NUMEL // comm.size,), float(factor * comm.rank))
        comm.barrier()
        before = link_bytes().received
        comm.barrier()
        comm.all_gather(full, own)
        comm.barrier()
        received = link_bytes().received - before
        return Told(comm.rank, socket.gethostname(), comm.transport, full.double().sum().item(), received)  # fmt: skip


@pytest.mark.usefixtures("warm_python")
def test_a_function_runs_as_ranks_of_several_hosts_whose_bytes_are_counted(
    cluster: type[Cluster], capfd: pytest.CaptureFixture[str]
) -> None:
    told = cluster(HOSTS, RANKS_A_HOST, rate="1gbit").run(gathers, (3,), timeout_s=TIMEOUT_S)
    ranks = HOSTS * RANKS_A_HOST
    for rank, each in enumerate(told):
        assert each is not None
        assert (each.rank, each.host) == (rank, f"host{rank // RANKS_A_HOST}")
        assert each.transport == "hosts"
        assert each.total == 3 * sum(range(ranks)) * NUMEL // ranks
        # The other host's parts, once; and what barriers, headers and acknowledgements are.
        parts = 4 * NUMEL * RANKS_A_HOST // ranks
        assert parts <= each.received_bytes <= 1.05 * parts
    assert "Warning" not in capfd.readouterr().err


def fails_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("of this rank alone")


def test_a_rank_that_raises_is_named_with_its_traceback(cluster: type[Cluster]) -> None:
    with pytest.raises(RankError, match=r"^rank 1 raised\n") as caught:
        cluster(hosts=1, ranks=2, rate="1gbit").run(fails_on_rank_1, timeout_s=TIMEOUT_S)
    assert "in fails_on_rank_1" in str(caught.value)
    assert "ZeroDivisionError: of this rank alone" in str(caught.value)


class Survived(NamedTuple):
    steps: int
    error: str
    waited_s: float


def steps_until_it_fails() -> Survived:
    torch.set_num_threads(1)
    with Communicator.from_env(deadline_s=COMM_DEADLINE_S) as comm:
        values = torch.ones(1000)
        for number in range(100):
            shardcomm.cluster.step(number)
            before = time.monotonic()
            try:
                comm.all_reduce(values, "avg")
            except CommError as error:
                return Survived(number, str(error), time.monotonic() - before)
    raise AssertionError("nothing has failed")


@pytest.mark.usefixtures("warm_python")
@pytest.mark.covers("dead rank", transports=["hosts"])
@pytest.mark.parametrize(
    ("kill", "killed"), [("host1 at step 7", {2, 3}), ("rank 2 at step 7", {2})]
)
def test_survivors_of_a_kill_get_a_comm_error_within_the_deadline(
    cluster: type[Cluster], kill: str, killed: set[int]
) -> None:
    told = cluster(HOSTS, RANKS_A_HOST, rate="1gbit").run(
        steps_until_it_fails, kill=kill, timeout_s=TIMEOUT_S
    )
    assert {rank for rank, each in enumerate(told) if each is None} == killed
    survivors = [each for each in told if each is not None]
    assert {each.steps for each in survivors} <= {6, 7}  # who is late, and who waits for it
    assert max(each.steps for each in survivors) == 7
    assert all(each.waited_s < COMM_DEADLINE_S + 10 for each in survivors)
    if killed == {2}:  # whose host lives on, and sees it die
        assert re.search(r"rank 2 \(pid \d+\) died", survivors[-1].error)


@pytest.mark.usefixtures("warm_python")
def test_a_kill_that_does_not_happen_is_told(cluster: type[Cluster]) -> None:
    expected = (
        r"kill 'host0 at step 7' did not happen: a rank of host0 has not called shardcomm\.cluster\.step\(7\)"
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=expected):
        cluster(1, 1, "1gbit").run(nothing, kill="host0 at step 7", timeout_s=TIMEOUT_S)


def nothing() -> None:
    shardcomm.cluster.step(6)


@pytest.mark.usefixtures("warm_python")
def test_a_kill_of_what_has_died_with_its_host_is_told(cluster: type[Cluster]) -> None:
    kills = ["host1 at step 2", "rank 1 at step 4", "host1 after 900s"]
    for kill in kills[1:]:
        with pytest.raises(RuntimeError, match=f"{kill}' {WAS_DEAD}"):
            cluster(2, 1, "1gbit").run(comes_to_step_2, kill=[kills[0], kill], timeout_s=TIMEOUT_S)


def comes_to_step_2() -> None:
    shardcomm.cluster.step(2)


def test_kills_by_time_of_what_has_died_with_its_host_are_told(cluster: type[Cluster]) -> None:
    """The other host goes on until their time has come."""
    kills = ["host1 after 1us", "rank 1 after 2us", "rank 0 after 1s"]
    with pytest.raises(RuntimeError, match=f"rank 1 after 2us' {WAS_DEAD}"):
        cluster(2, 1, "1gbit").run(waits, kill=kills, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("host", ["host1 after 5s", "host1 at step 5"])
def test_a_kill_before_that_of_its_host_came_to_a_rank_that_had_ended(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank ended by itself, so that there is nothing to kill at 1 us; its host is killed after that."""
    monkeypatch.setattr(due_kills, "pids_on", lambda _: [])
    hosts = [SimpleNamespace(link_bytes=lambda: LinkBytes(0, 0), kill=lambda: None)] * 2
    states = [OnHost("host0", ""), OnHost("host1", "")]
    kills = [parse_kill("rank 1 after 1us"), parse_kill(host), parse_kill("rank 1 after 900s")]
    due = DueKills(kills, hosts, states, 1, lambda _: None)  # type: ignore[arg-type]
    if kills[1].step is None:
        due.carry_out_at(time.monotonic() + 10)
    else:
        due.carry_out_at_step("1")
    assert due.missed() == {
        "rank 1 after 1us": "rank 1 had ended by then",
        "rank 1 after 900s": "host1 had been killed before",
    }


def waits() -> None:
    signal.pause()


def leaves_without_a_result() -> None:
    if os.environ["RANK"] == "1":
        os._exit(0)


@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_leaves_no_result_is_an_error(cluster: type[Cluster]) -> None:
    with pytest.raises(RankError, match=r"^rank 1 ended with exit status 0 and no result$"):
        cluster(1, 2, "1gbit").run(leaves_without_a_result, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(("given", "rank"), [("3", 3), ("x", None), ("", None)])
def test_a_program_may_have_any_text_as_its_rank(given: str, rank: int | None) -> None:
    with subprocess.Popen(
        ["sh", "-c", "echo begun; read never"],
        env={"RANK": given, "PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()  # before that, /proc may not show its environment yet
            assert rank_of(program.pid) == rank
        finally:
            program.kill()


@pytest.mark.usefixtures("warm_python")
def test_what_links_have_carried_by_the_end_of_the_time_is_known(
    cluster: type[Cluster], tmp_path: Path
) -> None:
    """Host1 sends 100 kB to host0, and neither ends."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, socket\n"
        "if os.environ['RANK'] == '0':\n"
        "    with socket.create_server(('', 1234)) as server, server.accept()[0].makefile('rb') as sent:\n"
        "        print(len(sent.read(100_000)), flush=True)\n"
        "while os.environ['RANK'] == '1':\n"
        "    try:\n"
        "        socket.create_connection(('host0', 1234)).sendall(bytes(100_000))\n"
        "        break\n"
        "    except ConnectionRefusedError:\n"
        "        pass\n"
        "signal.pause()\n"
    )
    lines: list[str] = []
    with cluster(2, 1, "1gbit").command(
        [str(program)], [], lambda _, line: lines.append(line)
    ) as processes:
        for timeout_s in range(1, int(TIMEOUT_S)):
            with pytest.raises(TimeoutError, match=f"after {timeout_s} s these hosts still ran"):
                processes.wait(timeout_s, grace_s=None)
            if "[host0] 100000\n" in lines:
                break
    host0, host1 = (each.carried for each in processes.on_hosts)
    assert host0.received > 100_000
    assert host1.sent > 100_000


@pytest.mark.usefixtures("warm_python")
def test_a_command_that_fails_is_told_by_its_last_lines(cluster: type[Cluster]) -> None:
    with pytest.raises(RankError, match=r"torchrun of host0 ended with status 1") as caught:
        cluster(1, 1, "1gbit").run(["sh", "-c", "echo here; exit 3"], timeout_s=TIMEOUT_S)
    assert "\nhere\n" in str(caught.value)
    assert re.search(r"exitcode *: 3", str(caught.value))


@pytest.mark.usefixtures("warm_python")
def test_a_command_that_is_late_is_ended(cluster: type[Cluster]) -> None:
    with pytest.raises(TimeoutError, match=r"after 0\.1 s these hosts still ran: host0, host1"):
        cluster(2, 1, "1gbit").run(["sleep", "infinity"], timeout_s=0.1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hosts": 0}, "Cluster: hosts is 0; it must be a whole number from 1 to 250"),
        ({"ranks": 2000}, "Cluster: ranks is 2000; it must be a whole number from 1 to 1024"),
        ({"rate": "1gb"}, "Cluster: rate is '1gb'; it must be a number and a unit"),
        ({"rate": "10bit"}, "Cluster: rate is '10bit'; it must be .* from 1kbit to 1000gbit"),
        ({"delay": "1"}, "Cluster: delay is '1'; it must be a number and a unit"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cluster(**{"hosts": 2, "ranks": 2, "rate": "1gbit", **given})  # type: ignore[arg-type]


def test_a_rate_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="Cluster: rate is a int; it must be a text such as"):
        Cluster(2, 2, 10**9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kill", "sentence"),
    [
        ("host1", "run: kill is 'host1'; it must be a host or a rank, and a step or a time"),
        ("host2 at step 1", "run: kill is 'host2 at step 1'; the hosts are host0 to host1"),
        ("rank 4 at step 1", "run: kill is 'rank 4 at step 1'; the ranks are 0 to 3"),
        ("rank 1 after 5", "run: kill is 'rank 1 after 5', where the time is '5'; it must be"),
        (
            ["host0 after 1s", "host 0 after 1000ms"],
            "run: kill is 'host 0 after 1000ms', which is given twice; it must be given once",
        ),
    ],
)
def test_a_kill_that_cannot_be_is_refused(kill: str | list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cluster(2, 2, "1gbit").run(["true"], kill=kill, timeout_s=1)


def test_what_is_neither_a_function_nor_words_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TypeError, match="run: what is a str; it must be a list or a tuple"):
        Cluster(2, 2, "1gbit").run("true", timeout_s=1)
    monkeypatch.setattr(nothing, "__module__", "__main__")
    with pytest.raises(TypeError, match=r"run: what is <function nothing .*> of the script that"):
        Cluster(2, 2, "1gbit").run(nothing, timeout_s=1)
    with pytest.raises(TypeError, match="run: what and args must be what pickle can send"):
        Cluster(2, 2, "1gbit").run(lambda: None, timeout_s=1)


@pytest.mark.parametrize(
    ("kill", "kind"),
    [(3, "int"), (None, "NoneType"), ([3], "int"), (b"host0 at step 1", "bytes")],
    ids=str,
)
def test_a_kill_that_is_no_text_is_refused(kill: Any, kind: str) -> None:
    with pytest.raises(
        TypeError, match=f"run: kill is a {kind}; it must be a text such as 'host1 at"
    ):
        Cluster(2, 2, "1gbit").run(["true"], kill=kill, timeout_s=1)


def test_a_command_of_other_words_or_with_args_is_refused() -> None:
    with pytest.raises(TypeError, match="run: a word of what is a int; it must be a text"):
        Cluster(2, 2, "1gbit").run([1, 2], timeout_s=1)  # type: ignore[list-item]
    with pytest.raises(
        ValueError, match=r"run: args is \(1,\); it is for a function, and a command"
    ):
        Cluster(2, 2, "1gbit").run(["true"], (1,), timeout_s=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("words", [[], ["no-such.py"], ["no-such", "true"]])
def test_a_program_that_is_not_there_is_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"run: what is '.*'; it must be a Python script whose"):
        Cluster(2, 2, "1gbit").run(words, timeout_s=1)


def test_a_step_outside_of_a_cluster_does_nothing() -> None:
    shardcomm.cluster.step(0)
    with pytest.raises(ValueError, match="step: number is -1; it must be a whole number from 0"):
        shardcomm.cluster.step(-1)
