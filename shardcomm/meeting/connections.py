"""TCP connections between ranks of several hosts.

A rank listens at the address by which its host reaches the store, or at that of the interface GLOO_SOCKET_IFNAME, and
tells all ranks where, with a token. Each rank connects to its counterparts on the hosts before its own. A connection
that does not begin with the token is closed.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardcomm._C import CommError
from shardcomm.meeting.comm_error import comm_error
from shardcomm.meeting.exchange import Exchange

CHANNELS = 2
"""How many connections lead to each other host."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface; Gloo's own."""

_TOKEN_BYTES = 16
_FIRST_WORDS = struct.Struct(
    f"!{_TOKEN_BYTES}sII"
)  # the token, the channel, the host that connects
_FIRST_WORDS_S = 5.0  # for who has connected to send them
_ANY_PORT = 9
_SIOCGIFADDR = 0x8915  # asks for the address of an interface: netdevice(7)


class _Listener(NamedTuple):
    """Where a rank listens, and what those who connect to it show."""

    address: str
    port: int
    token: str


def connect(exchange: Exchange, peers: Sequence[int]) -> list[int]:
    """Connects this rank with its counterparts on other hosts; collective among all ranks of `exchange`.

    Args:
        exchange: Reaches all ranks.
        peers: The ranks that are to be connected, one of each host, and this one among them.

    Returns:
        File descriptors, which the caller closes: for each channel that of the socket to each host, -1 for its own.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME is no interface with an address, or without it none is found.
        CommError: A rank died or gave up, or could not be reached.
    """
    until = time.monotonic() + exchange.deadline_s
    address, store = _own_address(exchange.store)
    with _listening(address) as listening:
        own = _Listener(address, listening.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))
        words = exchange(json.dumps(own).encode())
        of_peers = [_as_seen_here(_Listener(*json.loads(words[peer])), store) for peer in peers]
        sockets = _Sockets(exchange, peers, until)
        try:
            exchange.wait_for(lambda: sockets.connect(listening, own, of_peers))
        except BaseException:
            listening.shutdown(socket.SHUT_RDWR)  # the attempt may still wait there
            raise
    return sockets.detached()


@dataclass
class _Sockets:
    """The sockets of a rank, by channel and host."""

    exchange: Exchange
    peers: Sequence[int]
    until: float  # by the monotonic clock

    def __post_init__(self) -> None:
        self._host = self.peers.index(self.exchange.rank)
        self._made: dict[tuple[int, int], socket.socket] = {}

    def detached(self) -> list[int]:
        """See `connect`."""
        return [
            -1 if host == self._host else self._made[channel, host].detach()
            for channel in range(CHANNELS)
            for host in range(len(self.peers))
        ]

    def connect(
        self, listening: socket.socket, own: _Listener, of_peers: Sequence[_Listener]
    ) -> None:
        """Connects to the hosts before, and awaits those behind."""
        try:
            for host in range(self._host):
                for channel in range(CHANNELS):
                    self._made[channel, host] = self._connected(host, channel, of_peers[host])
            hosts = range(self._host + 1, len(self.peers))
            missing = {(channel, host) for channel in range(CHANNELS) for host in hosts}
            while missing:
                came, token, key = self._accepted(listening, own)
                if key in missing and hmac.compare_digest(token, bytes.fromhex(own.token)):
                    missing.remove(key)
                    self._made[key] = came
                else:
                    came.close()
        except BaseException:
            for each in self._made.values():
                each.close()
            raise

    def _connected(self, host: int, channel: int, at: _Listener) -> socket.socket:
        first_words = _FIRST_WORDS.pack(bytes.fromhex(at.token), channel, self._host)
        try:
            made = socket.create_connection((at.address, at.port), self._left_s())
            made.sendall(first_words)
        except OSError as error:
            raise self._failed(
                f"could not connect to rank {self.peers[host]} at port {at.port} of {at.address}",
                error,
            ) from error
        made.settimeout(None)
        return made

    def _accepted(
        self, listening: socket.socket, own: _Listener
    ) -> tuple[socket.socket, bytes, tuple[int, int]]:
        """The next connection, with the token, the channel and the host that it begins with."""
        listening.settimeout(self._left_s())
        try:
            came, _ = listening.accept()
        except OSError as error:
            raise self._failed(
                f"waited for ranks of other hosts at port {own.port} of {own.address}", error
            ) from error
        came.settimeout(min(self._left_s(), _FIRST_WORDS_S))
        token, channel, host = _FIRST_WORDS.unpack(_received(came, _FIRST_WORDS.size))
        came.settimeout(None)
        return came, token, (channel, host)

    def _failed(self, did: str, error: OSError) -> CommError:
        rank = self.exchange.rank
        return comm_error(
            "late" if isinstance(error, TimeoutError) else "backend",
            f"rank {rank} of {self.exchange.size} {did}: {error.strerror or error}; {INTERFACE} can name another "
            "interface, on each host its own",
            reporter=rank,
        )

    def _left_s(self) -> float:
        return max(self.until - time.monotonic(), 0.001)


def _received(came: socket.socket, nbytes: int) -> bytes:
    """So many bytes, of which those are zeros that do not come."""
    words = b""
    try:
        while len(words) < nbytes and (part := came.recv(nbytes - len(words))):
            words += part
    except OSError:
        pass
    return words.ljust(nbytes, b"\0")


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # A host that knows itself by a loopback address alone is known to others by another one.
    at = "" if ip_address(address).is_loopback else address
    return socket.create_server((at, 0), family=family)


def _own_address(store: Store) -> tuple[str, str]:
    """This host's address for other hosts, and the store's as this host sees it: "" if that has not been asked for."""
    if interface := os.environ.get(INTERFACE, "").partition(",")[0]:
        return _address_of(interface), ""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    name = store.host if isinstance(store, TCPStore) else socket.gethostname()
    trouble = ""
    try:
        for family, _, _, _, to in socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(to)  # sends nothing
                    return str(probe.getsockname()[0]), str(to[0])
            except OSError as error:
                trouble = str(error.strerror)
    except OSError as error:
        trouble = str(error.strerror)
    raise ValueError(
        f"this host finds no way to {name!r}, and so no address of its own for other hosts: {trouble}; set {INTERFACE} "
        "to the network interface by which hosts reach each other"
    )


def _as_seen_here(listener: _Listener, store: str) -> _Listener:
    """The listener of a rank that may have told a loopback address, since its host is the store's."""
    if store and ip_address(listener.address).is_loopback:
        return listener._replace(address=store)
    return listener


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(
                any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
            )
        except OSError as error:
            raise ValueError(
                f"environment variable {INTERFACE} is {interface!r}, which is no network interface with an IPv4 "
                f"address here: {error.strerror}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
