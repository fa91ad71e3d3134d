"""What others write into the rendezvous store ends the set-up on every rank; and what a run shows there of itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardcomm import CommError, Communicator, launch
from shardcomm.meeting.exchange import Exchange
from shardcomm.meeting.store import SECRET
from support.thread_ranks import each_rank


def errors_of(body: Callable[[Exchange], object], store: dist.Store, ranks: int = 2) -> list[str]:
    """What each rank's CommError says."""

    def run(rank: int) -> str:
        with pytest.raises(CommError) as caught:
            body(Exchange(store, "test", rank, ranks, 60.0))
        return str(caught.value)

    return each_rank(run, ranks)


@pytest.mark.parametrize("value", ["no number", "00ff", "ü", "9" * 1000])
def test_bytes_of_a_stranger_are_named_on_every_rank(value: str) -> None:
    store = dist.HashStore()
    store.set("test/0/1", value)
    for message in errors_of(lambda exchange: exchange(b"a word"), store):
        assert (
            f"key 'test/0/1' of the rendezvous store holds {len(value.encode())} bytes" in message
        )


@pytest.mark.parametrize("kind", ["tcp", "hash"])
def test_empty_value_of_a_stranger_is_replaced(kind: str) -> None:
    store: dist.Store = dist.HashStore()
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("test/0/0", "")
    assert Exchange(store, "test", 0, 1, 30.0)(b"a word") == [b"a word"]


def test_bytes_of_a_stranger_that_some_ranks_have_not_seen_are_named_on_every_rank() -> None:
    store = dist.HashStore()

    def body(exchange: Exchange) -> None:
        if exchange.rank == 0:  # after rank 1 has said its word, and a stranger has changed it
            store.wait(["test/0/1"], timedelta(seconds=30))
            store.set("test/0/1", "something else")
        exchange(b"first")
        exchange(b"second")

    for message in errors_of(body, store):
        assert "key 'test/0/1' of the rendezvous store" in message


def test_what_another_run_wrote_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv(SECRET, "of another run")
    Exchange(store, "test", 0, 1, 30.0)(b"a word")
    monkeypatch.setenv(SECRET, "of this run")
    for message in errors_of(lambda exchange: exchange(b"a word"), store, ranks=1):
        assert "key 'test/0/0' of the rendezvous store" in message


def test_two_processes_with_one_rank_are_told() -> None:
    store = dist.HashStore()
    Exchange(store, "test", 0, 1, 30.0)(b"process 1")
    with pytest.raises(CommError, match="two processes came to the rendezvous as rank 0 of 1"):
        Exchange(store, "test", 0, 1, 30.0)(b"process 2")


def keys_of_the_store() -> tuple[str, list[str]]:
    with Communicator.from_env(deadline_s=30, device="cpu"):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        return os.environ[SECRET], store.list_keys()  # type: ignore[attr-defined]


def test_each_launch_has_a_secret_that_its_keys_depend_on_and_do_not_tell() -> None:
    runs = [launch(keys_of_the_store, 2, timeout_s=60)[0] for _ in range(2)]
    (first, keys), (second, other_keys) = runs
    assert first != second
    assert keys
    assert other_keys
    assert not set(keys) & set(other_keys)
    assert not [key for key in keys if first in key]
