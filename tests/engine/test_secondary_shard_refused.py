"""What `reshard_after_forward` refuses: no host, other models' ranks, and ranks that say another."""

from __future__ import annotations

from typing import Any

import pytest

from shardcomm import CommError, Communicator, MemoryPlan, fully_shard
from support.nets import batch, loss_of, make
from support.thread_ranks import run_threads
from support.two_hosts import HOST, RANKS, on_two_hosts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reshard_after_forward": True}, "reshard_after_forward is True, which is strategy='full_shard' here"),
        ({"reshard_after_forward": False}, "reshard_after_forward is False, which is strategy='shard_grad_op' here"),
        ({"reshard_after_forward": 2}, "reshard_after_forward is 2, and comm is not a DeviceMesh"),
        ({"reshard_after_forward": "host"}, r"reshard_after_forward is a str; it must be a shardcomm\.Communicator"),
        ({"reshard_after_forward": [0, 1]}, "reshard_after_forward is a list"),
        ({"reshard_after_forward": 1}, "a group of 1; full parameters stay with strategy='shard_grad_op'"),
        ({"reshard_after_forward": 4}, "a group of 4, which are all; leave it out"),
        ({"reshard_after_forward": 3}, "a group of 3; it must be of a number that divides the 4 ranks"),
        ({"reshard_after_forward": -2}, "a group of -2; it must be of a number that divides"),
        ({"reshard_after_forward": 0}, "a group of 0; it must be of a number that divides"),
        ({"reshard_after_forward": 2, "strategy": "shard_grad_op"}, "is 'shard_grad_op', which keeps full"),
        ({"reshard_after_forward": 2, "strategy": "no_shard"}, "is 'no_shard', which keeps full"),
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused_with_a_sentence(given: dict[str, Any], message: str) -> None:
    def body(comm: Communicator) -> None:
        model = make()
        with pytest.raises((TypeError, ValueError), match=message):
            fully_shard(model, comm, **given)
        assert comm.rank == 0 or loss_of(model, batch(0, 0)).item() > 0  # it is as it was

    run_threads(body, RANKS)


@pytest.mark.parametrize(
    "given",
    [
        {"reshard_after_forward": 3},
        {"reshard_after_forward": True},
        {"reshard_after_forward": 2, "strategy": "hybrid_shard", "replicas": 2},
        {"reshard_after_forward": 2, "strategy": "shard_grad_op"},
    ],
)
def test_a_plan_refuses_the_same(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="reshard_after_forward is"):
        MemoryPlan.of(make(), RANKS, **given)


def test_ranks_of_other_models_are_refused_on_every_rank() -> None:
    """The tensor-parallel group given by mistake, say: it has other parts of the parameters."""
    rows = [Communicator.local_group(RANKS) for _ in range(2)]
    hosts = [Communicator.local_group(HOST) for _ in range(2)]
    crossing = [Communicator.local_group(2) for _ in range(2)]

    def body(comm: Communicator) -> None:
        row, rank = divmod(comm.rank, RANKS)
        given = hosts[row][rank - 2] if rank >= 2 else crossing[rank][row]
        with pytest.raises(
            ValueError, match="reshard_after_forward has ranks that are none of comm's"
        ):
            fully_shard(make(), rows[row][rank], reshard_after_forward=given)

    run_threads(body, 2 * RANKS)


def test_a_rank_that_gives_none_is_named() -> None:
    def body(comm: Communicator, host: Communicator) -> None:
        with pytest.raises(
            CommError, match=r"has reshard_after_forward 2 on ranks 0 to 2 and None on rank 3"
        ):
            fully_shard(make(), comm, reshard_after_forward=host if comm.rank < 3 else None)

    on_two_hosts(body)
