"""`shardcomm cluster`: what it prints, how it ends, what it refuses, and that nothing is left of its hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardcomm.cluster import refusal
from shardcomm.cluster.hosts import hosts
from shardcomm.cluster.links import Link
from support.commands import command
from support.gates import until
from support.traces_of_hosts import STAY, in_use, interfaces, mounts

DEADLINE_S = 120.0
SIZE = ("--hosts", "2", "--ranks", "1", "--rate", "1gbit")
# Python's own interpreter, as a user starts it.
PYTHON = sys.executable
PROGRAM = (PYTHON, "-m", "shardcomm", "cluster")
# The same, whose hosts start their interpreters by the path that is the first argument.
PROGRAM_OF_HOSTS = "import sys; from shardcomm.__main__ import main; sys.executable = sys.argv.pop(1); sys.exit(main())"
NO_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")

pytestmark = pytest.mark.usefixtures("warm_python")
needs_rights = pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")


@needs_rights
def test_each_host_runs_the_command_as_torchrun_would(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR']\n"
        "words = [*sys.argv[1:], *(os.environ[name] for name in names)]\n"
        "sys.stdout.write(' '.join(words) + '\\n')\n"  # at once, also where Python's output is unbuffered
        "sys.stderr.write('to stderr\\n')\n"
    )
    file = tmp_path / "told.json"
    ran = command(
        *("cluster", "--hosts", "2", "--ranks", "2", "--rate", "1gbit", "--json", str(file)),
        *("--", script.name, "--lr", "3"),
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    *lines, heads, host0, host1 = ran.stdout.splitlines()
    assert sorted(lines) == [
        f"[host{rank // 2}] --lr 3 {rank} 4 {rank % 2} 2 {rank // 2} 10.0.0.1" for rank in range(4)
    ]
    assert ran.stderr.count("[host1] to stderr") == 2
    assert heads.split() == ["host", "address", "status", "received", "MB", "sent", "MB"]
    assert host0.split()[:3] == ["host0", "10.0.0.1", "0"]
    assert host1.split()[:3] == ["host1", "10.0.0.2", "0"]
    told = json.loads(file.read_text())
    assert (told["rate"], told["ranks_a_host"], told["status"]) == ("1gbit", 2, 0)
    # The two torchruns have met, which takes some messages in each direction.
    for host in told["hosts"]:
        assert min(host["sent_bytes"], host["received_bytes"]) > 500


@needs_rights
def test_the_exit_status_is_that_of_the_torchrun_that_failed() -> None:
    ran = command("cluster", *SIZE, "--", "sh", "-c", "exit $((3 * RANK))")
    assert ran.returncode == 1
    assert re.search(r"^host1 +10\.0\.0\.2 +1 ", ran.stdout, re.MULTILINE)
    assert re.search(r"\[host1\] +exitcode *: 3", ran.stderr)


@needs_rights
def test_a_killed_host_is_no_failure_where_the_others_go_on(tmp_path: Path) -> None:
    """Rank 0 ends by itself once host1 is gone. Its torchrun would wait for that of host1 for five minutes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, socket, time\n"
        "import shardcomm.cluster\n"
        "if os.environ['RANK'] == '1':\n"
        "    shardcomm.cluster.step(7)\n"
        "while True:\n"
        "    try:\n"
        "        socket.create_connection(('host1', 1), timeout=1)\n"
        "    except ConnectionRefusedError:\n"
        "        time.sleep(0.01)\n"
        "    except OSError:\n"
        "        break\n"
    )
    file = tmp_path / "told.json"
    ran = command(
        "cluster", *SIZE, "--kill", "host1 at step 7", "--json", str(file), "--", str(program)
    )
    assert "shardcomm cluster: killed host1, " in ran.stderr
    told = json.loads(file.read_text())
    assert [(host["killed"], host["status"]) for host in told["hosts"]] == [(False, 0), (True, None)]  # fmt: skip
    assert ran.returncode == 0


@needs_rights
def test_a_killed_rank_is_a_failure_of_its_torchrun() -> None:
    """It is killed as soon as it is there. It alone would stay."""
    stays = "test $RANK != 1 || exec sleep infinity"
    ran = command("cluster", *SIZE, "--kill", "rank 1 after 1us", "--", "sh", "-c", stays)
    assert ran.returncode == 1
    assert re.search(r"\[host1\] +exitcode *: -9", ran.stderr)


@needs_rights
def test_what_was_not_killed_and_what_is_late_are_told(tmp_path: Path) -> None:
    file = tmp_path / "told.json"
    kill = ("--kill", "rank 0 at step 7", "--json", str(file))
    ran = command("cluster", *SIZE, *kill, "--", "true")
    assert ran.returncode == json.loads(file.read_text())["status"] == 1
    assert ran.stderr.endswith(
        "shardcomm cluster: --kill is 'rank 0 at step 7', which did not happen: it has not called "
        "shardcomm.cluster.step(7)\n"
    )
    ran = command("cluster", *SIZE, "--timeout", "0.1", "--json", "-", "--", "sleep", "infinity")
    assert ran.returncode == json.loads(ran.stdout)["status"] == 1
    assert ran.stderr.endswith("shardcomm cluster: after 0.1 s these hosts still ran: host0, host1\n")  # fmt: skip
    assert [host["status"] for host in json.loads(ran.stdout)["hosts"]] == [None, None]


@needs_rights
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_nothing_is_left_when_the_command_is_ended(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    before = interfaces(), mounts()
    with subprocess.Popen(
        [PYTHON, "-c", PROGRAM_OF_HOSTS, sys.executable, "cluster", *SIZE, "--", "sh", "-c", STAY],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as cluster:
        assert cluster.stdout
        made = {cluster.stdout.readline().split()[1] for _ in range(4)}
        assert len(made) == 4
        assert made <= in_use()
        cluster.send_signal(number)
        assert cluster.wait(DEADLINE_S) == status
    until(lambda: made.isdisjoint(in_use()), "no process is in the hosts' namespaces")
    assert (interfaces(), mounts(), list(tmp_path.iterdir())) == (*before, [])


@needs_rights
@pytest.mark.parametrize("options", [(), ("--kill", "rank 1 after 1us")])
def test_no_folder_is_left_when_the_command_ends(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun makes one on each host, for the ranks' logs."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ran = command("cluster", *SIZE, *options, "--", "sleep", "1")
    assert "host0  10.0.0.1" in ran.stdout, ran.stderr
    assert list(tmp_path.iterdir()) == []


@needs_rights
def test_torchruns_logs_are_kept_where_the_user_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("PET_REDIRECTS", "1")  # stdout goes to a file
    ran = command("cluster", *SIZE, "--", "sh", "-c", "echo rank $RANK")
    assert ran.returncode == 0, ran.stderr
    logs = [file.read_text() for file in tmp_path.glob("*/attempt_0/0/stdout.log")]
    assert sorted(logs) == ["rank 0\n", "rank 1\n"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--hosts", "0"), "argument --hosts: '0'; it must be a whole number from 1 to 250"),
        (("--ranks", "x"), "argument --ranks: 'x'; it must be a whole number from 1 to 1024"),
        (("--rate", "1gb"), "argument --rate: '1gb'; it must be a number and a unit"),
        (("--delay", "5"), "argument --delay: '5'; it must be a number and a unit"),
        (("--kill", "host1"), "--kill is 'host1'; it must be a host or a rank, and a step"),
        (("--kill", "host7 after 1s"), "--kill is 'host7 after 1s'; the hosts are host0 to host1"),
        (("--json", "/no/where"), "--json is '/no/where'; it must be a file that can be written"),
    ],
)
def test_a_bad_option_is_refused(options: tuple[str, ...], sentence: str) -> None:
    ran = command("cluster", *SIZE, *options, "--", "true")
    assert ran.returncode == 2
    assert sentence in ran.stderr


def test_a_cluster_without_a_rate_or_a_command_is_refused() -> None:
    ran = command("cluster", "--hosts", "2", "--ranks", "1", "--", "true")
    assert ran.returncode == 2
    assert "the following arguments are required: --rate" in ran.stderr
    ran = command("cluster", *SIZE)
    assert ran.returncode == 2
    assert "the following arguments are required: COMMAND" in ran.stderr


@pytest.mark.parametrize("program", ["no-such.py", "no-such", "./no-such"])
def test_a_program_that_is_not_there_is_refused_before_hosts_are_made(program: str) -> None:
    ran = command("cluster", *SIZE, "--", program)
    assert ran.returncode == 2
    assert f"COMMAND is '{program}'; it must be a Python script whose name ends" in ran.stderr


def has_netem() -> bool:
    trial = (
        "ip link add name one type veth peer name two && tc qdisc add dev one root netem delay 1ms"
    )
    shell = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", trial]
    return subprocess.run(shell, capture_output=True, check=False).returncode == 0


@needs_rights
@pytest.mark.skipif(has_netem(), reason="this kernel can delay packets")
def test_a_delay_without_netem_is_refused_in_one_sentence() -> None:
    ran = command("cluster", *SIZE, "--delay", "50ms", "--", "true")
    assert (ran.returncode, ran.stdout) == (1, "")
    sentence = (
        "shardcomm cluster: the delay is 50000 us, and this kernel cannot delay packets "
        r"\(.*CONFIG_NET_SCH_NETEM.*\n"
    )
    assert re.fullmatch(sentence, ran.stderr)


@needs_rights
@pytest.mark.skipif(not has_netem(), reason="this kernel has no netem")
def test_a_delay_is_kept_in_each_direction() -> None:
    with hosts(2, Link(10**9, delay_s=0.05)) as (first, second):
        connect = (
            "import socket, time; begin = time.monotonic()\n"
            f"try: socket.create_connection(('{second.name}', 1))\n"
            "except ConnectionRefusedError: print(time.monotonic() - begin)"
        )
        told = first.start(PYTHON, "-c", connect, stdout=subprocess.PIPE)
        assert float(told.communicate(timeout=DEADLINE_S)[0]) >= 0.1


def test_without_rights_one_sentence_says_which_are_missing() -> None:
    """Without capabilities, and where nobody may make a user namespace."""
    inside = f'echo 0 >/proc/sys/user/max_user_namespaces && exec {" ".join(NO_RIGHTS)} "$@"'
    shut = ("unshare", "--user", "--map-root-user", "sh", "-c", inside, "sh")
    if subprocess.run([*shut, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here (unshare -U), in which rights could be taken away")
    ran = subprocess.run(
        [*shut, *PROGRAM, *SIZE, "--", "true"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert re.fullmatch(
        r"shardcomm cluster: this process cannot make hosts on this machine: unshare: .*; it needs CAP_NET_ADMIN and "
        r"CAP_SYS_ADMIN, or a kernel that lets users make user namespaces\n",
        ran.stderr,
    )
