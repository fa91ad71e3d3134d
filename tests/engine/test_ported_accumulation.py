"""What PyTorch states of gradients that FSDP2 accumulates, stated of `fully_shard`; see docs/fsdp2_cases.md."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint

from shardcomm import Communicator, Engine, Mesh, fully_shard
from support.parity import MLP, STRATEGIES, MLPs, numbers, tokens, train_alike, whole
from support.thread_ranks import run_mesh, run_threads
from support.transformer import VOCABULARY, Transformer
from support.twins import twins


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_over_micro_batches(strategy: str, cpu_offload: bool, no_sync: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: MLPs(6))
        engine = fully_shard(model, comm, units=MLP, strategy=strategy, cpu_offload=cpu_offload)
        batch = numbers(2, 6)
        before = engine.traffic.reduced_bytes
        train_alike(comm, engine, model, plain, batch, micro=3, no_sync=no_sync, steps=1)
        once = engine.traffic.reduced_bytes - before
        before = engine.traffic.reduced_bytes
        train_alike(comm, engine, model, plain, batch, steps=1)
        each = engine.traffic.reduced_bytes - before
        assert once == (each if no_sync else 3 * each)

    run_threads(body, 4)


@pytest.mark.covers("training parity", "activation checkpointing")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("width", [3, 16, 17])
def test_replicas_of_shards(width: int, no_sync: bool, cpu_offload: bool, recompute: bool) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LayerNorm(width, bias=False), MLP(width, 3), MLP(width))
        if recompute:
            for module in model:
                composable_checkpoint(module)
        return model

    def body(mesh: Mesh) -> None:
        model, plain = twins(make)
        engine = fully_shard(
            model, mesh, units=MLP, strategy="hybrid_shard", cpu_offload=cpu_offload
        )
        batch = numbers(8, width)
        train_alike(mesh, engine, model, plain, batch, steps=2, micro=2, no_sync=no_sync)

    run_mesh(body, 2, 2)


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("unshard", [False, True])
def test_micro_batches_of_a_pipeline_stage(unshard: bool) -> None:
    """Gathered ahead by hand, and reduced once, at the last micro-batch."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Transformer)
        engine = fully_shard(model, comm, strategy="shard_grad_op")

        begun = set()

        def inputs(rank: int, index: int) -> tuple[torch.Tensor]:
            if unshard and index % 3 == 0 and index not in begun:
                begun.add(index)
                for unit in engine.units:
                    unit.unshard()
            return tokens(VOCABULARY, 2, 6)(rank, index)

        train_alike(comm, engine, model, plain, inputs, steps=2, micro=3, no_sync=True)

    run_threads(body, 2)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_divide_factor(ranks: int, factor: float) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(8, 4, bias=False)
        engine: Engine = fully_shard(model, comm)
        engine.set_gradient_divide_factor(factor)
        model(torch.ones(3, 8)).sum().backward()
        assert model.weight.grad is not None
        assert torch.equal(whole(model.weight.grad), torch.full((4, 8), 3 * ranks / factor))

    run_threads(body, ranks)
