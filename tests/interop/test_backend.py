"""The torch.distributed backend: asynchronous calls, groups, names and hosts; errors, and ranks that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardcomm import CommError, Communicator, RankError, backend, launch
from shardcomm.comm import introduction
from support.nccl_ranks import take_gpu

OURS = "shardcomm"
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_from = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def asynchronous() -> None:
    dist.init_process_group(OURS)
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    whole, total = torch.empty(4 * size), torch.full((1000,), float(rank))

    # Rank 0 begins both; the others come only when it has seen that it did not wait for them.
    if rank > 0:
        store.wait(["begun"])
    gathering = gather_into(whole, torch.full((4,), float(rank)), async_op=True)
    reducing = dist.all_reduce(total, async_op=True)
    if rank == 0:
        assert not gathering.is_completed()
        assert not reducing.is_completed()
        store.set("begun", "")
    reducing.wait()  # the reverse order
    gathering.wait()
    assert gathering.is_completed()
    assert torch.equal(whole, torch.arange(size).repeat_interleave(4).float())
    assert torch.equal(total, torch.full((1000,), size * (size - 1) / 2))

    # A reduce ends while a gather before it waits for the other ranks.
    pending = gather_into(whole, torch.zeros(4), async_op=True) if rank == 0 else None
    dist.all_reduce(total)
    if pending is None:
        store.wait(["reduced"])
        gather_into(whole, torch.ones(4))
    else:
        assert not pending.is_completed()
        store.set("reduced", "")
        pending.wait()

    # Whatever is synchronous comes after what was begun before it; the works need not be kept.
    counter = torch.ones(3)
    for _ in range(5):
        dist.all_reduce(counter, async_op=True)
    dist.all_reduce(counter)
    assert torch.equal(counter, torch.full((3,), float(size**6)))
    future = dist.all_reduce(counter, async_op=True).get_future()
    assert torch.equal(future.wait()[0], torch.full((3,), float(size**7)))
    with torch.inference_mode():
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True).wait()
        assert [part.tolist() for part in parts] == [[r, r] for r in range(size)]
    late = torch.full((1,), float(rank))
    dist.all_reduce(late, async_op=True)
    dist.barrier()
    assert late.item() == size * (size - 1) / 2
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_asynchronous_gathers_and_reduces_overlap(ranks: int) -> None:
    launch(asynchronous, ranks, timeout_s=60)


def in_sub_groups() -> None:
    dist.init_process_group(OURS)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    peers = {"replicate": rank + (rank + 2) % 4, "shard": rank + (rank ^ 1)}
    for name, total in peers.items():
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        assert x.item() == total
        assert backend.receipts(mesh.get_group(name))

    outer = dist.new_group([1, 3])
    if rank in (1, 3):
        whole = torch.empty(2)
        gather_into(whole, torch.tensor([float(rank)]), group=outer)
        assert whole.tolist() == [1, 3]
        dist.broadcast(whole, 3, group=outer)
        dist.destroy_process_group(outer)
    if rank < 3:
        first = dist.new_group([0, 1, 2], use_local_synchronization=True)
        whole = torch.ones(3)
        dist.all_reduce(whole, group=first)
        assert whole.tolist() == [3, 3, 3]
    dist.destroy_process_group()


@pytest.mark.covers("torch.distributed backend")
def test_sub_groups_and_device_meshes() -> None:
    launch(in_sub_groups, 4, timeout_s=60)


BAD: list[tuple[Callable[[], object], str]] = [
    (
        lambda: gather_into(torch.zeros(5), torch.zeros(2)),
        "output has 5 elements, and the input has 2; with 2 ranks it must have 2 x 2 = 4",
    ),
    (
        lambda: gather_into(torch.zeros(4).double(), torch.zeros(2)),
        "there are tensors of Float on cpu and of Double on cpu",
    ),
    (
        lambda: scatter_from(torch.zeros(3), torch.zeros(4)),
        "input has 4 elements, and the output has 3; with 2 ranks it must have 2 x 3 = 6",
    ),
    (
        lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
        "tensor_list has 1 tensors; it must have one for each of 2 ranks",
    ),
    (
        lambda: dist.all_gather([torch.zeros(1), torch.zeros(3)], torch.zeros(2)),
        r"tensor_list\[\d\] has [13] elements, and this rank's tensor has 2; they must have as many",
    ),
    (
        lambda: dist.reduce_scatter(torch.zeros(2), [torch.zeros(2)]),
        "input_list has 1 tensors; it must have one for each of 2 ranks",
    ),
]


def call_badly() -> None:
    with pytest.raises(ValueError, match="there is no default group"):
        backend.receipts()
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="the group's backend is 'gloo'"):
        backend.receipts(gloo)
    for call, message in BAD:
        with pytest.raises(ValueError, match=message):
            call()
    x = torch.ones(2)
    dist.all_reduce(x)  # and none of it has harmed the group
    assert x.tolist() == [2, 2]
    dist.destroy_process_group()


def test_bad_input_is_named_and_harms_nothing() -> None:
    launch(call_badly, 2, timeout_s=60)


def wait_for_the_dead() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2), async_op=True).wait()


def gather_from_the_dead() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_gather_object([None] * dist.get_world_size(), "here")


def train_with_the_dead() -> None:
    model = DistributedDataParallel(nn.Linear(7, 5))
    loss = model(torch.ones(4, 7)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def die_in(what: Callable[[], None]) -> None:
    dist.init_process_group(OURS)
    try:
        what()
    except RuntimeError as error:  # through DDP's C++, it is no longer a CommError
        raise CommError(" ".join(str(error).split())) from error


@pytest.mark.covers("torch.distributed backend", "dead rank")
@pytest.mark.parametrize("what", [wait_for_the_dead, gather_from_the_dead, train_with_the_dead])
def test_killed_rank_is_named_by_all_others_within_seconds(what: Callable[[], None]) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        launch(die_in, 3, (what,), timeout_s=60)
    assert time.monotonic() - begun < 30
    _, *others = str(caught.value).splitlines()
    assert len(others) == 2
    for said in others:
        assert "rank 1 (pid" in said
        assert "died" in said


def on_unlike_hosts() -> list[backend.Receipt]:
    rank = int(os.environ["RANK"])
    introduction.host_identity = lambda: "AAB"[rank]  # type: ignore[assignment]
    dist.init_process_group(OURS)
    x, whole = torch.ones(2), torch.empty(6)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    gather_into(whole, x)
    scatter_from(x, whole)
    dist.barrier()
    assert x.tolist() == [3, 3]
    receipts = backend.receipts()
    dist.destroy_process_group()
    return receipts


@pytest.mark.covers("torch.distributed backend", transports=["c10d"])
def test_ranks_on_unlike_hosts_use_gloo_and_say_so() -> None:
    for receipts in launch(on_unlike_hosts, 3, timeout_s=60):
        assert len(receipts) == 4
        for receipt in receipts:
            assert receipt.taken == "gloo"
            assert receipt.reason == (
                "the ranks are on several hosts, and the hosts have different numbers of ranks: 2, 1"
            )


def init_with(name: str) -> float:
    dist.init_process_group(name)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert dist.group.WORLD is not None
    assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "shardcomm"
    assert backend.receipts()
    dist.destroy_process_group()
    return float(x.sum())


@pytest.mark.parametrize("name", ["shardcomm", "cpu:shardcomm"])
def test_names_under_which_it_is_found(name: str) -> None:
    assert launch(init_with, 2, (name,), timeout_s=60) == [6.0, 6.0]
    assert launch(init_with, 1, (name,), timeout_s=60) == [3.0]


def a_group_beside_nccls() -> None:
    """As programs make one for what is on the host. In each group torch looks for a backend of the bound GPU."""
    device = take_gpu()
    dist.init_process_group("nccl", device_id=device)
    group = dist.new_group(backend="cpu:shardcomm,cuda:nccl")
    x, y = torch.ones(3), torch.ones(3, device=device)
    for tensor in (x, y):
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0] * 3
    for transport, found in (("auto", device), ("shm", torch.device("cpu"))):
        with Communicator.from_process_group(group, transport=transport) as comm:
            assert comm.device == found
    dist.destroy_process_group()


@pytest.mark.gpu
def test_a_group_for_both_kinds_of_tensors_is_made_beside_nccls() -> None:
    launch(a_group_beside_nccls, 2, timeout_s=60)


def operations_in_debug_mode() -> list[str]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch then wraps each backend
    dist.init_process_group("shardcomm")
    dist.all_reduce(torch.ones(3))
    operations = [receipt.operation for receipt in backend.receipts()]
    dist.destroy_process_group()
    return operations


def test_receipts_are_there_in_torchs_debug_mode() -> None:
    assert launch(operations_in_debug_mode, 2, timeout_s=60) == [["all_reduce"]] * 2
