"""Tensor parallel inside, sharding outside: 2 x 2 ranks train as one process does without either."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardcomm import (
    CommError,
    Communicator,
    Engine,
    ExponentialMovingAverage,
    MixedPrecision,
    Policy,
    fully_shard,
    launch,
)
from shardcomm.parameter.tensor_parallel import is_dtensor
from support.rank_processes import heard, join, kill, processes
from support.tensor_parallel_nets import (
    MAX_NORM,
    STEPS,
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

TOLERANCE = 5e-5  # AdamW divides by gradients' own size, and makes rounding of small ones large; measured: 1.2e-5
DEADLINE_S = 120
GO_ON = range(
    STEPS, STEPS + 1
)  # the step after a checkpoint, for which moments and parameters must be right


@contextlib.contextmanager
def process_group(backend: str = "shardcomm") -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def mesh_of(*shape: int) -> DeviceMesh:
    """Dims "dp" and "tp", before them "replicas" if there are three."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "dp", "tp")[-len(shape) :])


def assert_equals(engine: Engine, plain: nn.Module, tolerance: float = TOLERANCE) -> None:
    full = engine.full_state_dict()
    expected = plain.state_dict()
    assert full.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            full[name], value, rtol=0, atol=tolerance, msg=lambda said, name=name: f"{name}: {said}"
        )


@functools.cache
def trained(
    make: Callable[[], Net] = attention_net, **kwargs: Any
) -> tuple[nn.Module, list[float]]:
    """By one process, on whole batches."""
    _, plain = twins(make)
    return plain, train(plain, optimizer_of(plain), **kwargs)


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


def sharded(
    mesh: DeviceMesh,
    make: Callable[[], Net] = attention_net,
    plan: Callable[[Net, DeviceMesh], None] = sequence,
    **how: Any,
) -> tuple[Net, Engine]:
    net, _ = twins(make)
    plan(net, mesh["tp"])
    ranks = mesh["replicas", "dp"] if mesh.ndim == 3 else mesh["dp"]
    return net, fully_shard(net, ranks, **how)


def backward(net: nn.Module, part: int = 0, parts: int = 1) -> None:
    tokens, targets = (x.chunk(parts)[part] for x in batch(0))
    F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()


def take_norms() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        part = mesh["dp"].get_local_rank()
        for plan in (columns_and_rows, sequence):
            for how in ({}, {"granularity": "tensor"}, {"strategy": "no_shard"}):
                net, engine = sharded(mesh, plan=plan, **how)
                _, plain = twins(attention_net)
                backward(net, part, 2)
                backward(plain)
                for order in (0.0, 0.5, 1, 2, 3, math.inf, -math.inf):
                    for foreach in (True, False):
                        got, expected = (
                            torch.nn.utils.get_total_norm(
                                [p.grad for p in each.parameters()], order, foreach=foreach
                            )
                            for each in (net, plain)
                        )
                        close(got, expected, f"{plan.__name__} {how} order {order}")
                for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
                    with torch.no_grad():
                        close(p.norm(), q.norm(), name)
                    close(p.grad.norm(1), q.grad.norm(1), name)
                    for mine, whole in ((p, q), (p.grad, q.grad)):
                        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
                        torch.testing.assert_close(full.detach(), whole.detach())
                close(
                    engine.clip_grad_norm_(MAX_NORM),
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM),
                    "clip",
                )
                engine.close()


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got).detach(),
        expected.detach(),
        rtol=1e-4,
        atol=1e-6,
        msg=lambda said: f"{what}: {said}",
    )


@pytest.mark.covers("tensor parallel", "gradient clipping")
def test_norms_are_of_the_whole_and_count_what_is_replicated_once() -> None:
    launch(take_norms, 4, timeout_s=DEADLINE_S)


def take_norms_with_ignored_parameters() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        (net, plain) = twins(attention_net)
        sequence(net, mesh["tp"])
        ignored = [net.head.weight, net.scale]  # a DTensor, and a plain one
        fully_shard(net, mesh["dp"], ignored_params=ignored)
        backward(net)
        backward(plain)
        for foreach in (True, False):
            for order in (2, 3, math.inf):
                norms = [
                    torch.nn.utils.get_total_norm(
                        [p.grad for p in each.parameters()], order, foreach=foreach
                    )
                    for each in (net, plain)
                ]
                close(*norms, f"order {order}")
        net.scale.grad *= 1 + dist.get_rank()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        expected = sum(
            p.grad.norm() ** 2 for name, p in plain.named_parameters() if name != "scale"
        )
        own = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(own, net.scale.grad.norm() * norm / MAX_NORM)  # before they were clipped
        close(norm, (expected + torch.stack(own).square().mean()).sqrt(), "of all ranks")


@pytest.mark.covers("tensor parallel", "gradient clipping", "ignored parameters")
def test_norms_with_ignored_parameters_are_the_same_on_all_ranks() -> None:
    launch(take_norms_with_ignored_parameters, 4, timeout_s=DEADLINE_S)


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


def overflow() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        last = dist.get_rank() == 3
        net, engine = sharded(mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = engine.full_state_dict()
        scaler.scale(net(batch(0)[0]).sum()).backward()
        if last:
            net.layers[0].mlp.up.weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(torch.equal(v, before[k]) for k, v in engine.full_state_dict().items())
        engine.close()

        net, engine = sharded(mesh, units=[nn.Linear], on_nonfinite="skip")
        if mesh["tp"].get_local_rank() == 1:
            net.layers[1].mlp.up.register_forward_hook(lambda m, args, out: Overflowing.apply(out))
        backward(net)
        assert "layers.1.mlp.up" in engine.nonfinite
        assert "layers.1.mlp.down" not in engine.nonfinite
        assert all(p.grad is None for p in net.parameters())
        engine.close()


class Overflowing(torch.autograd.Function):
    """Its gradient is Inf."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, math.inf)


@pytest.mark.covers("tensor parallel", "loss scaling, NaN and Inf")
def test_what_overflows_in_one_part_is_left_out_on_all_ranks() -> None:
    launch(overflow, 4, timeout_s=DEADLINE_S)


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


class Uneven(nn.Module):
    """Sizes that neither 2 nor 4 divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.few = nn.Linear(5, 3)
        self.head = nn.Linear(5, VOCABULARY + 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.down(torch.tanh(self.up(x))) + self.few(x).sum(-1, keepdim=True)
        return self.head(x)


def spread_uneven(net: nn.Module, tp: DeviceMesh) -> None:
    parallelize_module(
        net,
        tp,
        {
            "embed": ColwiseParallel(output_layouts=Replicate()),
            "up": ColwiseParallel(use_local_output=False),  # a plain tensor has no uneven parts
            "down": RowwiseParallel(),
            "few": ColwiseParallel(output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )


NETS: dict[str, tuple[Callable[[], Any], Callable[[Any, DeviceMesh], None]]] = {
    "uneven": (Uneven, spread_uneven),
    "sequence": (attention_net, sequence),
    "columns and rows": (attention_net, columns_and_rows),
}


def save(path: str) -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        for name, (make, plan) in NETS.items():
            net, engine = sharded(mesh, make, plan, shard_dim="auto")
            optimizer = optimizer_of(net)
            train(net, optimizer, mesh["dp"].get_local_rank(), 2)
            state = {"model": engine, "optimizer": engine.optimizer_state(optimizer)}
            dcp.save(state, checkpoint_id=f"{path}/{name}")
            full = engine.full_state_dict()
            if dist.get_rank() == 0:
                torch.save(full, f"{path}/{name}.pt")
            assert (engine.full_state_dict(rank=1) == {}) == (mesh["dp"].get_local_rank() == 0)
            # By the model's own state dict, and by torch's functions.
            again, other = sharded(mesh, make, plan)
            again.load_state_dict(full)
            check_full(other, full)
            get_model_state_dict(net)
            state = {
                "model": net.state_dict(),
                "optimizer": get_optimizer_state_dict(net, optimizer),
            }
            dcp.save(state, checkpoint_id=f"{path}/{name}, torch")
            engine.close()
            other.close()


def check_full(engine: Engine, expected: dict[str, torch.Tensor]) -> None:
    got = engine.full_state_dict()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def load(path: str, shapes: list[tuple[int, int]]) -> None:
    with process_group():
        for shape in shapes:
            mesh = mesh_of(*shape)
            for name, (make, plan) in NETS.items():
                full = torch.load(f"{path}/{name}.pt")
                for saved in (name, f"{name}, torch"):
                    net, engine = sharded(mesh, make, plan)
                    with torch.no_grad():
                        for p in net.parameters():
                            p.zero_()
                    optimizer = optimizer_of(net)
                    by_torch = saved != name
                    state = {
                        "model": engine,
                        "optimizer": get_optimizer_state_dict(net, optimizer)
                        if by_torch
                        else engine.optimizer_state(optimizer),
                    }
                    dcp.load(state, checkpoint_id=f"{path}/{saved}")
                    if by_torch:
                        set_optimizer_state_dict(net, optimizer, state["optimizer"])
                    check_full(engine, full)
                    rest = train(net, optimizer, mesh["dp"].get_local_rank(), shape[0], steps=GO_ON)
                    plain, norms = trained(make, steps=range(GO_ON.stop))
                    assert rest == pytest.approx(norms[GO_ON.start :], rel=1e-4)
                    assert_equals(engine, plain)
                    engine.close()


@pytest.mark.covers("tensor parallel", "checkpoints", "optimizer state")
def test_checkpoints_go_from_any_shape_to_any_and_to_plain_models(tmp_path: Path) -> None:
    launch(save, 4, (str(tmp_path),), timeout_s=DEADLINE_S)
    for name, (make, _) in NETS.items():
        full = torch.load(tmp_path / f"{name}.pt")
        for saved in (name, f"{name}, torch"):
            plain = make()
            optimizer = optimizer_of(plain)
            moments = get_optimizer_state_dict(plain, optimizer)
            state = {"model": plain.state_dict(), "optimizer": moments}
            dcp.load(state, checkpoint_id=tmp_path / saved)
            for key, value in plain.state_dict().items():
                assert torch.equal(value, full[key]), (saved, key)
    launch(load, 4, (str(tmp_path), [(2, 2), (4, 1), (1, 4)]), timeout_s=DEADLINE_S)
    launch(load, 2, (str(tmp_path), [(1, 2)]), timeout_s=DEADLINE_S)


def look_and_write() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        net, engine = sharded(mesh)
        whole = {name: p.full_tensor() for name, p in net.named_parameters()}
        _, plain = twins(attention_net)
        for name, p in plain.named_parameters():
            assert torch.equal(whole[name], p), name
        tokens = batch(0)[0]
        with torch.no_grad():
            expected = plain(tokens)
            with engine.gathered():
                assert isinstance(net.head.weight, DTensor)
                assert torch.equal(net.head.weight.full_tensor(), plain.head.weight)
                torch.testing.assert_close(net(tokens), expected)
            with engine.gathered(write=True):
                net.head.weight.mul_(2)
                net.scale.add_(1)
                net.layers[0].mlp.up.weight.to_local().add_(1)
            plain.head.weight.mul_(2)
            plain.scale.add_(1)
            plain.layers[0].mlp.up.weight.add_(1)
            torch.testing.assert_close(net(tokens), plain(tokens))
        with (
            pytest.raises(RuntimeError, match="which is lost"),
            engine.gathered(),
            torch.no_grad(),
        ):
            net.head.weight.to_local().add_(1)

        ema = ExponentialMovingAverage(engine, 0.5)
        ema.update()
        before = engine.full_state_dict()
        train(net, optimizer_of(net), mesh["dp"].get_local_rank(), 2, steps=range(1))
        after = engine.full_state_dict()
        ema.update()
        with ema.applied():
            for name, value in engine.full_state_dict().items():
                torch.testing.assert_close(value, (before[name] + after[name]) / 2)
        ema.load_state_dict(
            {"n_averaged": torch.tensor(3)} | {f"module.{k}": v for k, v in before.items()}
        )
        with ema.applied():
            check_full(engine, before)

        # A weight that is read outside of its unit's forward, with gradients.
        unit = engine.unit(net.layers[0])
        net.zero_grad()
        unit.unshard()
        weight = net.layers[0].mlp.up.weight
        assert isinstance(weight, DTensor)
        (weight * weight).sum().backward()
        grad = net.layers[0].mlp.up.weight.grad
        torch.testing.assert_close(grad.full_tensor(), 2 * after["layers.0.mlp.up.weight"])
        engine.close()


@pytest.mark.covers("tensor parallel", "gathered and unshard", "averages of parameters")
def test_gathered_unshard_averages_and_full_tensors() -> None:
    launch(look_and_write, 4, timeout_s=DEADLINE_S)


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
