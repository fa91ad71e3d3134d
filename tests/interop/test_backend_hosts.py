"""The torch.distributed backend over several hosts, against Gloo. They are one host here that says it is two."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardcomm import CommError, backend, launch
from shardcomm.comm import introduction
from support.nets import batch, loss_of, make, sgd_of

OURS = "shardcomm"
RANKS = 4

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def begin(name: str = OURS, hosts: str = "AABB") -> int:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    introduction.host_identity = lambda: hosts[rank]  # type: ignore[assignment]
    dist.init_process_group(name)
    return rank


def operations(name: str, seed: int) -> list[torch.Tensor]:
    """What each operation leaves on this rank; of whole numbers, so that every order has one sum."""
    rank = begin(name)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    results: list[torch.Tensor] = []
    for numel in (1, 700, 200_003):
        own = torch.randint(-50, 50, (numel,), generator=generator).float()
        wide = torch.randint(-50, 50, (RANKS * numel,), generator=generator).float()
        gathered = torch.empty(RANKS * numel)
        dist.all_gather_into_tensor(gathered, own)
        if name == OURS:  # Gloo has no lists of different lengths
            uneven = [torch.empty(numel + r) for r in range(RANKS)]
            dist.all_gather(uneven, torch.full((numel + rank,), float(rank)))
            for r, each in enumerate(uneven):
                assert each.eq(r).all()
        part = torch.empty(numel)
        dist.reduce_scatter_tensor(part, wide)
        summed, largest, from_2 = own.clone(), own.clone(), own.clone()
        works = [
            dist.all_reduce(summed, async_op=True),
            dist.broadcast(from_2, 2, async_op=True),
            dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True),
        ]
        for work in works:
            work.wait()
        halves = wide.bfloat16()
        dist.all_reduce(halves)
        # What moves no shards goes to Gloo.
        exchanged, at_1, onto_3 = torch.empty_like(wide), torch.zeros_like(own), own.clone()
        dist.all_to_all_single(exchanged, wide)
        dist.scatter(at_1, list(wide.chunk(RANKS)) if rank == 1 else None, src=1)
        dist.reduce(onto_3, 3)
        if rank != 3:
            onto_3.zero_()  # of other ranks nothing is said
        dist.barrier()
        by_turns = torch.empty_like(wide)
        begun = dist.all_to_all_single(by_turns, wide, async_op=True)
        dist.barrier()  # waits for what Gloo has begun, too
        assert begun is not None
        assert begun.is_completed()
        assert by_turns.equal(exchanged)
        around = torch.empty_like(own)
        send = dist.isend(own, (rank + 1) % RANKS)
        dist.recv(around, (rank - 1) % RANKS)
        send.wait()
        results += [gathered, part, summed, largest, from_2, halves]
        results += [exchanged, at_1, onto_3, around]
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(RANKS)]
    dist.barrier()
    if name == OURS:
        taken = {each.operation: each.taken for each in backend.receipts()}
        shards = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
        assert {taken.pop(operation) for operation in shards} == {"hosts"}
        assert set(taken.values()) == {"gloo"}
        assert "all_to_all_single" in taken
    dist.destroy_process_group()
    return results


@pytest.mark.covers("torch.distributed backend", transports=["hosts"])
def test_every_operation_is_gloos(seed: int) -> None:
    ours, gloos = (
        launch(operations, RANKS, (name, seed), timeout_s=120) for name in (OURS, "gloo")
    )
    for mine, other in zip(ours, gloos, strict=True):
        for one, expected in zip(mine, other, strict=True):
            assert one.equal(expected)


def groups_within() -> list[tuple[str, str]]:
    rank = begin()
    taken = []
    for members in ([0, 1], [1, 2], [0, 2, 3], [3, 2, 1, 0]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [len(members)] * 3
        taken.append(backend.receipts(group)[0])
    dist.barrier()
    dist.destroy_process_group()
    return [(each.taken, each.reason) for each in taken]


def test_a_group_takes_what_its_own_ranks_can_have() -> None:
    several = "the ranks are on several hosts, and "
    one_host = ("inline", "")
    uneven = ("gloo", several + "the hosts have different numbers of ranks: 1, 2")
    one_each = all_of_them = ("hosts", "")
    said = launch(groups_within, RANKS, timeout_s=60)
    assert said[0] == [one_host, uneven, all_of_them]
    assert said[1] == [one_host, one_each, all_of_them]
    assert said[2] == [one_each, uneven, all_of_them]
    assert said[3] == [uneven, all_of_them]


def trained(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> list[torch.Tensor]:
    model = wrap(make(layers=2))
    optimizer = sgd_of(model)
    for step in range(3):
        loss_of(model, batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in whole]


def trains(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    begin(name)
    mesh = init_device_mesh("cpu", (RANKS,))

    def sharded(model: torch.nn.Module) -> torch.nn.Module:
        return fully_shard(model, mesh=mesh)

    results = trained(sharded), trained(DistributedDataParallel)
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.covers("torch.distributed backend", "training parity", transports=["hosts"])
def test_unmodified_training_is_gloos_within_summation_order() -> None:
    ours, gloos = (launch(trains, RANKS, (name,), timeout_s=120) for name in (OURS, "gloo"))
    for way in range(2):
        for one, expected in zip(ours[0][way], gloos[0][way], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def dies(folder: Path) -> None:
    rank = begin()
    step = 0
    try:
        while True:
            dist.all_reduce(torch.ones(100_000))
            step += 1
            if step == 5 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError as error:
        (folder / str(rank)).write_text(f"{error.kind}: {error}")


@pytest.mark.covers("failed ranks", transports=["hosts"])
def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="rank 2 was killed by SIGKILL"):
        launch(dies, RANKS, (tmp_path,), timeout_s=25)
    said = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert set(said) == {0, 1, 3}
    assert said[3].startswith("died: rank 2")
    assert "lost the ranks of other hosts" in said[0] + said[1]
