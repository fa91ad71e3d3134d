"""The torch.distributed backend: every collective against Gloo on the same inputs; errors, and what is left behind."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardcomm import CommError, RankError, backend, launch
from shardcomm.comm import introduction
from support.gates import until
from support.interpreters import run_ranks

OURS = "shardcomm"
CORE_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8)
OPS = tuple(op for name, op in dist.ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM")
NUMELS = (0, 6, 4099)

Tensors = list[torch.Tensor]
Group = dist.ProcessGroup
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_from = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def both_groups() -> tuple[Group, Group]:
    """The default group, of this backend, and Gloo's of the same ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # 2.13's names of some differ
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    return dist.group.WORLD, dist.new_group(backend="gloo")


def values(case: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's: whole numbers so small that no sum of them rounds."""
    generator = torch.Generator().manual_seed(case * 64 + dist.get_rank())
    low = 0 if dtype in (torch.uint8, torch.bool) else -8
    return torch.randint(low, 9, (numel,), generator=generator).to(dtype)


# Of each collective: its outputs. `x` has a multiple of the group's size of elements, `part` one of that many.


def into_tensor(group: Group, x: torch.Tensor) -> Tensors:
    output = x.new_empty(group.size() * x.numel())
    gather_into(output, x, group=group)
    return [output]


def in_place(group: Group, x: torch.Tensor) -> Tensors:
    output = x.new_empty(group.size() * x.numel())
    mine = output.chunk(group.size())[group.rank()] if x.numel() else output
    gather_into(output, mine.copy_(x), group=group)
    return [output]


def into_list(group: Group, x: torch.Tensor) -> Tensors:
    outputs = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(outputs, x, group=group)
    return outputs


def into_views(group: Group, x: torch.Tensor) -> Tensors:
    outputs = list(x.new_empty(group.size(), x.numel()))
    dist.all_gather(outputs, x, group=group)
    return outputs


def into_strided_list(group: Group, x: torch.Tensor) -> Tensors:
    x = x.view(group.size(), -1)
    outputs = [torch.empty_like(x).t().contiguous().t() for _ in range(group.size())]
    dist.all_gather(outputs, x.t().contiguous().t(), group=group)
    return outputs


def gathers_coalesced(group: Group, x: torch.Tensor) -> Tensors:
    inputs = [x, x + x, x[: x.numel() // 2]]
    outputs = [each.new_empty(group.size() * each.numel()) for each in inputs]
    with dist._coalescing_manager(group):
        for output, each in zip(outputs, inputs, strict=True):
            gather_into(output, each, group=group)
    return outputs


def broadcast(group: Group, x: torch.Tensor) -> Tensors:
    copies = [x.clone(), x.view(group.size(), -1).t().contiguous().t()]
    for root, copy in enumerate(copies):
        dist.broadcast(copy, root, group=group)
    return copies


def gather_and_scatter(group: Group, x: torch.Tensor) -> Tensors:
    rank, size = group.rank(), group.size()
    if x.is_complex():
        x = torch.view_as_real(x).flatten()  # Gloo takes no others
    x = x.view(size, -1).t().contiguous().t()
    received = []
    for root in range(2):
        gathered = [torch.empty_like(x) for _ in range(size)] if rank == root else []
        dist.gather(x, gathered if rank == root else None, root, group=group)
        scattered = torch.empty_like(x)
        parts = [torch.empty_like(x).copy_(torch.roll(x, i)) for i in range(size)]
        dist.scatter(scattered, parts if rank == root else None, root, group=group)
        received += [scattered, *gathered]
    return received


def functional_gathers(group: Group, x: torch.Tensor) -> Tensors:
    gathered = funcol.all_gather_tensor(x.view(-1, 1), 0, group)
    return [funcol.wait_tensor(gathered), funcol.wait_tensor(funcol.broadcast(x, 1, group))]


def exchanges(group: Group, x: torch.Tensor) -> Tensors:
    """All-to-all in its forms, with even and uneven parts: rank s sends (r + s) rows to rank r."""
    rank, size = group.rank(), group.size()
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x, group=group)
    rows = [[r + s for r in range(size)] for s in range(size)]
    sent, received = rows[rank], [row[rank] for row in rows]
    wide = torch.cat([x[:1], x.new_ones(1)])[:1].expand(sum(sent), 3).contiguous()
    got = wide.new_empty(sum(received), 3)
    dist.all_to_all_single(got, wide, received, sent, group=group)
    lists = [torch.empty_like(x) for _ in range(size)]
    dist.all_to_all(lists, [(x + r).to(x.dtype) for r in range(size)], group=group)
    return [swapped, got, *lists]


def messages(group: Group, x: torch.Tensor) -> Tensors:
    """Every rank sends to each other with two tags; the receives are begun in the other order."""
    rank, size = group.rank(), group.size()
    peers = [r for r in range(size) if r != rank]
    x = torch.cat([x, x.new_ones(1)])  # Gloo has no empty messages
    sends = [dist.isend((x + tag).to(x.dtype), r, group, tag) for r in peers for tag in (0, 1)]
    received = {(r, tag): torch.empty_like(x) for r in peers for tag in (0, 1)}
    recvs = [dist.irecv(received[r, tag], r, group, tag) for r in peers for tag in (1, 0)]
    for work in (*recvs, *sends):
        assert work is not None
        work.wait()
    if rank == 0:
        dist.send(x, 1, group, 7)
    if rank == 1:
        received[0, 7] = torch.empty_like(x)
        assert dist.recv(received[0, 7], None, group, 7) == 0
    swap = [torch.empty_like(x) for _ in peers]
    ops = [dist.P2POp(dist.isend, x, r, group) for r in peers]
    ops += [dist.P2POp(dist.irecv, each, r, group) for each, r in zip(swap, peers, strict=True)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [*received.values(), *swap]


def reduce_to_each(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    results = []
    for root in range(group.size()):
        copy = x.clone()
        dist.reduce(copy, root, op, group=group)
        if group.rank() == root:
            results.append(copy)
    return results


def all_reduce(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    copies = [x.clone(), x.view(group.size(), -1).t().contiguous().t()]
    for copy in copies:
        dist.all_reduce(copy, op, group=group)
    return copies


def all_reduces_coalesced(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    copies = [x.clone(), x[: x.numel() // 2].clone()]
    with dist._coalescing_manager(group):
        for copy in copies:
            dist.all_reduce(copy, op, group=group)
    return copies


def scatter_tensor(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    outputs = [x.new_empty(x.numel() // group.size()) for _ in range(2)]
    scatter_from(outputs[0], x, op, group=group)
    scatter_from(outputs[1], torch.stack([x, x], 1)[:, 0], op, group=group)
    return outputs


def scatter_list(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    parts = list(x.chunk(group.size())) if x.numel() else [x] * group.size()
    outputs = [torch.empty_like(parts[0]) for _ in range(2)]
    dist.reduce_scatter(outputs[0], parts, op, group=group)
    dist.reduce_scatter(outputs[1], [part.clone() for part in parts], op, group=group)
    return outputs


def scatters_coalesced(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    outputs = [x.new_empty(x.numel() // group.size()) for _ in range(2)]
    with dist._coalescing_manager(group):
        for output in outputs:
            scatter_from(output, x, op, group=group)
    return outputs


def functional_reduces(group: Group, x: torch.Tensor, op: Any) -> Tensors:
    name = op.name.lower()
    return [
        funcol.wait_tensor(funcol.all_reduce(x, name, group)),
        funcol.wait_tensor(funcol.reduce_scatter_tensor(x, name, 0, group)),
    ]


def sparse_and_unwaited(group: Group, x: torch.Tensor) -> Tensors:
    sparse = x.to_sparse()
    dist.all_reduce(sparse, group=group)
    unwaited = funcol.all_reduce(x, "sum", group)
    dist.all_reduce(unwaited, group=group)
    return [sparse.to_dense(), unwaited + 0]


MOVES = (
    into_tensor,
    in_place,
    into_list,
    into_views,
    into_strided_list,
    gathers_coalesced,
    broadcast,
    gather_and_scatter,
    functional_gathers,
    exchanges,
    messages,
)
REDUCES = (
    all_reduce,
    all_reduces_coalesced,
    scatter_tensor,
    scatter_list,
    scatters_coalesced,
    functional_reduces,
    reduce_to_each,
)


def compare(run: Callable[[Group, torch.Tensor], Tensors], case: int, dtype: torch.dtype) -> None:
    """Raises unless both backends give the same, or refuse."""
    assert dist.group.WORLD is not None
    for numel in NUMELS:
        results: list[Tensors | None] = []
        for group in (dist.group.WORLD, GLOO[0]):
            try:
                results.append(run(group, values(case, numel * group.size(), dtype)))
            except CommError:
                raise
            except (RuntimeError, ValueError, TypeError):
                results.append(None)
        got, wanted = results
        assert (got is None) == (wanted is None), (run, dtype, numel, results)
        # Values are exact, but for averages, which torch rounds twice in halves.
        rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 2**-22)
        for mine, gloos in zip(got or [], wanted or [], strict=True):
            torch.testing.assert_close(mine, gloos, rtol=rtol, atol=0, msg=f"{run} {dtype} {numel}")


GLOO: list[Group] = []


def every_move() -> list[backend.Receipt]:
    GLOO.append(both_groups()[1])
    for case, move in enumerate(MOVES):
        for dtype in (*CORE_DTYPES, torch.complex64):
            compare(move, case, dtype)
    receipts = backend.receipts()
    for dtype in (torch.float32, torch.int64):
        compare(sparse_and_unwaited, 98, dtype)
    dist.destroy_process_group()
    return receipts


def every_reduce() -> None:
    GLOO.append(both_groups()[1])
    for case, reduce in enumerate(REDUCES):
        for dtype in (*CORE_DTYPES, torch.int16):
            for op in OPS:
                if op == dist.ReduceOp.AVG and dtype in INTEGERS:
                    continue  # Gloo has no average of integers
                compare(functools.partial(reduce, op=op), case, dtype)
    dist.destroy_process_group()


def averages_of_integers(hosts: str) -> list[list[int]]:
    rank = int(os.environ["RANK"])
    if hosts == "several":
        introduction.host_identity = lambda: f"host {rank}"  # type: ignore[assignment]
    dist.init_process_group(OURS)
    averages = []
    for dtype in INTEGERS:
        x = torch.tensor([7, 3 + rank, 8 * rank], dtype=dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        averages.append(x.tolist())
        part = torch.empty(1, dtype=dtype)
        scatter_from(part, torch.tensor([5, 8 + rank], dtype=dtype), dist.ReduceOp.AVG)
        averages.append(part.tolist())
        with torch.inference_mode():
            seven = torch.tensor([7, 7], dtype=dtype)
            work = dist.all_reduce(seven, dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            work.wait()
            averages.append(seven.tolist())
    dist.destroy_process_group()
    return averages


@pytest.mark.covers("torch.distributed backend")
@pytest.mark.parametrize("hosts", ["one", "several"])
def test_averages_of_integers_are_cut_as_nccls_are(hosts: str) -> None:
    """Lightning takes them of batch sizes."""
    for rank, averages in enumerate(launch(averages_of_integers, 2, (hosts,), timeout_s=60)):
        assert averages == [[7, 3, 4], [[5], [8]][rank], [7, 7]] * len(INTEGERS)


@pytest.mark.covers("torch.distributed backend")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_move_equals_gloos(ranks: int) -> None:
    for receipts in launch(every_move, ranks, timeout_s=120):
        moves = {"all_gather", "all_to_all", "broadcast", "gather", "scatter"}
        assert {receipt.operation for receipt in receipts} == moves
        assert all(receipt.taken != "gloo" for receipt in receipts), receipts


@pytest.mark.covers("torch.distributed backend")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_reduction_equals_gloos(ranks: int) -> None:
    launch(every_reduce, ranks, timeout_s=120)


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
    _, gloo = both_groups()
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


def threads_and_files() -> tuple[int, int]:
    """How many of each this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def no_more_than(before: tuple[int, int]) -> bool:
    return all(map(le, threads_and_files(), before))


def come_and_go() -> None:
    before = (0, 0)
    for turn in range(5):
        dist.init_process_group(OURS)
        world = dist.group.WORLD
        work = dist.all_reduce(torch.ones(5), async_op=True)
        work.get_future().wait()
        gather_into(torch.empty(2 * dist.get_world_size()), torch.ones(2), async_op=True)
        dist.destroy_process_group()
        with pytest.raises(CommError, match="closed"):
            world.allreduce([torch.ones(1)], dist.distributed_c10d.AllreduceOptions()).wait()  # type: ignore[union-attr]
        del world, work
        if turn < 2:  # torch keeps some
            before = threads_and_files()
        else:  # a thread is listed a little longer than it does anything
            until(partial(no_more_than, before), f"no more than {before}")


def test_destroyed_groups_leave_nothing_behind_and_new_ones_follow() -> None:
    launch(come_and_go, 2, timeout_s=120)


def held_things() -> dict[str, int]:
    """How many of each this process holds, and how many files of shared memory there are."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    threads, files = threads_and_files()
    return {
        "threads": threads,
        "files": files,
        "maps": len(maps),
        "shm": len(os.listdir("/dev/shm")),
    }


def a_thousand_groups() -> tuple[dict[str, int], dict[str, int]]:
    """What is held after 100 sub-groups that have come and gone, and after 1,000."""
    dist.init_process_group(OURS)
    after = []
    for turn in range(1, 1001):
        group = dist.new_group([0, 1])
        total = torch.full((turn,), float(dist.get_rank()))
        dist.all_reduce(total, group=group)
        assert torch.equal(total, torch.ones(turn))
        dist.destroy_process_group(group)
        if turn in (100, 1000):
            after.append(held_things())
    dist.destroy_process_group()
    return after[0], after[1]


def test_a_thousand_groups_leave_nothing_behind() -> None:
    for early, late in launch(a_thousand_groups, 2, timeout_s=120):
        assert (
            late["maps"] <= early["maps"] + 8
        )  # of the allocator's, as parts of memory come into use
        assert {**late, "maps": 0} == {**early, "maps": 0}


UNTIDY = """
import torch, torch.distributed as dist, shardcomm
dist.init_process_group("shardcomm")
x = torch.ones(9)
dist.all_reduce(x, async_op=True).get_future()
if dist.get_rank() == 0:
    dist.all_gather([x, x], x, async_op=True)  # the other never comes
"""


def test_a_program_that_ends_with_work_begun_ends_quietly() -> None:
    for ended in run_ranks(UNTIDY, 2):
        assert ended.returncode == 0, ended.stderr


def on_two_hosts() -> list[backend.Receipt]:
    rank = os.environ["RANK"]
    introduction.host_identity = lambda: f"host {rank}"  # type: ignore[assignment]
    dist.init_process_group(OURS)
    x, whole = torch.ones(2), torch.empty(4)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    gather_into(whole, x)
    scatter_from(x, whole)
    dist.barrier()
    assert x.tolist() == [2, 2]
    receipts = backend.receipts()
    dist.destroy_process_group()
    return receipts


@pytest.mark.covers("torch.distributed backend", transports=["c10d"])
def test_ranks_on_several_hosts_use_gloo_and_say_so() -> None:
    for receipts in launch(on_two_hosts, 2, timeout_s=60):
        assert len(receipts) == 4
        for receipt in receipts:
            assert receipt.taken == "gloo"
            assert receipt.reason == "the ranks are on several hosts, and each host has one rank"


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
