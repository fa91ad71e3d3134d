"""The gradients of one unit, from what backward leaves on this rank to the `.grad` of its rows.

    EMPTY ──backward──► LOCAL ──pack──► PACKED ──reduce──► REDUCING ──publish──► READY
                         ▲  │                                 │                    │
                         └──┘ no_sync: sums of backwards      └──── backward ──────┴──► LOCAL, and adds to them

Among replicas REDUCING has two parts, a reduce and an all-reduce; the second may be put off to a later backward.

`engine/actions.py` says when each of them happens, and `bucket/reduction.py` does the middle ones. A unit's `.grad` is
published as soon as its reduce has ended, if this rank knows that every parameter has one: an optimizer may step there,
and give the memory back, while backward goes on. Where a parameter was not used here, another rank may have used it:
that is asked once for all units when backward ends (`engine/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice

import torch
from torch import nn

from shardcomm.bucket.bucket import Bucket
from shardcomm.parameter.plain import grad_of, plain
from shardcomm.parameter.tensor_parallel import Distribution
from shardcomm.stream.work import Work


class Stage(Enum):
    """How far a unit's gradients are on their way."""

    EMPTY = "empty"  # no backward has been here; `.grad` shows earlier ones, if it does
    LOCAL = "local"  # backward leaves, or has left, full ones on this rank
    PACKED = "packed"  # copied to where they are reduced; the full ones are let go of
    REDUCING = "reducing"  # on their way over the ranks, or there and not shown yet
    READY = "ready"  # `.grad` shows them


EMPTY, LOCAL, PACKED, REDUCING, READY = Stage  # as in sharded_unit.py


class ParamGradient:
    """Of one parameter: what backwards have left for `full`, and the `shard` whose `.grad` the mean becomes.

    `how`: of a `full` that is a DTensor; what is reduced is this rank's part of its gradients.
    """

    def __init__(
        self, full: nn.Parameter, shard: nn.Parameter, how: Distribution | None = None
    ) -> None:
        self.full = full
        self.shard = shard
        self._how = how
        self.used = False  # this rank had one in this backward
        self._sum: torch.Tensor | None = None  # of backwards that were not reduced

    @property
    def holds_earlier(self) -> bool:
        """Whether a backward that was not reduced left something, before the parameter was frozen for instance."""
        return self._sum is not None or self.full.grad is not None

    def take(self) -> torch.Tensor | None:
        """What backwards left; the next one starts from nothing."""
        if self._sum is not None:
            self.add(self._sum.dtype)
        grad = self.full.grad if self._sum is None else self._sum
        if grad is None:
            return None
        self._sum = None
        self.full.grad = None
        self.used = True
        return grad if self._how is None else self._how.part_of(grad)

    def add(self, dtype: torch.dtype) -> None:
        """Moves what autograd left to the sum of earlier backwards, in `dtype`."""
        grad, self.full.grad = self.full.grad, None
        if grad is None:
            return
        grad = grad.detach().to_dense()
        if self._how is not None:
            grad = self._how.part_of(grad)
        if self._sum is None:
            self._sum = grad.to(dtype)
        else:
            self._sum.add_(grad)

    def forget(self) -> None:
        """As if no backward had been."""
        self.full.grad = self._sum = None
        self.used = False


class UnitGradients:
    """The one owner of a unit's gradients.

    Attributes:
        stage: how far they are.
        early: whether they may be published before backward has ended.
        reduces, all_reduces: under way, to be waited for.
        awaits_replicas: whether an all-reduce is to come.
    """

    def __init__(
        self, name: str, buckets: Iterable[tuple[Bucket, Sequence[ParamGradient]]]
    ) -> None:
        self.stage = EMPTY
        self.early = False
        self.reduces: list[Work] = []
        self.all_reduces: list[Work] = []
        self._name = name
        self._buckets = list(buckets)
        self._dropped = [
            bucket.gradients
            for bucket, _ in self._buckets
            if bucket.offload is None and bucket.layout.world_size > 1
        ]
        self._params = [param for _, params in self._buckets for param in params]
        self._open_calls = 0  # of forward, whose backward has not come yet
        self._trained = self._buckets  # whose gradients this backward leaves
        self.awaits_replicas = False

    # In the order in which it happens.

    def call(self) -> None:
        """A forward has begun whose backward's end will be told by `end_call`."""
        self._open_calls += 1

    def begin(self) -> None:
        """Backward comes to the unit.

        Raises:
            RuntimeError: it has been there and ended, and hooks were given what was not all of a gradient.
        """
        if self.stage is READY and self._hooked():
            raise RuntimeError(
                f"backward came to unit {self._name!r} again after its gradients were given to hooks of "
                "register_post_accumulate_grad_hook as complete; return the unit's tensors in tuples, lists, dicts or "
                "dataclasses, by which the end of its backward is known, or step after backward instead of in hooks"
            )
        self.stage = LOCAL
        self._trained = [
            entry
            for entry in self._buckets
            if any(p.full.requires_grad or p.holds_earlier for p in entry[1])
        ]

    def join(self) -> None:
        """Backward has ended, which may have come to the unit on other ranks alone: they wait for this one's reduce."""
        if self.stage is EMPTY:
            self.begin()

    @property
    def came_unannounced(self) -> bool:
        """Whether backward has left gradients without `begin`."""
        return self.stage is not LOCAL and any([p.full.grad is not None for p in self._params])

    def end_call(self) -> None:
        """The backward of a call has ended."""
        if self._open_calls:
            self._open_calls -= 1

    def end_calls(self) -> None:
        """Backward has ended, as it has for calls which it did not come to."""
        self._open_calls = 0

    @property
    def complete(self) -> bool:
        """Whether backward has left all that there is to reduce."""
        return self.stage is LOCAL and not self._open_calls

    def keep(self) -> None:
        """Ends a backward that is not reduced: in a narrow dtype autograd's own sum would lose later gradients."""
        for bucket, params in self._buckets:
            if bucket.reduce_dtype.itemsize > bucket.param_dtype.itemsize:
                for param in params:
                    param.add(bucket.reduce_dtype)

    def reduce(self, *, put_off: bool = False) -> None:
        """Queues the reduces of what backward left; `reduces` are to be waited for.

        `put_off`: no all-reduce comes in this backward.
        """
        for bucket, params in self._trained:
            left = bucket.pack([param.take() for param in params], async_op=True)
            self.stage = PACKED
            if left:
                work = bucket.reduce(async_op=True, put_off=put_off)
                if work.event is not None:
                    self.reduces.append(work)
        self.stage = REDUCING
        self.awaits_replicas = any([b.reduction.replicas for b, _ in self._trained])

    def all_reduce(self) -> None:
        """Queues the all-reduces of what `reduce` left; `all_reduces` are to be waited for."""
        self.awaits_replicas = False
        self.all_reduces += [bucket.all_reduce(async_op=True) for bucket, _ in self._trained]

    def arrived(self) -> None:
        """What was queued may have ended: publishes the gradients if they are there and known to be all."""
        if (
            self.early
            and self.stage is REDUCING
            and not (self.reduces or self.all_reduces or self.awaits_replicas)
            and all([param.used for _, params in self._trained for param in params])
        ):
            for bucket, _ in self._trained:
                bucket.gradients.show()
            self._published()

    def known(self) -> list[bool]:
        """Of each parameter: whether this rank knows that a rank used it, or that nobody asks."""
        if self.stage is not REDUCING:
            return [True] * len(self._params)
        asked = self._trained
        return [param.used or entry not in asked for entry in self._buckets for param in entry[1]]

    def publish(self, used: Sequence[bool]) -> None:
        """Shows the reduced gradients of the parameters `used` as `.grad`; then calls their hooks."""
        rest = iter(used)
        for entry in self._buckets:
            bucket, params = entry
            flags = list(islice(rest, len(params)))
            if entry in self._trained:
                bucket.gradients.show(flags)
        self._published()

    def _published(self) -> None:
        self.stage = READY
        for param in self._params:
            param.used = False
        hooked = self._hooked()
        for shard in hooked:
            with plain():
                hooks = list(shard._post_accumulate_grad_hooks.values())
            for hook in hooks:
                hook(shard)
        if hooked:
            self.drop()

    def end(self) -> None:
        """A backward begins: what the one before published is of the past."""
        if self.stage is READY:
            self.stage = EMPTY

    def forget(self) -> None:
        """Drops what is not shown, and what a backward that failed has shown already."""
        for bucket, params in self._buckets:
            bucket.gradients.forget(shown=self.stage is READY)
            bucket.reduction.forget()
            for param in params:
                param.forget()
        self.stage = EMPTY
        self._open_calls = 0
        self.awaits_replicas = False

    def drop(self) -> None:
        """Gives memory back that no `.grad` shows.

        Not what is pinned, nor whole gradients: to come by as much memory takes a CPU long.
        """
        for gradients in self._dropped:
            gradients.drop()

    @property
    def reduce_bytes(self) -> int:
        """What this rank sends in one reduce."""
        return sum([bucket.reduce_bytes for bucket, _ in self._trained])

    @property
    def all_reduce_bytes(self) -> int:
        """What this rank sends in one all-reduce."""
        return sum([bucket.all_reduce_bytes for bucket, _ in self._trained])

    def _hooked(self) -> list[nn.Parameter]:
        with plain():
            return [
                param.shard
                for param in self._params
                if param.shard._post_accumulate_grad_hooks and grad_of(param.shard) is not None
            ]
