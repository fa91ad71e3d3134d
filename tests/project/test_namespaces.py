"""Hosts on one machine, as bench/namespaces.py makes them: apart, as slow as asked for, and gone whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.gates import until

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import namespaces  # noqa: E402
from namespaces import Host, NoHostsError, hosts, run_ranks  # noqa: E402

DEADLINE_S = 60.0

# Says in which namespaces it is, and stays.
STAY = "readlink /proc/self/ns/net /proc/self/ns/pid; exec sleep infinity"

MAKER = f"""
import signal
from namespaces import hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
with hosts(2, 10**9) as two:
    for host in two:
        host.start("sh", "-c", {STAY!r})
    signal.pause()
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
    if why_not := namespaces.refusal():
        pytest.skip(why_not)


def stays_on(host: Host) -> set[str]:
    """The namespaces of a process that stays on the host."""
    process = host.start("sh", "-c", STAY, stdout=subprocess.PIPE)
    assert process.stdout
    return {process.stdout.readline().strip() for _ in range(2)}


def in_use() -> set[str]:
    """The network and PID namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for kind in ("net", "pid", "pid_for_children"):
            try:
                found.add(os.readlink(process / "ns" / kind))
            except OSError:  # it has ended
                continue
    return found


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def mounts() -> list[str]:
    return sorted(Path("/proc/self/mountinfo").read_text().splitlines())


def test_nothing_is_left_after_an_exception() -> None:
    before = interfaces(), mounts()
    made: set[str] = set()

    def fail() -> None:
        with hosts(2, 10**9) as two:
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
    env = os.environ | {"PYTHONPATH": str(BENCH)}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as maker:
        assert maker.stdout
        made = {maker.stdout.readline().strip() for _ in range(4)}
        assert len(made) == 4
        assert made <= in_use()
        maker.send_signal(number)
        maker.wait(DEADLINE_S)
    until(lambda: made.isdisjoint(in_use()), "no process is in the hosts' namespaces")
    assert (interfaces(), mounts()) == before


def test_a_link_carries_what_was_asked_for_and_counts_it() -> None:
    bits_per_s, sent, senders = 20 * 10**6, 1 << 20, 2
    with hosts(1 + senders, bits_per_s) as (first, *others):
        for host in (first, *others):
            told = host.start("tc", "-j", "qdisc", "show", "dev", "eth0", stdout=subprocess.PIPE)
            (bucket,) = json.loads(told.communicate(timeout=DEADLINE_S)[0])
            assert (bucket["kind"], bucket["options"]["rate"]) == ("tbf", bits_per_s // 8)

        receiver = first.start(sys.executable, "-c", RECEIVE, str(senders), stdout=subprocess.PIPE)
        assert receiver.stdout
        assert receiver.stdout.readline() == "listening\n"
        for host in others:
            host.start(sys.executable, "-c", SEND, first.address, str(sent))
        received, seconds = receiver.communicate(timeout=DEADLINE_S)[0].split()
        total = sent * senders
        assert int(received) == total
        # What both send goes through one link, whose bucket was full.
        assert float(seconds) >= 0.9 * (total - (256 << 10)) * 8 / bits_per_s
        assert total <= first.link_bytes().received <= 1.05 * total
        assert all(sent <= host.link_bytes().sent <= 1.05 * sent for host in others)


def test_ranks_of_one_host_share_its_processes_and_memory(tmp_path: Path) -> None:
    where = "$(readlink /proc/self/ns/pid) $(stat -c %d /dev/shm)"
    script = f'echo $LOCAL_RANK/$LOCAL_WORLD_SIZE/$WORLD_SIZE {where} >"$0/$RANK"'
    with hosts(2, 10**9) as two:
        run_ranks(two, 2, ["sh", "-c", script, str(tmp_path)], DEADLINE_S)
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [words[0] for words in told] == ["0/2/4", "1/2/4", "0/2/4", "1/2/4"]
    here = [os.readlink("/proc/self/ns/pid"), str(os.stat("/dev/shm").st_dev)]
    for own, first, second in zip(here, told[0][1:], told[2][1:], strict=True):
        assert len({own, first, second}) == 3
    assert told[0][1:] == told[1][1:]
    assert told[2][1:] == told[3][1:]


def test_a_rank_that_fails_or_is_late_is_named() -> None:
    script = "test $RANK != 1 || exit 3; exec sleep infinity"
    with hosts(2, 10**9) as two:
        with pytest.raises(RuntimeError, match="rank 1 of 4 ended with status 3"):
            run_ranks(two, 2, ["sh", "-c", script], DEADLINE_S)
        with pytest.raises(TimeoutError, match=r"these ranks still ran: \[0\]"):
            run_ranks(two[:1], 1, ["sleep", "infinity"], 0.1)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(NoHostsError, match=r"ip not found \(Debian: iproute2\)"),
        hosts(1, 10**9),
    ):
        pass
