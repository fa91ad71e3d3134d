"""Training with the engine over processes equals torch's DistributedDataParallel over Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from test_engine import batch, loss_of, make, optimizer_of
from torch.nn.parallel import DistributedDataParallel

from shardcomm import Communicator, fully_shard, launch

STEPS = 20


def train_both(transport: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    ddp = DistributedDataParallel(make(width=16))
    optimizer = optimizer_of(ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        optimizer.step()

    model = make(width=16)
    with Communicator.from_process_group(transport=transport) as comm:  # type: ignore[arg-type]
        engine = fully_shard(model, comm)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        ours = engine.full_state_dict()
        engine.close()
    dist.destroy_process_group()
    return ours, {name: value.clone() for name, value in ddp.module.state_dict().items()}


def test_fp32_at_world_size_2_is_bitwise_equal() -> None:
    for transport in ("shm", "c10d"):
        for ours, ddp in launch(train_both, 2, (transport,), deadline_s=120):
            for name, expected in ddp.items():
                assert torch.equal(ours[name], expected), (transport, name)


def test_fp32_at_3_and_4_ranks_is_equal_within_summation_order() -> None:
    for ranks in (3, 4):
        for ours, ddp in launch(train_both, ranks, ("shm",), deadline_s=120):
            for name, expected in ddp.items():
                error = (ours[name] - expected).norm() / expected.norm().clamp(min=1e-12)
                assert error < 1e-6, (ranks, name, float(error))
