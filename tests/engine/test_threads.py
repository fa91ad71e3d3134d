"""Forwards of a sharded model in several threads of a rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, fully_shard
from support.gates import until
from support.thread_ranks import run_threads
from support.twins import WIDTH, Encoder, assert_same_gradients, twins, values


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_forward_beside_one_in_another_thread_is_refused(strategy: str, method: str) -> None:
    """Else both compute with the same full parameters, which the one that ends first gives away."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Encoder)
        engine = fully_shard(model, comm, strategy=strategy)
        engine.register_forward_method(model, "encode")
        call = model if method == "forward" else model.encode

        def beside(_number: int, x: torch.Tensor) -> torch.Tensor:
            model.between = alone  # for the other thread's forward, should there be one
            with ThreadPoolExecutor(1) as other:
                for each in (model, model.encode):
                    with pytest.raises(RuntimeError, match=r"'\(root\)' while another thread runs"):
                        other.submit(each, values(4, WIDTH)).result()
            return x

        alone = model.between
        for between in (beside, alone):
            model.between = between
            model.zero_grad()
            call(values(4, WIDTH)).sum().backward()
        plain(values(4, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)
        with ThreadPoolExecutor(1) as other, torch.no_grad():  # one after the other
            given = other.submit(call, values(4, WIDTH)).result()
        assert given.isfinite().all()
        engine.close()

    run_threads(body, 2)


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_forward_that_still_gathers_is_not_joined_by_another_thread(method: str) -> None:
    refused = threading.Event()

    def body(comm: Communicator) -> None:
        model, _ = twins(Encoder)
        engine = fully_shard(model, comm)
        engine.register_forward_method(model, "encode")
        call = model if method == "forward" else model.encode
        if comm.rank == 0:
            with ThreadPoolExecutor(1) as other:
                first = other.submit(call, values(4, WIDTH))
                until(lambda: any(p.call for p in comm.pending() if p.rank == 0), "rank 0 gathers")
                for each in (model, model.encode, model.blocks[0]):
                    with pytest.raises(RuntimeError, match="while another thread runs one"):
                        each(values(4, WIDTH))
                refused.set()
                first.result()
        else:
            assert refused.wait(60)
            call(values(4, WIDTH))
        engine.close()

    run_threads(body, 2)


def test_autograds_threads_recompute_inside_of_a_forward() -> None:
    """As on a GPU, where autograd has threads of its own."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def energy(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            energy = checkpoint(self.energy, x, use_reentrant=False)
            with ThreadPoolExecutor(1) as autograds:
                (forces,) = autograds.submit(torch.autograd.grad, energy, x).result()
            return forces

    def body(comm: Communicator) -> None:
        model, plain = twins(Forces)
        engine = fully_shard(model, comm)
        engine.register_forward_method(model, "energy")
        x = values(4, WIDTH).requires_grad_()
        torch.testing.assert_close(model(x), plain(x))
        engine.close()

    run_threads(body, 2)
