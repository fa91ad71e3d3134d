"""Tensor parallel inside, sharding outside: 2 x 2 ranks train as one process does without either."""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardcomm import CommError, Communicator, MixedPrecision, Policy, fully_shard, launch
from shardcomm.parameter.tensor_parallel import is_dtensor
from support.rank_processes import heard, join, kill, processes
from support.tensor_parallel_nets import (
    VOCABULARY,
    Layer,
    Net,
    attention_net,
    batch,
    columns_and_rows,
    mlp_net,
    optimizer_of,
    sequence,
    train,
    twins,
)
from support.tensor_parallel_ranks import (
    DEADLINE_S,
    TOLERANCE,
    assert_equals,
    backward,
    mesh_of,
    process_group,
    sharded,
    trained,
)


def train_plans() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        for make, plan, how in [
            (mlp_net, columns_and_rows, {}),
            (mlp_net, sequence_of_mlps, {}),
            (attention_net, columns_and_rows, {"units": [Layer]}),
            (attention_net, sequence, {}),
            (attention_net, sequence, {"units": []}),
            (attention_net, sequence, {"units": [Layer, nn.Linear, nn.Embedding, nn.LayerNorm]}),
            (attention_net, sequence, {"strategy": "shard_grad_op"}),
            (attention_net, sequence, {"strategy": "no_shard"}),
            (attention_net, sequence, {"shard_dim": -1}),
            (attention_net, sequence, {"shard_dim": "auto"}),
            (attention_net, sequence, {"granularity": "element"}),
            (attention_net, sequence, {"granularity": "tensor"}),
            (attention_net, sequence, {"cpu_offload": True}),
            (
                attention_net,
                sequence,
                {"units": {Layer: None, nn.LayerNorm: Policy(strategy="no_shard")}},
            ),
        ]:
            net, _ = twins(make)
            plan(net, mesh["tp"])
            engine = fully_shard(net, mesh["dp"], **how)
            norms = train(net, optimizer_of(net), mesh["dp"].get_local_rank(), 2)
            plain, expected = trained(make)
            torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0, msg=str(how))
            assert_equals(engine, plain)
            engine.close()


def sequence_of_mlps(net: Net, tp: DeviceMesh) -> None:
    parallelize_module(
        net,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    columns_and_rows(net, tp)


@pytest.mark.covers("tensor parallel", "training parity")
def test_training_equals_one_process() -> None:
    launch(train_plans, 4, timeout_s=DEADLINE_S)


def train_shapes() -> None:
    with process_group("gloo"):
        mesh = mesh_of(1, 4)
        net, engine = sharded(mesh)
        assert train(net, optimizer_of(net)) == pytest.approx(trained()[1], rel=1e-5)
        assert_equals(engine, trained()[0])
        engine.close()
        for shape in ((4, 1), (2, 1, 2), (1, 2, 2)):
            mesh = mesh_of(*shape)
            strategy = "hybrid_shard" if len(shape) == 3 else "full_shard"
            net, engine = sharded(mesh, strategy=strategy)
            part, parts = dist.get_rank() // shape[-1], math.prod(shape[:-1])
            norms = train(net, optimizer_of(net), part, parts)
            plain, expected = trained()
            assert norms == pytest.approx(expected, rel=1e-5), shape
            assert_equals(engine, plain)
            engine.close()


@pytest.mark.covers("tensor parallel")
def test_any_number_of_ranks_on_either_side() -> None:
    launch(train_shapes, 4, timeout_s=DEADLINE_S)


def compose() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        part = mesh["dp"].get_local_rank()

        # Accumulation: two backwards of half batches as one of the whole.
        net, engine = sharded(mesh)
        _, plain = twins(attention_net)
        tokens, targets = (x.chunk(2)[part] for x in batch(0))
        with engine.no_sync():
            (F.cross_entropy(net(tokens[:1]).flatten(0, 1), targets[0]) / 2).backward()
        (F.cross_entropy(net(tokens[1:]).flatten(0, 1), targets[1]) / 2).backward()
        backward(plain)
        check_gradients(net, plain)
        engine.close()

        # The same, with gradients that are reduced in a wider dtype than they are computed in.
        net, engine = sharded(
            mesh,
            mixed_precision=MixedPrecision(
                torch.bfloat16, torch.float32, output_dtype=torch.float32
            ),
        )
        with engine.no_sync():
            (F.cross_entropy(net(tokens[:1]).flatten(0, 1), targets[0]) / 2).backward()
        (F.cross_entropy(net(tokens[1:]).flatten(0, 1), targets[1]) / 2).backward()
        check_gradients(net, plain, rtol=0.1, atol=0.01)
        engine.close()

        for use_reentrant in (False, True):
            net, _ = twins(attention_net)
            sequence(net, mesh["tp"])
            for layer in net.layers:
                recompute(layer, use_reentrant=use_reentrant)
            engine = fully_shard(net, mesh["dp"])
            backward(net, part, 2)
            check_gradients(net, plain)
            engine.close()

        # A unit whose inputs, outputs and gradients are DTensors.
        net, engine = sharded(
            mesh, plan=partial(sequence, local=False), units=[nn.LayerNorm, nn.Linear]
        )
        backward(net, part, 2)
        check_gradients(net, plain)
        engine.close()


def recompute(layer: nn.Module, *, use_reentrant: bool) -> None:
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)


def check_gradients(net: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.full_tensor(),
            q[1].grad,
            msg=lambda said, name=name: f"{name}: {said}",
            **tolerance,
        )


@pytest.mark.covers(
    "tensor parallel", "gradient accumulation", "mixed precision", "activation checkpointing"
)
def test_accumulation_precision_recomputation_and_dtensors_between_units() -> None:
    launch(compose, 4, timeout_s=DEADLINE_S)


def refuse() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        for placement, what in ((Partial(), "Partial"), (Shard(0), "")):
            net = nn.Linear(4, 4)
            if what:
                net.weight = nn.Parameter(
                    DTensor.from_local(net.weight.detach(), mesh["tp"], [placement])
                )
                with pytest.raises(
                    ValueError, match=f"parameter 'weight' is a DTensor placed by {what}"
                ):
                    fully_shard(net, mesh["dp"])
        # All ranks, or those that have other parts of the same parameters, do not have the same parts.
        for ranks in (Communicator.from_env(), mesh["tp"]):
            net, _ = twins(attention_net)
            sequence(net, mesh["tp"])
            with pytest.raises(CommError, match=r"has place in its own DeviceMesh \(0,\) on rank"):
                fully_shard(net, ranks)
        whole = init_device_mesh("cpu", (4,))
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_module(net[0], mesh["tp"], ColwiseParallel())
        parallelize_module(net[1], whole, ColwiseParallel())
        with pytest.raises(ValueError, match="have one rank in common"):
            fully_shard(net, mesh["dp"])
        net, engine = sharded(mesh, granularity="tensor")
        other, _ = twins(attention_net)
        sequence(other, mesh["tp"])
        with pytest.raises(ValueError, match=r"embed.weight is a DTensor.*pass full_tensor"):
            engine.load_state_dict(other.state_dict())
        muon = torch.optim.Muon([net.layers[0].mlp.up.weight])
        backward(net)
        with pytest.raises(
            RuntimeError, match=r"Muon.step of 'layers.0.mlp.up.weight'.*no DTensors"
        ):
            muon.step()
        engine.close()


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    launch(refuse, 4, timeout_s=DEADLINE_S)


def refuse_orders() -> None:
    with process_group():
        for table in ([[1, 0], [3, 2]], [[0, 1], [3, 2]]):
            mesh = DeviceMesh("cpu", table, mesh_dim_names=("dp", "tp"))
            net, _ = twins(mlp_net)
            columns_and_rows(net, mesh["tp"])
            with pytest.raises(
                (ValueError, CommError),  # of other ranks
                match=r"'layers\.0\.up\.weight.* cut over a DeviceMesh of the ranks \[(1, 0|3, 2)\], in this order",
            ):
                fully_shard(net, mesh["dp"])
        # Of what is replicated, and among the ranks that shard, the order does not matter.
        mesh = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("dp", "tp"))
        net, engine = sharded(mesh)
        train(net, optimizer_of(net), mesh["dp"].get_local_rank(), 2)
        assert_equals(engine, trained()[0])
        engine.close()
        mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
        net = nn.Linear(4, 4)
        net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh["tp"], [Replicate()]))
        engine = fully_shard(net, mesh["dp"])
        assert torch.equal(net.weight.full_tensor(), engine.full_state_dict()["weight"])
        engine.close()


def test_parts_in_another_order_than_their_groups_are_refused() -> None:
    """DTensor itself takes some of these by their place in the mesh, and others by that in the group."""
    launch(refuse_orders, 4, timeout_s=DEADLINE_S)


def start_apart() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        # Values that differ from rank to rank, some drawn on the meta device's way: all start from rank 0's.
        torch.manual_seed(dist.get_rank())
        with torch.device("meta"):
            net = attention_net()
        net.scale = nn.Parameter(torch.randn(VOCABULARY))
        sequence(net, mesh["tp"])
        engine = fully_shard(net, mesh["dp"])
        full = engine.full_state_dict()
        for name, value in full.items():
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), name
            assert value.isfinite().all()
        assert full["head.weight"].std() > 0
        engine.close()


def test_all_ranks_start_from_the_same_values_of_what_is_replicated() -> None:
    launch(start_apart, 4, timeout_s=DEADLINE_S)


def train_beside_fsdp2() -> None:
    with process_group("gloo"):
        mesh = mesh_of(2, 2)
        part = mesh["dp"].get_local_rank()
        for plan in (columns_and_rows, sequence):
            net, engine = sharded(mesh, plan=plan)
            other, _ = twins(attention_net)
            plan(other, mesh["tp"])
            for layer in other.layers:
                fsdp2(layer, mesh=mesh["dp"])
            fsdp2(other, mesh=mesh["dp"])
            for each in (net, other):
                # PyTorch does not take norms over parameters on different meshes.
                train(each, optimizer_of(each), part, 2, clip=lambda: torch.zeros(()))
            expected = other.state_dict()
            for name, value in engine.full_state_dict().items():
                torch.testing.assert_close(
                    value, expected[name].full_tensor(), rtol=0, atol=TOLERANCE
                )
            engine.close()


@pytest.mark.covers("tensor parallel", "training parity")
def test_training_equals_pytorch_fsdp2_with_tensor_parallel() -> None:
    launch(train_beside_fsdp2, 4, timeout_s=DEADLINE_S)


def train_until_a_rank_dies(
    rank: int, tell: Connection, ranks: int, address: str, meeting: str
) -> None:
    join(rank, ranks, address, meeting)
    mesh = mesh_of(2, 2)
    net, _ = sharded(mesh)
    optimizer = optimizer_of(net)
    train(net, optimizer, steps=range(1))
    tell.send("trains")
    try:
        train(net, optimizer, steps=range(1_000_000))
    except RuntimeError as error:  # CommError is one
        tell.send(f"{type(error).__name__}: {error}")


@pytest.mark.covers("tensor parallel", "failed ranks")
def test_a_rank_that_dies_ends_training_on_both_of_its_meshes(tmp_path: Path) -> None:
    with processes(train_until_a_rank_dies, 4, tmp_path / "meeting") as (started, ears):
        assert [heard(ear) for ear in ears] == ["trains"] * 4
        begin = time.monotonic()
        kill(started[3])
        said = [heard(ear, rank) for rank, ear in enumerate(ears[:3])]
        assert time.monotonic() - begin < 10, said


def test_a_plain_tensor_is_no_dtensor_while_another_thread_loads_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("loading"))
    assert not is_dtensor(torch.ones(1))
