"""Hosts on one machine: apart, as slow as asked for, killed at once, and gone whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardcomm.cluster import NoHostsError
from shardcomm.cluster.hosts import Host, hosts, refusal
from shardcomm.cluster.links import Link
from support.gates import until
from support.traces_of_hosts import STAY, in_use, interfaces, mounts

DEADLINE_S = 60.0

MAKER = f"""
import signal
from shardcomm.cluster.hosts import hosts
from shardcomm.cluster.links import Link
with hosts(2, Link(10**9)) as two:
    for host in two:
        host.start("sh", "-c", {STAY!r})
    signal.pause()
"""

STOPPED = """
from pathlib import Path
from shardcomm.cluster.hosts import hosts
from shardcomm.cluster.links import Link
with hosts(2, Link(10**9)) as two:
    waiting = [host.start("sh", "-c", "kill -STOP $$") for host in two]
    for each in waiting:
        while Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
    two[0].kill()
print([each.wait() for each in waiting])
"""

OF_A_USER = """
import os
from shardcomm.cluster.hosts import hosts
from shardcomm.cluster.links import Link
with hosts(2, Link(10**9)) as (first, second):
    second.start("sh", "-c", "getent ahostsv4 host0 | head -n1; echo to its maker >/proc/1/fd/1").wait()
    print(os.geteuid(), os.read(second.namespaces.written_inside, 100))
    second.kill()
    first.start("hostname").wait()
"""

RECEIVE = """
import socket, sys, time
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    senders = [server.accept()[0] for _ in range(int(sys.argv[1]))]
    start = time.perf_counter()
    for sender in senders:
        sender.sendall(b"go")
    received = 0
    for sender in senders:
        while piece := sender.recv(1 << 16):
            received += len(piece)
    print(received, time.perf_counter() - start)
"""

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.recv(2)
    connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def rights() -> None:
    if why_not := refusal():
        pytest.skip(why_not)


def said_on(host: Host, script: str) -> list[str]:
    """The lines that a shell prints on the host."""
    process = host.start("sh", "-c", script, stdout=subprocess.PIPE)
    return process.communicate(timeout=DEADLINE_S)[0].decode().splitlines()


def stays_on(host: Host) -> set[str]:
    """The namespaces of a process that stays on the host."""
    process = host.start("sh", "-c", STAY, stdout=subprocess.PIPE)
    assert process.stdout
    return {process.stdout.readline().decode().strip() for _ in range(2)}


def test_nothing_is_left_after_an_exception() -> None:
    before = interfaces(), mounts()
    made: set[str] = set()

    def fail() -> None:
        with hosts(2, Link(10**9)) as two:
            for host in two:
                made.update(stays_on(host))
            assert made <= in_use()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(made) == 4
    assert made.isdisjoint(in_use())
    assert (interfaces(), mounts()) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_the_maker_is_killed(number: signal.Signals) -> None:
    before = interfaces(), mounts()
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as maker:
        assert maker.stdout
        made = {maker.stdout.readline().strip() for _ in range(4)}
        assert len(made) == 4
        assert made <= in_use()
        maker.send_signal(number)
        maker.wait(DEADLINE_S)
    until(lambda: made.isdisjoint(in_use()), "no process is in the hosts' namespaces")
    assert (interfaces(), mounts()) == before


def test_a_stopped_process_ends_with_its_host() -> None:
    command = [sys.executable, "-c", STOPPED]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.stdout == f"{[-signal.SIGKILL] * 2}\n", ended.stderr


def test_a_link_carries_what_was_asked_for_and_counts_it() -> None:
    bits_per_s, sent, senders = 20 * 10**6, 1 << 20, 2
    with hosts(1 + senders, Link(bits_per_s)) as (first, *others):
        for host in (first, *others):
            told = host.start("tc", "-j", "qdisc", "show", "dev", "eth0", stdout=subprocess.PIPE)
            (bucket,) = json.loads(told.communicate(timeout=DEADLINE_S)[0])
            assert (bucket["kind"], bucket["options"]["rate"]) == ("tbf", bits_per_s // 8)

        receiver = first.start(sys.executable, "-c", RECEIVE, str(senders), stdout=subprocess.PIPE)
        assert receiver.stdout
        assert receiver.stdout.readline() == b"listening\n"
        for host in others:
            host.start(sys.executable, "-c", SEND, first.address, str(sent))
        received, seconds = receiver.communicate(timeout=DEADLINE_S)[0].split()
        total = sent * senders
        assert int(received) == total
        # What both send goes through one link, whose bucket was full.
        assert float(seconds) >= 0.9 * (total - (256 << 10)) * 8 / bits_per_s
        assert total <= first.link_bytes().received <= 1.05 * total
        assert all(sent <= host.link_bytes().sent <= 1.05 * sent for host in others)


def test_each_host_is_apart_and_finds_the_others_by_name() -> None:
    own = "readlink /proc/self/ns/pid /proc/self/ns/net /proc/self/ns/ipc; stat -c %d /dev/shm; hostname"
    here = subprocess.run(["sh", "-c", own], capture_output=True, text=True, check=True).stdout
    with hosts(2, Link(10**9)) as two:
        told = [said_on(host, own) for host in two]
        for kinds in zip(here.splitlines(), *told, strict=True):
            assert len(set(kinds)) == 3
        assert [words[-1] for words in told] == ["host0", "host1"]
        for host, other in (two, reversed(two)):
            resolved = said_on(host, f"getent ahostsv4 {other.name}; getent hosts {other.address}")
            assert {line.split()[0] for line in resolved} == {other.address}
            assert other.name in resolved[-1]


def test_what_one_host_has_in_shared_memory_no_other_sees() -> None:
    mine = Path(f"/dev/shm/shardcomm-test-{os.getpid()}")
    try:
        with hosts(2, Link(10**9)) as two:
            assert said_on(two[0], f"touch {mine}; ls /dev/shm") == [mine.name]
            assert said_on(two[1], "ls /dev/shm") == []
        assert not mine.exists()
    finally:
        mine.unlink(missing_ok=True)


def test_a_killed_host_is_gone_and_says_no_farewell() -> None:
    """Its connections are not closed: the other host waits for its own timeout."""
    wait = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    print(connection.recv(1), flush=True)
    connection.settimeout(0.5)
    try:
        print(connection.recv(1))
    except TimeoutError:
        print("silence")
"""
    connect = """
import socket, sys, signal
connection = socket.create_connection((sys.argv[1], 5000))
connection.sendall(b"x")
signal.pause()
"""
    with hosts(2, Link(10**9)) as (first, second):
        waiting = first.start(sys.executable, "-c", wait, stdout=subprocess.PIPE)
        assert waiting.stdout
        assert waiting.stdout.readline() == b"listening\n"
        there = stays_on(second)
        connected = second.start(sys.executable, "-c", connect, first.address)
        assert waiting.stdout.readline() == b"b'x'\n"
        second.kill()
        assert connected.wait(DEADLINE_S) == -signal.SIGKILL
        assert there.isdisjoint(in_use())
        assert waiting.communicate(timeout=DEADLINE_S)[0] == b"silence\n"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(NoHostsError, match=r"ip not found \(Debian: iproute2\)"),
        hosts(1, Link(10**9)),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="is about what root gives up")
def test_a_user_without_rights_makes_hosts_in_a_user_namespace() -> None:
    as_nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        sys.executable,
        "-c",
    ]
    can = "import shardcomm.cluster as c; assert not c.refusal(); print('can', flush=True)\n"
    told = subprocess.run(
        [*as_nobody, can + OF_A_USER],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    if not told.stdout:
        pytest.skip("nobody may not read this tree, or make user namespaces")
    assert told.returncode == 0, told.stderr
    first, *lines = told.stdout.splitlines()
    assert first == "can"
    address, said, name = sorted(lines)
    assert address.split() == ["10.0.0.1", "STREAM", "host0"]
    assert said == r"65534 b'to its maker\n'"
    assert name == "host0"
