"""What a reduce adds to, and what it leaves: in the rows of a bucket, in its padding, and in what `.grad` shows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from shardcomm import (
    Bucket,
    CommError,
    Communicator,
    Layout,
    Mesh,
    MixedPrecision,
    ParamSpec,
    fully_shard,
)
from shardcomm.parameter.plain import grad_of, plain
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, local, twins, values

SHAPES = {"a": (4, 3), "b": (6,)}


def ones(value: float = 1.0) -> list[torch.Tensor]:
    return [torch.full(shape, value) for shape in SHAPES.values()]


def bucket_of(comm: Communicator) -> Bucket:
    return Bucket.from_tensors({name: torch.zeros(shape) for name, shape in SHAPES.items()}, comm)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_gradient_that_was_dropped_starts_from_nothing_beside_one_that_is_added_to(
    ranks: int, async_op: bool
) -> None:
    def body(comm: Communicator) -> None:
        bucket = bucket_of(comm)
        bucket.reduce_scatter(ones(5.0), async_op=async_op).wait()
        bucket.shards[0].grad = None
        bucket.reduce_scatter(ones(), async_op=async_op).wait()
        dropped, kept = (shard.grad for shard in bucket.shards)
        assert dropped is not None
        assert kept is not None
        assert dropped.eq(1.0).all()
        assert kept.eq(6.0).all()

    run_threads(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_nobody_needs_any_more_are_freed(ranks: int) -> None:
    """Those of the first reduce, too."""

    def body(comm: Communicator) -> None:
        bucket = bucket_of(comm)
        bucket.reduce_scatter(ones())
        first = weakref.ref(bucket.gradients.flat)
        for shard in bucket.shards:
            shard.grad = None
        bucket.gradients.drop()
        gc.collect()
        assert first() is None

    run_threads(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_gradients_that_somebody_has_kept_stay_as_they_are_until_he_lets_go(
    ranks: int, drops: bool
) -> None:
    """As an object, as a view, in NumPy, in another process's reach, or among the values of a graph."""

    def in_graph(grad: torch.Tensor) -> object:
        with plain():
            weight = torch.ones(grad.shape, requires_grad=True)
            return weight, grad * weight

    for keep in (
        lambda grad: grad,
        lambda grad: grad.data.detach(),
        lambda grad: torch.from_numpy(grad.detach().numpy()),
        lambda grad: grad.detach().share_memory_(),
        in_graph,
    ):

        def body(comm: Communicator, keep: Callable[[torch.Tensor], object] = keep) -> None:
            bucket = bucket_of(comm)
            bucket.reduce_scatter(ones())
            first = weakref.ref(bucket.gradients.flat)
            grad = bucket.shards[0].grad
            assert grad is not None
            kept: object = keep(grad)
            del grad
            for shard in bucket.shards:
                shard.grad = None
            if drops:
                bucket.gradients.drop()
            bucket.reduce_scatter(ones(3.0))
            for shard in bucket.shards:
                assert shard.grad is not None
                assert shard.grad.eq(3.0).all()
            if isinstance(kept, tuple):
                weight, product = kept
                product.sum().backward()
                kept = weight.grad
            assert isinstance(kept, torch.Tensor)
            assert kept.eq(1.0).all()
            del kept
            gc.collect()
            assert first() is None

        run_threads(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_flat_gradients_that_were_read_stay_where_they_are(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        bucket = bucket_of(comm)
        bucket.reduce_scatter(ones(5.0))
        flat = bucket.grad
        views = bucket.grad.split(2)
        for shard in bucket.shards:
            shard.grad = None
        bucket.reduce_scatter(ones())
        assert bucket.grad is flat
        assert torch.equal(torch.cat(views), flat)
        assert bucket.shards[0].grad is not None
        assert bucket.shards[0].grad.eq(1.0).all()

    run_threads(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reduce_adds_to_a_gradient_that_somebody_else_has_set(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        bucket = bucket_of(comm)
        for shard in bucket.shards:
            shard.grad = torch.full_like(shard, 10.0)
        bucket.reduce_scatter(ones())
        for shard in bucket.shards:
            assert shard.grad is not None
            assert shard.grad.eq(11.0).all()

    run_threads(body, ranks)


def test_padding_of_a_shared_buffer_holds_nothing_of_another_bucket() -> None:
    """NaN of one bucket's gradients must not be found in what the other's reduce leaves."""

    def body(comm: Communicator) -> None:
        wide = Layout.plan([ParamSpec("w", (64, 2))], comm.size)
        narrow = Layout.plan([ParamSpec("w", (3, 2))], comm.size)
        assert narrow.padding > 0
        shared = comm.allocate(wide.flat_numel, use="reduce")
        first = Bucket(wide, comm, reduce_buffer=shared)
        second = Bucket(narrow, comm, reduce_buffer=shared[: narrow.flat_numel])
        second.nonfinite = torch.zeros(1, dtype=torch.int32)
        for _ in range(2):
            first.reduce_scatter([torch.full((64, 2), float("nan"))])
            second.reduce_scatter([torch.ones(3, 2)])
            assert second.nonfinite.item() == 0
            assert second.grad.isfinite().all()
            for shard in second.shards:
                shard.grad = None

    run_threads(body, 2)


@pytest.mark.covers("gradient accumulation")
def test_an_inner_no_sync_does_not_end_the_outer_one() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        with engine.no_sync():
            with engine.no_sync():
                model(values(3, WIDTH)).sum().backward()
            model(values(3, WIDTH, seed=2)).sum().backward()
            assert all(param.grad is None for param in model.parameters())
        model(values(3, WIDTH, seed=3)).sum().backward()
        for seed in (1, 2, 3):
            plain(values(3, WIDTH, seed=seed)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Either(nn.Module):
    """Uses one of its parameters in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((WIDTH,), 1.0 + i) for i in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x * self.weights[which]


class TwoUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.either = Either()
        self.other = Either()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.either(x, which) + self.other(x, which)


def test_a_unit_that_is_reduced_twice_in_a_backward_keeps_what_either_used() -> None:
    """Raw inputs have no mark to tell the end of a unit's backward: another unit that needs its slot ends it."""

    def body(comm: Communicator) -> None:
        model, plain = twins(TwoUnits)
        engine = fully_shard(model, comm, units=Either, slots=1)
        x = values(3, WIDTH)
        for net in (model, plain):
            sum(net(x, which).square().sum() for which in (0, 1)).backward()  # type: ignore[union-attr]
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_a_forward_that_failed_keeps_none_of_its_inputs() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm)
        inputs: list[weakref.ref[torch.Tensor]] = []

        def fail(module: nn.Module, args: tuple[torch.Tensor]) -> None:
            inputs.append(weakref.ref(args[0]))
            raise LookupError

        hook = model.blocks[2].linear.register_forward_pre_hook(fail)
        with pytest.raises(LookupError):
            model(values(3, WIDTH))
        hook.remove()
        assert len(inputs) == 1
        engine.full_state_dict()  # as what comes first after it
        gc.collect()
        assert inputs[0]() is None

    run_threads(body, 2)


def test_gradients_below_the_norm_stay_as_they_are() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).sum().backward()
        engine.clip_grad_norm_(1e6)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_what_was_used_in_one_step_has_no_gradient_in_the_next() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Either)
        engine = fully_shard(model, comm)
        for which in (1, 0):
            for net in (model, plain):
                net.zero_grad()
                net(values(3, WIDTH), which).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_units_of_one_size_are_told_apart() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        fully_shard(model, comm, prefetch=0)
        if comm.rank == 1:
            model.blocks = nn.ModuleList(reversed(model.blocks))
        with (
            torch.no_grad(),
            pytest.raises(CommError, match=r"unit 'blocks.0' #.*unit 'blocks.3' #"),
        ):
            model(values(3, WIDTH))

    run_threads(body, 2)


class ByKeyword(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = self.between(i, block(x=x))
        return x


@pytest.mark.parametrize("make", [Chain, ByKeyword])
def test_a_units_gradients_are_packed_before_the_next_units_backward(make: type[Chain]) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(make)
        engine = fully_shard(model, comm)
        seen: list[int] = []

        def watch(i: int, x: torch.Tensor) -> torch.Tensor:
            def packed(_: torch.Tensor) -> None:
                later = engine.units[i + 2 :]  # the root is unit 0
                with plain():
                    assert all(grad_of(p.full) is None for unit in later for p in unit.params)
                seen.append(i)

            x.register_hook(packed)  # type: ignore[no-untyped-call]
            return x

        model.between = watch
        model(values(3, WIDTH)).sum().backward()
        assert seen == [3, 2, 1, 0]

    run_threads(body, 2)


@pytest.mark.covers("gradient accumulation")
def test_replicas_sum_what_backward_told_only_at_its_end() -> None:
    def body(mesh: Mesh) -> None:
        model, plain = twins(Either)
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        x = (1.0 + mesh.rank) * torch.ones(1, WIDTH)
        model(x, 0).sum().backward()  # raw inputs: no mark tells the end of the unit's backward
        plain(2.5 * torch.ones(1, WIDTH), 0).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_mesh(body, 2, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_and_sums_of_gradients_are_packed_in_turn(ranks: int) -> None:
    """A sum of `no_sync` comes in the wider dtype, a single gradient in the narrow one."""

    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        precision = MixedPrecision(torch.bfloat16, torch.float32)
        engine = fully_shard(model, comm, mixed_precision=precision)
        for summed in (False, True, False, True):
            model.zero_grad()
            with engine.no_sync() if summed else nullcontext():
                model(torch.ones(1, WIDTH)).sum().backward()
            if summed:
                model(torch.ones(1, WIDTH)).sum().backward()
            assert model.weight.grad is not None
            assert local(model.weight.grad).eq(1.0 + summed).all()

    run_threads(body, ranks)
