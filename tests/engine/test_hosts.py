"""hybrid_shard over two hosts: shared memory inside each, Gloo between them.

The hosts are network namespaces joined by links, with process namespaces of their own: what is said over the links is
all that they have of each other, as `introduction.host_identity` sees it, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardcomm.cluster
from shardcomm import CommError, fully_shard
from shardcomm.cluster import Cluster
from support.nets import batch, loss_of, make, sgd_of

STEPS = 3
DEADLINE_S = 120.0


class Trained(NamedTuple):
    ours: dict[str, Any]
    ddp: dict[str, Any]
    error: str


def program() -> Trained:
    """A rank: trains, and then for ever, until rank 3 dies."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ours, plain = make(layers=3), make(layers=3)
    engine = fully_shard(ours, init_device_mesh("cpu", (2, 2)), strategy="hybrid_shard")
    assert (engine.mesh.shard.transport, engine.mesh.replicate.transport) == ("shm", "hosts")
    assert engine.mesh.rank == rank
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    for model in (ours, ddp):
        optimizer = sgd_of(model)
        for step in range(STEPS):
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    states = engine.full_state_dict(), plain.state_dict()
    try:
        while True:
            loss_of(ours, batch(rank, 0)).backward()
            shardcomm.cluster.step(STEPS)
    except CommError as error:
        return Trained(*states, str(error))


@pytest.mark.usefixtures("warm_python")
@pytest.mark.covers(
    "training parity", "failed ranks", strategies=["hybrid_shard"], transports=["shm", "c10d"]
)
def test_training_over_two_hosts_is_ddp_and_a_dead_rank_ends_all(cluster: type[Cluster]) -> None:
    told = cluster(hosts=2, ranks=2, rate="10gbit").run(
        program, kill=f"rank 3 at step {STEPS}", timeout_s=DEADLINE_S
    )
    assert told[3] is None
    for trained in told[:3]:
        assert trained is not None
        assert trained.error
        for name, value in trained.ddp.items():
            torch.testing.assert_close(trained.ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
