"""The gradients of one unit, from those that backward leaves on this rank to the `.grad` of its rows.

    EMPTY ──backward──► LOCAL ──pack──► PACKED ──reduce──► REDUCING ──publish──► READY
                         ▲  │                                 │                    │
                         └──┘ no_sync: sums of backwards      └──── backward ──────┴──► LOCAL, and adds to them

With replicas, REDUCING has two parts, a reduce and an all-reduce; the second may be put off to a later backward.

`engine/actions.py` decides when each of these happens, and `bucket/reduction.py` does those in the middle. A unit's
`.grad` is published as soon as its reduce has ended, if this rank knows that every parameter has a gradient. An
optimizer may then step in a hook, and give the memory back, while backward goes on. If a parameter was not used on this
rank, another rank may have used it. The ranks ask each other once for all units, when backward ends
(`engine/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice

import torch
from torch import nn

from shardcomm.bucket.bucket import Bucket
from shardcomm.parameter.plain import grad_of, plain, set_grad
from shardcomm.parameter.whole import Whole, awaiting
from shardcomm.sharded.awaited_backward import Awaited
from shardcomm.stream.streams import on_host
from shardcomm.stream.work import DONE, Work


class Stage(Enum):
    """How far a unit's gradients have come."""

    EMPTY = "empty"  # no backward has come to the unit; `.grad` may show earlier gradients
    LOCAL = "local"  # backward leaves, or has left, full gradients on this rank
    PACKED = "packed"  # they are in the buffer that is reduced; the full ones are dropped
    REDUCING = "reducing"  # they are being reduced, or are reduced and not shown yet
    READY = "ready"  # `.grad` shows them


EMPTY, LOCAL, PACKED, REDUCING, READY = Stage  # as in sharded_unit.py


class ParamGradient:
    """The gradient of one parameter. Its methods are called inside of `plain()`, where full parameters are plain.

    Args:
        full: The full parameter, to which backwards leave gradients.
        shard: This rank's rows, whose `.grad` the mean becomes.
        whole: What they are a part of.

    Attributes:
        used: Whether this rank had a gradient for the parameter in this backward.
    """

    def __init__(self, full: nn.Parameter, shard: nn.Parameter, whole: Whole) -> None:
        self.full = full
        self.shard = shard
        self.whole = whole
        # How `full` is distributed if it is a DTensor, of whose gradients this rank's part is reduced.
        self._how = whole.part.how
        self.used = False
        self._sum: torch.Tensor | None = None  # the sum over backwards that were not reduced

    @property
    def holds_earlier(self) -> bool:
        """Whether it has gradients of backwards that were not reduced, as before the parameter was frozen."""
        return self._sum is not None or grad_of(self.full) is not None

    def take(self) -> torch.Tensor | None:
        """Takes the gradient that backwards have left; the next backward starts from nothing."""
        if self._sum is not None:
            self.add(self._sum.dtype)
        grad = grad_of(self.full) if self._sum is None else self._sum
        if grad is None:
            return None
        self._sum = None
        set_grad(self.full, None)
        self.used = True
        return grad if self._how is None else self._how.part_of(grad)

    def add(self, dtype: torch.dtype) -> None:
        """Adds the gradient that autograd has left to the sum of earlier backwards, which is in `dtype`."""
        grad = grad_of(self.full)
        if grad is None:
            return
        set_grad(self.full, None)
        grad = grad.detach().to_dense()
        if self._how is not None:
            grad = self._how.part_of(grad)
        if self._sum is None:
            self._sum = grad.to(dtype)
        else:
            self._sum.add_(grad)

    def forget(self) -> None:
        """Drops the gradients of all backwards."""
        set_grad(self.full, None)
        self._sum = None
        self.used = False


class UnitGradients:
    """The one owner of a unit's gradients.

    Attributes:
        stage: How far the gradients are.
        early: Whether they may be published before backward has ended.
        reduces: The reduces under way, to be waited for.
        all_reduces: The all-reduces under way, to be waited for.
        awaited: The backwards that have yet to come, each an `AwaitedBackward`, by its `id`.
        awaits_replicas: Whether an all-reduce is to come.
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
        self._droppable = [
            bucket.gradients
            for bucket, _ in self._buckets
            if bucket.offload is None
            and (bucket.layout.world_size > 1 or not on_host(bucket.comm.device))
        ]
        self._params = [param for _, params in self._buckets for param in params]
        self.awaited = Awaited()
        self._trained = self._buckets  # those whose gradients this backward leaves
        # Those of which `keep` has ended a backward that is not published yet: they may have been frozen since. Other
        # ranks have the same ones, even if this rank had no gradient.
        self._owed: list[tuple[Bucket, Sequence[ParamGradient]]] = []
        self.awaits_replicas = False
        self._kept = False  # whether `keep` has ended a backward since the latest was published

    # The methods, in the order in which a step calls them.

    def begin(self) -> None:
        """Notes that backward comes to the unit.

        Raises:
            RuntimeError: Backward came to the unit before and seemed to end, so that hooks were given incomplete
                gradients.
        """
        if self.stage is READY and self._hooked():
            raise RuntimeError(
                f"backward came to unit {self._name!r} again after its gradients were given to hooks of "
                "register_post_accumulate_grad_hook as complete; return the unit's tensors in tuples, lists, dicts or "
                "dataclasses, by which the end of its backward is known, or step after backward instead of in hooks"
            )
        self.stage = LOCAL
        with plain():
            self._trained = [
                entry
                for entry in self._buckets
                if entry in self._owed or any(param.full.requires_grad for param in entry[1])
            ]

    def join(self) -> None:
        """At the end of a backward that may have come to the unit on other ranks only: takes part in their reduce."""
        if self.stage is EMPTY:
            self.begin()

    @property
    def came_unannounced(self) -> bool:
        """Whether backward has left gradients without `begin`."""
        if self.stage is LOCAL:
            return False
        with plain():
            return any([grad_of(param.full) is not None for param in self._params])

    def end_backward(self) -> None:
        """Notes that backward has ended: what it did not come to is awaited no more."""
        self.awaited.clear()

    @property
    def complete(self) -> bool:
        """Whether backward has left all gradients that will be reduced."""
        return self.stage is LOCAL and not self.awaited

    def keep(self) -> None:
        """Ends a backward that is not reduced.

        It keeps sums in the wider dtype: in a narrow one, autograd's own sum would lose later gradients.
        """
        for bucket, params in self._buckets:
            for param in params:
                with plain():
                    if bucket.reduce_dtype.itemsize > bucket.param_dtype.itemsize:
                        param.add(bucket.reduce_dtype)
                    param.whole.awaits_reduce = self.stage is REDUCING or param.holds_earlier
        if self.stage is not EMPTY:
            self._owed = self._trained
        self._kept = True
        awaiting.add(self)

    def reduce(self, *, put_off: bool = False) -> None:
        """Queues the reduces of the gradients that backward has left, which `reduces` lists to be waited for.

        The gradients of all buckets are packed first. Else this rank would wait for the reduce of one bucket before it
        packs the next, and the link would be idle meanwhile.

        Args:
            put_off: Whether no all-reduce comes in this backward.
        """
        packed = []
        for bucket, params in self._trained:
            with plain():
                grads = [param.take() for param in params]
            if bucket.reduction.pack(grads, async_op=True):
                packed.append(bucket.reduction)
            self.stage = PACKED
        for reduction in packed:
            work = reduction.reduce(async_op=True, put_off=put_off)
            if work is not DONE:
                self.reduces.append(work)
        self.stage = REDUCING
        self.awaits_replicas = any([b.reduction.among_replicas for b, _ in self._trained])

    def all_reduce(self) -> None:
        """Queues the all-reduces of the gradients that `reduce` left, which `all_reduces` lists to be waited for."""
        self.awaits_replicas = False
        self.all_reduces += [b.reduction.all_reduce(async_op=True) for b, _ in self._trained]

    def arrived(self) -> None:
        """Publishes the gradients if their reduces have ended, and if this rank knows that none is missing."""
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
        """For each parameter, whether this rank knows that a rank has used it, or need not know."""
        if self.stage is not REDUCING:
            return [True] * len(self._params)
        asked = self._trained
        return [param.used or entry not in asked for entry in self._buckets for param in entry[1]]

    def publish(self, used: Sequence[bool]) -> None:
        """Shows the reduced gradients of the parameters that were `used` as `.grad`; then calls their hooks."""
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
        self._await_no_reduce()
        hooked = self._hooked()
        for shard in hooked:
            with plain():
                hooks = list(shard._post_accumulate_grad_hooks.values())
            for hook in hooks:
                if hook(shard) is not None:
                    raise RuntimeError(
                        "a hook of register_post_accumulate_grad_hook returned a value; it must return None, and may "
                        "change param.grad"
                    )
        if hooked:
            self.drop()

    def reset(self) -> None:
        """Before a backward: forgets that the one before has published gradients."""
        if self.stage is READY:
            self.stage = EMPTY

    def forget(self) -> None:
        """Drops gradients that are not shown, and those that a failed backward has shown already."""
        for bucket, params in self._buckets:
            bucket.gradients.forget(shown=self.stage is READY)
            bucket.reduction.forget()
            with plain():
                for param in params:
                    param.forget()
        self._await_no_reduce()
        self.stage = EMPTY
        self.awaited.clear()
        self.awaits_replicas = False

    def drop(self) -> None:
        """Gives back the memory of gradients that no `.grad` shows.

        Pinned memory is kept, since to allocate as much again takes long, and on a CPU so are the gradients of whole
        units.
        """
        for gradients in self._droppable:
            gradients.drop()

    @property
    def reduce_bytes(self) -> int:
        """The bytes that this rank sends in one reduce."""
        return sum([bucket.reduce_bytes for bucket, _ in self._trained])

    @property
    def all_reduce_bytes(self) -> int:
        """The bytes that this rank sends in one all-reduce."""
        return sum([bucket.all_reduce_bytes for bucket, _ in self._trained])

    def _await_no_reduce(self) -> None:
        if self._kept:
            self._kept = False
            self._owed = []
            for param in self._params:
                param.whole.awaits_reduce = False
            awaiting.discard(self)

    def _hooked(self) -> list[nn.Parameter]:
        with plain():
            return [
                param.shard
                for param in self._params
                if param.shard._post_accumulate_grad_hooks and grad_of(param.shard) is not None
            ]
