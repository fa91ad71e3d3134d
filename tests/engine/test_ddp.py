"""Training with the engine over processes equals torch's DistributedDataParallel over Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardcomm import Communicator, fully_shard, launch
from support.nets import batch, loss_of, make, optimizer_of

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


@pytest.mark.covers("training parity")
def test_fp32_at_world_size_2_is_bitwise_equal() -> None:
    for transport in ("shm", "c10d"):
        for ours, ddp in launch(train_both, 2, (transport,), timeout_s=120):
            for name, expected in ddp.items():
                assert torch.equal(ours[name], expected), (transport, name)


@pytest.mark.covers("training parity")
def test_fp32_at_3_and_4_ranks_is_equal_within_summation_order() -> None:
    for ranks in (3, 4):
        for ours, ddp in launch(train_both, ranks, ("shm",), timeout_s=120):
            for name, expected in ddp.items():
                error = (ours[name] - expected).norm() / expected.norm().clamp(min=1e-12)
                assert error < 1e-6, (ranks, name, float(error))


def train_compiled() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    states = []
    with Communicator.from_env() as comm:
        for compiled in (True, False):
            model = make(layers=2)
            if compiled:
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            engine = fully_shard(model, comm)
            optimizer = optimizer_of(model)
            for step in range(3):
                loss_of(model, batch(comm.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append(engine.full_state_dict())
            engine.close()
    return states[0], states[1]


@pytest.mark.covers("torch.compile")
def test_compiled_blocks_train_as_eager_ones() -> None:
    for compiled, eager in launch(train_compiled, 2, timeout_s=300):
        for name, expected in eager.items():
            torch.testing.assert_close(compiled[name], expected, rtol=1e-5, atol=1e-6, msg=name)
