"""Torch's algorithms over a group of the backend, against the same over Gloo: bit for bit at 2 ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardcomm import backend, launch

# Torch 2.13's names, and those before.
gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
reduce_scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)

Tensors = list[torch.Tensor]
OURS = "shardcomm"


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 7)
    )


def batches(steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        yield torch.randn(4, 7, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    for x in batches(6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Recomputed(nn.Module):
    """A layer that is used twice, and recomputed in backward, which DDP allows with a static graph alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layers, x, use_reentrant=False)
        return x


def static_graph() -> Tensors:
    model = DistributedDataParallel(Recomputed(), static_graph=True)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def zero_redundancy() -> Tensors:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    trained = train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"]
        trained += [states[number]["exp_avg"] for number in sorted(states)]
    return trained


def post_local_sgd() -> Tensors:
    model = DistributedDataParallel(net())
    pairs, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=pairs, start_localSGD_iter=2
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return train(
        model,
        PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), PeriodicModelAverager(2, warmup_steps=2)
        ),
    )


def compiled_collectives() -> Tensors:
    def collectives(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        total = functional.all_reduce(x * 2, "sum", group)
        gathered = gather(total[:1] + x[:1], 0, group)
        part = reduce_scatter(gathered * x[:1], "sum", 0, group)
        exchanged = functional.all_to_all_single(gathered, None, None, group)
        return total, gathered, part, exchanged, functional.broadcast(x, 1, group)

    x = torch.arange(6.0).view(2, 3) + dist.get_rank()
    compiled = torch.compile(collectives, backend="aot_eager", fullgraph=True)
    results = list(compiled(x))
    for one, expected in zip(results, collectives(x), strict=True):
        assert one.equal(expected)
    return results


def pipeline(schedule: Callable[..., Any]) -> Tensors:
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = net()
    own = layers[:2] if rank == 0 else layers[2:]
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    steps = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(5)
    x, target = (torch.randn(8, 7, generator=generator) for _ in range(2))
    losses: Tensors = []
    results: Tensors = []
    for _ in range(2):
        if rank == 0:
            steps.step(x)
        else:
            results = [steps.step(target=target, losses=losses)]
    return [*results, *losses, *(parameter.grad.clone() for parameter in own.parameters())]


def gpipe() -> Tensors:
    return pipeline(ScheduleGPipe)


def one_forward_one_backward() -> Tensors:
    return pipeline(Schedule1F1B)


WAYS = (
    static_graph,
    zero_redundancy,
    post_local_sgd,
    compiled_collectives,
    gpipe,
    one_forward_one_backward,
)


def run_all(name: str) -> dict[str, Tensors]:
    torch.set_num_threads(1)
    dist.init_process_group(name)
    results = {way.__name__: way() for way in WAYS}
    if name == OURS:
        assert "gloo" not in {receipt.taken for receipt in backend.receipts()}
    dist.destroy_process_group()
    return results


@pytest.mark.covers("torch.distributed backend")
def test_torchs_algorithms_at_2_ranks_are_bitwise_gloos() -> None:
    ours, gloos = (launch(run_all, 2, (name,), timeout_s=150) for name in (OURS, "gloo"))
    for mine, theirs in zip(ours, gloos, strict=True):
        for way, wanted in theirs.items():
            assert len(mine[way]) == len(wanted) > 0
            for got, want in zip(mine[way], wanted, strict=True):
                assert torch.equal(got, want), way
