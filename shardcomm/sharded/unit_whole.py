"""What the rows of a unit's parameter are a part of, and how the whole of them is gathered."""

from __future__ import annotations

from functools import partial

import torch

from shardcomm.bucket.bucket import Bucket
from shardcomm.bucket.gathering import Gathering
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.shard_tensor import Part
from shardcomm.parameter.tensor_parallel import Distribution, with_same
from shardcomm.parameter.whole import Held, Owned, Whole
from shardcomm.unit.unit import OwnedParam


def whole_of(owned: OwnedParam, unit: str, holders: Holders, bucket: Bucket, index: int) -> Whole:
    """The whole parameter of which this rank has rows.

    Args:
        owned: The parameter.
        unit: The name of its unit.
        holders: The ranks that hold the unit's parameters.
        bucket: The parameter's bucket.
        index: Its number there.
    """
    how = owned.distribution
    is_cut = how is not None and bool(how.cut_over)
    placement = bucket.layout.placements[index]
    piece = bucket.layout.piece(bucket.comm.rank, index)
    part = Part(placement, piece, holders.everyone.size, how)
    held = Held.ELSEWHERE if part.elsewhere else Held.ROWS
    if piece.numel == placement.numel and not is_cut:
        held = Held.WHOLE
    owned_as = Owned.PART if is_cut else Owned.WHOLE
    has_owner = placement.spec.granularity == "tensor" and bucket.comm.size > 1
    return Whole(
        owned.name,
        unit,
        holders.of(how),
        bucket.shards[index].detach(),
        part,
        is_part=bucket.layout.world_size > 1 or holders.differs or is_cut,
        held=held,
        owned=owned_as if has_owner else Owned.NOT,
        # Not the bucket, which has the parameter: a `.grad` has its Whole, and garbage collection does not see the
        # parameter's reference to its `.grad`.
        gather=partial(_gathered, holders, bucket.gathering, index, how),
        counts=all(comm.rank == 0 for comm in with_same(how, holders.everyone.inner)),
    )


def _gathered(
    holders: Holders, gathering: Gathering, index: int, how: Distribution | None, held: torch.Tensor
) -> torch.Tensor:
    with holders.everyone.failing_together, holders.mesh.failing_together:
        part = gathering.rows(index, held)
    return part if how is None else how.whole(part)
