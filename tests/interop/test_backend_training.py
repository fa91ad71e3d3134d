"""Unmodified training loops on the torch.distributed backend, against Gloo on the same inputs."""

from __future__ import annotations

import gc
import os
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardcomm import CommError, RankError, backend, launch

OURS = "shardcomm"
EXAMPLE = Path(__file__).parents[2] / "examples" / "backend.py"

Tensors = list[torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 5)
    )


def train(model: nn.Module, same_data: bool = False) -> Tensors:
    """Losses and parameters of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(
            100 * step + (0 if same_data else dist.get_rank())
        )
        loss = model(torch.randn(4, 7, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*losses, *(parameter.detach().clone() for parameter in parameters)]


def ddp() -> Tensors:
    return train(DistributedDataParallel(net(), bucket_cap_mb=0.0005))  # type: ignore[arg-type]


def ddp_with_hook() -> Tensors:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, allreduce_hook)
    return train(model)


class Sparse(nn.Module):
    """Gradients that are sparse, and a layer that takes no part in each second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(9, 5, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, step: int) -> torch.Tensor:
        tokens = torch.tensor([step, 2 * step, dist.get_rank()])
        x = self.embed(tokens)
        for layer in self.layers[step % 2 :]:
            x = layer(x)
        return x.square().mean()


def ddp_sparse_and_unused() -> Tensors:
    model = DistributedDataParallel(Sparse(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def fsdp1() -> Tensors:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = train(model)[:4]
    with FullyShardedDataParallel.summon_full_params(model):
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def fsdp2(*shape: int, **options: Any) -> Tensors:
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = net()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return train(model)


class Complex(nn.Module):
    """Parameters that are complex numbers, as of a layer that works on spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4) + torch.linspace(0, 2, 4) * 1j)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=7)


def fsdp2_complex() -> Tensors:
    return train(fully_shard(Complex(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def hsdp() -> Tensors:
    return fsdp2(2, dist.get_world_size() // 2)


def fsdp2_reshard_to_pairs() -> Tensors:
    return fsdp2(reshard_after_forward=2)


def tensor_parallel() -> Tensors:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(net(), mesh, plan), same_data=True)  # type: ignore[arg-type]


def redistributed() -> Tensors:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(0)])
    columns = x.redistribute(mesh, [Shard(1)])
    return [x.to_local(), columns.to_local(), columns.redistribute(mesh, [Replicate()]).to_local()]


WAYS = (
    ddp,
    ddp_with_hook,
    ddp_sparse_and_unused,
    fsdp1,
    fsdp2,
    fsdp2_complex,
    tensor_parallel,
    redistributed,
)
ON_FOUR = (fsdp2, hsdp, fsdp2_reshard_to_pairs)


def train_all(name: str, ways: tuple[Callable[[], Tensors], ...]) -> dict[str, Tensors]:
    torch.set_num_threads(1)
    dist.init_process_group(name)
    results = {way.__name__: way() for way in ways}
    if name == OURS:
        taken = {receipt.operation: receipt.taken for receipt in backend.receipts()}
        assert {"all_gather", "reduce_scatter"} <= set(taken)
    dist.destroy_process_group()
    return results


@pytest.mark.covers("torch.distributed backend")
def test_unmodified_training_at_2_ranks_is_bitwise_gloos() -> None:
    ours, gloos = (launch(train_all, 2, (name, WAYS), timeout_s=120) for name in (OURS, "gloo"))
    for mine, theirs in zip(ours, gloos, strict=True):
        for way, wanted in theirs.items():
            for got, want in zip(mine[way], wanted, strict=True):
                assert torch.equal(got, want), way


@pytest.mark.covers("torch.distributed backend")
def test_unmodified_fsdp2_at_4_ranks_is_gloos_within_summation_order() -> None:
    ours, gloos = (launch(train_all, 4, (name, ON_FOUR), timeout_s=120) for name in (OURS, "gloo"))
    for mine, theirs in zip(ours, gloos, strict=True):
        for way, wanted in theirs.items():
            torch.testing.assert_close(mine[way], wanted, rtol=1e-4, atol=1e-6, msg=way)


def run_example(name: str) -> list[float]:
    losses: list[float] = runpy.run_path(str(EXAMPLE))["main"](name)
    return losses


def test_the_example_trains_alike_on_both_backends() -> None:
    ours, gloos = (launch(run_example, 2, (name,), timeout_s=60) for name in (OURS, "gloo"))
    assert ours == gloos
    assert ours[0][-1] < ours[0][0]


def fail_in_backward(model: nn.Module) -> weakref.ref[nn.Module]:
    """Returns a reference to what this call alone has."""
    last = nn.Identity()
    with pytest.raises(CommError, match=r"rank 1 .* died") as failed:
        last(model(torch.ones(2, 7))).sum().backward()
    assert type(failed.value) is CommError
    assert (failed.value.kind, failed.value.rank) == ("died", 1)
    assert failed.value.operation == "all_reduce"
    return weakref.ref(last)


def train_with_one_that_dies(path: Path) -> None:
    dist.init_process_group(OURS)
    model = DistributedDataParallel(net())
    model(torch.ones(2, 7)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(3)
    last = fail_in_backward(model)
    gc.collect()
    assert last() is None, "the error is kept, and its traceback with it"
    path.touch()


@pytest.mark.covers("torch.distributed backend")
def test_a_failure_in_ddps_backward_is_a_comm_error(tmp_path: Path) -> None:
    """It comes out of torch's autograd engine."""
    seen = tmp_path / "seen"
    with pytest.raises(RankError, match="rank 1 ended with exit status 3"):
        launch(train_with_one_that_dies, 2, (seen,), timeout_s=60)
    assert seen.exists()
