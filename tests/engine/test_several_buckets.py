"""Units with several buckets: this rank packs the gradients of all before it waits for the reduce of any."""

from __future__ import annotations

import threading

import torch
from torch import nn

import shardcomm
from shardcomm import Communicator
from support.thread_ranks import run_threads


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 0.5))
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.scale.float()


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def test_a_unit_of_two_buckets_does_not_wait_for_its_reduces() -> None:
    """Rank 1 begins its backward when rank 0 has come through the last block's."""
    came = threading.Event()
    data = [torch.randn(3, 8), torch.randn(3, 8)]

    def body(comm: Communicator) -> list[torch.Tensor]:
        net = model()
        engine = shardcomm.fully_shard(net, comm, units=list(net), strategy="shard_grad_op")
        assert [len(engine.unit(block).buckets) for block in net] == [2, 2]
        x = data[comm.rank].clone().requires_grad_()
        between = net[0](x)
        out = net[1](between)
        if comm.rank == 0:
            between.register_hook(lambda grad: came.set())
        else:
            assert came.wait(30.0), "rank 0 waits for a reduce before it goes on"
        out.sum().backward()
        return [grad.full_tensor() for p in net.parameters() if (grad := p.grad) is not None]

    results = run_threads(body, 2)

    plain = model()
    sum(plain(each).sum() for each in data).backward()  # type: ignore[union-attr]
    for got in results:
        for mine, p in zip(got, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad / 2, rtol=2e-2, atol=2e-2)
