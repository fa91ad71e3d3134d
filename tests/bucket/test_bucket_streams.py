"""Buckets that share memory, while a stream lags: what one still needs there, another does not overwrite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shardcomm import Bucket, Communicator, Layout, Mesh, ParamSpec, Stream, fully_shard
from shardcomm.bucket.staging import Staging
from shardcomm.stream.streams import AnyEvent, AnyStream, Streams, copy
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Chain, local, twins

SHAPE = (8, 2)


@contextmanager
def lagging(stream: AnyStream) -> Iterator[None]:
    """What is put on `stream` in here begins a while later: right results do not depend on how long."""
    gate = threading.Event()
    stream.enqueue(gate.wait)
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def reduce_both(first: Bucket, second: Bucket, late: AnyStream) -> None:
    for times in (1, 2):  # the second reduce accumulates
        with lagging(late):
            works = [
                bucket.reduce_scatter([torch.full(SHAPE, value)], async_op=True)
                for bucket, value in ((first, 1.0), (second, 2.0))
            ]
            for work in works:
                work.wait()
        for bucket, value in ((first, 1.0), (second, 2.0)):
            (shard,) = bucket.shards
            assert shard.grad is not None
            assert shard.grad.eq(times * value).all(), (times, value, shard.grad)


def test_a_reduce_buffer_is_packed_when_the_reduce_before_has_left_it() -> None:
    def body(comm: Communicator) -> None:
        layout = Layout.plan([ParamSpec("w", SHAPE)], comm.size)
        shared = comm.allocate(layout.flat_numel, use="reduce")
        first, second = (Bucket(layout, comm, reduce_buffer=shared) for _ in range(2))
        reduce_both(first, second, comm.streams.reduce)

    run_threads(body, 2)


@pytest.mark.parametrize("late", ["reduce", "replicate"])
@pytest.mark.parametrize("shards", [1, 2])
def test_staging_is_filled_when_it_is_free_and_all_reduced_when_it_is_full(
    late: str, shards: int
) -> None:
    def body(mesh: Mesh) -> None:
        layout = Layout.plan([ParamSpec("w", SHAPE)], shards)
        nbytes = layout.shard_numel * 4
        staging = Staging(mesh.replicate.allocate(nbytes, dtype=torch.uint8, use="reduce"))
        first, second = (
            Bucket(layout, mesh.shard, replicas=mesh.replicate, staging=staging) for _ in range(2)
        )
        reduce_both(first, second, getattr(mesh.shard.streams, late))

    run_mesh(body, 2, shards)


@pytest.mark.parametrize("late", ["reduce", "replicate"])
def test_synchronous_reduces_with_replicas_come_in_turn(late: str) -> None:
    def body(mesh: Mesh) -> None:
        layout = Layout.plan([ParamSpec("w", SHAPE)], 2)
        staging = Staging(mesh.replicate.allocate(1024, dtype=torch.uint8, use="reduce"))
        buckets = [
            Bucket(layout, mesh.shard, replicas=mesh.replicate, staging=staging) for _ in range(2)
        ]
        with lagging(getattr(mesh.shard.streams, late)):
            work = buckets[0].reduce_scatter([torch.full(SHAPE, 1.0)], async_op=True)
            work.wait()
            buckets[1].reduce_scatter([torch.full(SHAPE, 2.0)])
        for bucket, value in zip(buckets, (1.0, 2.0), strict=True):
            assert bucket.shards[0].grad is not None
            assert bucket.shards[0].grad.eq(value).all()

    run_mesh(body, 2, 2)


class LateCompute(Streams):
    """As on a GPU: the host queues what is computed, and it is computed later."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        stream = Stream()
        self.compute = lambda: stream
        self._on_host = False

    def zero(self, memory: torch.Tensor) -> None:
        never = threading.Event()
        self.compute().enqueue(lambda: (never.wait(0.2), memory.zero_()))


@pytest.mark.parametrize("put_off", [False, True])
def test_gradients_are_added_to_zeros_when_these_are_written(put_off: bool) -> None:
    def body(mesh: Mesh) -> None:
        streams = LateCompute()
        layout = Layout.plan([ParamSpec("w", SHAPE)], 2)
        bucket = Bucket(layout, mesh.shard, replicas=mesh.replicate, streams=streams)
        gradients, reduction = bucket.gradients, bucket.reduction
        gradients.flat.fill_(torch.nan)

        def begin_reduce() -> bool:
            streams.zero(gradients.flat)
            return True

        gradients.begin_reduce = begin_reduce
        for put in [True, False] if put_off else [False]:
            reduction.pack([torch.full(SHAPE, float(mesh.rank))], async_op=True)
            reduction.reduce(async_op=True, put_off=put).wait()
        reduction.all_reduce(async_op=True).wait()
        mean = (0 + 1 + 2 + 3) / 4
        assert gradients.rows[0].eq(2 * mean if put_off else mean).all(), gradients.rows

    run_mesh(body, 2, 2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size", [6, 1024])  # memory that is let go of too early may be unmapped
def test_gradients_with_gaps_are_packed_as_they_are(ranks: int, size: int) -> None:
    full = torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    strided = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(2))[:, ::2]

    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"a": full, "b": full}, comm)
        bucket.reduce_scatter([full.t(), strided])
        bucket.shard.copy_(bucket.grad)
        got = bucket.gathered_shards(torch.empty(bucket.layout.flat_numel))
        for value, expected in zip(got, (full.t(), strided), strict=True):
            assert torch.equal(value, expected)

    run_threads(body, ranks)


def test_doubles_of_one_rank_are_scaled_in_double_precision() -> None:
    comm = Communicator.local_group(1)[0]
    bucket = Bucket.from_tensors({"w": torch.zeros(4, dtype=torch.float64)}, comm)
    bucket.grad_scale = 1 / 3
    grad = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    bucket.reduce_scatter([grad])
    torch.testing.assert_close(bucket.grad[:4], grad / 3, rtol=1e-7, atol=0)


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between device and host, as on a stream that lags."""

    def late(to: torch.Tensor, source: torch.Tensor, stream: AnyStream) -> AnyEvent:
        never = threading.Event()
        stream.enqueue(lambda: never.wait(0.1))
        return copy(to, source, stream)

    monkeypatch.setattr("shardcomm.bucket.offload.copy", late)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_backward_ends_when_offloaded_gradients_are_in_host_memory(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model, comm, cpu_offload=True)
        for times in (1, 2):  # the second is added to the first
            model(torch.ones(1, 4)).sum().backward()
            assert model.weight.grad is not None
            assert local(model.weight.grad).eq(times).all()

    run_threads(body, ranks)


@pytest.mark.usefixtures("late_copies")
def test_a_forward_ends_when_no_shard_is_being_copied_not_even_for_a_unit_that_it_skipped() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: Chain(layers=3))
        engine = fully_shard(model, comm, prefetch=9, cpu_offload=True)
        model.skipped = {2}
        model(torch.ones(1, WIDTH))
        (offload,) = {bucket.offload for unit in engine.units for bucket, _ in unit.buckets}
        assert offload is not None
        assert offload._fetched is not None
        assert offload._fetched.query()

    run_threads(body, 2)


def test_sparse_gradients_are_packed_as_dense_ones() -> None:
    table = torch.zeros(9, 4)
    table[[1, 5]] = torch.randn(2, 4, generator=torch.Generator().manual_seed(4))

    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"table": table}, comm)
        bucket.reduce_scatter([table.to_sparse(1)])
        bucket.shard.copy_(bucket.grad)
        (got,) = bucket.gathered_shards(torch.empty(bucket.layout.flat_numel))
        assert torch.equal(got, table)

    run_threads(body, 2)
