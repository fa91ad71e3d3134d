"""A unit at run time: its buckets, and for each parameter the full tensor and this rank's rows of it.

ShardedUnit ─┬─ full: FullParams          what is in its slot
             ├─ gradients: UnitGradients  what becomes of its gradients
             ├─ forward: ForwardState     its forward that is running
             └─ callbacks: Callbacks      the engine's functions that it calls
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
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
from shardcomm.parameter.whole import Held
from shardcomm.parameter.whole_parameter import WholeParameter
from shardcomm.schedule.triggers import Phase, Trigger
from shardcomm.sharded.full_params import FullParams
from shardcomm.sharded.hooks import weakly
from shardcomm.sharded.unit_gradients import UnitGradients
from shardcomm.sharded.unit_io import Entered
from shardcomm.sharded.unit_param import UnitParam
from shardcomm.sharded.unit_whole import whole_of
from shardcomm.stream.streams import AnyEvent
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


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The engine's functions that a unit calls.

    Attributes:
        on_backward: When the gradient of an output is there.
        on_backward_end: When backward has come to a marked input; told whether through the unit for certain.
        on_gradient: When backward has left a full parameter's gradient.
        on_shard_gradient: When a gradient comes to a whole parameter past the forward; returns what `.grad` gets.
        on_unshard: When the user calls `unshard()`.
        on_reshard: When the user calls `reshard()`.
        keep_out_of_graphs: To be called with whether graphs of torch.compile are to end at the unit's module.
    """

    on_backward: Callable[[torch.Tensor], None]
    on_backward_end: Callable[[bool], None]
    on_gradient: Callable[[torch.Tensor], None]
    on_shard_gradient: Callable[[UnitParam, torch.Tensor], torch.Tensor]
    on_unshard: Callable[[], None]
    on_reshard: Callable[[], None]
    keep_out_of_graphs: Callable[[bool], None]


class ForwardState:
    """The forward of a unit that is running, and what is left of the latest.

    Attributes:
        depth: How many calls of the unit's module are running, each inside of the one before.
        thread: The thread of the outermost of these calls, or of a method's; None: none runs.
        in_method: Whether a method that was registered as a forward is running.
        in_transform: Whether the unit is unsharded for a transform of torch.func.
        entered: What the unit computes with in the place of its caller's inputs; None: no forward runs.
        returned: The type that the latest forward returned.
    """

    __slots__ = ("depth", "entered", "in_method", "in_transform", "returned", "thread")

    def __init__(self) -> None:
        self.depth = 0
        self.thread: int | None = None
        self.in_method = False
        self.in_transform = False
        self.entered: Entered | None = None
        self.returned: type = type(None)


class ShardedUnit:
    """One unit at run time: its buckets, and the state of its full parameters. `Engine.unit` gives it.

    Attributes:
        name: The module's name in the model; "(root)" for the model itself.
        module: The unit's module.
        mesh: The ranks over which the unit is sharded.
        buckets: The unit's buckets, each with its parameters. There is one for each dtype, and others for frozen
            parameters and for parameters that are not cut.
        params: The parameters of all buckets.
        state: What the full parameters are in use for.
    """

    # A step comes to every unit a dozen times, where a dict of so many attributes would miss the cache again and again.
    __slots__ = (
        "__weakref__",
        "_places",
        "apart",
        "backward_in",
        "began",
        "buckets",
        "callbacks",
        "forward",
        "full",
        "gradients",
        "holders",
        "input_dtype",
        "mesh",
        "module",
        "name",
        "output_dtype",
        "params",
        "post_backward",
        "post_forward",
        "pre_backward",
        "pre_forward",
        "state",
        "streams",
        "unsharded",
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
        self.callbacks: Callbacks  # set by the engine
        given: list[tuple[str, torch.Tensor]] = []
        self.buckets = [
            (
                bucket,
                [
                    UnitParam(
                        owned,
                        bucket.shards[i],
                        bucket.params[i],
                        whole_of(owned, name, holders, bucket, i),
                        None if bucket.full is bucket.shard else given,
                    )
                    for i, owned in enumerate(params)
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
        self.state = IDLE
        self.full = FullParams(slot, self.buckets, given, secondary)
        self.gradients = UnitGradients(
            name,
            [(bucket, [param.gradient for param in params]) for bucket, params in self.buckets],
        )
        self.forward = ForwardState()
        # Its full parameters in memory of their own: those of `engine.gathered`, and those of `unshard`.
        self.apart: Apart | None = None
        self.unsharded: Apart | None = None
        self.backward_in = 0  # the backward that came to it last, as autograd counts them
        self.began: AnyEvent | None = None  # when its computation began, for a trace
        self.show_shard()

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
        self.callbacks.on_unshard()
        until = ExitStack()
        until.callback(self.reshard)
        return until

    def reshard(self) -> None:
        """Shows this rank's rows in the model again. Does nothing without `unshard()`. A backward may still come.

        Raises:
            RuntimeError: A full parameter was changed, which is lost.
        """
        self.callbacks.on_reshard()

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
        if (name := self.full.take_change()) is not None:
            refuse_change(name, self.name)

    def check_current(self) -> None:
        """RuntimeError if the rows have changed inside of the unit's forward, which has computed with the old ones."""
        if self.full.is_old:
            raise RuntimeError(
                f"forward of unit {self.name!r}: inside of it its parameters were changed, as by an optimizer's step "
                "after a backward; change them before or after it"
            )

    def show_shard(self) -> None:
        """Shows this rank's rows in the model, for the optimizer and for everything between steps."""
        if self.unsharded is None:
            for params, attribute, param in self._places:
                params[attribute] = param.shard

    def refuse_forward(self) -> None:
        """Makes later forwards raise, since nobody gathers the parameters; unless this rank has all of them."""
        if any(bucket.layout.world_size > 1 for bucket, _ in self.buckets):
            self.module.register_forward_pre_hook(_refuse_forward, prepend=True)

    def watch_gradients(self) -> bool:
        """Has `on_gradient` called from now on whenever backward has left a parameter's gradient.

        Returns:
            Whether any parameter can have one.
        """
        with plain():
            for param in self.params:
                if param.watch is None and param.full.requires_grad:
                    param.watch = param.full.register_post_accumulate_grad_hook(
                        self.callbacks.on_gradient
                    )  # type: ignore[no-untyped-call]
            return any([param.full.requires_grad for param in self.params])

    def watch_shards(self) -> None:
        """Has `on_shard_gradient` called from now on for gradients that come to whole parameters past the forward.

        On a rank that has a parameter as a whole, also as the one that owns it, autograd takes it wherever the model
        uses it.
        """
        for param in self.params if self.mesh.size > 1 else ():
            shard = param.shard
            is_whole = type(shard) is WholeParameter or param.whole.held is Held.WHOLE
            if is_whole and shard.requires_grad and param.shard_watch is None:
                hook = weakly(self._pass_on, param)
                param.shard_watch = torch.Tensor.register_hook(shard, hook)  # type: ignore[no-untyped-call]

    def _pass_on(self, param: UnitParam, grad: torch.Tensor) -> torch.Tensor:
        return self.callbacks.on_shard_gradient(param, grad)

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
        if self.full.shares_slot:
            raise TypeError(
                f"backward came to unit {self.name!r} by another way than a tensor which it returned, after its "
                f"parameters were released; it returned {self.forward.returned.__name__}: return the tensors, an "
                "auxiliary loss too, in tuples, lists, dicts or dataclasses, or put them into one that it is given, or "
                "use strategy='shard_grad_op'"
            )

    def prepare_double_backward(self) -> None:
        """Prepares for create_graph=True: the second backward takes ways that the first one recorded, past the outputs.

        Raises:
            RuntimeError: The parameters would be overwritten before the second backward.
        """
        if self.full.shares_slot:
            raise RuntimeError(
                f"backward with create_graph=True came to unit {self.name!r}, whose parameters share slot "
                f"{self.full.slot} with other units' and would be overwritten before the second backward; use "
                "strategy='shard_grad_op' or 'no_shard'"
            )
        self.watch_gradients()

    def wire_error(self, use: Use) -> WireError | None:
        """What formats on the wire have cost its gathers, or its reduces, since the last call; None if it has none."""
        buckets = [bucket for bucket, _ in self.buckets]
        if use == "gather":
            coded = any(bucket.gather_format for bucket in buckets)
            taken = [bucket.gathering.take_error() for bucket in buckets]
        else:
            coded = any(bucket.reduce_format for bucket in buckets)
            taken = [bucket.reduction.take_error() for bucket in buckets]
        if not coded:
            return None
        errors = [error for error in taken if error is not None]
        return WireError(
            max((error.bound for error in errors), default=0.0),
            max((error.seen for error in errors), default=0.0),
            sum(error.flagged for error in errors),
        )

    def begin_step(self) -> None:
        """Prepares for a forward of the model. An optimizer's step, which may have raised, may have come before."""
        self.full.outdate()
        for param in self.params:
            param.guard()
        self.gradients.drop()


def _refuse_forward(module: nn.Module, args: tuple[object, ...]) -> None:
    raise RuntimeError(
        f"forward of a {type(module).__name__} whose engine was closed: this rank has only its rows of the "
        "parameters; close the engine after the last forward, or load its full_state_dict() into another model"
    )
