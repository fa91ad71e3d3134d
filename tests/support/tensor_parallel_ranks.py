"""Ranks that shard outside and are tensor parallel inside, and what one process without either comes to."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcomm import Engine, fully_shard
from support.tensor_parallel_nets import (
    Net,
    attention_net,
    batch,
    optimizer_of,
    sequence,
    train,
    twins,
)

TOLERANCE = 5e-5  # AdamW divides by gradients' own size, and makes rounding of small ones large; measured: 1.2e-5

DEADLINE_S = 120


@contextlib.contextmanager
def process_group(backend: str = "shardcomm") -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def mesh_of(*shape: int) -> DeviceMesh:
    """Dims "dp" and "tp", before them "replicas" if there are three."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "dp", "tp")[-len(shape) :])


def assert_equals(engine: Engine, plain: nn.Module, tolerance: float = TOLERANCE) -> None:
    full = engine.full_state_dict()
    expected = plain.state_dict()
    assert full.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            full[name], value, rtol=0, atol=tolerance, msg=lambda said, name=name: f"{name}: {said}"
        )


@functools.cache
def trained(
    make: Callable[[], Net] = attention_net, **kwargs: Any
) -> tuple[nn.Module, list[float]]:
    """By one process, on whole batches."""
    _, plain = twins(make)
    return plain, train(plain, optimizer_of(plain), **kwargs)


def sharded(
    mesh: DeviceMesh,
    make: Callable[[], Net] = attention_net,
    plan: Callable[[Net, DeviceMesh], None] = sequence,
    **how: Any,
) -> tuple[Net, Engine]:
    net, _ = twins(make)
    plan(net, mesh["tp"])
    ranks = mesh["replicas", "dp"] if mesh.ndim == 3 else mesh["dp"]
    return net, fully_shard(net, ranks, **how)


def backward(net: nn.Module, part: int = 0, parts: int = 1) -> None:
    tokens, targets = (x.chunk(parts)[part] for x in batch(0))
    F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
