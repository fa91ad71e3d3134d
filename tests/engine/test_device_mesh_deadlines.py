"""Ranks of a DeviceMesh wait as long as `init_process_group(timeout=...)` says, in each of its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardcomm import CommError, Engine, fully_shard, launch

RANKS, ABSENT = 4, 3
DEADLINE_S = 5.0

Begin = Callable[[DeviceMesh], tuple[Engine, Callable[[], object]]]


def shards_and_replicas(mesh: DeviceMesh) -> tuple[Engine, Callable[[], object]]:
    model = nn.Linear(4, 4)
    engine = fully_shard(model, mesh, strategy="hybrid_shard")
    return engine, lambda: model(torch.ones(1, 4)).sum().backward()


def tensor_parallel(mesh: DeviceMesh) -> tuple[Engine, Callable[[], object]]:
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    engine = fully_shard(model, mesh["dp"], strategy="no_shard")
    model(torch.ones(1, 4)).sum().backward()
    return engine, lambda: engine.clip_grad_norm_(1.0)


def wait_in_vain(begin: Begin, waiting: set[int]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    store = dist.distributed_c10d._get_default_store()
    engine, go_on = begin(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    if dist.get_rank() == ABSENT:
        store.wait([f"{rank} has heard" for rank in waiting], timedelta(seconds=50))
    elif dist.get_rank() in waiting:
        with pytest.raises(CommError, match=f"within {DEADLINE_S:g} s"):
            go_on()
        store.set(f"{dist.get_rank()} has heard", "")
    engine.close()
    dist.destroy_process_group()


@pytest.mark.covers("late rank")
@pytest.mark.parametrize(
    ("begin", "waiting"), [(shards_and_replicas, {0, 1, 2}), (tensor_parallel, {2})]
)
def test_who_does_not_come_is_noticed_at_the_timeout_of_the_default_group(
    begin: Begin, waiting: set[int]
) -> None:
    launch(wait_in_vain, RANKS, (begin, waiting), timeout_s=60)
