"""A small model's training under any strategy, in steps that accumulate gradients in one of several ways."""

from __future__ import annotations

import torch

from shardcomm import Communicator, Mesh, MixedPrecision, fully_shard
from shardcomm.layout.param_spec import Granularity
from support.nets import batch, loss_of, make, sgd_of

STEPS = 2
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# How a step of two batches is accumulated: not at all (two steps), unsharded, reduced each time, or reduced to shards
# that are averaged among replicas at the end.
ACCUMULATION = ["", "no_sync", "every", "put_off"]


def train(
    ranks: Communicator | Mesh,
    strategy: str,
    half: bool,
    accumulation: str,
    *,
    cpu_offload: bool = False,
    granularity: Granularity = "row",
) -> dict[str, torch.Tensor]:
    model = make(layers=3)
    precision = HALF if half else None
    engine = fully_shard(
        model,
        ranks,
        strategy=strategy,
        mixed_precision=precision,
        cpu_offload=cpu_offload,
        granularity=granularity,
    )
    optimizer = sgd_of(model)
    batches = 2 if accumulation else 1
    for step in range(STEPS):
        for m in range(batches):
            tokens = batch(ranks.rank, step * batches + m)
            if accumulation == "no_sync" and m == 0:
                with engine.no_sync():
                    loss_of(model, tokens).backward()
            else:
                engine.set_requires_all_reduce(accumulation != "put_off" or m == 1)
                loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict()
    engine.close()
    return state
