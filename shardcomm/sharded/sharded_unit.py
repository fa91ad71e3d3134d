"""A unit at run time: its buckets, and for each parameter the full tensor and this rank's rows of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcomm.bucket.bucket import Bucket
from shardcomm.bucket.secondary_shard import SecondaryShard
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.optimizer_steps import replaced
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import Part
from shardcomm.parameter.sharded_parameter import ShardedParameter, Whole, WholeParameter
from shardcomm.parameter.tensor_parallel import Distribution, local, shown, with_same
from shardcomm.parameter.versions import Versions
from shardcomm.planner.footprint import Footprint
from shardcomm.schedule.schedule import Phase, Trigger
from shardcomm.sharded.unit_gradients import ParamGradient, UnitGradients
from shardcomm.sharded.unit_io import Marked
from shardcomm.stream.streams import Event
from shardcomm.stream.work import Work
from shardcomm.unit.unit import OwnedParam

if TYPE_CHECKING:
    from shardcomm.sharded.apart import Apart


_OURS = (ShardedParameter, WholeParameter)  # of another engine that had the parameter


class State(Enum):
    """What a unit's full parameters are in use for; another unit may take its slot only when IDLE."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


IDLE, FORWARD, BACKWARD = (
    State  # a step asks often, and Python 3.11 is slow to find a member in its class
)


class ShardedParam:
    """One parameter: `shard` is what the optimizer sees, `full` what forward and backward compute with.

    Both are views made once, of the bucket's shard and of the unit's slot.
    """

    def __init__(
        self, owned: OwnedParam, shard: nn.Parameter, full: torch.Tensor, whole: Whole
    ) -> None:
        requires_grad = owned.param.requires_grad
        self.name = owned.name
        self.owned = owned
        # Marks of the user's own, such as `_no_weight_decay`: not torch's, nor of another engine that had it.
        marks = {
            name: value
            for name, value in vars(owned.param).items()
            if name not in ("_is_param", "_shardcomm_refused")
        }
        kind = type(owned.param)
        replaced(owned.param, owned.name)
        self.distribution = owned.distribution
        self._kind = ShardedParameter if whole.is_part else WholeParameter
        owned.param = shard  # lets go of the full one
        vars(shard).update(marks)
        shard.requires_grad = requires_grad
        self.whole = shard.whole = whole  # type: ignore[attr-defined]
        self.counts = whole.counts  # in norms
        self.shard = shard
        self.guard()
        self.full = shown(full, self.distribution, requires_grad=requires_grad)
        if issubclass(kind, nn.Parameter) and not issubclass(kind, _OURS):
            _become(self.full, kind, owned.name)  # the user's own, which forward may ask for
        vars(self.full).update(marks)
        self.gradient = ParamGradient(self.full, shard, self.distribution)
        self.watch: Any = None  # see ShardedUnit.watch_gradients

    def guard(self) -> None:
        """The shard knows what it is, also where an exception ended an optimizer's step."""
        self.shard.__class__ = self._kind


class ShardedUnit:
    """The buckets of one unit (one per dtype, frozen parameters apart), and the state of its full parameters."""

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        slot: int,
        buckets: Sequence[tuple[Bucket, Sequence[OwnedParam]]],
        holders: Holders,
        *,
        secondary: SecondaryShard | None,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.module = module
        self.holders = holders
        self.mesh = holders.mesh
        self.streams = self.mesh.streams
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self.pre_forward = Trigger(Phase.PRE_FORWARD, index)
        self.post_forward = Trigger(Phase.POST_FORWARD, index)
        self.pre_backward = Trigger(Phase.PRE_BACKWARD, index)
        self.post_backward = Trigger(Phase.POST_BACKWARD, index)
        self.on_backward: Callable[[torch.Tensor], None]  # set by the engine, as are the next
        self.on_backward_end: Callable[[], None]
        self.on_gradient: Callable[[torch.Tensor], None]
        self.on_unshard: Callable[[], None]
        self.on_reshard: Callable[[], None]
        self.buckets = [
            (
                bucket,
                [
                    ShardedParam(owned, shard, full, self._whole(bucket, i, owned, shard))
                    for i, (owned, shard, full) in enumerate(
                        zip(params, bucket.shards, bucket.params, strict=True)
                    )
                ],
            )
            for bucket, params in buckets
        ]
        self.params = [param for _, params in self.buckets for param in params]
        # Without a slot where the shard is the whole unit: nothing to gather, nobody to share it with.
        self._apart = [bucket for bucket, _ in buckets if bucket.full is not bucket.shard]
        self.slot = slot if self._apart else -1
        self.versions = Versions(self._gathered_params())
        self._plain = [param.full for param in self.params if param.distribution is None]
        self._addresses = [full.data_ptr() for full in self._plain]
        self.tells = True  # of its backward: the outputs of its latest forward; else its gradients, when it has been
        self.secondary = secondary
        self._gather_bytes = sum(bucket.gather_bytes for bucket, _ in buckets)
        self.state = IDLE
        # Its full parameters in memory of their own: of `engine.gathered`, and of `unshard`.
        self.apart: Apart | None = None
        self.unsharded: Apart | None = None
        self.in_forward = self.in_method = False  # one of its module's goes on
        self.in_transform = False  # of torch.func, for which it is unsharded
        self.gathered = False
        self.gathers: list[Work] = []
        self.gradients = UnitGradients(
            self.name,
            [(bucket, [param.gradient for param in params]) for bucket, params in self.buckets],
        )
        self.marked: Marked = []  # inputs of the forward that goes on
        self.returned: type = type(None)  # what its forward returned last
        self.began: Event | None = None  # of a trace: its computation
        self.shares_slot = False  # with another unit; set with the actions
        # Where a view of a parameter, given out, would come to show another unit's.
        self.storages = frozenset(b.full.untyped_storage()._cdata for b in self._apart)
        self.show_shard()

    def _whole(self, bucket: Bucket, index: int, owned: OwnedParam, shard: torch.Tensor) -> Whole:
        how = owned.distribution
        is_cut = how is not None and bool(how.cut_over)
        placement = bucket.layout.placements[index]
        piece = bucket.layout.piece(bucket.comm.rank, index)
        part = Part(placement, piece, self.holders.everyone.size, how)
        is_owned = placement.spec.granularity == "tensor" and bucket.comm.size > 1
        return Whole(
            owned.name,
            self.name,
            self.holders.of(how),
            shard.detach(),
            part,
            is_part=bucket.layout.world_size > 1 or self.holders.differs or is_cut,
            is_here=piece.numel == placement.numel and not is_cut,
            is_elsewhere=part.elsewhere,
            gather=partial(_gathered, self.holders, bucket, index, how),
            is_owned=is_owned and not is_cut,
            is_part_owned=is_owned and is_cut,
            counts=all(comm.rank == 0 for comm in with_same(how, self.holders.everyone.inner)),
        )

    def _gathered_params(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, full parameter and rows, for `Versions`."""
        for bucket, params in self.buckets:
            for param in params if bucket in self._apart else ():
                rows = param.whole.rows
                yield param.name, param.full, rows
                if param.distribution is not None:  # computation may take this rank's part of it
                    yield param.name, local(param.full), rows

    def unshard(self) -> ExitStack:
        """Gathers the full parameters, and shows them in the model: until `reshard()`, or the end of the next backward.

        What it returns may be used as a context, which ends in `reshard()`.

        Collective. They are in memory of their own, in the dtype to compute in. What is computed with them outside of
        the unit's forward, such as `F.linear(x, embed.weight)`, gives gradients as in it. Read them, do not write. A
        state dict, saved or loaded, ends it as `reshard()` does.

        Raises:
            RuntimeError: autograd runs, or the unit is shown by `engine.gathered()`.
        """
        self.on_unshard()
        until = ExitStack()
        until.callback(self.reshard)
        return until

    def reshard(self) -> None:
        """The model shows this rank's rows again; does nothing without `unshard()`. A backward may still come.

        Raises:
            RuntimeError: a parameter was changed, which is lost.
        """
        self.on_reshard()

    def owns_any(self, modules: Collection[nn.Module]) -> bool:
        """Whether one of `modules` shows one of its parameters."""
        return any(module in modules for p in self.params for module, _ in p.owned.places)

    @property
    def converts(self) -> bool:
        """Whether it computes in another dtype than that of the shards."""
        return any(bucket.param_dtype != bucket.shard.dtype for bucket, _ in self.buckets)

    def show_full(self) -> None:
        """Forward and backward see the full parameters."""
        if self.unsharded is not None:
            return
        with plain():
            for param in self.params:
                shard, full = param.shard, param.full
                if full.requires_grad is not shard.requires_grad:  # frozen or thawed
                    full.requires_grad_(shard.requires_grad)
                for module, attribute in param.owned.places:
                    # Not setattr: nn.Module's checks cost more than the rest of a step's bookkeeping.
                    shown = module._parameters
                    if shown.get(attribute) is not shard:
                        param.owned.check(shard, full)
                    shown[attribute] = full

    def check_unchanged(self) -> None:
        """RuntimeError if its forward has changed a parameter."""
        with plain():
            name = self.versions.changed() if self._apart else None
            addresses = [full.data_ptr() for full in self._plain]
        if addresses != self._addresses:  # by `.data = ...`
            name = self._take_back()
        if name is not None:
            self.gathered = False
            raise RuntimeError(
                f"parameter {name!r} was changed in the forward of unit {self.name!r}, where it is a "
                "copy, so that the change would be lost; change parameters inside of engine.gathered(write=True), or "
                "this rank's rows of them elementwise, as by clamp_, before a forward or after the optimizer's step"
            )

    def _take_back(self) -> str:
        """Gives full parameters their own memory again; the name of one that had another."""
        names = []
        for bucket, params in self.buckets:
            for param, memory in zip(params, bucket.params, strict=True):
                if param.distribution is None and param.full.data_ptr() != memory.data_ptr():
                    param.full.data = memory
                    names.append(param.name)
        return names[0]

    def show_shard(self) -> None:
        """The optimizer, and whoever looks between steps, sees this rank's rows."""
        if self.unsharded is None:
            for param in self.params:
                shard = param.shard
                for module, attribute in param.owned.places:
                    module._parameters[attribute] = shard

    def refuse_forward(self) -> None:
        """Its forward says from now on that nobody gathers its parameters; unless this rank has all of them."""
        if any(bucket.layout.world_size > 1 for bucket, _ in self.buckets):
            self.module.register_forward_pre_hook(_refuse_forward, prepend=True)

    def watch_gradients(self) -> None:
        """Has `on_gradient` called whenever backward has left a parameter's gradient, from now on."""
        for param in self.params:
            if param.watch is None and param.full.requires_grad:
                param.watch = param.full.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]

    def stop_watching(self) -> None:
        """Lets go of the engine: Python's garbage collection does not see through autograd's hooks."""
        for param in self.params:
            if param.watch is not None:
                param.watch.remove()
                param.watch = None

    def check_unmarked_backward(self) -> None:
        """Backward has been here and no output told so: TypeError unless nothing else can have come into the slot."""
        if self.shares_slot:
            raise TypeError(
                f"backward came to unit {self.name!r} by another way than a tensor which it returned, after its "
                f"parameters were released; it returned {self.returned.__name__}: return the tensors, an auxiliary "
                "loss too, in tuples, lists, dicts or dataclasses, or use strategy='shard_grad_op'"
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

    @property
    def gather_bytes(self) -> int:
        """What this rank receives from the others in its next gather."""
        if self.secondary is not None and self.secondary.is_current:
            return self.secondary.gather_bytes
        return self._gather_bytes

    def gather(self, *, keep: bool) -> None:
        """Queues the all-gathers; `gathers` are to be waited for. `keep`: the secondary shard takes its part."""
        self.gathered = True
        if self.secondary is not None and self.secondary.is_current:
            self.versions.gather_again()
            self.gathers += self.secondary.gather()
            return
        self.versions.gather()
        for bucket in self._apart:
            work = bucket.all_gather(async_op=True)
            if work.event is not None:
                self.gathers.append(work)
        if self.secondary is not None and keep:
            self.secondary.keep()

    def overwritten(self) -> None:
        """Another unit's parameters come into the slot."""
        self.gathered = False
        if self.tells:  # else `check_unmarked_backward` says more than autograd would
            self.versions.leave()

    def outdate(self) -> None:
        """What was gathered is not to be computed with any more: the shards may have changed."""
        self.gathered = False
        if self.secondary is not None:
            self.secondary.is_current = False

    def begin_step(self) -> None:
        """A forward of the model begins, perhaps after an optimizer's step, which may have raised."""
        self.outdate()
        for param in self.params:
            param.guard()
        self.gradients.drop()

    def outdate_changed(self) -> None:
        """A backward comes to a forward from before: if the shards have changed since, they are gathered again.

        As without sharding, it computes again with the new values, and autograd refuses what needs the old ones.
        """
        if self.gathered and self.versions.are_old:
            self.outdate()


def measured(units: Iterable[ShardedUnit]) -> Footprint:
    """What `units` hold, from their tensors."""
    units = list(units)
    buckets = [bucket for unit in units for bucket, _ in unit.buckets]
    return Footprint(
        parameter_bytes=sum(bucket.shard.nbytes for bucket in buckets),
        gradient_bytes=sum(bucket.gradients.nbytes for bucket in buckets),
        slot_bytes=_memory(b.full for b in buckets if b.full is not b.shard),
        secondary_bytes=sum(unit.secondary.memory.nbytes for unit in units if unit.secondary),
        reduce_buffer_bytes=_memory(
            b.reduction.buffer for b in buckets if b.reduction.buffer is not None
        ),
        staging_bytes=_memory(
            b.reduction.staging.memory for b in buckets if b.reduction.staging is not None
        ),
        offload_bytes=sum(offload.nbytes for offload in {b.offload for b in buckets} if offload),
        padding_bytes=sum(bucket.layout.padding * bucket.shard.itemsize for bucket in buckets),
        total_parameter_bytes=sum(
            bucket.layout.numel * bucket.shard.itemsize for bucket in buckets
        ),
    )


def _become(full: nn.Parameter, kind: type[nn.Parameter], name: str) -> None:
    try:
        full.__class__ = kind
    except TypeError as error:  # of a class with __slots__, for instance
        raise TypeError(
            f"fully_shard: parameter {name!r} is a {kind.__name__}, which a gathered parameter cannot become: {error}; "
            "make it an nn.Parameter, or leave it to each rank by ignored_params="
        ) from None


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind `tensors`, once where several share them."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def _gathered(
    holders: Holders, bucket: Bucket, index: int, how: Distribution | None, held: torch.Tensor
) -> torch.Tensor:
    with holders.everyone.failing_together, holders.mesh.failing_together:
        part = bucket.gathered_rows(index, held)
    return part if how is None else how.whole(part)


def _refuse_forward(module: nn.Module, args: tuple[object, ...]) -> None:
    raise RuntimeError(
        f"forward of a {type(module).__name__} whose engine was closed: this rank has only its rows of the "
        "parameters; close the engine after the last forward, or load its full_state_dict() into another model"
    )
