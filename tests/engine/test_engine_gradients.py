"""Gradients that are not there yet, not any more, or not reduced yet."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardcomm import Communicator, Engine, MemoryPlan, Mesh, MixedPrecision, fully_shard
from shardcomm.parameter.plain import grad_of
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, local, twins, values


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_buckets_hold_no_gradients_until_they_are_thawed(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        for net in (model, plain):
            net.blocks[1].requires_grad_(False)
        engine = fully_shard(model, comm)
        frozen = engine.units[2]
        assert frozen.name == "blocks.1"
        assert engine.footprint().gradient_bytes == 0
        for net in (model, plain):
            net(values(3, WIDTH)).sum().backward()
        held = [bucket for unit in engine.units if unit is not frozen for bucket, _ in unit.buckets]
        assert engine.footprint().gradient_bytes == sum(bucket.shard.nbytes for bucket in held)

        for net in (model, plain):
            net.blocks[1].requires_grad_(True)
            net(values(3, WIDTH, seed=2)).sum().backward()
        held += [bucket for bucket, _ in frozen.buckets]
        assert engine.footprint().gradient_bytes == sum(bucket.shard.nbytes for bucket in held)
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


def most_gradients(engine: Engine, model: nn.Module) -> tuple[int, int]:
    """Bytes of full gradients, and of these and the shards' together, that a step from `zero_grad` has at most."""
    alive: list[tuple[StorageWeakRef, int]] = []
    full, together = [], []

    def count(param: torch.Tensor) -> None:
        grad = grad_of(param)
        assert grad is not None
        alive.append((StorageWeakRef(grad.untyped_storage()), grad.nbytes))
        full.append(sum(nbytes for grad, nbytes in alive if not grad.expired()))
        together.append(full[-1] + engine.footprint().gradient_bytes)

    hooks = [
        param.full.register_post_accumulate_grad_hook(count)
        for unit in engine.units
        for param in unit.params
    ]
    model.zero_grad()
    model(values(3, 4 * WIDTH)).sum().backward()
    for hook in hooks:
        hook.remove()
    return max(full), max(together)


@pytest.mark.covers("memory as planned")
@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"])
def test_full_gradients_are_gone_when_the_plan_says_so(strategy: str) -> None:
    """And their unit's sharded ones come only then, into memory that the step before does not keep."""
    replicas = 2 if strategy == "hybrid_shard" else None

    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False) for _ in range(4)))

    def body(ranks: Communicator | Mesh) -> None:
        model, _ = twins(chain)
        engine = fully_shard(model, ranks, units=nn.Linear, strategy=strategy)
        plan = MemoryPlan.of(
            chain(), ranks.size, units=nn.Linear, strategy=strategy, replicas=replicas
        )
        reduced_last = plan.units[1].gradient_bytes
        for _ in range(2):
            full, together = most_gradients(engine, model)
            assert full == plan.full_gradient_bytes
            if strategy != "no_shard":  # it keeps them
                assert together == full + plan.footprint.gradient_bytes - reduced_last

    if replicas:
        run_mesh(body, replicas, 2)
    else:
        run_threads(body, 2)


@pytest.mark.covers("gradient accumulation", "mixed precision")
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_sync_sums_a_thousand_bf16_gradients_in_float32(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        engine = fully_shard(
            model, comm, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
        )
        ones = torch.ones(1, WIDTH)
        with engine.no_sync():
            for _ in range(999):
                model(ones).sum().backward()
        model(ones).sum().backward()
        assert model.weight.grad is not None
        assert local(model.weight.grad).eq(1000).all()

    run_threads(body, ranks)


@pytest.mark.covers("gradient accumulation")
def test_zero_grad_keeps_what_no_sync_summed() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        with engine.no_sync():
            model(values(3, WIDTH)).sum().backward()
        model.zero_grad()
        model(values(3, WIDTH, seed=2)).sum().backward()
        for seed in (1, 2):
            plain(values(3, WIDTH, seed=seed)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def earlier_backward_and_a_freeze(engine: Engine, model: nn.Module, plain: nn.Module) -> None:
    """A backward whose gradients stay with the ranks, then one in which a unit, and a bias, are frozen."""
    for net in (model, plain):
        with contextlib.ExitStack() as kept:
            if net is model and engine.mesh.replicate.size == 1:
                kept.enter_context(engine.no_sync())
            engine.set_requires_all_reduce(False)
            net(values(3, WIDTH)).square().mean().backward()
        net.get_submodule("blocks.1").requires_grad_(False)
        net.get_parameter("blocks.2.linear.bias").requires_grad_(False)
        engine.set_requires_all_reduce(True)
        net(values(3, WIDTH, seed=2)).square().mean().backward()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_what_no_sync_kept_of_a_parameter_that_is_frozen_then_is_reduced(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm, strategy=strategy)
        earlier_backward_and_a_freeze(engine, model, plain)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("then", ["looks", "trains on"])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_awaits_an_all_reduce_as_a_parameter_is_frozen_is_reduced_once(
    shards: int, then: str
) -> None:
    def body(mesh: Mesh) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        earlier_backward_and_a_freeze(engine, model, plain)
        for net in (model, plain) if then == "trains on" else ():
            net.zero_grad()
            net.requires_grad_(True)
            net(values(3, WIDTH, seed=3)).square().mean().backward()
        assert_same_gradients(engine, model, plain)

    run_mesh(body, 2, shards)


def test_what_no_sync_kept_on_one_rank_alone_is_reduced_though_it_is_frozen_then() -> None:
    class Skipped(Block):
        is_on = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.is_on else x * 1

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Skipped))
        engine = fully_shard(model, comm)
        for net in (model, plain):
            skipped = net.get_submodule("blocks.1")
            assert isinstance(skipped, Skipped)
            for is_on in (True, False) if net is plain else (comm.rank == 0,):
                skipped.is_on = is_on
                with engine.no_sync():
                    (net(values(3, WIDTH)).square().mean() / (2 if net is plain else 1)).backward()
            skipped.is_on = True
            skipped.requires_grad_(False)
            net(values(3, WIDTH, seed=2)).square().mean().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_marks_that_a_forward_sets_are_of_the_gathered_copy_alone() -> None:
    class Marked(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.requires_grad_(False)
            self.linear.bias.seen = True  # type: ignore[attr-defined]
            return super().forward(x)

    def body(comm: Communicator) -> None:
        model = Chain(Marked)
        fully_shard(model, comm)
        for _ in range(2):
            model(values(3, WIDTH)).sum().backward()
        weight, bias = model.blocks[0].parameters()
        assert weight.requires_grad
        assert not hasattr(bias, "seen")

    run_threads(body, 2)
