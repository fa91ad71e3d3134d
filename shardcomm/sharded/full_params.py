"""The full parameters of one unit in its slot: what was gathered, what is under way, and what has become old.

    not gathered ──gather──► under way ──arrive──► in the slot
         ▲                                             │
         ├── outdate: the rows have changed ───────────┤
         ├── overwritten: the slot is another unit's ──┤
         └── take_change: forward has written into it ─┘

`engine/actions.py` decides when each of these happens. `unit_gradients.py` is its counterpart for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardcomm.bucket.bucket import Bucket
from shardcomm.bucket.secondary_shard import SecondaryShard
from shardcomm.parameter.plain import plain
from shardcomm.parameter.tensor_parallel import local
from shardcomm.parameter.versions import Versions
from shardcomm.sharded.unit_param import UnitParam
from shardcomm.stream.work import DONE, Work


class FullParams:
    """Knows what is in a unit's slot.

    Args:
        slot: The number of the slot.
        buckets: The unit's buckets, each with its parameters.
        given: What `.data` of full parameters gives to the forward that goes on, with the parameter's name.
        secondary: The unit's secondary shard; None: it has none.

    Attributes:
        slot: The number of the slot; -1 if the shard is the whole unit, which then needs no gather.
        shares_slot: Whether another unit has the same slot; set by `Actions`.
        storages: The memory of the slot. A view of it that forward returns would come to show another unit's
            parameters.
        gathered: Whether a gather was queued, and its values are not old yet.
        gathers: The gathers under way, to be waited for.
        announced: Whether the outputs of the unit's latest forward announce its backward. If not, only its gradients
            tell of it, later.
        secondary: The unit's secondary shard; None: it has none.
    """

    __slots__ = (
        "_buckets",
        "_gather_bytes",
        "_given",
        "_versions",
        "announced",
        "gathered",
        "gathers",
        "secondary",
        "shares_slot",
        "slot",
        "storages",
    )

    def __init__(
        self,
        slot: int,
        buckets: Sequence[tuple[Bucket, Sequence[UnitParam]]],
        given: list[tuple[str, torch.Tensor]],
        secondary: SecondaryShard | None,
    ) -> None:
        to_gather = [entry for entry in buckets if entry[0].full is not entry[0].shard]
        self._buckets = [bucket for bucket, _ in to_gather]
        self._gather_bytes = sum(bucket.gather_bytes for bucket in self._buckets)
        self._given = given
        self._versions = Versions(_versioned(to_gather))
        self.slot = slot if self._buckets else -1
        self.shares_slot = False
        self.storages = frozenset(bucket.full.untyped_storage()._cdata for bucket in self._buckets)
        self.gathered = False
        self.gathers: list[Work] = []
        self.announced = True
        self.secondary = secondary

    @property
    def gather_bytes(self) -> int:
        """The bytes that this rank receives from the others in its next gather."""
        if self.secondary is not None and self.secondary.is_current:
            return self.secondary.gather_bytes
        return self._gather_bytes

    def gather(self, *, keep: bool) -> None:
        """Queues the all-gathers, which `gathers` lists to be waited for.

        Args:
            keep: Whether the secondary shard takes its part of what is gathered.
        """
        self.gathered = True
        if self.secondary is not None and self.secondary.is_current:
            self._versions.gather_again()
            self.gathers += self.secondary.gather()
            return
        self._versions.gather()
        for bucket in self._buckets:
            work = bucket.gathering.all_gather(async_op=True)
            if work is not DONE:
                self.gathers.append(work)
        if self.secondary is not None and keep:
            self.secondary.keep()

    def arrive(self) -> None:
        """Notes that what is queued next comes after the gather, if one was queued."""
        self._versions.arrive()

    def take_change(self) -> str | None:
        """Looks whether the unit's forward has changed a parameter; if so, the unit counts as not gathered.

        Returns:
            The name of a parameter that was changed; None if none was.
        """
        name = None
        if self._buckets:
            with plain():
                name = self._versions.changed()
        if self._given:
            name = next((of for of, values in self._given if values._version), name)
            self._given.clear()
        if name is not None:
            self.gathered = False
        return name

    def overwritten(self) -> None:
        """Notes that another unit's parameters come into the slot."""
        self.gathered = False
        if (
            self.announced
        ):  # else `ShardedUnit.check_unmarked_backward` says more than autograd would
            self._versions.leave()

    def outdate(self) -> None:
        """Marks gathered parameters as stale, since the shards may have changed."""
        self.gathered = False
        if self.secondary is not None:
            self.secondary.is_current = False
        if self.announced:
            self._versions.forbid()

    def outdate_changed(self) -> None:
        """Marks gathered parameters as stale if the shards have changed since, as before a late backward.

        Then they are gathered again. As without sharding, a recomputation uses the new values, and autograd refuses
        what needs the old ones.
        """
        if self.is_old:
            self.outdate()

    @property
    def is_old(self) -> bool:
        """Whether the shards have changed since they were gathered."""
        return self.gathered and self._versions.are_old


def _versioned(
    buckets: Sequence[tuple[Bucket, Sequence[UnitParam]]],
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name, the full parameter and the rows of each parameter, for `Versions`."""
    for _, params in buckets:
        for param in params:
            rows = param.whole.rows
            yield param.name, param.full, rows
            if param.distribution is not None:  # computation may use its local tensor itself
                yield param.name, local(param.full), rows
