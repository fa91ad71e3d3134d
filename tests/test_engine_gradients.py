"""Gradients that are not there yet, not any more, or not reduced yet."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import run_threads
from torch import nn
from twins import WIDTH, Chain, assert_same_gradients, twins, values

from shardcomm import Communicator, MixedPrecision, fully_shard


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
        assert model.weight.grad.eq(1000).all()

    run_threads(body, ranks)


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
