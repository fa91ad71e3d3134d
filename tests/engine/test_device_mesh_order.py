"""A DeviceMesh in whatever order of ranks: a model is trained as over one in ascending order, or refused.

torch makes groups of sorted ranks, so that a column's ranks may be at different places in their rows' groups.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcomm import fully_shard, launch
from support.nets import STEPS, Block, assert_same, batch, loss_of, make, reference, sgd_of

RANKS = 4


def train_over(ranks: list[Any], options: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    model = make()
    engine = fully_shard(model, DeviceMesh("cpu", ranks), units=Block, **options)
    optimizer = sgd_of(model)
    for step in range(STEPS):
        loss_of(model, batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = reference(make(), RANKS, optimizer_of=sgd_of)
    assert_same(engine.full_state_dict(), expected, bitwise=False)
    engine.close()
    dist.destroy_process_group()


@pytest.mark.covers("training parity")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ([3, 1, 0, 2], {}),
        ([3, 1, 0, 2], {"reshard_after_forward": 2}),
        ([[3, 2], [1, 0]], {"strategy": "hybrid_shard"}),
        ([[2, 0], [3, 1]], {"strategy": "hybrid_shard"}),
    ],
)
def test_a_model_is_trained_as_over_ranks_in_ascending_order(
    ranks: list[Any], options: dict[str, Any]
) -> None:
    launch(train_over, RANKS, (ranks, options), timeout_s=60)


def refuse(ranks: list[list[int]]) -> None:
    dist.init_process_group("gloo")
    said = f"fully_shard: comm is a DeviceMesh of the ranks {ranks}; .* such as [[0, 1], [2, 3]]"
    with pytest.raises(ValueError, match=re.escape(said).replace(r"\.\*", ".*")):
        fully_shard(make(), DeviceMesh("cpu", ranks), strategy="hybrid_shard")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [[[3, 0], [1, 2]], [[0, 1], [3, 2]], [[0, 3], [2, 1]]])
def test_columns_of_different_shards_are_refused(ranks: list[list[int]]) -> None:
    launch(refuse, RANKS, (ranks,), timeout_s=60)
