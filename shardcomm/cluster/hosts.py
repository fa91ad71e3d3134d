"""Hosts on one machine: namespaces on a switch::

    host0   eth0 ══ port0 ┐
    host1   eth0 ══ port1 ┼ bridge, in a namespace that is the switch
    host2   eth0 ══ port2 ┘
                 both ends of a link send through a token bucket

A host has a network, processes, a name, a /dev/shm and IPC of its own, so that shardcomm, torch and NCCL take it for
another host. All see the files, the memory and the cores of this machine.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from shardcomm.cluster.links import DEVICE, Link, LinkBytes, link_bytes
from shardcomm.cluster.namespaces import REFUSED, Namespaces, NoHostsError, new_namespaces

MOST_HOSTS = 250


@dataclass(frozen=True)
class Host:
    """A host on this machine; see `hosts`."""

    number: int
    address: str
    namespaces: Namespaces
    _switch: Namespaces
    _processes: ExitStack  # waits for what was started here, once the host has ended

    @property
    def name(self) -> str:
        """The host name inside, which all hosts can resolve."""
        return name_of(self.number)

    def start(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process on the host, which ends with the host at the latest.

        The `Popen` is of a process outside that only waits for the one on the host, and ends with its status. To kill
        it would not end the other.
        """
        process = subprocess.Popen(
            [*self.namespaces.within(), *command],
            env=env,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for the maker, who ends the host
        )
        self.namespaces.add(process)
        return self._processes.enter_context(process)

    def link_bytes(self) -> LinkBytes:
        """What the host's link has carried so far."""
        return link_bytes(self.namespaces.pid)

    def kill(self) -> None:
        """Ends the host as a power cut would: its link goes down first, so that no other host hears of it."""
        self._switch.set_up(f"ip link set port{self.number} down")
        self.namespaces.end()


@contextmanager
def hosts(count: int, link: Link) -> Iterator[list[Host]]:
    """Makes hosts that are joined by links of one kind. At the end they are gone, with all that runs there.

    Raises:
        NoHostsError: This process may not make namespaces, a program is missing, or the kernel cannot delay packets.
    """
    addresses = [f"10.0.0.{i + 1}" for i in range(count)]
    # A socket that takes both IPv4 and IPv6 asks for the name of an IPv4 address in IPv6's notation.
    entries = [
        f"{before}{address} {name_of(i)}\n"
        for i, address in enumerate(addresses)
        for before in ("", "::ffff:")
    ]
    names = "".join(["127.0.0.1 localhost\n", *entries])
    with ExitStack() as held:
        processes = held.enter_context(ExitStack())
        switch = held.enter_context(new_namespaces("switch"))
        switch.set_up("ip link add bridge type bridge", "ip link set bridge up")
        made = []
        for i, address in enumerate(addresses):
            inside = held.enter_context(new_namespaces(name_of(i), names, switch))
            switch.set_up(
                f"ip link add port{i} type veth peer name {DEVICE} netns {inside.pid}",
                link.at_switch(f"port{i}"),
                f"ip link set port{i} master bridge up",
            )
            if link.delay_s:
                _delay(inside, link)
            inside.set_up(
                link.at_host(),
                f"ip address add {address}/24 dev {DEVICE}",
                f"ip link set {DEVICE} up",
                "ip link set lo up",
            )
            made.append(Host(i, address, inside, switch, processes))
        yield made


def name_of(number: int) -> str:
    """The name of a host."""
    return f"host{number}"


@functools.cache
def refusal() -> str:
    """The sentence that says why this process cannot make hosts; "" if it can."""
    try:
        with hosts(1, Link(10**9)) as (host,):
            status = host.start("true").wait()
    except NoHostsError as error:
        return str(error)
    return f"{REFUSED}: a process there ended with status {status}" if status else ""


def _delay(inside: Namespaces, link: Link) -> None:
    try:
        inside.set_up(link.delay())
    except NoHostsError as error:
        said = str(error).removeprefix(f"{REFUSED}: ")
        raise NoHostsError(
            f"the delay is {link.delay_s * 1e6:g} us, and this kernel cannot delay packets ({said} It lacks netem: "
            "CONFIG_NET_SCH_NETEM, the module sch_netem); leave the delay out"
        ) from error
