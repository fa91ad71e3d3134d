"""Ranks that are threads, on GPUs and an NCCL that are played: what the scripts of test_played_cuda.py share.

To be imported before shardcomm, whose extension it replaces.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import played_cuda

INSTANT = ["two_events_a_collective"]
played_cuda.install(
    instant=sys.argv[1] in INSTANT, extension=Path(sys.argv[2]) if sys.argv[2:] else None
)

from shardcomm import _C, Bucket, Communicator  # noqa: E402
from shardcomm.bucket import bucket  # noqa: E402
from shardcomm.comm.core import CoreCommunicator  # noqa: E402
from shardcomm.engine import call, sharding  # noqa: E402

# What is played computes when its stream does, and torch here at once: nothing that is gathered can be read at set-up.
bucket.difference = call.difference = lambda _groups, _items: ""
sharding.check_secondary = lambda _mesh: None

RANKS = 2
SHAPES = {"weight": (24, 16), "bias": (24,), "scale": (16,)}


def run_ranks(body: Callable[[Communicator, played_cuda.Stream], None], ranks: int = RANKS) -> None:
    """`body(communicator, stream)` on each rank, which computes on that stream."""
    unique_id = _C.nccl_unique_id()
    errors: list[BaseException] = []

    def rank_body(rank: int) -> None:
        try:
            comm = CoreCommunicator(_C.make_nccl(unique_id, rank, ranks, 0, 60.0))
            with played_cuda.Stream() as stream:
                body(comm, stream)
                stream.synchronize()
            comm.close()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def values(seed: int) -> dict[str, torch.Tensor]:
    """Small integers, whose sums and means over two ranks are exact."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-8, 9, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }


def check_params(bucket: Bucket, full: dict[str, torch.Tensor]) -> None:
    for param, value in zip(bucket.params, full.values(), strict=True):
        assert torch.equal(param.float(), value)


def check_grads(bucket: Bucket, of_ranks: list[dict[str, torch.Tensor]]) -> None:
    """They are this rank's rows of the ranks' mean."""
    mean = {name: sum(of[name] for of in of_ranks) / RANKS for name in SHAPES}
    for shard, (placement, piece) in zip(bucket.shards, bucket._placed, strict=True):
        if piece.numel:
            rows = mean[placement.spec.name][piece.start : piece.stop]
            assert torch.equal(shard.grad, rows), placement.spec.name
