"""Tensor parallel inside, sharding outside: checkpoints, full parameters and averages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardcomm import Engine, ExponentialMovingAverage, launch
from support.tensor_parallel_nets import (
    STEPS,
    VOCABULARY,
    attention_net,
    batch,
    columns_and_rows,
    optimizer_of,
    sequence,
    train,
    twins,
)
from support.tensor_parallel_ranks import (
    DEADLINE_S,
    assert_equals,
    mesh_of,
    process_group,
    sharded,
    trained,
)

# The step after a checkpoint, for which moments and parameters must be right.
GO_ON = range(STEPS, STEPS + 1)


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
# By the engine's checkpoint, or that of torch's functions, which know no engine.
SAVED = ["uneven", "uneven, torch", "sequence", "columns and rows, torch"]


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
            if (by_torch := f"{name}, torch") in SAVED:
                moments = get_optimizer_state_dict(net, optimizer)
                state = {"model": net.state_dict(), "optimizer": moments}
                dcp.save(state, checkpoint_id=f"{path}/{by_torch}")
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
            for saved in SAVED:
                name, *by_torch = saved.split(", ")
                make, plan = NETS[name]
                full = torch.load(f"{path}/{name}.pt")
                net, engine = sharded(mesh, make, plan)
                with torch.no_grad():
                    for p in net.parameters():
                        p.zero_()
                optimizer = optimizer_of(net)
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
    for saved in SAVED:
        name = saved.split(", ")[0]
        full = torch.load(tmp_path / f"{name}.pt")
        plain = NETS[name][0]()
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
