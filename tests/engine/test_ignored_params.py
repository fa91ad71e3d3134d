"""Parameters that are left out: `ignored_params`."""

from __future__ import annotations

import pytest
import torch

from shardcomm import Communicator, fully_shard
from support.nets import batch, loss_of, make
from support.thread_ranks import run_threads
from support.twins import local

RANKS = 2


@pytest.mark.covers("ignored parameters")
def test_ignored_parameters_stay_as_they_are() -> None:
    def body(comm: Communicator) -> None:
        model = make(seed=comm.rank)
        before = {name: param for name, param in model.named_parameters()}
        values = {name: param.detach().clone() for name, param in before.items()}
        ignored = [model.head.weight, *model.blocks[1].parameters()]
        names = {name for name, param in before.items() if any(param is i for i in ignored)}
        engine = fully_shard(model, comm, ignored_params=ignored)
        for name, param in model.named_parameters():
            assert (param is before[name]) is (name in names)
            if name in names:
                assert torch.equal(param, values[name])  # this rank's own
        loss_of(model, batch(comm.rank, 0)).backward()
        mine = make(seed=comm.rank)
        first = make(seed=0)
        for name, param in mine.named_parameters():
            if name not in names:
                param.data = first.get_parameter(name).data
        loss_of(mine, batch(comm.rank, 0)).backward()
        for name in names:
            grad = model.get_parameter(name).grad
            assert grad is not None
            torch.testing.assert_close(grad, mine.get_parameter(name).grad)
        full = engine.full_state_dict()
        assert full.keys() == model.state_dict().keys()
        for name in names:
            assert torch.equal(full[name], values[name])
        engine.load_state_dict(first.state_dict())
        assert torch.equal(local(model.head.weight), first.head.weight)

    run_threads(body, RANKS)
