"""A unit at run time: its buckets, and for each parameter the full tensor and this rank's rows of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardcomm.bucket.bucket import Bucket
from shardcomm.bucket.secondary_shard import SecondaryShard
from shardcomm.comm.words import Use
from shardcomm.copy.wire_stats import WireError
from shardcomm.parameter.full_parameter import refuse_change
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import Part
from shardcomm.parameter.tensor_parallel import Distribution, local, with_same
from shardcomm.parameter.versions import Versions
from shardcomm.parameter.whole import Held, Owned, Whole
from shardcomm.parameter.whole_parameter import WholeParameter
from shardcomm.schedule.triggers import Phase, Trigger
from shardcomm.sharded.hooks import weakly
from shardcomm.sharded.unit_gradients import UnitGradients
from shardcomm.sharded.unit_io import NOTHING_ENTERED
from shardcomm.sharded.unit_param import UnitParam
from shardcomm.stream.streams import AnyEvent
from shardcomm.stream.work import DONE, Work
from shardcomm.unit.unit import OwnedParam

if TYPE_CHECKING:
    from shardcomm.sharded.apart import Apart


class State(Enum):
    """What a unit's full parameters are in use for. Another unit may take its slot only when it is IDLE."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


# Names of their own: a step asks often, and Python 3.11 is slow to find a member in its class.
IDLE, FORWARD, BACKWARD = State


class ShardedUnit:
    """One unit at run time: its buckets, and the state of its full parameters. `Engine.unit` gives it.

    Attributes:
        name: The module's name in the model; "(root)" for the model itself.
        module: The unit's module.
        mesh: The ranks over which the unit is sharded.
        buckets: The unit's buckets, each with its parameters. There is one for each dtype, and others for frozen
            parameters and for parameters that are not cut.
        params: The parameters of all buckets.
        slot: The number of the slot for the full parameters; -1 if the shard is the whole unit.
        state: What the full parameters are in use for.
    """

    # A step comes to every unit a dozen times, where a dict of so many attributes would miss the cache again and again.
    __slots__ = (
        "__weakref__",
        "_gather_bytes",
        "_given",
        "_places",
        "_to_gather",
        "apart",
        "began",
        "buckets",
        "depth",
        "entered",
        "gathered",
        "gathers",
        "gradients",
        "holders",
        "in_method",
        "in_transform",
        "input_dtype",
        "keep_out_of_graphs",
        "mesh",
        "module",
        "name",
        "on_backward",
        "on_backward_end",
        "on_gradient",
        "on_reshard",
        "on_shard_gradient",
        "on_unshard",
        "output_dtype",
        "params",
        "post_backward",
        "post_forward",
        "pre_backward",
        "pre_forward",
        "returned",
        "secondary",
        "shares_slot",
        "slot",
        "state",
        "storages",
        "streams",
        "tells",
        "unsharded",
        "versions",
    )

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
        self.on_shard_gradient: Callable[[UnitParam, torch.Tensor], torch.Tensor]
        self.on_unshard: Callable[[], None]
        self.on_reshard: Callable[[], None]
        self.keep_out_of_graphs: Callable[[bool], None]
        # What `.data` of its full parameters has given to the forward that goes on.
        self._given: list[tuple[str, torch.Tensor]] = []
        self.buckets = [
            (
                bucket,
                [
                    UnitParam(
                        owned,
                        shard,
                        full,
                        self._whole(bucket, i, owned, shard),
                        None if bucket.full is bucket.shard else self._given,
                    )
                    for i, (owned, shard, full) in enumerate(
                        zip(params, bucket.shards, bucket.params, strict=True)
                    )
                ],
            )
            for bucket, params in buckets
        ]
        self.params = [param for _, params in self.buckets for param in params]
        # Not shown by setattr: nn.Module's checks cost more than the rest of a step's bookkeeping.
        self._places = [
            (module._parameters, attribute, param)
            for param in self.params
            for module, attribute in param.owned.places
        ]
        # Buckets that need a gather. There are none if the shard is the whole unit, which then needs no slot.
        self._to_gather = [bucket for bucket, _ in buckets if bucket.full is not bucket.shard]
        self.slot = slot if self._to_gather else -1
        self.versions = Versions(self._gathered_params())
        # Whether the outputs of its latest forward announce its backward. If not, only its gradients tell of it, later.
        self.tells = True
        self.secondary = secondary
        self._gather_bytes = sum(bucket.gather_bytes for bucket, _ in buckets)
        self.state = IDLE
        # Its full parameters in memory of their own: those of `engine.gathered`, and those of `unshard`.
        self.apart: Apart | None = None
        self.unsharded: Apart | None = None
        self.depth = 0  # how many calls of its module go on, each inside of the one before
        self.in_method = False  # whether a registered method of it goes on
        self.in_transform = False  # whether it is unsharded for a transform of torch.func
        self.gathered = False
        self.gathers: list[Work] = []
        self.gradients = UnitGradients(
            self.name,
            [(bucket, [param.gradient for param in params]) for bucket, params in self.buckets],
        )
        self.entered = (
            NOTHING_ENTERED  # what is not the caller's of the inputs of the forward that goes on
        )
        self.returned: type = type(None)  # the type that its forward returned last
        self.began: AnyEvent | None = None  # when its computation began, for a trace
        self.shares_slot = False  # whether it does so with another unit; set by `Actions`
        # The memory of the slots: a view of it that forward returns would come to show another unit's parameters.
        self.storages = frozenset(b.full.untyped_storage()._cdata for b in self._to_gather)
        self.show_shard()

    def _whole(self, bucket: Bucket, index: int, owned: OwnedParam, shard: torch.Tensor) -> Whole:
        how = owned.distribution
        is_cut = how is not None and bool(how.cut_over)
        placement = bucket.layout.placements[index]
        piece = bucket.layout.piece(bucket.comm.rank, index)
        part = Part(placement, piece, self.holders.everyone.size, how)
        held = Held.ELSEWHERE if part.elsewhere else Held.ROWS
        if piece.numel == placement.numel and not is_cut:
            held = Held.WHOLE
        owned_as = Owned.PART if is_cut else Owned.WHOLE
        has_owner = placement.spec.granularity == "tensor" and bucket.comm.size > 1
        return Whole(
            owned.name,
            self.name,
            self.holders.of(how),
            shard.detach(),
            part,
            is_part=bucket.layout.world_size > 1 or self.holders.differs or is_cut,
            held=held,
            owned=owned_as if has_owner else Owned.NOT,
            gather=partial(_gathered, self.holders, bucket, index, how),
            counts=all(comm.rank == 0 for comm in with_same(how, self.holders.everyone.inner)),
        )

    def _gathered_params(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The name, the full parameter and the rows of each parameter that is gathered, for `Versions`."""
        for bucket, params in self.buckets:
            for param in params if bucket in self._to_gather else ():
                rows = param.whole.rows
                yield param.name, param.full, rows
                if param.distribution is not None:  # computation may use its local tensor itself
                    yield param.name, local(param.full), rows

    def unshard(self) -> ExitStack:
        """Gathers the full parameters, and shows them in the model until `reshard()` or the end of the next backward.

        Collective. The full parameters are in memory of their own, in the dtype in which the unit computes. Computation
        with them outside of the unit's forward, such as `F.linear(x, embed.weight)`, gives gradients as in the forward.
        Read them, but do not write them. To save or load a state dict ends it as `reshard()` does.

        Returns:
            A context, for those who want one, which ends in `reshard()`.

        Raises:
            RuntimeError: Autograd runs, or the unit is shown by `engine.gathered()`.
        """
        self.on_unshard()
        until = ExitStack()
        until.callback(self.reshard)
        return until

    def reshard(self) -> None:
        """Shows this rank's rows in the model again. Does nothing without `unshard()`. A backward may still come.

        Raises:
            RuntimeError: A full parameter was changed, which is lost.
        """
        self.on_reshard()

    def owns_any(self, modules: Collection[nn.Module]) -> bool:
        """Whether one of `modules` shows one of the unit's parameters."""
        return any(module in modules for p in self.params for module, _ in p.owned.places)

    @property
    def converts(self) -> bool:
        """Whether the unit computes in another dtype than that of its shards."""
        return any(bucket.param_dtype != bucket.shard.dtype for bucket, _ in self.buckets)

    def show_full(self) -> None:
        """Shows the full parameters in the model, for forward and backward."""
        if self.unsharded is not None:
            return
        for params, attribute, param in self._places:
            if params.get(attribute) is not param.shard:
                param.owned.check(param.shard, param.full)
            params[attribute] = param.full

    def follow_freezing(self) -> None:
        """Makes the full parameters require gradients where the rows do, which may have been frozen or thawed."""
        with plain():
            for param in self.params:
                requires_grad = param.shard.requires_grad
                if param.full.requires_grad is not requires_grad:
                    param.full.requires_grad_(requires_grad)
                    self.watch_shards()

    def check_unchanged(self) -> None:
        """RuntimeError if the unit's forward has changed a parameter."""
        if (name := self.take_change()) is not None:
            refuse_change(name, self.name)

    def take_change(self) -> str | None:
        """The name of a parameter that the unit's forward has changed, which is gathered anew then; None: of none."""
        name = None
        if self._to_gather:
            with plain():
                name = self.versions.changed()
        if self._given:
            name = next((of for of, values in self._given if values._version), name)
            self._given.clear()
        if name is not None:
            self.gathered = False
        return name

    def show_shard(self) -> None:
        """Shows this rank's rows in the model, for the optimizer and for everything between steps."""
        if self.unsharded is None:
            for params, attribute, param in self._places:
                params[attribute] = param.shard

    def refuse_forward(self) -> None:
        """Makes later forwards raise, since nobody gathers the parameters; unless this rank has all of them."""
        if any(bucket.layout.world_size > 1 for bucket, _ in self.buckets):
            self.module.register_forward_pre_hook(_refuse_forward, prepend=True)

    def watch_gradients(self) -> None:
        """Has `on_gradient` called from now on whenever backward has left a parameter's gradient."""
        with plain():
            for param in self.params:
                if param.watch is None and param.full.requires_grad:
                    param.watch = param.full.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]

    def watch_shards(self) -> None:
        """Has `on_shard_gradient` called from now on for gradients that come to whole parameters past the forward.

        On a rank that has a parameter as a whole, autograd takes it wherever the model uses it.
        """
        for param in self.params if self.mesh.size > 1 else ():
            shard = param.shard
            if type(shard) is WholeParameter and shard.requires_grad and param.shard_watch is None:
                hook = weakly(self._pass_on, param)
                param.shard_watch = torch.Tensor.register_hook(shard, hook)  # type: ignore[no-untyped-call]

    def _pass_on(self, param: UnitParam, grad: torch.Tensor) -> torch.Tensor:
        return self.on_shard_gradient(param, grad)

    def stop_watching(self) -> None:
        """Removes these hooks; some keep the engine alive: garbage collection does not see through autograd."""
        for param in self.params:
            for watch in (param.watch, param.shard_watch):
                if watch is not None:
                    watch.remove()
            param.watch = param.shard_watch = None

    def check_unmarked_backward(self) -> None:
        """After a backward that no output has announced: checks that the parameters were still in the slot.

        Raises:
            TypeError: Another unit shares the slot.
        """
        if self.shares_slot:
            raise TypeError(
                f"backward came to unit {self.name!r} by another way than a tensor which it returned, after its "
                f"parameters were released; it returned {self.returned.__name__}: return the tensors, an auxiliary "
                "loss too, in tuples, lists, dicts or dataclasses, or use strategy='shard_grad_op'"
            )

    def prepare_double_backward(self) -> None:
        """Prepares for create_graph=True: the second backward takes ways that the first one recorded, past the outputs.

        Raises:
            RuntimeError: The parameters would be overwritten before the second backward.
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
            self.versions.gather_again()
            self.gathers += self.secondary.gather()
            return
        self.versions.gather()
        for bucket in self._to_gather:
            work = bucket.all_gather(async_op=True)
            if work is not DONE:
                self.gathers.append(work)
        if self.secondary is not None and keep:
            self.secondary.keep()

    def wire_error(self, use: Use) -> WireError | None:
        """What formats on the wire have cost its gathers, or its reduces, since the last call; None if it has none."""
        buckets = [bucket for bucket, _ in self.buckets]
        if use == "gather":
            coded = any(bucket.gather_format for bucket in buckets)
            errors = [b.block_gather.take_error() for b in buckets if b.block_gather]
        else:
            coded = any(bucket.reduce_format for bucket in buckets)
            taken = [bucket.reduction.take_error() for bucket in buckets]
            errors = [error for error in taken if error is not None]
        if not coded:
            return None
        return WireError(
            max((error.bound for error in errors), default=0.0),
            max((error.seen for error in errors), default=0.0),
            sum(error.flagged for error in errors),
        )

    def overwritten(self) -> None:
        """Notes that another unit's parameters come into the slot."""
        self.gathered = False
        if self.tells:  # else `check_unmarked_backward` says more than autograd would
            self.versions.leave()

    def outdate(self) -> None:
        """Marks gathered parameters as stale, since the shards may have changed."""
        self.gathered = False
        if self.secondary is not None:
            self.secondary.is_current = False
        if self.tells:
            self.versions.tell()

    def begin_step(self) -> None:
        """Prepares for a forward of the model. An optimizer's step, which may have raised, may have come before."""
        self.outdate()
        for param in self.params:
            param.guard()
        self.gradients.drop()

    def outdate_changed(self) -> None:
        """Marks gathered parameters as stale if the shards have changed since, as before a late backward.

        Then they are gathered again. As without sharding, a recomputation uses the new values, and autograd refuses
        what needs the old ones.
        """
        if self.gathered and self.versions.are_old:
            self.outdate()


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
