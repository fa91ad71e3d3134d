"""Bucket against what it stands for: slices of the full parameters, and the mean of the ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardcomm import Bucket, CommError, Communicator, Layout, Mesh, ParamSpec
from support.thread_ranks import run_mesh, run_threads


def tensors_of(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = {"weight": (7, 5), "bias": (7,), "scalar": (), "empty": (0, 4), "cube": (3, 2, 2)}
    # Small integers: their sums are exact in every dtype here.
    return {
        name: torch.randint(-8, 9, shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.covers("buckets")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("async_op", [False, True])
def test_gather_gives_the_full_parameters_and_reduce_the_mean(ranks: int, async_op: bool) -> None:
    full = tensors_of(99)
    mean = {name: sum(tensors_of(rank)[name] for rank in range(ranks)) / ranks for name in full}

    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors(full, comm)
        work = bucket.all_gather(async_op=async_op)
        if work is not None:
            work.wait()
        for value, expected in zip(bucket.params, full.values(), strict=True):
            assert torch.equal(value, expected)

        for times in (1, 2):  # the second reduce accumulates
            work = bucket.reduce_scatter(list(tensors_of(comm.rank).values()), async_op=async_op)
            if work is not None:
                work.wait()
            gathered = torch.empty(bucket.layout.flat_numel)
            comm.all_gather(gathered, bucket.grad)
            for placement in bucket.layout.placements:
                got = gathered[placement.offset : placement.offset + placement.numel]
                torch.testing.assert_close(
                    got, times * mean[placement.spec.name].flatten(), rtol=1e-6, atol=1e-6
                )

    run_threads(body, ranks)


def test_shards_are_this_ranks_rows() -> None:
    full = tensors_of(1)

    def body(comm: Communicator) -> list[torch.Tensor]:
        return [shard.clone() for shard in Bucket.from_tensors(full, comm).shards]

    shards = run_threads(body, 3)
    for i, (name, expected) in enumerate(full.items()):
        if name == "scalar":
            assert sum(rank[i].numel() for rank in shards) == 1
            continue
        assert torch.equal(torch.cat([rank[i] for rank in shards]), expected), name


@pytest.mark.covers("buckets")
@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_granularity_and_shard_dim_gathers_the_same(granularity: str, dim: int) -> None:
    shapes = {"a": (6, 5), "b": (4, 9)}
    full = [torch.randn(shape) for shape in shapes.values()]
    specs = [ParamSpec(n, s, granularity=granularity, shard_dim=dim) for n, s in shapes.items()]

    def body(comm: Communicator) -> None:
        bucket = Bucket(Layout.plan(specs, comm.size), comm)
        bucket.load(full)
        bucket.all_gather()
        for value, expected in zip(bucket.params, full, strict=True):
            assert torch.equal(value, expected)
        bucket.reduce_scatter(full)
        flat = torch.empty(bucket.layout.flat_numel)
        comm.all_gather(flat, bucket.grad)
        bucket.shard.copy_(bucket.grad)
        for value, expected in zip(bucket.gathered_shards(flat), full, strict=True):
            torch.testing.assert_close(value, expected)

    run_threads(body, 3)


@pytest.mark.covers("buckets", "sums in fp32")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_wire_rounds_once_and_sums_in_fp32(half: torch.dtype) -> None:
    ranks = 3
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(9, 4, generator=generator)
    grads = [torch.randn(9, 4, generator=generator).to(half) for _ in range(ranks)]
    mean = (grads[0].float() + grads[1].float() + grads[2].float()) * (1.0 / ranks)

    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"w": weight}, comm, param_dtype=half)
        bucket.all_gather()
        assert torch.equal(bucket.params[0], weight.to(half))
        bucket.reduce_scatter([grads[comm.rank]])
        bucket.shard.copy_(bucket.grad)
        assert torch.equal(bucket.gathered_shards(torch.empty(bucket.layout.flat_numel))[0], mean)

    run_threads(body, ranks)


@pytest.mark.covers("buckets")
@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicas_average_their_shards(
    replicas: int, shards: int, async_op: bool, dtype: torch.dtype
) -> None:
    ranks = replicas * shards
    total = sum(tensors_of(rank, dtype)["weight"] for rank in range(ranks))

    def body(mesh: Mesh) -> None:
        layout = Layout.plan([ParamSpec("w", (7, 5))], shards)
        bucket = Bucket(layout, mesh.shard, dtype=dtype, replicas=mesh.replicate)
        for times in (1, 2):  # the second reduce accumulates
            grad = tensors_of(mesh.rank, dtype)["weight"]
            bucket.reduce_scatter([grad], async_op=async_op).wait()
            whole = torch.empty(layout.flat_numel, dtype=dtype)
            mesh.shard.all_gather(whole, bucket.grad)
            torch.testing.assert_close(whole[:35].view(7, 5), times * total / ranks)

    run_mesh(body, replicas, shards)


def test_missing_gradients_count_as_zeros() -> None:
    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"a": torch.ones(4, 2), "b": torch.ones(3)}, comm)
        for shard_grad in bucket.gradients.rows:
            shard_grad.fill_(9.0)  # an overwriting reduce must not leave this behind
        bucket.reduce_scatter([torch.ones(4, 2) if comm.rank == 0 else None, None])
        assert bucket.gradients.rows[0].eq(0.5).all()
        assert bucket.gradients.rows[1].eq(0.0).all()

    run_threads(body, 2)


def test_wrong_shapes_are_named() -> None:
    comm = Communicator.local_group(1)[0]
    bucket = Bucket.from_tensors({"w": torch.ones(4, 2)}, comm)
    with pytest.raises(
        ValueError, match=r"grads for w has shape \(2, 4\); the layout says \(4, 2\)"
    ):
        bucket.reduce_scatter([torch.ones(2, 4)])
    with pytest.raises(ValueError, match="tensors has 0 entries; the layout has 1 parameters"):
        bucket.load([])
    with pytest.raises(ValueError, match="exactly one"):
        Bucket.from_tensors({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.half)}, comm)
    with pytest.raises(
        TypeError, match="tensors is a list; it must be a mapping of names to tensors"
    ):
        Bucket.from_tensors([torch.ones(1)], comm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="comm is a int; it must be a Communicator"):
        Bucket.from_tensors({"w": torch.ones(1)}, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout is for 2 ranks, comm has 1"):
        Bucket(Layout.plan([ParamSpec("w", (4, 2))], 2), comm)


@pytest.mark.parametrize(
    "call",
    [Bucket.all_gather, lambda bucket: bucket.reduce_scatter([torch.ones(4)])],
    ids=["all_gather", "reduce_scatter"],
)
def test_a_rank_that_takes_buckets_of_one_size_in_another_order_is_noticed(
    call: Callable[[Bucket], object],
) -> None:
    order = r"of the bucket of 'w' #.* of the bucket of 'w' \(2\) #"

    def body(comm: Communicator) -> None:
        buckets = [Bucket.from_tensors({"w": torch.full((4,), float(i))}, comm) for i in range(2)]
        with pytest.raises(CommError, match=order):
            call(buckets[comm.rank])

    run_threads(body, 2)


def test_a_refused_bucket_takes_no_tag() -> None:
    def body(comm: Communicator) -> None:
        tensors = {"w": torch.ones(4)}
        if comm.rank == 0:
            with pytest.raises(TypeError, match="gather_format is a str"):
                Bucket.from_tensors(tensors, comm, gather_format="mxint8")  # type: ignore[arg-type]
        bucket = Bucket.from_tensors(tensors, comm)
        bucket.all_gather()
        assert bucket.params[0].tolist() == [1.0] * 4

    run_threads(body, 2)


def test_a_shard_that_was_given_other_memory_is_refused() -> None:
    bucket = Bucket.from_tensors(
        {"a": torch.ones(2), "b": torch.ones(4)}, Communicator.local_group(1)[0]
    )
    bucket.shards[1].data.copy_(torch.full((4,), 2.0))
    bucket.all_gather()
    assert bucket.params[1].tolist() == [2.0] * 4
    bucket.shards[1].data = torch.full((4,), 3.0)
    with pytest.raises(ValueError, match=r"all_gather: shards\[1\], rows of 'b', has moved"):
        bucket.all_gather()


@pytest.mark.covers("buckets")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_a_backward_past_a_gather_of_changed_shards_raises(changes: bool, async_op: bool) -> None:
    """As past torch's own gather, or a step of a plain optimizer. A gather of the same values harms nothing."""

    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"w": torch.arange(8.0).view(2, 4)}, comm)
        x = torch.ones(1, 4, requires_grad=True)
        bucket.all_gather(async_op=async_op).wait()
        weight = bucket.params[0].requires_grad_()
        loss = torch.nn.functional.linear(x, weight).sum()
        if changes:
            with torch.no_grad():
                bucket.shards[0].mul_(100)
        bucket.all_gather(async_op=async_op).wait()
        if changes:
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            assert x.grad is not None
            assert x.grad.tolist() == [[4, 6, 8, 10]]

    run_threads(body, 2)


def test_buckets_of_one_communicator_may_be_under_way_together() -> None:
    """Without buffers or streams of their own choice, made with different data."""
    wholes = [{"weight": torch.full((64, 32), float(i))} for i in range(6)]

    def body(comm: Communicator) -> None:
        buckets = [Bucket.from_tensors(whole, comm) for whole in wholes]
        for work in [bucket.all_gather(async_op=True) for bucket in buckets]:
            work.wait()
        grads = [[(1 + comm.rank) * bucket.params[0]] for bucket in buckets]
        pairs = zip(buckets, grads, strict=True)
        for work in [bucket.reduce_scatter(grad, async_op=True) for bucket, grad in pairs]:
            work.wait()
        for i, bucket in enumerate(buckets):
            assert bucket.grad.eq(1.5 * i).all()

    for _ in range(5):
        run_threads(body, 2)
