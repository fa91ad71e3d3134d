"""The `nccl` transport: how ranks meet, which needs no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import _C, CommError
from shardcomm.comm import core, nccl
from shardcomm.meeting.exchange import Exchange
from support.thread_ranks import each_rank

RANKS = 3


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NCCL: an id is 256 numbered bytes, and a communicator is the arguments that it was made from."""
    made: list[bytes] = []

    def unique_id() -> bytes:
        made.append(bytes([len(made)]) * 256)
        return made[-1]

    monkeypatch.setattr(_C, "nccl_unique_id", unique_id)
    monkeypatch.setattr(_C, "make_nccl", lambda *arguments: arguments)


def meet(store: dist.Store, rank: int, deadline_s: float = 30.0) -> Any:
    exchange = Exchange(store, "test", rank, RANKS, deadline_s)
    return nccl.connect(exchange, rank, RANKS, 0, deadline_s)


@pytest.mark.usefixtures("ids")
def test_all_ranks_get_the_id_that_rank_0_made() -> None:
    for group in range(3):
        store = dist.PrefixStore(f"{group}", dist.HashStore())
        made = each_rank(lambda rank, store=store: meet(store, rank), RANKS)
        expected = [(bytes([group]) * 256, rank, RANKS, 0, 30.0) for rank in range(RANKS)]
        assert [arguments[:5] for arguments in made] == expected


@pytest.mark.usefixtures("ids")
def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        return meet(dist.FileStore(str(tmp_path / "store"), RANKS), rank)[0]

    assert each_rank(body, RANKS) == [bytes(256)] * RANKS


def test_error_of_rank_0_reaches_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise RuntimeError("there is no NCCL to use: it is lost")

    monkeypatch.setattr(_C, "nccl_unique_id", fail)
    store = dist.HashStore()

    def body(rank: int) -> RuntimeError:
        with pytest.raises(RuntimeError, match="it is lost") as caught:
            meet(store, rank, 600.0)
        return caught.value

    own, *others = each_rank(body, RANKS)
    assert not isinstance(own, CommError)
    for rank, error in enumerate(others, start=1):
        assert isinstance(error, CommError)
        assert f"rank {rank} of {RANKS}: rank 0 could not make NCCL's id" in str(error)


def test_rank_0_that_does_not_come_is_a_comm_error() -> None:
    with pytest.raises(CommError, match=r"rank 1 of 3: not all ranks came .* within 0.2 s"):
        meet(dist.HashStore(), 1, 0.2)


def test_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; it must be 0 to size - 1 = 1"):
        nccl.connect(lambda payload: [payload], 2, 2, 0)


def test_barrier_raises_though_its_stream_is_behind_what_no_abort_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = SimpleNamespace(query=lambda: False, wait=lambda: pytest.fail("it waits for ever"))
    stream = SimpleNamespace(record=lambda: never, capturing=False)
    monkeypatch.setattr(core, "compute_stream", lambda _: stream)
    checks = []

    def check() -> None:
        checks.append(len(checks))
        if len(checks) == 3:
            raise CommError("rank 1 is late")

    played: Any = SimpleNamespace(
        rank=0, size=2, transport="nccl", exact_sums=False, codes_reduces=False,
        check=check,
    )  # fmt: skip
    comm = core.CoreCommunicator(played, torch.device("cuda:0"))
    vars(comm)["_barrier"] = SimpleNamespace(enqueue=lambda _: None)
    with pytest.raises(CommError, match="rank 1 is late"):
        comm.barrier()


def test_a_barrier_raises_what_cuda_did_and_that_it_cannot_wait_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise _C.CudaError("what CUDA did")

    for capturing, has_fired in ((True, False), (False, True)):
        event = SimpleNamespace(query=lambda fired=has_fired: fired, wait=refuse)
        stream = SimpleNamespace(record=lambda made=event: made, capturing=capturing)
        monkeypatch.setattr(core, "compute_stream", lambda _, given=stream: given)
        played: Any = SimpleNamespace(
            rank=0, size=2, transport="nccl", exact_sums=False, codes_reduces=False,
            check=lambda: None,
        )  # fmt: skip
        comm = core.CoreCommunicator(played, torch.device("cuda:0"))
        vars(comm)["_barrier"] = SimpleNamespace(enqueue=lambda _: None)
        with pytest.raises(_C.CudaError, match="what CUDA did"):
            comm.barrier()
