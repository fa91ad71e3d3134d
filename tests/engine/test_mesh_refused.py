"""A Mesh whose groups are no rows and columns, and a DeviceMesh of other ranks: refused before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcomm import CommError, Communicator, Mesh, Policy, fully_shard, launch
from support.nets import batch, loss_of, make
from support.thread_ranks import each_rank

Groups = list[list[int]]

ROWS = [[0, 1], [2, 3]]
COLUMNS = [[0, 2], [1, 3]]
CROSSED = [[0, 3], [1, 2]]


def seats(groups: Groups) -> dict[int, Communicator]:
    """Each rank's place in its group."""
    return {
        rank: comm
        for group in groups
        for rank, comm in zip(
            group, Communicator.local_group(len(group), deadline_s=30), strict=True
        )
    }


def meshes(rows: Groups, columns: Groups) -> list[Mesh]:
    """Each rank's mesh."""
    shard, replicate = seats(rows), seats(columns)
    return [Mesh(shard[rank], replicate[rank]) for rank in sorted(shard)]


def check_refused(mesh: Mesh, message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"^fully_shard: comm is a Mesh .*: {message}"):
        fully_shard(model, mesh, strategy="hybrid_shard")
    assert all(type(param) is nn.Parameter for param in model.parameters())
    for comm in (mesh.shard, mesh.replicate):  # they stay usable
        ones = torch.ones(1)
        comm.all_reduce(ones)
        assert ones.item() == comm.size


SHARD_RANKS = r"replicate has ranks whose shard\.rank is 0 on rank 0 and 1 on rank 1; "


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (ROWS, CROSSED, r"replicate has ranks whose shard\.rank is "),
        (ROWS, ROWS, SHARD_RANKS),
        (ROWS, [[0, 1, 2, 3]], r"replicate .* shard\.rank is 0 on ranks 0, 2 and 1 on ranks 1, 3; "),
        (ROWS, [[0, 2], [3, 1]], r"shard .* replicate\.rank is (0 on rank 0 and 1|1 on rank 0 and 0) on rank 1; "),
        ([[0, 1], [2]], [[0, 2], [1]], r"(replicate .* shard\.size is 2 on rank 0 and 1 on rank 1|shard has ranks)"),
        (
            [[0, 1, 2], [3, 4, 5]],
            [[0, 3], [1, 5], [2, 4]],
            r"(replicate .* shard\.rank is |shard .* replicate is right on rank 0 and of several .* on ranks 1, 2; )",
        ),
        (ROWS, [[0, 2], [1], [3]], r"shard has ranks whose replicate\.size is 2 on rank 0 and 1 on rank 1; "),
        (
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [[0, 4], [1, 7], [2, 6], [3, 5]],  # in each the ranks fit, but a row meets others by each of its columns
            r"shard has ranks whose replicate is of the rows #.*, #.* on rank 0 and .* on rank 1; ",
        ),
    ],
    ids=["crossed", "rows twice", "all", "reversed", "short row", "two crossed", "short columns", "other rows"],
)  # fmt: skip
def test_groups_that_are_no_rows_and_columns_are_refused_on_every_rank(
    rows: Groups, columns: Groups, message: str
) -> None:
    of_ranks = meshes(rows, columns)
    each_rank(lambda rank: check_refused(of_ranks[rank], message), len(of_ranks))


def test_one_communicator_is_not_both_dimensions() -> None:
    ranks = Communicator.local_group(2, deadline_s=30)
    each_rank(lambda rank: check_refused(Mesh(ranks[rank], ranks[rank]), SHARD_RANKS), 2)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_rows_and_columns_train(shape: tuple[int, int]) -> None:
    replicas, shards = shape
    rows = [[row * shards + i for i in range(shards)] for row in range(replicas)]
    of_ranks = meshes(rows, [list(column) for column in zip(*rows, strict=True)])

    def body(rank: int) -> None:
        model = make()
        fully_shard(model, of_ranks[rank], strategy="hybrid_shard")
        loss_of(model, batch(rank, 0)).backward()

    each_rank(body, replicas * shards)


def test_a_policys_mesh_is_refused_on_every_rank() -> None:
    """Ranks 0 to 3, whose mesh is right, hear of the error of ranks 4 to 7."""
    everyone = Communicator.local_group(8, deadline_s=30)
    of_ranks = meshes(ROWS, COLUMNS) + meshes(ROWS, CROSSED)

    def body(rank: int) -> None:
        model = make()
        policy = Policy(comm=of_ranks[rank], strategy="hybrid_shard")
        kind = ValueError if rank >= 4 else CommError
        with pytest.raises(kind, match=r"a policy's comm is a Mesh .* whose shard\.rank is "):
            fully_shard(model, everyone[rank], units={nn.Linear: policy})
        assert all(type(param) is nn.Parameter for param in model.parameters())
        everyone[rank].barrier()

    each_rank(body, 8)


def outside() -> None:
    dist.init_process_group("gloo")
    of_rank_0 = DeviceMesh("cpu", [0])
    of_a_row = DeviceMesh("cpu", [[0]])
    given: list[Callable[[], object]] = [
        lambda: fully_shard(make(), of_rank_0),
        lambda: fully_shard(make(), of_a_row, strategy="hybrid_shard"),
    ]
    for call in given:
        if dist.get_rank() == 0:
            call()
        else:
            with pytest.raises(
                ValueError,
                match=r"^fully_shard: comm is a DeviceMesh of shape \(1.*\) without this rank, 1; ",
            ):
                call()
    dist.barrier()
    dist.destroy_process_group()


def test_a_device_mesh_without_this_rank_is_refused() -> None:
    launch(outside, 2, timeout_s=60)
