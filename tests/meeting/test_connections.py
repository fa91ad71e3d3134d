"""The TCP connections between hosts. Hosts are threads here, which meet over a store of this process."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from shardcomm import CommError
from shardcomm.meeting.connections import CHANNELS, INTERFACE, connect
from shardcomm.meeting.exchange import Exchange
from support.gates import until
from support.thread_ranks import each_rank

HOSTS = 3


@pytest.fixture(autouse=True)
def no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)


@pytest.fixture(scope="module")
def kept() -> Store:
    return TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False
    )


@pytest.fixture
def store(kept: Store, request: pytest.FixtureRequest) -> Store:
    return PrefixStore("a run", PrefixStore(request.node.name, kept))


class Altered(Exchange):
    """An exchange after which a rank finds other listeners than the ranks have shown: what `change` makes of them."""

    change: Callable[[list[bytes]], list[bytes]]

    def __call__(self, payload: bytes) -> list[bytes]:
        words = super().__call__(payload)
        return self.change(words) if payload else words


def connected(
    store: Store,
    rank: int,
    change: Callable[[list[bytes]], list[bytes]] | None = None,
    *,
    deadline_s: float = 20.0,
) -> list[socket.socket | None]:
    exchange = Altered(store, "connections", rank, HOSTS, deadline_s)
    exchange.change = change or list
    with exchange.telling():
        found = connect(exchange, range(HOSTS))
    return [None if fd == -1 else socket.socket(fileno=fd) for fd in found]


def tell_each_other(sockets: list[socket.socket | None], rank: int) -> None:
    """Each socket leads to the host of its place, on the channel of its place."""
    for place, each in enumerate(sockets):
        if each is not None:
            each.sendall(bytes([rank, place // HOSTS]))
    for place, each in enumerate(sockets):
        channel, host = divmod(place, HOSTS)
        assert (each is None) == (host == rank)
        if each is not None:
            assert each.recv(2, socket.MSG_WAITALL) == bytes([host, channel])
            each.close()


def test_each_socket_leads_to_its_host_and_channel(store: Store) -> None:
    def rank_of(rank: int) -> None:
        sockets = connected(store, rank)
        assert len(sockets) == CHANNELS * HOSTS
        assert all(each.getpeername()[0].endswith("127.0.0.1") for each in sockets if each)
        tell_each_other(sockets, rank)

    each_rank(rank_of, HOSTS)


def test_only_some_ranks_are_connected(store: Store) -> None:
    """Of four ranks on two hosts, ranks 0 and 2 are connected, and 1 and 3."""

    def rank_of(rank: int) -> None:
        exchange = Exchange(store, "two hosts", rank, 4, 20.0)
        sockets = connect(exchange, [rank % 2, rank % 2 + 2])
        with socket.socket(fileno=sockets[1 - rank // 2]) as first:
            first.sendall(bytes([rank]))
            assert first.recv(1) == bytes([rank ^ 2])
        os.close(sockets[CHANNELS + 1 - rank // 2])

    each_rank(rank_of, 4)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(24), bytes(23), bytes(16) + b"\0\0\0\1\0\0\0\2"],
    ids=["nothing", "http", "zeros", "too-short", "a-place-without-the-token"],
)
def test_strangers_are_sent_away(store: Store, sent: bytes) -> None:
    strangers: list[socket.socket] = []

    def after_strangers(words: list[bytes]) -> list[bytes]:
        for word in words:
            address, port, _ = json.loads(word)
            strangers.append(socket.create_connection((address, port), 10.0))
            strangers[-1].sendall(sent)
            strangers[-1].shutdown(socket.SHUT_WR)
        return words

    def rank_of(rank: int) -> None:
        last = rank == HOSTS - 1  # which all others wait for
        tell_each_other(connected(store, rank, after_strangers if last else None), rank)

    each_rank(rank_of, HOSTS)
    for stranger in strangers:
        with stranger, suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_silent_strangers_keep_nobody_waiting(store: Store) -> None:
    """As many as would take minutes, if each were waited for. Some have begun to speak."""
    strangers: list[socket.socket] = []

    def after_strangers(words: list[bytes]) -> list[bytes]:
        address, port, _ = json.loads(words[0])
        for number in range(60):
            strangers.append(socket.create_connection((address, port), 10.0))
            strangers[-1].sendall(bytes(number % 2))
        return words

    def rank_of(rank: int) -> None:
        last = rank == HOSTS - 1
        tell_each_other(connected(store, rank, after_strangers if last else None), rank)

    each_rank(rank_of, HOSTS)
    for stranger in strangers:
        with stranger, suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def with_rank_1_at_a_closed_port(words: list[bytes]) -> list[bytes]:
    address, _, token = json.loads(words[1])
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
    return [words[0], json.dumps([address, port, token]).encode(), words[2]]


def test_a_rank_that_cannot_be_reached_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    create = socket.create_connection

    def kept(*args: Any) -> socket.socket:
        made.append(create(*args))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", kept)

    def rank_of(rank: int) -> str:
        with pytest.raises(CommError) as raised:
            connected(store, rank, with_rank_1_at_a_closed_port if rank == 2 else None)
        assert raised.value.kind == "backend"
        return str(raised.value)

    said = each_rank(rank_of, HOSTS)
    assert re.fullmatch(
        r"rank 2 of 3 could not connect to rank 1 at port \d+ of 127\.0\.0\.1: Connection refused; GLOO_SOCKET_IFNAME "
        "can name another interface, on each host its own",
        said[2],
    )
    assert set(said) == {said[2]}  # also rank 0, to which both others have connected
    assert len(made) == 2 * CHANNELS
    until(lambda: all(each.fileno() == -1 for each in made), "no socket is left")


def test_a_host_that_does_not_connect_is_late(store: Store) -> None:
    came = threading.Event()

    def rank_of(rank: int) -> str:
        if rank == 2:
            exchange = Exchange(store, "connections", rank, HOSTS, 20.0)
            exchange(json.dumps(["127.0.0.1", 1, "00" * 16]).encode())
            came.wait(30.0)
            return ""
        with pytest.raises(CommError) as raised:
            connected(store, rank, deadline_s=1.0)
        assert raised.value.kind == "late"
        came.set()
        return str(raised.value)

    first, second, _ = each_rank(rank_of, HOSTS)
    for text in (first, second):
        assert "waited for ranks of other hosts at port" in text
        assert "timed out" in text


def test_the_interface_that_a_variable_names_is_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE, "lo,eth7")  # Gloo takes several

    def rank_of(rank: int) -> None:
        tell_each_other(connected(store, rank), rank)

    each_rank(rank_of, HOSTS)


def test_an_interface_that_is_not_there_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERFACE, "eth77")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME is 'eth77', which is no network"):
        connected(store, 0)


def test_where_the_store_has_no_host_this_host_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [
        info[4][0]
        for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    ]
    address = next((each for each in own if not ip_address(each).is_loopback), None)
    if address is None:
        pytest.skip("this host's name leads to no address but loopback ones")

    def rank_of(rank: int) -> None:
        store = FileStore(str(tmp_path / "store"), HOSTS)
        sockets = connected(store, rank)
        assert all(each.getpeername()[0] == address for each in sockets if each)
        tell_each_other(sockets, rank)

    each_rank(rank_of, HOSTS)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("localhost", r"it is (127\.0\.0\.1|::1) here"),
        ("nowhere.invalid", ""),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    store = FileStore(str(tmp_path / "store"), HOSTS)
    said = f"no way to '{re.escape(name)}'.*{why}.*; set GLOO_SOCKET_IFNAME"
    with pytest.raises(ValueError, match=said):
        connected(store, 0)
