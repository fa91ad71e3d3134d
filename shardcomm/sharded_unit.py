"""A unit at run time: its buckets, and for each parameter the full tensor and this rank's rows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import nn

from shardcomm.boundary import Marked
from shardcomm.bucket import Bucket
from shardcomm.mesh import Mesh
from shardcomm.optimizer_steps import replaced
from shardcomm.schedule import Phase, Trigger
from shardcomm.sharded_parameter import ShardedParameter, Whole
from shardcomm.streams import Event
from shardcomm.unit import OwnedParam
from shardcomm.work import Work


class State(Enum):
    """What a unit's full parameters are in use for; another unit may take its slot only when IDLE."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ShardedParam:
    """One parameter: `shard` is what the optimizer sees, `full` what forward and backward compute with.

    Both are views made once, of the bucket's shard and of the unit's slot.
    """

    def __init__(
        self, owned: OwnedParam, shard: nn.Parameter, full: torch.Tensor, whole: Whole | None
    ) -> None:
        requires_grad = owned.param.requires_grad
        self.name = owned.name
        self.owned = owned
        replaced(owned.param, owned.name)
        self.whole = whole
        owned.param = shard  # lets go of the full one
        shard.requires_grad = requires_grad
        if whole is not None:
            shard.whole = whole  # type: ignore[attr-defined]
        self.shard = shard
        self.guard()
        self.full = nn.Parameter(full, requires_grad=requires_grad)
        self.unsharded_grad: torch.Tensor | None = None  # sum of backwards that were not reduced
        self.used = False  # this rank had a gradient for it in this backward
        self.watched = False  # see ShardedUnit.watch_gradients

    def guard(self) -> None:
        """The shard is a ShardedParameter, also where an exception ended an optimizer's step."""
        if self.whole is not None:
            self.shard.__class__ = ShardedParameter

    def show_full(self) -> None:
        """The model computes with the full parameter."""
        self.owned.check(self.shard, self.full)
        if self.full.requires_grad is not self.shard.requires_grad:  # frozen or thawed since
            self.full.requires_grad_(self.shard.requires_grad)
        self.owned.show(self.full)

    def show_shard(self) -> None:
        """The model shows this rank's rows."""
        self.owned.show(self.shard)

    def take_full_grad(self) -> torch.Tensor | None:
        """What backwards left for the full parameter; the next one starts from nothing."""
        if self.unsharded_grad is not None:
            self.add_full_grad(self.unsharded_grad.dtype)
        grad = self.full.grad if self.unsharded_grad is None else self.unsharded_grad
        self.full.grad = self.unsharded_grad = None
        self.used |= grad is not None
        return grad

    def add_full_grad(self, dtype: torch.dtype) -> None:
        """Moves what autograd left for the full parameter to the sum of earlier backwards, in `dtype`."""
        grad, self.full.grad = self.full.grad, None
        if grad is None:
            return
        grad = grad.detach().to_dense()
        if self.unsharded_grad is None:
            self.unsharded_grad = grad.to(dtype)
        else:
            self.unsharded_grad.add_(grad)


class ShardedUnit:
    """The buckets of one unit (one per dtype, frozen parameters apart), and the state of its full parameters."""

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        slot: int,
        buckets: Sequence[tuple[Bucket, Sequence[OwnedParam]]],
        mesh: Mesh,
    ) -> None:
        self.name = name or "(root)"
        self.module = module
        self.trigger = {phase: Trigger(phase, index) for phase in Phase}
        self.on_backward: Callable[[torch.Tensor], None]  # set by the engine, as are the next
        self.on_backward_end: Callable[[], None]
        self.on_gradient: Callable[[torch.Tensor], None]
        self.buckets = [
            (
                bucket,
                [
                    ShardedParam(
                        owned, shard, full, self._whole(bucket, i, owned.name, shard, mesh)
                    )
                    for i, (owned, shard, full) in enumerate(
                        zip(params, bucket.shards, bucket.params, strict=True)
                    )
                ],
            )
            for bucket, params in buckets
        ]
        self.params = [param for _, params in self.buckets for param in params]
        # Without a slot where the shard is the whole unit: nothing to gather, nobody to share it with.
        self.slot = slot if any(b.full is not b.shard for b, _ in buckets) else -1
        self.gather_bytes = sum(bucket.gather_bytes for bucket, _ in buckets)
        self.state = State.IDLE
        self.gathered = False
        self.gathers: list[Work] = []
        self.reduces: list[Work] = []
        self.all_reduces: list[Work] = []
        self.needs_reduce = self.needs_all_reduce = False
        self.pending_calls = 0  # forward calls whose backward has not come yet
        self.marked: Marked = []  # inputs of the forward that goes on
        self.returned: type = type(None)  # what its forward returned last
        self.began: Event | None = None  # of a trace: its computation
        self.shares_slot = False  # with another unit; set with the actions
        self.storages = frozenset(b.full.untyped_storage()._cdata for b, _ in buckets)
        self.show_shard()

    def _whole(
        self, bucket: Bucket, index: int, name: str, shard: torch.Tensor, mesh: Mesh
    ) -> Whole | None:
        if bucket.layout.world_size == 1:
            return None
        placement = bucket.layout.placements[index]
        piece = bucket.layout.piece(bucket.comm.rank, index)
        return Whole(
            name,
            self.name,
            mesh,
            shard.detach(),
            is_here=piece.numel == placement.numel,
            is_elsewhere=placement.is_elsewhere(piece),
            gather=partial(bucket.gathered_rows, index),
        )

    def show_full(self) -> None:
        """Forward and backward see the full parameters."""
        for param in self.params:
            param.show_full()

    def show_shard(self) -> None:
        """The optimizer, and whoever looks between steps, sees this rank's rows."""
        for param in self.params:
            param.show_shard()

    def refuse_forward(self) -> None:
        """Its forward says from now on that nobody gathers its parameters; unless this rank has all of them."""
        if any(bucket.layout.world_size > 1 for bucket, _ in self.buckets):
            self.module.register_forward_pre_hook(_refuse_forward, prepend=True)

    def watch_gradients(self) -> None:
        """Has `on_gradient` called whenever backward has left a parameter's gradient, from now on."""
        for param in self.params:
            if not param.watched and param.full.requires_grad:
                param.full.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]
                param.watched = True

    def check_unmarked_backward(self) -> None:
        """Backward has been here and no output told so: TypeError unless nothing else can have come into the slot."""
        if self.shares_slot:
            raise TypeError(
                f"backward came to unit {self.name!r} by another way than a tensor which it returned, after its "
                f"parameters were released; it returned {self.returned.__name__}: return the tensors in tuples, "
                "lists, dicts or dataclasses, or use strategy='shard_grad_op'"
            )

    def prepare_double_backward(self) -> None:
        """With create_graph=True gradients come by ways that were recorded in backward, past the outputs.

        Raises:
            RuntimeError: the parameters would be overwritten before the second backward.
        """
        if self.shares_slot:
            raise RuntimeError(
                f"backward with create_graph=True came to unit {self.name!r}, whose parameters share slot "
                f"{self.slot} with other units' and would be overwritten before the second backward; use "
                "strategy='shard_grad_op' or 'no_shard'"
            )
        self.watch_gradients()

    def forget_backward(self) -> None:
        """Drops the gradients that are not reduced, and those that are but were not shown."""
        self.needs_reduce = self.needs_all_reduce = False
        self.pending_calls = 0
        for bucket, _ in self.buckets:
            bucket.gradients.unshown = False
        for param in self.params:
            param.full.grad = param.unsharded_grad = None
            param.used = False

    def gather(self) -> None:
        """Queues the all-gathers; `gathers` are to be waited for."""
        self.gathered = True
        for bucket, _ in self.buckets:
            work = bucket.all_gather(async_op=True)
            if work.queued:
                self.gathers.append(work)

    def keep_gradients(self) -> None:
        """Ends a backward that is not reduced: in a narrow dtype autograd's own sum would lose later gradients."""
        for bucket, params in self.buckets:
            if bucket.reduce_dtype.itemsize > bucket.param_dtype.itemsize:
                for param in params:
                    param.add_full_grad(bucket.reduce_dtype)

    @property
    def reduce_bytes(self) -> int:
        """What this rank sends in one reduce."""
        return sum(bucket.reduce_bytes for bucket, _ in self._trained())

    @property
    def all_reduce_bytes(self) -> int:
        """What this rank sends in one all-reduce."""
        return sum(bucket.all_reduce_bytes for bucket, _ in self._trained())

    def reduce(self) -> None:
        """Queues the reduces of the gradients that backward left; `reduces` are to be waited for."""
        for bucket, params in self._trained():
            bucket.pack([param.take_full_grad() for param in params], async_op=True)
            work = bucket.reduce(async_op=True)
            if work.queued:
                self.reduces.append(work)
        self.needs_all_reduce = any(bucket.replicas is not None for bucket, _ in self.buckets)

    def all_reduce(self) -> None:
        """Queues the all-reduces of what `reduce` left; `all_reduces` are to be waited for."""
        self.needs_all_reduce = False
        self.all_reduces += [bucket.all_reduce(async_op=True) for bucket, _ in self._trained()]

    def _trained(self) -> Iterable[tuple[Bucket, list[ShardedParam]]]:
        return (entry for entry in self.buckets if any(p.shard.requires_grad for p in entry[1]))


@dataclass(frozen=True)
class Footprint:
    """Bytes one rank holds for a model between steps. Optimizer state comes on top, in the shards' shapes.

    Attributes:
        parameter_bytes: shards, padding included; with `cpu_offload` in host memory, as are the gradients.
        gradient_bytes: their gradients, padding included: of all that have been reduced, until the next forward gives
            the memory back where it can.
        slot_bytes: full-size buffers; between processes of one host all see the same ones.
        reduce_buffer_bytes: where gradients are packed to be reduced.
        staging_bytes: where they are all-reduced among replicas.
        offload_bytes: of the device, through which shards and gradients pass that are in host memory.
        padding_bytes: of all ranks' shards together; what the layout costs.
        total_parameter_bytes: the whole model's parameters. What `ranks` ranks hold is this plus the padding.
    """

    parameter_bytes: int
    gradient_bytes: int
    slot_bytes: int
    reduce_buffer_bytes: int
    staging_bytes: int
    offload_bytes: int
    padding_bytes: int
    total_parameter_bytes: int

    @classmethod
    def of(cls, units: Iterable[ShardedUnit]) -> Footprint:
        """Measured from the tensors of `units`."""
        buckets = [bucket for unit in units for bucket, _ in unit.buckets]
        return cls(
            parameter_bytes=sum(bucket.shard.nbytes for bucket in buckets),
            gradient_bytes=sum(bucket.gradients.nbytes for bucket in buckets),
            slot_bytes=_memory(b.full for b in buckets if b.full is not b.shard),
            reduce_buffer_bytes=_memory(
                b.reduce_buffer for b in buckets if b.reduce_buffer is not None
            ),
            staging_bytes=_memory(b.staging.memory for b in buckets if b.staging is not None),
            offload_bytes=sum(
                offload.nbytes for offload in {b.offload for b in buckets} if offload
            ),
            padding_bytes=sum(bucket.layout.padding * bucket.shard.itemsize for bucket in buckets),
            total_parameter_bytes=sum(
                bucket.layout.numel * bucket.shard.itemsize for bucket in buckets
            ),
        )


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind `tensors`, once where several share them."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def _refuse_forward(module: nn.Module, args: tuple[object, ...]) -> None:
    raise RuntimeError(
        f"forward of a {type(module).__name__} whose engine was closed: this rank has only its rows of the "
        "parameters; close the engine after the last forward, or load its full_state_dict() into another model"
    )
