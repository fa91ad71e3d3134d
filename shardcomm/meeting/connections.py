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
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
_BACKLOG = 4096  # of connections that nobody has looked at yet; the system may have less
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
    place = exchange.wait_for(lambda: _place_of(exchange.store))
    with _listening(place) as listening:
        own = _Listener(place.address, listening.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))
        words = exchange(json.dumps(own).encode())
        of_peers = [_as_seen_from(place, _Listener(*json.loads(words[peer]))) for peer in peers]
        sockets = _Sockets(exchange, peers, until)
        try:
            exchange.wait_for(lambda: sockets.connect(listening, own, of_peers))
            exchange(b"")  # all ranks are connected: no later call waits for one that has given up
        except BaseException:
            sockets.give_up()
            listening.shutdown(socket.SHUT_RDWR)  # the attempt may still wait there
            raise
    return sockets.detached()


class _Sockets:
    """The sockets of a rank, by channel and host."""

    def __init__(self, exchange: Exchange, peers: Sequence[int], until: float) -> None:
        self._exchange = exchange
        self._peers = peers
        self._until = until  # by the monotonic clock
        self._host = peers.index(exchange.rank)
        self._made: dict[tuple[int, int], socket.socket] = {}
        self._given_up = False
        self._lock = threading.Lock()

    def detached(self) -> list[int]:
        """See `connect`."""
        for each in self._made.values():
            each.setblocking(True)
        return [
            -1 if host == self._host else self._made[channel, host].detach()
            for channel in range(CHANNELS)
            for host in range(len(self._peers))
        ]

    def give_up(self) -> None:
        """Closes all sockets, also those that are made from now on."""
        with self._lock:
            self._given_up = True
            for each in self._made.values():
                each.close()

    def connect(
        self, listening: socket.socket, own: _Listener, of_peers: Sequence[_Listener]
    ) -> None:
        """Connects to the hosts before, and awaits those behind."""
        for host in range(self._host):
            for channel in range(CHANNELS):
                self._dial(host, channel, of_peers[host])
        hosts = range(self._host + 1, len(self._peers))
        missing = {(channel, host) for channel in range(CHANNELS) for host in hosts}
        try:
            for came in _callers(listening, self._until) if missing else ():
                key = came.channel, came.host
                if key in missing and hmac.compare_digest(came.token, bytes.fromhex(own.token)):
                    missing.remove(key)
                    self._keep(key, came.socket)
                else:
                    came.socket.close()
                if not missing:
                    return
        except OSError as error:
            where = f"waited for ranks of other hosts at port {own.port} of {own.address}"
            raise self._failed(where, error) from error

    def _dial(self, host: int, channel: int, at: _Listener) -> None:
        first_words = _FIRST_WORDS.pack(bytes.fromhex(at.token), channel, self._host)
        try:
            made = socket.create_connection((at.address, at.port), self._left_s())
            self._keep((channel, host), made)
            made.sendall(first_words)
        except OSError as error:
            where = (
                f"could not connect to rank {self._peers[host]} at port {at.port} of {at.address}"
            )
            raise self._failed(where, error) from error

    def _keep(self, key: tuple[int, int], made: socket.socket) -> None:
        with self._lock:
            if self._given_up:
                made.close()
            self._made[key] = made

    def _failed(self, did: str, error: OSError) -> CommError:
        rank = self._exchange.rank
        return comm_error(
            "late" if isinstance(error, TimeoutError) else "backend",
            f"rank {rank} of {self._exchange.size} {did}: {error.strerror or error}; {INTERFACE} can name another "
            "interface, on each host its own",
            reporter=rank,
        )

    def _left_s(self) -> float:
        return max(self._until - time.monotonic(), 0.001)


class _Caller(NamedTuple):
    """Who has connected, and what it has said first."""

    socket: socket.socket
    token: bytes
    channel: int
    host: int


def _callers(listening: socket.socket, until: float) -> Iterator[_Caller]:
    """Those who connect, when they have said their first words. Who is silent keeps nobody waiting, and is sent away.

    Raises:
        TimeoutError: It is later than `until`.
        OSError: Nobody can connect any more.
    """
    listening.setblocking(False)
    begun: dict[
        socket.socket, tuple[bytearray, float]
    ] = {}  # the words so far, and when it is sent away
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        try:
            while (now := time.monotonic()) < until:
                for silent in [each for each, (_, end) in begun.items() if end < now]:
                    selector.unregister(silent)
                    begun.pop(silent)
                    silent.close()
                for key, _ in selector.select(min(until - now, _FIRST_WORDS_S)):
                    came = key.fileobj
                    assert isinstance(came, socket.socket)
                    if came is listening:
                        with suppress(BlockingIOError):  # it has gone already
                            came, _ = listening.accept()
                            came.setblocking(False)
                            selector.register(came, selectors.EVENT_READ)
                            begun[came] = bytearray(), now + _FIRST_WORDS_S
                        continue
                    words, _ = begun[came]
                    part = _received(came, _FIRST_WORDS.size - len(words))
                    words += part
                    if part and len(words) < _FIRST_WORDS.size:
                        continue
                    selector.unregister(came)
                    begun.pop(came)
                    if len(words) < _FIRST_WORDS.size:
                        came.close()
                        continue
                    yield _Caller(came, *_FIRST_WORDS.unpack(words))
        finally:
            for each in begun:
                each.close()
    raise TimeoutError("timed out")


def _received(came: socket.socket, nbytes: int) -> bytes:
    try:
        return came.recv(nbytes)
    except OSError:  # as if it had ended the connection in peace
        return b""


class _Place(NamedTuple):
    """Where this host is.

    Attributes:
        address: By which other hosts reach it.
        store: The store's address, as this host knows it; "" if nobody has asked.
        is_chosen: Whether a variable names the interface.
    """

    address: str
    store: str
    is_chosen: bool


def _listening(place: _Place) -> socket.socket:
    if ip_address(place.address).is_loopback and not place.is_chosen:
        # The store's host, which knows itself by this address alone. Others know it by another one.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    return socket.create_server((place.address, 0), family=family, backlog=_BACKLOG)


def _place_of(store: Store) -> _Place:
    if interface := os.environ.get(INTERFACE, "").partition(",")[0]:
        return _Place(_address_of(interface), "", True)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    of_store = isinstance(store, TCPStore)
    name = store.host if isinstance(store, TCPStore) else socket.gethostname()
    trouble = "no address"
    try:
        for family, _, _, _, to in socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(to)  # sends nothing
                    address = str(probe.getsockname()[0])
            except OSError as error:
                trouble = str(error.strerror)
                continue
            if of_store or not ip_address(address).is_loopback:
                return _Place(address, str(to[0]) if of_store else "", False)
            trouble = f"it is {address} here"
    except OSError as error:
        trouble = str(error.strerror)
    raise ValueError(
        f"this host finds no way to {name!r}, and so no address of its own for other hosts: {trouble}; set {INTERFACE} "
        "to the network interface by which hosts reach each other"
    )


def _as_seen_from(place: _Place, listener: _Listener) -> _Listener:
    """The listener of a rank that may have told a loopback address, since its host is the store's."""
    if place.store and ip_address(listener.address).is_loopback:
        return listener._replace(address=place.store)
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
