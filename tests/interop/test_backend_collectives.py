"""The torch.distributed backend: every collective against Gloo on the same inputs."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from shardcomm import CommError, backend, launch
from shardcomm.comm import introduction

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


def init_beside_gloo() -> Group:
    """Makes the default group, of this backend, and Gloo's of the same ranks, which it returns."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # 2.13's names of some differ
    dist.init_process_group(OURS, timeout=timedelta(seconds=60))
    gloo: Group = dist.new_group(backend="gloo")
    return gloo


def values(case: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's: whole numbers so small that no sum of them rounds."""
    generator = torch.Generator().manual_seed(case * 64 + dist.get_rank())
    low = 0 if dtype in (torch.uint8, torch.bool) else -8
    whole = torch.randint(low, 9, (numel,), generator=generator).to(dtype)
    return whole * torch.tensor(1 - 2j, dtype=dtype) if dtype.is_complex else whole


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
    # Its indices and values can be read as those of Gloo's sum, which is coalesced.
    return [sparse.indices(), sparse.values(), unwaited + 0]


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


def compare(
    gloo: Group, run: Callable[[Group, torch.Tensor], Tensors], case: int, dtype: torch.dtype
) -> None:
    """Raises unless both backends give the same, or refuse."""
    assert dist.group.WORLD is not None
    for numel in NUMELS:
        results: list[Tensors | None] = []
        for group in (dist.group.WORLD, gloo):
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


def every_move() -> list[backend.Receipt]:
    gloo = init_beside_gloo()
    for case, move in enumerate(MOVES):
        for dtype in (*CORE_DTYPES, torch.complex64):
            compare(gloo, move, case, dtype)
    receipts = backend.receipts()
    for dtype in (torch.float32, torch.int64):
        compare(gloo, sparse_and_unwaited, 98, dtype)
    dist.destroy_process_group()
    return receipts


def every_reduce(dtypes: Sequence[torch.dtype]) -> None:
    gloo = init_beside_gloo()
    for case, reduce in enumerate(REDUCES):
        for dtype in dtypes:
            for op in OPS:
                if op == dist.ReduceOp.AVG and dtype in INTEGERS:
                    continue  # Gloo has no average of integers
                compare(gloo, functools.partial(reduce, op=op), case, dtype)
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


def sums_of_products(hosts: str) -> list[list[float]]:
    rank = int(os.environ["RANK"])
    if hosts == "several":
        introduction.host_identity = lambda: f"host {rank}"  # type: ignore[assignment]
    dist.init_process_group(OURS)
    group, x = dist.group.WORLD, torch.tensor([4.0, 8.0, 12.0, 16.0]) + rank
    assert group is not None
    op = dist._make_nccl_premul_sum(0.25)
    reduces = [reduce for reduce in REDUCES if reduce is not functional_reduces]
    outputs = [output.flatten().tolist() for reduce in reduces for output in reduce(group, x, op)]
    assert x[0] == 4.0 + rank  # inputs are not written
    with pytest.raises(ValueError, match="op is PREMUL_SUM and a tensor is sparse"):
        dist.all_reduce(torch.eye(2).to_sparse(), op)
    weight = torch.nn.Parameter(torch.ones(2))
    dist.all_reduce(weight, op)
    assert weight.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="op is PREMUL_SUM and dtype is Int"):
        dist.all_reduce(x.int(), op)
    dist.destroy_process_group()
    return outputs


@pytest.mark.covers("torch.distributed backend")
@pytest.mark.parametrize("hosts", ["one", "several"])
def test_sums_of_products_are_as_nccls(hosts: str) -> None:
    """FSDP2 takes them after `set_gradient_divide_factor`, as torchtitan does."""
    for rank, outputs in enumerate(launch(sums_of_products, 2, (hosts,), timeout_s=60)):
        whole = [2.25, 4.25, 6.25, 8.25]
        assert outputs == [whole, whole, whole, whole[:2], *[whole[2 * rank :][:2]] * 6, whole]


def sums_of_bools() -> list[int]:
    dist.init_process_group(OURS)
    sums = torch.zeros(3, dtype=torch.bool)
    scatter_from(sums, torch.tensor([True, dist.get_rank() == 0, False]).repeat(2))
    dist.destroy_process_group()
    return sums.view(torch.uint8).tolist()


@pytest.mark.covers("torch.distributed backend")
def test_the_bytes_of_a_sum_of_bools_are_bools() -> None:
    assert launch(sums_of_bools, 2, timeout_s=60) == [[1, 1, 0]] * 2


@pytest.mark.covers("torch.distributed backend")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_move_equals_gloos(ranks: int) -> None:
    for receipts in launch(every_move, ranks, timeout_s=120):
        moves = {"all_gather", "all_to_all", "broadcast", "gather", "scatter"}
        assert {receipt.operation for receipt in receipts} == moves
        assert all(receipt.taken != "gloo" for receipt in receipts), receipts


@pytest.mark.covers("torch.distributed backend")
@pytest.mark.parametrize(
    ("ranks", "dtypes"),
    [
        (2, [*CORE_DTYPES, torch.complex64, torch.int16]),
        (3, [torch.int64, torch.float16, torch.bfloat16, torch.float32]),
    ],
)
def test_every_reduction_equals_gloos(ranks: int, dtypes: list[torch.dtype]) -> None:
    launch(every_reduce, ranks, (dtypes,), timeout_s=120)
