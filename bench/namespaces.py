"""Hosts on one machine: namespaces on a switch, with links as slow as `tc` makes them.

    with hosts(2, bits_per_s=10**9) as two:
        run_ranks(two, 2, [sys.executable, "program.py"], timeout_s=60)  # ranks 0 and 1 on two[0], 2 and 3 on two[1]

A host has a network, processes and a /dev/shm of its own, so shardcomm takes it for another host::

    host 0   eth0 ══ port0 ┐
    host 1   eth0 ══ port1 ┼ bridge, in a namespace that is the switch
    host 2   eth0 ══ port2 ┘
                  both ends of a link send through a token bucket

Nothing here has a name that could outlive its maker. Each host lives as long as a `cat` that reads from a pipe of the
maker's. When the maker closes the pipe, or is killed, the `cat` ends. It is the first process of its PID namespace, so
the kernel then kills all others of the host. When a namespace has no process any more, the kernel removes it, and its
interfaces with it.

Root is not needed where users may make namespaces of their own.
"""

from __future__ import annotations

import functools
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

PROGRAMS = {
    "ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux",
}  # fmt: skip
REFUSED = "this process cannot make hosts on this machine"
PORT = 29500  # of the ranks' store, in a network where nobody else listens

# The packets of a TCP connection come to the bucket in pieces of up to 64 KiB, which it must hold. What waits for it is
# not dropped: times then tell of bandwidth alone.
BUCKET = "burst 256k limit 64mb"


class NoHostsError(RuntimeError):
    """This process cannot make hosts. The message is a sentence that says why."""


class LinkBytes(NamedTuple):
    """What has come into a host over its link, and gone out, with the headers of packets as the kernel counts them."""

    received: int
    sent: int


@dataclass(frozen=True)
class Host:
    """A host on this machine; see `hosts`."""

    address: str
    _pid: int  # of a process in its network
    _processes: ExitStack  # waits for what was started here, once the host has ended

    def start(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a process on the host, which ends with the host at the latest.

        The `Popen` is of a process outside that only waits for the one on the host, and ends with its status. To kill
        it would not end the other.
        """
        inside = ["--mount", f"--pid=/proc/{self._pid}/ns/pid_for_children"]
        process = subprocess.Popen(
            [*_entering(self._pid), *inside, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            text=True,
            start_new_session=True,  # Ctrl-C is for the maker, who ends the host
        )
        return self._processes.enter_context(process)

    def link_bytes(self) -> LinkBytes:
        """What the host's link has carried so far."""
        return link_bytes(self._pid)


def link_bytes(process: int | str = "self") -> LinkBytes:
    """What has gone over the link of the host on which a process is: this one, or that of a pid."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == "eth0":
            received, sent = (int(counters.split()[column]) for column in (0, 8))
            return LinkBytes(received, sent)
    raise LookupError(f"process {process} is in a network without eth0")


@contextmanager
def hosts(count: int, bits_per_s: int) -> Iterator[list[Host]]:
    """Makes hosts whose links carry `bits_per_s` in each direction. At the end they are gone, with all that runs there.

    Raises:
        NoHostsError: This process may not make namespaces, or a program is missing.
    """
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise NoHostsError(f"{REFUSED}: {program} not found (Debian: {package})")
    with ExitStack() as held:
        processes = held.enter_context(ExitStack())
        user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        shaped = f"root tbf rate {bits_per_s}bit {BUCKET}"
        switch = held.enter_context(_namespaces([], user))
        _set_up(switch, "ip link add bridge type bridge", "ip link set bridge up")
        made = []
        for i in range(count):
            pid = held.enter_context(_namespaces(_entering(switch)))
            host = Host(f"10.0.0.{i + 1}", pid, processes)
            _set_up(
                switch,
                f"ip link add port{i} type veth peer name eth0 netns {pid}",
                f"tc qdisc add dev port{i} {shaped}",
                f"ip link set port{i} master bridge up",
            )
            _set_up(
                pid,
                f"tc qdisc add dev eth0 {shaped}",
                f"ip address add {host.address}/24 dev eth0",
                "ip link set eth0 up",
                "ip link set lo up",
            )
            made.append(host)
        yield made


@functools.cache
def refusal() -> str:
    """The sentence that says why this process cannot make hosts; "" if it can."""
    try:
        with hosts(1, 10**9) as (host,):
            status = host.start("true").wait()
    except NoHostsError as error:
        return str(error)
    return f"{REFUSED}: a process there ended with status {status}" if status else ""


def run_ranks(
    where: Sequence[Host], ranks_a_host: int, command: Sequence[str], timeout_s: float
) -> None:
    """Runs a command once a rank, in the environment that torchrun would give, until all have ended.

    Raises:
        RuntimeError: A rank has ended with another status than 0. The others end with their hosts.
        TimeoutError: Ranks still ran after `timeout_s`. They end with their hosts.
    """
    size, deadline = len(where) * ranks_a_host, time.monotonic() + timeout_s
    with ExitStack() as opened, selectors.DefaultSelector() as running:
        for rank in range(size):
            host, local_rank = divmod(rank, ranks_a_host)
            own = {
                "RANK": rank, "WORLD_SIZE": size,
                "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks_a_host,
                "GROUP_RANK": host, "GROUP_WORLD_SIZE": len(where),
                "MASTER_ADDR": where[0].address, "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns of addresses that have no name
            }  # fmt: skip
            env = os.environ | {name: str(value) for name, value in own.items()}
            process = where[host].start(*command, env=env)
            end = os.pidfd_open(process.pid)
            opened.callback(os.close, end)
            running.register(end, selectors.EVENT_READ, (rank, process))
        while late := [key.data[0] for key in running.get_map().values()]:
            ended = running.select(max(0, deadline - time.monotonic()))
            if not ended:
                raise TimeoutError(f"after {timeout_s:g} s these ranks still ran: {late}")
            for key, _ in ended:
                running.unregister(key.fd)
                rank, process = key.data
                if status := process.wait():
                    raise RuntimeError(f"rank {rank} of {size} ended with status {status}")


@contextmanager
def _namespaces(within: Sequence[str], also: Sequence[str] = ()) -> Iterator[int]:
    """New namespaces, which end with the context or with this process; gives the pid of a process in them."""
    holder = subprocess.Popen(
        [
            *within, "unshare", *also, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
            "sh", "-ec", "mount -t tmpfs tmpfs /dev/shm; echo; exec cat",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert holder.stdin
    assert holder.stdout
    assert holder.stderr
    try:
        if not holder.stdout.readline():  # its first is an empty one
            raise NoHostsError(f"{REFUSED}: {_last_line(holder.stderr.read())}")
        yield holder.pid
    finally:
        holder.stdin.close()
        holder.wait()  # unshare ends after the first process in the namespace, and that one after all others
        holder.stdout.close()
        holder.stderr.close()


def _entering(pid: int) -> list[str]:
    """The beginning of a command in the network of a process."""
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={pid}", *user, "--net"]


def _set_up(pid: int, *commands: str) -> None:
    """Runs commands in the network of a process."""
    script = [*_entering(pid), "sh", "-ec", "\n".join(commands)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHostsError(f"{REFUSED}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
