"""Gradients whose sums cross between hosts in fewer bytes, against plain autograd and the bound of the format.

Two hosts of two ranks, which are one host here that says it is two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardcomm import (
    BlockFormat,
    Bucket,
    CommError,
    Communicator,
    Layout,
    MemoryPlan,
    Mesh,
    MixedPrecision,
    ParamSpec,
    fully_shard,
    launch,
)
from shardcomm.comm import introduction
from shardcomm.copy.blocks import ReduceFormat
from shardcomm.interop.chakra import write_step
from support.thread_ranks import run_mesh, run_threads

RANKS, HOSTS = 4, 2
FORMATS = [
    torch.bfloat16,
    BlockFormat("mxint8", 64),
    BlockFormat("mxfp8"),
    BlockFormat("mxint8", rounding="stochastic"),
]


def connected() -> Communicator:
    rank = int(os.environ["RANK"])
    introduction.host_identity = lambda: "AABB"[rank]  # type: ignore[assignment]
    return Communicator.from_env(transport="hosts", deadline_s=60.0)


def made_net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(40, 51), nn.Tanh(), nn.Linear(51, 7), nn.LayerNorm(7))


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.linspace(-1, 1 + rank, 5 * 40).view(5, 40) * (1 + step)
    inputs = inputs.to(next(net.parameters()).dtype)
    return (net(inputs).sin() * torch.arange(1, 8)).sum()


def exact_gradients(steps: int) -> dict[str, Tensor]:
    """The sums over `steps` backwards of the mean over all ranks, in float64."""
    net = made_net().double()
    for step in range(steps):
        for rank in range(RANKS):
            (loss_of(net, rank, step) / RANKS).backward()
    return {name: param.grad for name, param in net.named_parameters()}


def check_gradients(
    engine: Any, precision: MixedPrecision, steps: int = 1, rounding: float = 1e-5
) -> None:
    """The gradients are those of the mean but for what the format may cost, and it does cost something."""
    errors = engine.wire_error("reduce")
    assert set(errors) == {unit.name for unit in engine.units if unit.params}
    exact = exact_gradients(steps)
    farthest = 0.0
    comm = engine.mesh.shard
    for unit in engine.units:
        if not unit.params:
            continue
        error = errors[unit.name]
        assert 0 <= error.seen <= error.bound
        assert error.flagged == 0
        bound = torch.tensor(error.bound)
        comm.all_reduce(bound, "max")
        for bucket, params in unit.buckets:
            whole = bucket.gathered_shards(torch.empty(bucket.layout.flat_numel))
            assert len(whole) == len(params)
            for i, param in enumerate(params):
                got = bucket.gathered_rows(i, bucket.gradients.rows[i])
                want = exact[param.name]
                allowed = steps * HOSTS * float(bound) / RANKS
                allowed += rounding * float(want.abs().max())
                off = float((got.double() - want).abs().max())
                assert off <= allowed, (param.name, precision, off, allowed)
                farthest = max(farthest, off / float(want.abs().max()))
    assert farthest > 2e-4  # it can tell: float32 alone is closer
    assert all(error == (0, 0, 0) for error in engine.wire_error("reduce").values())  # taken


def trains() -> None:
    torch.set_num_threads(1)
    with connected() as comm:
        for format in FORMATS:
            for given in (
                {},
                {"gather_format": BlockFormat("mxint8")},
                {"reduce_dtype": torch.bfloat16},
            ):
                precision = MixedPrecision(reduce_format=format, **given)
                engine = fully_shard(made_net(), comm, units=nn.Linear, mixed_precision=precision)
                loss_of(engine.model, comm.rank, 0).backward()
                rounding = 1e-5 if not given else 0.1  # parameters, or gradients, are rounded, too
                check_gradients(engine, precision, rounding=rounding)
                assert bool(engine.wire_error("gather")) == ("gather_format" in given)
                engine.close()


@pytest.mark.covers("block formats", "mixed precision", "training parity", transports=["hosts"])
def test_gradients_are_as_close_as_the_format_promises() -> None:
    launch(trains, RANKS, timeout_s=120)


def accumulates_and_offloads() -> None:
    torch.set_num_threads(1)
    with connected() as comm:
        precision = MixedPrecision(reduce_format=BlockFormat("mxint8"))
        for given in ({}, {"cpu_offload": True}, {"strategy": "shard_grad_op"}):
            engine = fully_shard(
                made_net(), comm, units=nn.Linear, mixed_precision=precision, **given
            )
            for step in range(2):
                loss_of(engine.model, comm.rank, step).backward()
            check_gradients(engine, precision, steps=2)
            plan = MemoryPlan.of(
                made_net(),
                RANKS,
                rank=comm.rank,
                units=nn.Linear,
                mixed_precision=precision,
                **given,
            )
            assert engine.footprint() == plan.footprint
            engine.close()


@pytest.mark.covers("block formats", "gradient accumulation", "CPU offload", transports=["hosts"])
def test_coded_reduces_add_up_and_are_planned() -> None:
    launch(accumulates_and_offloads, RANKS, timeout_s=120)


def in_a_bucket() -> None:
    torch.set_num_threads(1)
    with connected() as comm:
        layout = Layout.plan([ParamSpec("w", (16, 32))], comm.size)
        grads = [torch.linspace(0, 1 + r, 512).view(16, 32) for r in range(RANKS)]
        hosts = [(grads[0] + grads[1]).bfloat16(), (grads[2] + grads[3]).bfloat16()]
        mean = (hosts[0].float() + hosts[1].float()) / RANKS
        piece = layout.piece(comm.rank, 0)
        rows = mean[piece.start : piece.stop].flatten()
        for bucket in (
            Bucket(layout, comm, reduce_format=torch.bfloat16),
            Bucket.from_tensors({"w": grads[0]}, comm, reduce_format=torch.bfloat16),
        ):
            for async_op in (False, True):
                bucket.shards[0].grad = None
                bucket.reduce_scatter([grads[comm.rank]], async_op=async_op).wait()
                assert bucket.shards[0].grad.flatten().equal(rows)
            error = bucket.reduction.take_error()
            assert error is not None
            assert 0 < error.seen <= error.bound, error


def test_a_bucket_reduces_in_a_format() -> None:
    launch(in_a_bucket, RANKS, timeout_s=60)


def disagrees(format: ReduceFormat, other: ReduceFormat | None) -> str:
    with connected() as comm:
        precision = MixedPrecision(reduce_format=format if comm.rank else other)
        with pytest.raises(CommError) as raised:
            fully_shard(made_net(), comm, mixed_precision=precision)
        return str(raised.value)


@pytest.mark.parametrize("other", [None, BlockFormat("mxfp8")], ids=["none", "mxfp8"])
def test_ranks_must_agree(other: ReduceFormat | None) -> None:
    for error in launch(disagrees, RANKS, (BlockFormat("mxint8"), other), timeout_s=60):
        assert "reduce_format" in error


def test_ranks_of_one_host_are_told_to_leave_it_out() -> None:
    def run(comm: Communicator) -> None:
        fully_shard(made_net(), comm, mixed_precision=MixedPrecision(reduce_format=torch.bfloat16))

    with pytest.raises(ValueError, match=r"transport 'local' has no such sums; leave it out"):
        run_threads(run, 2)


def test_replicas_are_refused() -> None:
    precision = MixedPrecision(reduce_format=torch.bfloat16)

    def hybrid(mesh: Mesh) -> None:
        fully_shard(made_net(), mesh, strategy="hybrid_shard", mixed_precision=precision)

    def whole(comm: Communicator) -> None:
        fully_shard(made_net(), comm, strategy="no_shard", mixed_precision=precision)

    said = "there are 2 replicas, whose all-reduce has no such"
    with pytest.raises(ValueError, match=said):
        run_mesh(hybrid, 2, 2)
    with pytest.raises(ValueError, match=said):
        run_threads(whole, 2)


def test_a_rank_alone_sends_nothing() -> None:
    precision = MixedPrecision(reduce_format=BlockFormat("mxint8"))
    net, plain = made_net(), made_net()
    engine = fully_shard(net, Communicator.local_group(1)[0], mixed_precision=precision)
    for each in (net, plain):
        loss_of(each, 0, 0).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert set(engine.wire_error("reduce").values()) == {(0.0, 0.0, 0)}
    with pytest.raises(ValueError, match='accepted: "gather" and "reduce"'):
        engine.wire_error("scatter")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", [torch.float16, "mxint8", BlockFormat, lambda *_: None])
def test_other_formats_are_refused(format: object) -> None:
    with pytest.raises(TypeError, match=r"reduce_format is .*it must be torch\.bfloat16, a shard"):
        MixedPrecision(reduce_format=format)  # type: ignore[arg-type]


def test_plans_with_coded_reduces_have_no_execution_trace(tmp_path: Path) -> None:
    net = made_net()
    precision = MixedPrecision(reduce_format=BlockFormat("mxint8"))
    plan = MemoryPlan.of(net, 4, units=nn.Linear, mixed_precision=precision)
    assert {unit.reduce_format for unit in plan.units} == {str(BlockFormat("mxint8"))}
    with pytest.raises(ValueError, match="in another format, which an execution trace does not"):
        write_step(plan, tmp_path, tokens=8)
