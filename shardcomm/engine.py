"""A minimal FSDP engine: hooks that fire triggers, and the actions that the schedule lists for them.

It reads in the order a step happens. For each unit:

    pre_forward     wait until its parameters are gathered (a prefetch mostly has been); show the full ones
    post_forward    show this rank's rows again; release the slot if another unit needs it
    pre_backward    as pre_forward, and prefetch in the other direction
    post_backward   release, and reduce the gradients over the ranks
    end_of_backward wait for the reduces; the optimizer's parameters have their `.grad`

What is issued, awaited and released at each trigger is decided in `schedule.py`, and done in `actions.py`. A step that
deviates from the schedule (a unit skipped, repeated, or recomputed) is gathered on demand, and planned for from there.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardcomm import boundary
from shardcomm.actions import Actions
from shardcomm.gradients import Gradients, OnNonfinite
from shardcomm.mesh import Mesh
from shardcomm.mixed_precision import MixedPrecision
from shardcomm.optimizer_state import OptimizerState
from shardcomm.schedule import Phase, Schedule, Trigger
from shardcomm.sharded_unit import Footprint, ShardedUnit, State
from shardcomm.state_dict import (
    Parts,
    full_state_dict,
    install_hooks,
    load_state_dict,
    parts_of,
    state_dict,
)
from shardcomm.trace import Trace
from shardcomm.traffic import Traffic


class Engine:
    """Drives the communication of one model; made by `fully_shard`.

    Attributes:
        model: with this rank's rows as its parameters.
        mesh: the ranks; `mesh.rank` of `mesh.size` is this one.
        units: what is gathered and reduced together; the model itself is the first.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        units: Sequence[ShardedUnit],
        plan: Callable[[Sequence[Trigger], bool], Schedule],
        order: Sequence[Trigger],
        check: Callable[[], None],
        mixed_precision: MixedPrecision,
        on_nonfinite: OnNonfinite,
        *,
        owns_mesh: bool,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self._owns_mesh = owns_mesh
        self.units = units
        self._root = units[0]
        self._input_dtype = mixed_precision.input_dtype
        self._output_dtype = mixed_precision.output_dtype
        self._streams = mesh.streams
        self._actions = Actions(units, mesh)
        self._gradients = Gradients(units, mesh, on_nonfinite)
        self._check = check

        # Orders differ from step to step where layers are dropped at random; the latest are worth keeping.
        self._program = functools.lru_cache(maxsize=8)(
            lambda order, backward: self._actions.program(plan(order, backward))
        )
        self._train = self._program(order, True)
        self._evaluate = self._program(order, False)
        self._current = self._train
        self._seen: list[Trigger] = []  # this forward's triggers, to learn the order from
        self._in_backward = False
        self._at_end: weakref.ref[Any] | None = None  # what autograd calls then, while it means to
        self._thread = threading.get_ident()
        self._thread_ranks_on_gpu = mesh.device.type != "cpu" and any(
            comm.transport == "local" and comm.size > 1 for comm in (mesh.shard, mesh.replicate)
        )
        self._hooks = [hook for unit in units for hook in self._install(unit)]
        install_hooks(units, self._parts, self._forget_gathers)

    # What a training loop calls.

    @property
    def traffic(self) -> Traffic:
        """Bytes moved and time waited so far."""
        return self._actions.traffic

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards in here stay unsharded on this rank; the next backward outside reduces the sum.

        The sum is taken in `reduce_dtype` where that is wider than `param_dtype`. It is not in `.grad`, so
        `zero_grad()` does not drop it (as in PyTorch FSDP2); an exception in a backward does.
        """
        before, self._actions.sync = self._actions.sync, False
        try:
            yield
        finally:
            self._actions.sync = before

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Names of units in whose gradients the latest backward left NaN or Inf; see `on_nonfinite`."""
        return self._gradients.nonfinite

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sums of gradients over all ranks are divided by `factor` from now on, instead of by the number of ranks.

        Raises:
            ValueError: `factor` is not a number above 0, or float32 cannot hold what it makes of the sums.
        """
        if isinstance(factor, bool) or not (
            isinstance(factor, int | float) and 1e-30 <= factor <= 1e30
        ):
            raise ValueError(
                f"set_gradient_divide_factor: factor is {factor!r}; it must be a number above 0, from 1e-30 to 1e30"
            )
        for unit in self.units:
            for bucket, _ in unit.buckets:
                bucket.grad_scale = self.mesh.size / factor

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_` on the whole model, with one all-reduce of one number.

        Raises:
            ValueError: `max_norm` is not a number of at least 0, or infinite.
        """
        limit = math.nan
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            limit = math.nan if isinstance(max_norm, str) else float(max_norm)
        if not limit >= 0:
            raise ValueError(
                f"clip_grad_norm_: max_norm is {max_norm!r}; it must be a number of at least 0, or math.inf"
            )
        return self._gradients.clip_norm_(limit)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the model, with the model's own names: for `torch.distributed.checkpoint` (DCP).

        Parameters are ShardTensors, views of the shards, from which DCP saves and into which it loads; no rank sends
        parameters. With `load_state_dict` this makes the engine itself DCP's `Stateful`::

            state = {"model": engine, "optimizer": engine.optimizer_state(optimizer)}
            torch.distributed.checkpoint.save(state, checkpoint_id=path)  # load: the same, with load

        It needs a torch process group of the same ranks (Gloo is enough) to agree on what is where. A checkpoint can
        be loaded with any number of ranks, strategy, granularity and dims, by PyTorch's FSDP2 and by a plain model, and
        theirs here (`torch.distributed.checkpoint.state_dict.get_state_dict` gives the same names).
        """
        self._settle()
        return state_dict(self.model, self._parts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's part of what `state_dict()` gave, or of full tensors; no communication.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs; nothing is changed then.
        """
        self._forget_gathers()
        load_state_dict(self.model, self._parts, state_dict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Saves and loads the state of an optimizer of this model by DCP; see `state_dict`."""
        return OptimizerState(optimizer, self.model, self._parts)

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The model's state dict with full parameters, original names and order, in CPU memory; collective.

        On every rank, or on `rank` alone (the others get {}; ValueError if it is no rank of the mesh). Parameters are
        gathered unit by unit: at any moment at most one unit exists in full besides the result.
        """
        self._settle()
        return full_state_dict(self.model, self.units, self.mesh, rank)

    @functools.cached_property
    def _parts(self) -> Parts:
        return parts_of(self.units, self.mesh.size)

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Records what this rank computes, gathers, reduces and waits for in here; see `shardcomm.trace`.

        Afterwards `trace.timeline()`, which is collective, has it of all ranks.
        """
        self._actions.trace = Trace(self.mesh, self._streams)
        try:
            yield self._actions.trace
        finally:
            self._actions.trace = None

    def footprint(self) -> Footprint:
        """Bytes this rank holds."""
        return Footprint.of(self.units)

    def close(self) -> None:
        """Ends training: removes the hooks, and leaves the groups made of a DeviceMesh.

        The model keeps this rank's rows. State dicts can still be saved and loaded (but not `full_state_dict` over a
        DeviceMesh, since it gathers). A forward raises RuntimeError, unless each rank has the whole model ("no_shard").
        """
        while self._hooks:
            self._hooks.pop().remove()
        for unit in self.units:
            unit.refuse_forward()
        self._settle()
        if self._owns_mesh:
            self.mesh.close()

    # A step, in the order it happens. Hooks do nothing but call these.

    def _pre_forward(
        self, unit: ShardedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        recompute = boundary.in_backward()
        if not recompute:
            if unit is self._root:
                self._begin_forward()
            unit.state = State.FORWARD
            if self._root.state is State.FORWARD:
                self._seen.append(unit.trigger[Phase.PRE_FORWARD])
                self._fire(unit.trigger[Phase.PRE_FORWARD])
            else:  # called by itself: nothing has told whether its parameters have changed
                self._actions.release(unit)
        self._actions.require(unit)
        self._actions.begin_compute(unit)
        unit.show_full()
        args, kwargs, marked = boundary.enter(args, kwargs, self._input_dtype, unit.on_backward_end)
        if marked and not recompute:
            unit.marked = marked
            unit.pending_calls += 1
        return args, kwargs

    def _begin_forward(self) -> None:
        """What was gathered before is stale: the optimizer may have stepped."""
        self._settle()
        for unit in self.units:
            unit.gathered = False
            for param in unit.params:
                param.guard()
            for bucket, _ in unit.buckets:
                # Not what is pinned, nor whole gradients: to come by as much memory takes a CPU long.
                if bucket.offload is None and self.mesh.shard.size > 1:
                    bucket.gradients.drop()
        self._seen.clear()
        self._thread = threading.get_ident()
        self._current = self._train if torch.is_grad_enabled() else self._evaluate

    def _forget_gathers(self) -> None:
        """Waits for what is queued, and gathers anew what is used next."""
        self._settle()
        for unit in self.units:
            unit.gathered = False

    def _settle(self) -> None:
        """Waits for what is queued. What an exception left of a step is forgotten, with its backward's gradients."""
        for unit in self.units:
            if unit.state is not State.IDLE:
                unit.show_shard()
                unit.state = State.IDLE
                unit.marked = []
            if self._in_backward:
                unit.forget_backward()
        self._in_backward = False
        self._actions.wait_all()

    def _post_forward(self, unit: ShardedUnit, output: Any) -> Any:
        self._actions.end_compute(unit, "forward")
        boundary.carry_back(unit.marked)
        unit.marked = []
        unit.returned = type(output)
        dtype = self._output_dtype if unit is self._root else None
        output, marked = boundary.leave(output, dtype, unit.storages, unit.on_backward)
        if not marked and torch.is_grad_enabled():
            unit.watch_gradients()
        if unit.state is State.BACKWARD:  # recomputed, and its backward goes on
            return output
        unit.show_shard()
        in_step = self._root.state is State.FORWARD
        unit.state = State.IDLE
        if boundary.in_backward():  # recomputed; stays gathered, since its backward comes next
            return output
        if in_step:
            self._seen.append(unit.trigger[Phase.POST_FORWARD])
            self._fire(unit.trigger[Phase.POST_FORWARD])
        if unit is self._root:
            self._end_forward()
        if self._root.state is not State.FORWARD:  # the model's user may write shards now
            self._actions.wait_host()
        return output

    def _end_forward(self) -> None:
        """Plans for the order that was seen, from this step's backward on."""
        order = tuple(self._seen)
        if torch.is_grad_enabled():
            self._current = self._train = self._program(order, True)
        else:
            self._evaluate = self._program(order, False)
            self._actions.wait_all()  # for a prefetch of a unit that was not called

    def _pre_backward(self, unit: ShardedUnit) -> None:
        if self._at_end is not None and self._in_backward and self._at_end() is None:
            self._settle()  # an exception ended the backward before
        if unit.state is State.BACKWARD:  # another of its outputs came first
            return
        if torch.is_grad_enabled():
            unit.prepare_double_backward()
        if not self._in_backward:
            self._check_thread()
            self._in_backward = True
            self._gradients.begin_backward()
            at_end = functools.partial(self._end_of_backward)  # autograd alone keeps it
            self._at_end = weakref.ref(at_end)
            torch.autograd.Variable._execution_engine.queue_callback(at_end)
        occupant = self._actions.occupant(unit)
        if occupant is not None and occupant.state is State.BACKWARD:
            # No input of it has a gradient whose end would tell; autograd runs what was recorded last first.
            self._release_from_backward(occupant)
        unit.state = State.BACKWARD
        unit.needs_reduce = True
        self._fire(unit.trigger[Phase.PRE_BACKWARD])
        self._actions.require(unit)
        self._actions.begin_compute(unit)
        unit.show_full()

    def _check_thread(self) -> None:
        """Thread ranks on one GPU wait for each other, which autograd's only thread of that GPU must not."""
        if self._thread_ranks_on_gpu and threading.get_ident() != self._thread:
            raise RuntimeError(
                f"backward runs in autograd's own thread of {self.mesh.device}, where the ranks of a local group "
                "would wait for each other for ever; run it inside torch.autograd.set_multithreading_enabled(False)"
            )

    def _post_backward(self, unit: ShardedUnit) -> None:
        unit.pending_calls = max(0, unit.pending_calls - 1)
        if unit.state is not State.BACKWARD:
            unit.check_unmarked_backward()
        self._release_from_backward(unit)

    def _release_from_backward(self, unit: ShardedUnit) -> None:
        self._actions.end_compute(unit, "backward")
        unit.show_shard()
        unit.state = State.IDLE
        self._fire(unit.trigger[Phase.POST_BACKWARD])

    def _on_gradient(self, unit: ShardedUnit) -> None:
        """A gradient is complete in a unit whose outputs cannot tell of its backward."""
        if unit.state is not State.BACKWARD:
            unit.check_unmarked_backward()
            self._pre_backward(unit)

    def _end_of_backward(self) -> None:
        for unit in self.units:
            unit.pending_calls = 0
            if unit.state is State.BACKWARD:
                unit.show_shard()
                unit.state = State.IDLE
        # In the order in which a backward would have come to them, the same on every rank.
        for unit in reversed(self.units):
            self._actions.reduce(unit)
            self._actions.all_reduce(unit)
        self._fire(Trigger(Phase.END_OF_BACKWARD, -1))
        self._actions.wait_all()  # for a prefetch of a unit that backward did not come to, too
        for unit in self.units:
            unit.gathered = False
        self._in_backward = False
        if self._actions.sync:
            self._gradients.publish()
            self._check()
        else:
            for unit in self.units:
                unit.keep_gradients()

    def _fire(self, trigger: Trigger) -> None:
        for act, unit in self._current.get(trigger, ()):
            act(unit)

    # Set-up.

    def _install(self, unit: ShardedUnit) -> Iterator[Any]:
        unit.on_backward = lambda _grad: self._pre_backward(unit)
        unit.on_backward_end = lambda: self._post_backward(unit)
        unit.on_gradient = lambda _param: self._on_gradient(unit)

        def pre_forward(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if module is not unit.module:
                raise RuntimeError(
                    f"forward of a copy of unit {unit.name!r}, whose hooks are those of the original's engine; copy a "
                    "model before fully_shard, or load its full_state_dict() into another one"
                )
            return self._pre_forward(unit, args, kwargs)

        def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self._post_forward(unit, output)

        if unit.module._compiled_call_impl is not None:
            # `module.compile()` compiles its hooks too; what is between them is what should be.
            pre_forward = torch.compiler.disable(pre_forward)  # type: ignore[no-untyped-call]
            post_forward = torch.compiler.disable(post_forward)  # type: ignore[no-untyped-call]
        yield unit.module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
        yield unit.module.register_forward_hook(post_forward)
