"""A minimal FSDP engine: hooks that fire triggers, and the actions that the schedule lists for them.

It reads in the order a step happens. For each unit:

    pre_forward     wait until its parameters are gathered (a prefetch mostly has been); show the full ones
    post_forward    show this rank's rows again; release the slot if another unit needs it
    pre_backward    as pre_forward, and prefetch in the other direction
    post_backward   release, and reduce the gradients over the ranks; `.grad` of units whose reduce has ended
    end_of_backward wait for the reduces that are left; all parameters have their `.grad`

What is issued, awaited and released at each trigger is decided in `schedule/schedule.py`, and done in `actions.py`. A
step that deviates from the schedule (a unit skipped, repeated, or recomputed) is gathered on demand, and planned for
from there.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch._C import _is_tracing as is_tracing

from shardcomm._C import CommError
from shardcomm.arguments.checks import check_flag, check_type
from shardcomm.checkpoint.elsewhere import Elsewhere
from shardcomm.checkpoint.optimizer_state import OptimizerState
from shardcomm.checkpoint.state_dict import (
    Parts,
    full_state_dict,
    install_hooks,
    load_state_dict,
    parts_of,
    state_dict,
)
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import FailingTogether, Mesh
from shardcomm.engine import forward_methods
from shardcomm.engine.actions import Actions
from shardcomm.engine.gradients import Gradients, OnNonfinite
from shardcomm.parameter import versions
from shardcomm.planner.footprint import Footprint
from shardcomm.schedule.schedule import Phase, Schedule, Trigger
from shardcomm.sharded import unit_io
from shardcomm.sharded.apart import Apart, gathered, nobodys_gradient
from shardcomm.sharded.hooks import Hooks
from shardcomm.sharded.sharded_unit import (
    BACKWARD,
    FORWARD,
    IDLE,
    ShardedParam,
    ShardedUnit,
    measured,
)
from shardcomm.trace.recording import Trace
from shardcomm.trace.traffic import Traffic


class Engine:
    """Drives the communication of one model; made by `fully_shard`.

    Attributes:
        model: with this rank's rows as its parameters.
        mesh: the ranks; `mesh.rank` of `mesh.size` is this one.
        units: what is gathered and reduced together; the model itself is the first, by the name "(root)".
        elsewhere: what other ranks hold of the model, where they have other experts.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        units: Sequence[ShardedUnit],
        plan: Callable[[Sequence[Trigger], bool], Schedule],
        order: Sequence[Trigger],
        check: Callable[[], None],
        on_nonfinite: OnNonfinite,
        *,
        strategy: str,
        owned: Sequence[Mesh | Communicator],
        elsewhere: Elsewhere,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.units = units
        self._strategy = strategy
        self._owned = owned
        self.elsewhere = elsewhere
        meshes = dict.fromkeys([mesh, *(unit.mesh for unit in units)])
        self._together = FailingTogether([*meshes])
        self._root = units[0]
        self._streams = mesh.streams
        self._actions = Actions(units, self._together)
        self._gradients = Gradients(units, mesh, on_nonfinite)
        # Experts that nobody gathers: a forward without them, on some of their ranks, is none that the others wait for.
        self._may_be_left_out = [
            u for u in units if u.slot < 0 and u.mesh.size not in (1, mesh.size)
        ]
        self._check = check
        self._divide_gradients(mesh.size)

        # Orders differ from step to step where layers are dropped at random; the latest are worth keeping.
        self._program = functools.lru_cache(maxsize=8)(
            lambda order, backward: self._actions.program(plan(order, backward))
        )
        self._train = self._program(order, True)
        self._evaluate = self._program(order, False)
        self._current = self._train
        self._seen: list[Trigger] = []  # this forward's triggers, to learn the order from
        self._changes = versions.changes  # of rows, by the time of the latest forward
        self._in_backward = False
        self._backward_failed = False  # an exception ended it, of which nothing is cleared up yet
        self._at_end: weakref.ref[Any] | None = None  # what autograd calls then, while it means to
        self._thread = threading.get_ident()
        self._thread_ranks_on_gpu = mesh.device.type != "cpu" and any(
            comm.transport == "local" and comm.size > 1
            for each in meshes
            for comm in (each.shard, each.replicate)
        )
        self._hooks = [hook for unit in units for hook in self._install(unit)]
        install_hooks(units, self._parts, self._begin_state_dict)
        for param in self._parts if elsewhere.ambiguous else ():
            param.whole.check_names = elsewhere.check  # type: ignore[attr-defined]

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

    def set_requires_all_reduce(self, requires: bool) -> None:
        """With False, backwards reduce gradients to shards and leave out the all-reduce among replicas, from now on.

        The sums of such backwards are kept as shards, in the parameters' dtype, and take part in the all-reduce of the
        first backward after True, which shows the `.grad`. For accumulation with strategy "hybrid_shard": less memory
        than in `no_sync`, less communication than without. As PyTorch FSDP2's method; without replicas nothing changes.

        Raises:
            ValueError: `requires` is no bool.
        """
        check_flag("set_requires_all_reduce", "requires", requires)
        self._actions.all_reduces = requires or all(
            unit.mesh.replicate.size == 1 for unit in self.units
        )

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
        self._divide_gradients(factor)

    def _divide_gradients(self, factor: float) -> None:
        for unit in self.units:
            for bucket, _ in unit.buckets:
                bucket.grad_scale = unit.mesh.size / factor

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_` on the whole model, with one all-reduce of one number. Gradients of
        `ignored_params`, which are each rank's own, are neither counted nor scaled.

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

    @contextlib.contextmanager
    def gathered(self, module: nn.Module | None = None, *, write: bool = False) -> Iterator[None]:
        """In here the parameters of `module` (default: the model), and of what is in it, are the full ones; collective.

        They are copies, in memory of their own and in the dtype of this rank's rows, and so are the other parameters
        of the units around them. State dicts are full ones. A forward under `torch.no_grad()` computes with them; one
        with gradients is refused. With `write=True` each rank takes its rows of the values they have at the end, unless
        an exception ends it: every rank must write the same (merging adapters, initialising). Without, a change raises.

        Raises:
            TypeError: `module` is no module.
            ValueError: it is none of the model's, or `write` is no bool, or True inside of a `gathered` without it.
            RuntimeError: autograd runs; or at the end a parameter was changed without `write`, replaced or converted,
                or rows were changed, by an optimizer's step for instance.
        """
        check_flag("gathered", "write", write)
        module = self.model if module is None else module
        check_type(
            "gathered", "module", module, nn.Module, "a module of the model, or None for all of it"
        )
        inside = set(module.modules())
        if not inside <= set(self.model.modules()):
            raise ValueError(
                f"gathered: module is a {type(module).__name__} that is none of the model's; give one of its modules"
            )
        self.release()
        units = [unit for unit in self.units if unit.owns_any(inside)]
        with gathered(units, self._together, write=write):
            yield

    def unit(self, module: nn.Module) -> ShardedUnit:
        """The unit whose parameters are gathered for the forward of `module`: to `unshard()` and `reshard()` it.

        Raises:
            ValueError: `module` is not a unit's; the message names the unit around it.
        """
        for unit in self.units:
            if unit.module is module:
                return unit
        around = [unit.name for unit in self.units if module in unit.module.modules()]
        where = f"is part of unit {around[-1]!r}" if around else "is none of the model's modules"
        raise ValueError(
            f"module, a {type(module).__name__}, {where}; give the module of one of the units "
            f"{', '.join(repr(unit.name) for unit in self.units)}, or make it one by fully_shard(..., units=)"
        )

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Has the method `name` of a unit's `module`, such as `generate`, gather its parameters as its forward does.

        Inputs and outputs are cast as a forward's, and gradients flow. What the method calls of the module, its forward
        too, is part of the same use; units inside of it are gathered call by call. As PyTorch's
        `register_fsdp_forward_method`. Every rank must call the method, and come to the same units in it.

        Raises:
            ValueError: `module` is not a unit's, or has no such method.
        """
        after = functools.partial(self._post_forward, method=True)
        unit = self.unit(module)
        self._hooks.append(
            forward_methods.install(unit, name, self._pre_forward, after, self._forward_failed)
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the model, with the model's own names: for `torch.distributed.checkpoint` (DCP).

        Parameters are ShardTensors, views of the shards, from which DCP saves and into which it loads; no rank sends
        parameters, so that it works after a CommError, too. With `load_state_dict` this makes the engine itself DCP's
        `Stateful`::

            state = {"model": engine, "optimizer": engine.optimizer_state(optimizer)}
            torch.distributed.checkpoint.save(state, checkpoint_id=path)  # load: the same, with load

        It needs a torch process group of the same ranks (Gloo is enough) to agree on what is where. A checkpoint can
        be loaded with any number of ranks, strategy, granularity and dims, by PyTorch's FSDP2 and by a plain model, and
        theirs here (`torch.distributed.checkpoint.state_dict.get_state_dict` gives the same names).
        """
        self._begin_state_dict()
        return state_dict(self.model, self._parts)

    def _begin_state_dict(self) -> None:
        """Raises RuntimeError if other ranks have other parameters of the same names."""
        self.elsewhere.check("state_dict")
        self.release()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's part of what `state_dict()` gave, or of full tensors; no communication.

        What is of experts that only other ranks have is passed over.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs; nothing is changed then.
        """
        self.release()
        load_state_dict(self.model, self._parts, state_dict, self.elsewhere.names)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Saves and loads the state of an optimizer of this model by DCP; see `state_dict`.

        Raises:
            ValueError: it has a parameter that is not the model's.
            RuntimeError: other ranks have other parameters of the same names.
        """
        self.elsewhere.check("optimizer_state")
        return OptimizerState(optimizer, self.model, self.elsewhere)

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The model's state dict with full parameters, original names and order, in CPU memory; collective.

        On every rank, or on `rank` alone (the others get {}; ValueError if it is no rank of the mesh); where parameters
        are DTensors, on that rank of each mesh. Parameters are gathered unit by unit: at any moment at most one unit
        exists in full besides the result. Of a model whose ranks have other experts it is the whole, with all experts;
        each rank holds a copy of its own meanwhile.

        Raises:
            ValueError: `rank` is none.
            RuntimeError: other ranks have other parameters of the same names, or extra state that is no tensor.
        """
        self.elsewhere.check("full_state_dict")
        self.release()
        return full_state_dict(
            self.model, self.units, self._parts, self.elsewhere, self._together, rank
        )

    def release(self) -> None:
        """Waits for what is queued, and lets go of full parameters: what computes next gathers anew.

        Call it before the memory of shards is written by another way than the model's parameters. Where a rank has
        failed, the next collective raises CommError, and this does not.

        Raises:
            RuntimeError: autograd runs, and needs them.
        """
        if unit_io.in_backward():
            raise RuntimeError(
                "a state dict, engine.gathered() or engine.release(): autograd runs; call it before or after a backward"
            )
        self._settle()
        for unit in self.units:
            unit.outdate()
            self._reshard(unit)

    @functools.cached_property
    def _parts(self) -> Parts:
        return parts_of(self.units)

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Records what this rank computes, gathers, reduces and waits for in here; see `shardcomm.trace.recording`.

        Afterwards `trace.timeline()`, which is collective, has it of all ranks.
        """
        self._actions.trace = Trace(self.mesh, self._streams)
        try:
            yield self._actions.trace
        finally:
            self._actions.trace = None

    def footprint(self) -> Footprint:
        """Bytes this rank holds."""
        return measured(self.units)

    def close(self) -> None:
        """Ends training: removes the hooks, and leaves the groups made of a DeviceMesh; after a CommError, too.

        The model keeps this rank's rows. State dicts can still be saved and loaded (but not `full_state_dict` over a
        DeviceMesh, since it gathers). A forward raises RuntimeError, unless each rank has the whole model ("no_shard").
        """
        while self._hooks:
            self._hooks.pop().remove()
        for unit in self.units:
            unit.refuse_forward()
            unit.stop_watching()
        with contextlib.ExitStack() as leaving:  # whatever `release` raises
            for group in (*self._owned, *self.mesh.inner.values()):
                leaving.callback(group.close)
            self.release()

    def __repr__(self) -> str:
        mesh, held = self.mesh, self.footprint()
        names = [
            unit.name + (f" (over {unit.mesh.size})" if unit.mesh.size != mesh.size else "")
            for unit in self.units
        ]
        if len(names) > 6:
            names[4:-1] = [f"... {len(names) - 5} more ..."]
        numbers = {
            name.removesuffix("_bytes").replace("_", " "): count
            for name, count in asdict(held).items()
            if count and name not in ("padding_bytes", "total_parameter_bytes")
        }
        return "\n".join(
            [
                f"Engine({self._strategy} of a {type(self.model).__name__} over {mesh.replicate.size} x "
                f"{mesh.shard.size} ranks (replicas x shards), of which this is {mesh.rank}",
                f"  {len(self.units)} units: {', '.join(names)}",
                f"  {sum(len(unit.params) for unit in self.units)} parameters of "
                f"{held.total_parameter_bytes:,} bytes",
                "  bytes of this rank: "
                + ", ".join(f"{name} {count:,}" for name, count in numbers.items())
                + ")",
            ]
        )

    # A step, in the order it happens. Hooks do nothing but call these.

    def _pre_forward(
        self, unit: ShardedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if unit.apart is not None:
            self._check_apart(unit, unit.apart)
            return args, kwargs
        if is_tracing():
            raise _keeps_constants("torch.jit.trace", unit)
        if unit.in_method:
            args, kwargs = unit_io.cast((args, kwargs), unit.input_dtype)
            return args, kwargs
        recompute = unit_io.in_backward()
        if not recompute:
            if unit is self._root:
                self._begin_forward()
            unit.state = FORWARD
            if self._root.state is FORWARD:
                self._seen.append(unit.pre_forward)
                if unit.pre_forward in self._current:
                    self._fire(unit.pre_forward)
            else:  # called by itself: nothing has told whether its parameters have changed
                unit.outdate()
                _check_not_recorded(unit)
        elif versions.changes != self._changes:
            unit.outdate_changed()
        if unit_io.in_transform():
            return self._enter_transformed(unit, args, kwargs)
        self._actions.require(unit)
        unit.show_full()
        args, kwargs, marked = unit_io.enter(args, kwargs, unit.input_dtype, unit.on_backward_end)
        if marked and not recompute:
            unit.marked = marked
            unit.gradients.call()
        elif not marked and torch.is_grad_enabled():
            # No input tells of a backward that passes the outputs by: of features that a hook took.
            unit.watch_gradients()
        return args, kwargs

    def _check_apart(self, unit: ShardedUnit, apart: Apart) -> None:
        """RuntimeError if a forward of `unit` inside of `gathered` cannot be right."""
        if torch.is_grad_enabled() and apart.is_shown:
            raise nobodys_gradient("a forward with gradients enabled", unit)
        if unit is not self._root and self._root.state is not FORWARD:
            return
        if any(u.converts and u.apart is None for u in self.units):
            raise RuntimeError(
                "a forward of the model inside of engine.gathered() of a part of it: with mixed precision the rest "
                "computes in another dtype; gather the whole model by engine.gathered()"
            )

    def _enter_transformed(
        self, unit: ShardedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inside of torch.func's transforms no mark tells of a backward: the parameters are in memory that stays."""
        with unit_io.outside_transforms():
            unit.in_transform = unit.unsharded is None
            self._unshard(unit)
        args, kwargs = unit_io.cast((args, kwargs), unit.input_dtype)
        return args, kwargs

    def _begin_forward(self) -> None:
        """What was gathered before is stale: the optimizer may have stepped."""
        _check_not_recorded(self._root)
        self._settle()
        for unit in self.units:
            unit.begin_step()
        self._changes = versions.changes
        self._seen.clear()
        self._thread = threading.get_ident()
        self._actions.keeps_secondary = torch.is_grad_enabled()
        self._current = self._train if torch.is_grad_enabled() else self._evaluate

    def _unshard(self, unit: ShardedUnit) -> None:
        if unit.apart is not None:
            raise RuntimeError(
                f"unshard of unit {unit.name!r} inside of engine.gathered(), where its full parameters are shown "
                "already, until the end of that; call it after"
            )
        if unit.unsharded is not None:
            return
        if unit_io.in_backward():
            raise RuntimeError(f"unshard of unit {unit.name!r}: autograd runs; call it before")
        self._actions.wait_all()  # what is queued comes first, on every rank
        unit.unsharded = Apart(
            unit, self._together, to_compute=True, on_gradient=self._on_unsharded_gradient
        )

    def _reshard(self, unit: ShardedUnit) -> None:
        unsharded, unit.unsharded = unit.unsharded, None
        if unsharded is None:
            return
        try:
            unsharded.check()
        finally:
            unit.show_shard()
            if unit.state is not IDLE:
                unit.show_full()

    def _settle(self) -> None:
        """Waits for what is queued. What an exception left of a step is forgotten, with its backward's gradients."""
        for unit in self.units:
            unit.in_forward = False
            if unit.state is not IDLE:
                unit.show_shard()
                unit.state = IDLE
                unit.marked = []
            if self._in_backward:
                unit.gradients.forget()
        self._in_backward = self._backward_failed = False
        # What it gives is dropped; where a rank has failed, the next collective says so.
        with contextlib.suppress(CommError):
            self._actions.wait_all()

    def _post_forward(self, unit: ShardedUnit, output: Any, *, method: bool = False) -> Any:
        if unit.apart is not None:
            return output
        if unit.in_method:
            return unit_io.cast(output, unit.output_dtype)
        if unit.state is IDLE and not unit_io.in_backward():
            raise RuntimeError(
                f"forward of unit {unit.name!r}: inside of it a state dict or engine.gathered() put this rank's rows "
                "in the place of its parameters; call these before or after the model"
            )
        unit.check_unchanged()
        if unit.began is not None:
            self._actions.end_compute(unit, unit.began, "forward")
        unit_io.carry_back(unit.marked)
        unit.marked = []
        unit.returned = type(output)
        if unit_io.in_transform():
            output, marked = unit_io.cast(output, unit.output_dtype), False
            self._leave_transform(unit)
        else:
            output, marked = unit_io.leave(
                output, unit.output_dtype, unit.storages, unit.on_backward
            )
        if torch.is_grad_enabled():
            unit.tells = marked
            if not marked:
                unit.watch_gradients()
        if unit.state is BACKWARD:  # recomputed, and its backward goes on
            return output
        unit.show_shard()
        in_step = self._root.state is FORWARD
        unit.state = IDLE
        if unit_io.in_backward():  # recomputed; stays gathered, since its backward comes next
            return output
        if in_step:
            self._seen.append(unit.post_forward)
            self._fire(unit.post_forward)
        if self._root.state is not FORWARD:
            self._return_to_user(unit, is_step=marked or not method)
        return output

    def _return_to_user(self, unit: ShardedUnit, *, is_step: bool) -> None:
        if unit is self._root and is_step:
            self._end_forward()
        elif unit is self._root:  # a `generate` comes to units again and again: no order of a step
            self._actions.wait_all()
        self._actions.wait_host()  # shards may be written now

    def _leave_transform(self, unit: ShardedUnit) -> None:
        if unit.in_transform:
            unit.in_transform = False
            with unit_io.outside_transforms():
                self._reshard(unit)

    def _forward_failed(self, unit: ShardedUnit) -> None:
        """An exception ended its forward: the model shows rows again."""
        if unit.state is not FORWARD:  # recomputed, up to what its backward needs
            return
        unit.state = IDLE
        unit.marked = []
        self._leave_transform(unit)
        unit.show_shard()

    def _end_forward(self) -> None:
        """Plans for the order that was seen, from this step's backward on."""
        order = tuple(self._seen)
        if torch.is_grad_enabled():
            self._current = self._train = self._program(order, True)
        else:
            self._evaluate = self._program(order, False)
            self._actions.wait_all()  # for a prefetch of a unit that was not called

    def _pre_backward(self, unit: ShardedUnit, _grad: object = None) -> None:
        if self._backward_failed:
            self._settle()
        if unit.apart is not None:
            raise nobodys_gradient("a backward", unit)
        if unit.state is BACKWARD:  # another of its outputs came first
            return
        if unit.shares_slot and unit.gradients.came_unannounced:
            unit.check_unmarked_backward()
        if torch.is_grad_enabled():
            unit.prepare_double_backward()
        if not self._in_backward:
            self._begin_backward()
        if unit.shares_slot:
            occupant = self._actions.occupant(unit)
            if occupant is not None and occupant.state is BACKWARD:
                # No input of it has a gradient whose end would tell; autograd runs what was recorded last first.
                self._release_from_backward(occupant)
        unit.state = BACKWARD
        unit.gradients.begin()
        if unit.pre_backward in self._current:
            self._fire(unit.pre_backward)
        self._actions.require(unit)
        unit.show_full()

    def _begin_backward(self) -> None:
        self._check_thread()
        self._in_backward = True
        self._gradients.begin_backward()
        if versions.changes != self._changes:
            for each in self.units:
                each.outdate_changed()
        at_end = functools.partial(self._end_of_backward)  # autograd alone keeps it
        self._at_end = weakref.ref(at_end, self._let_go)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def _let_go(self, _at_end: object) -> None:
        """Autograd has ended a backward. One that raised has left full parameters in the model: `zero_grad` is next."""
        if self._in_backward:
            self._backward_failed = True
            for unit in self.units:
                if unit.state is BACKWARD:
                    unit.show_shard()

    def _on_unsharded_gradient(
        self, unit: ShardedUnit, param: ShardedParam, grad: torch.Tensor
    ) -> None:
        """It is reduced with what the unit's own forward and backward leave, or after it."""
        if self._backward_failed:
            self._settle()
        if not self._in_backward:
            self._begin_backward()
        grad, other = grad.detach().to_dense(), param.full.grad
        param.full.grad = grad if other is None else other.to_dense() + grad
        unit.gradients.begin()

    def _check_thread(self) -> None:
        """Thread ranks on one GPU wait for each other, which autograd's only thread of that GPU must not."""
        if self._thread_ranks_on_gpu and threading.get_ident() != self._thread:
            raise RuntimeError(
                f"backward runs in autograd's own thread of {self.mesh.device}, where the ranks of a local group "
                "would wait for each other for ever; run it inside torch.autograd.set_multithreading_enabled(False)"
            )

    def _post_backward(self, unit: ShardedUnit) -> None:
        unit.gradients.end_call()
        if unit.state is not BACKWARD:  # no output has told of its backward
            self._on_gradient(unit)
        self._release_from_backward(unit)

    def _release_from_backward(self, unit: ShardedUnit) -> None:
        if unit.began is not None:
            self._actions.end_compute(unit, unit.began, "backward")
        unit.show_shard()
        unit.state = IDLE
        self._fire(unit.post_backward)

    def _on_gradient(self, unit: ShardedUnit) -> None:
        """A gradient is complete in a unit whose outputs cannot tell of its backward."""
        if unit.state is not BACKWARD:
            unit.check_unmarked_backward()
            self._pre_backward(unit)

    def _end_of_backward(self) -> None:
        for unit in self.units:
            unit.gradients.end_calls()
            if unit.gradients.came_unannounced:
                unit.check_unmarked_backward()
                unit.gradients.begin()
            if unit.state is BACKWARD:
                unit.show_shard()
                unit.state = IDLE
        for unit in self._may_be_left_out:
            unit.gradients.join()
        # In the order in which a backward would have come to them, the same on every rank.
        for unit in reversed(self.units):
            if unit.gradients.complete:
                self._actions.reduce(unit)
            if unit.gradients.awaits_replicas:
                self._actions.all_reduce(unit)
        self._fire(Trigger(Phase.END_OF_BACKWARD, -1))
        self._actions.wait_all()  # for a prefetch of a unit that backward did not come to, too
        for unit in self.units:
            unit.outdate()
            if unit.unsharded is not None:
                self._reshard(unit)
        self._in_backward = False
        if self._actions.sync and self._actions.all_reduces:
            self._gradients.publish()
            self._check()
        else:
            for unit in self.units:
                unit.gradients.keep()

    def _fire(self, trigger: Trigger) -> None:
        for act, unit in self._current.get(trigger, ()):
            act(unit)

    # Set-up.

    def _install(self, unit: ShardedUnit) -> Iterator[Any]:
        unit.on_backward = functools.partial(self._pre_backward, unit)
        unit.on_backward_end = functools.partial(self._post_backward, unit)
        unit.on_gradient = lambda _param: self._on_gradient(unit)
        unit.on_unshard = lambda: self._unshard(unit)
        unit.on_reshard = lambda: self._reshard(unit)

        call = _Call(self, unit)
        begin: Any = call.begin
        end: Any = call.end
        if unit.module._compiled_call_impl is not None:
            # `module.compile()` compiles its hooks too; what is between them is what should be.
            begin, end = map(torch.compiler.disable, (begin, end))
        yield unit.module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        yield unit.module.register_forward_hook(end, always_call=True)


def _check_not_recorded(unit: ShardedUnit) -> None:
    if unit_io.in_make_fx():
        raise _keeps_constants("make_fx", unit)


def _keeps_constants(recorder: str, unit: ShardedUnit) -> RuntimeError:
    return RuntimeError(
        f"{recorder} of unit {unit.name!r} would keep as constants parameters that are gathered for this call alone; "
        "trace inside of engine.gathered()"
    )


class _Call(Hooks):
    """Of a unit's module: its calls come to the engine."""

    def __init__(self, engine: Engine, unit: ShardedUnit) -> None:
        self._engine = engine
        self._unit = unit

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if module is not self._unit.module:  # which has the hook perhaps without its kwargs
            raise RuntimeError(forward_methods.copied(self._unit))
        args, kwargs = self._engine._pre_forward(self._unit, args, kwargs)
        self._unit.in_forward = True
        return args, kwargs

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._unit.in_forward = False
        try:
            if output is not None or not _call_failed():
                return self._engine._post_forward(self._unit, output)
        except BaseException:
            self._failed()
            raise
        return self._failed()

    def _failed(self) -> None:
        if not self._unit.in_method:  # which has its own way to hear of that
            self._engine._forward_failed(self._unit)


def _call_failed() -> bool:
    """Whether a hook of `always_call` is called because an exception ended its module's call."""
    traceback = sys.exc_info()[2]
    return traceback is not None and traceback.tb_frame.f_code is nn.Module._call_impl.__code__
