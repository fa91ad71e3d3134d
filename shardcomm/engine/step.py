"""A training step, as hooks of modules and autograd see it: they fire triggers, and a schedule says what each sets off.

The file reads in the order in which a step happens; what is no plain step comes last. For each unit:

    pre_forward     prefetch the next units; wait until its own parameters are gathered (mostly a prefetch began that
                    before); show the full ones
    post_forward    show this rank's rows again; release the slot if another unit needs it
    pre_backward    as pre_forward, but prefetch in the other direction
    post_backward   release, and reduce the gradients over the ranks; show the `.grad` of units whose reduce has ended
    end_of_backward wait for the reduces that are left; all parameters have their `.grad`

`schedule/` decides what is issued, awaited and released at each trigger, and `actions.py` does it. In a step that
deviates from the schedule (a unit is skipped, repeated or recomputed), units are gathered on demand, and the next
schedule is planned for the order that was seen.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from shardcomm._C import CommError
from shardcomm.comm.mesh import FailingTogether, Mesh
from shardcomm.engine.actions import Actions
from shardcomm.engine.gradients import Gradients
from shardcomm.engine.module_calls import ModuleCalls
from shardcomm.engine.recorders import check_not_in_a_graph, check_not_recorded
from shardcomm.engine.sharded_modules import Containers
from shardcomm.engine.unsharding import Unsharding
from shardcomm.parameter import versions
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.triggers import Phase, Trigger
from shardcomm.sharded import now, unit_io
from shardcomm.sharded.apart import Apart, nobodys_gradient
from shardcomm.sharded.awaited_backward import AwaitedBackward
from shardcomm.sharded.hooks import run_eagerly, weakly
from shardcomm.sharded.sharded_unit import BACKWARD, FORWARD, IDLE, Callbacks, ShardedUnit


class Step:
    """The step that goes on; `Engine` makes one for all of a model's steps."""

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        mesh: Mesh,
        actions: Actions,
        gradients: Gradients,
        together: FailingTogether,
        plan: Callable[[Sequence[Trigger], bool], Schedule],
        order: Sequence[Trigger],
        check_memory: Callable[[], None],
        may_be_left_out: Sequence[ShardedUnit],
    ) -> None:
        self._units = units
        self._root = units[0]
        self._device = mesh.device
        self._actions = actions
        self._gradients = gradients
        self.unsharding = Unsharding(actions, together, self._join_backward)
        self._check_memory = check_memory
        self._may_be_left_out = may_be_left_out
        self._containers = Containers(units[0].module)

        # `plan(order, ...)`, which `fully_shard` made, returns the schedule of an order of units. Where layers are
        # dropped at random, orders differ from step to step: the latest programs are worth keeping.
        self._program = functools.lru_cache(maxsize=8)(
            lambda order, backward: self._actions.program(plan(order, backward))
        )
        self._train = self._program(order, True)
        self._evaluate = self._program(order, False)
        self._current = self._train
        self._seen: list[Trigger] = []  # this forward's triggers, from which the order is learnt
        self._changes = versions.changes  # how often rows had changed when the latest forward began
        self._in_backward = False
        self._backward_failed = False  # an exception ended one, which `settle` has yet to clear up
        self._at_end: weakref.ref[Any] | None = None  # lives as long as autograd may call it
        self._thread = threading.get_ident()
        self._thread_ranks_on_gpu = mesh.device.type != "cpu" and any(
            comm.transport == "local" and comm.size > 1
            for each in dict.fromkeys(unit.mesh for unit in units)
            for comm in (each.shard, each.replicate)
        )

    def install(self, unit: ShardedUnit) -> Iterator[Any]:
        """Has calls of the unit's module come here; yields the handles of the hooks."""
        calls = ModuleCalls(unit, self)
        unit.callbacks = Callbacks(
            on_backward=functools.partial(self._pre_backward, unit),
            on_backward_end=functools.partial(self._post_backward, unit),
            on_gradient=weakly(self._on_gradient, unit),
            on_shard_gradient=weakly(self.unsharding.on_shard_gradient, unit),
            on_unshard=functools.partial(self.unsharding.unshard, unit),
            on_reshard=functools.partial(self.unsharding.reshard, unit),
            keep_out_of_graphs=calls.keep_out_of_graphs,
        )
        unit.watch_shards()
        yield from calls.install()

    # A step, in the order in which it happens. Hooks do nothing but call these.

    def claim(self, unit: ShardedUnit) -> bool:
        """Keeps other threads out of the unit's forward while a call of its module, or of a method, runs.

        Returns:
            Whether the call is the outermost one, which gives the forward back: it sets `unit.forward.thread` to None.

        Raises:
            RuntimeError: Another thread runs the unit's forward, or the root's. Both would compute with the same full
                parameters, which the one that ends first gives away.
        """
        # Autograd recomputes in threads of its own, while the forward's thread waits for it.
        if is_dynamo_compiling() or unit.apart is not None or now.in_backward():
            return False
        this = threading.get_ident()
        for each in (self._root, unit):
            if each.forward.thread not in (None, this):
                raise RuntimeError(
                    f"forward of unit {unit.name!r} while another thread runs one: the forwards of a model share its "
                    "full parameters; call it in one thread at a time, in one order on all ranks, or inside of "
                    "engine.gathered()"
                )
        outermost = unit.forward.thread is None
        unit.forward.thread = this
        return outermost

    def pre_forward(
        self, unit: ShardedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of the unit begins; returns the inputs, cast and marked, with which it is to be called."""
        if unit.apart is not None:
            self._check_apart(unit, unit.apart)
            return args, kwargs
        check_not_in_a_graph(unit)
        if unit.forward.in_method:
            args, kwargs = unit_io.cast((args, kwargs), unit.input_dtype)
            return args, kwargs
        recompute = now.in_backward()
        if versions.changes != self._changes:
            unit.full.outdate_changed()
        if not recompute:
            if unit is self._root:
                self._begin_forward()
            unit.state = FORWARD
            if self._root.state is FORWARD:
                self._seen.append(unit.pre_forward)
                if unit.pre_forward in self._current:
                    self._fire(unit.pre_forward)
            else:  # a unit called by itself: its parameters may have changed since the last gather
                unit.full.outdate()
                check_not_recorded(unit)
                self._forget_casts()
        elif unit.full.shares_slot:
            self._end_recomputed(unit)
        if now.in_transform():
            self.unsharding.begin_transform(unit)
            args, kwargs = unit_io.cast((args, kwargs), unit.input_dtype)
            return args, kwargs
        self._actions.require(unit)
        unit.follow_freezing()
        unit.show_full()
        callbacks = unit.callbacks
        backward = AwaitedBackward(
            unit.gradients.awaited, callbacks.on_backward, callbacks.on_backward_end
        )
        args, kwargs, entered = unit_io.enter(
            args, kwargs, unit.input_dtype, self._device, backward
        )
        unit.forward.entered = entered
        if entered.marked and not recompute:
            backward.begin()
        if not entered.aliases and torch.is_grad_enabled():
            # No input announces a backward that does not pass the unit's outputs, such as one of features that a hook
            # took. Gradients do.
            unit.watch_gradients()
        return args, kwargs

    def _begin_forward(self) -> None:
        """Begins a step. Parameters that were gathered before are stale, since the optimizer may have stepped."""
        check_not_recorded(self._root)
        self._containers.check()
        self._forget_casts()
        self.settle()
        for unit in self._units:
            unit.begin_step()
        self._changes = versions.changes
        self._seen.clear()
        self._thread = threading.get_ident()
        self._actions.keeps_secondary = torch.is_grad_enabled()
        self._current = self._train if torch.is_grad_enabled() else self._evaluate

    def _forget_casts(self) -> None:
        """Drops the casts of parameters that autocast has kept from an earlier forward, which had other values."""
        if torch.is_autocast_enabled(self._device.type):
            torch.clear_autocast_cache()

    def post_forward(self, unit: ShardedUnit, output: Any, *, method: bool = False) -> Any:
        """A forward of the unit, or a `method` registered as one, has returned; returns its output, cast and marked."""
        if unit.apart is not None:
            return output
        if unit.forward.in_method:
            return unit_io.cast(output, unit.output_dtype)
        check_not_in_a_graph(unit)
        if unit.state is IDLE and not now.in_backward():
            raise RuntimeError(
                f"forward of unit {unit.name!r}: inside of it a state dict, engine.gathered() or engine.close() put "
                "this rank's rows in the place of its parameters; call these before or after the model"
            )
        unit.check_unchanged()
        if versions.changes != self._changes:
            unit.check_current()
        if unit.began is not None:
            self._actions.end_compute(unit, unit.began, "forward")
        entered, unit.forward.entered = unit.forward.entered, None
        unit.forward.returned = type(output)
        if entered is None:  # inside of a transform of torch.func
            output, marked = unit_io.cast(output, unit.output_dtype), False
            self.unsharding.end_transform(unit)
        else:
            output, marked = unit_io.leave(
                output,
                entered,
                unit.output_dtype,
                unit.full.storages,
                unit.name if unit.full.shares_slot else None,
            )
        if torch.is_grad_enabled():
            # Where no gradient can tell of the unit's backward either, autograd is to refuse what was overwritten.
            unit.full.announced = marked or not unit.watch_gradients()
        if unit.state is BACKWARD:  # it was recomputed, and its backward goes on
            return output
        unit.show_shard()
        in_step = self._root.state is FORWARD
        unit.state = IDLE
        if now.in_backward():  # recomputed; it stays gathered, since its backward comes next
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
        elif unit is self._root:  # a `generate` calls units many times, which teaches no order
            self._actions.wait_all()
        self._actions.wait_host()  # the user may write shards now

    def _end_forward(self) -> None:
        """Ends the root's forward: from this step's backward on, the schedule is for the order that was seen."""
        order = tuple(self._seen)
        if torch.is_grad_enabled():
            self._current = self._train = self._program(order, True)
        else:
            self._evaluate = self._program(order, False)
            self._actions.wait_all()  # a unit may have been prefetched and not called

    def _pre_backward(self, unit: ShardedUnit, _grad: object = None) -> None:
        if self._backward_failed:
            self.settle()
        if unit.apart is not None:
            raise nobodys_gradient("a backward", unit)
        if unit.state is BACKWARD:  # the gradient of another of its outputs came first
            return
        if unit.full.shares_slot and unit.state is IDLE and unit.gradients.came_unannounced:
            unit.check_unmarked_backward()
        if torch.is_grad_enabled():
            unit.prepare_double_backward()
        if not self._in_backward:
            self._begin_backward()
        if unit.full.shares_slot:
            occupant = self._actions.occupant(unit)
            if occupant is not None and occupant.state is BACKWARD:
                # No input of the occupant has told of its end. But autograd runs first what was recorded last, so that
                # the occupant's backward is over.
                self._release_from_backward(occupant)
        unit.state = BACKWARD
        unit.backward_in = now.backward()
        unit.gradients.begin()
        if unit.pre_backward in self._current:
            self._fire(unit.pre_backward)
        self._actions.require(unit)
        unit.show_full()

    def _join_backward(self) -> None:
        """Begins this step's backward, unless that was done when autograd came to another unit."""
        if self._backward_failed:
            self.settle()
        if not self._in_backward:
            self._begin_backward()

    def _begin_backward(self) -> None:
        self._check_thread()
        self._in_backward = True
        self._gradients.begin_backward()
        # Autograd, too, leaves what is frozen by now without a gradient.
        for each in self._units:
            each.follow_freezing()
        if versions.changes != self._changes:
            for each in self._units:
                each.full.outdate_changed()
        at_end = functools.partial(self._end_of_backward)  # autograd holds the only reference
        self._at_end = weakref.ref(at_end, self._backward_is_gone)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def _check_thread(self) -> None:
        """RuntimeError where a backward of thread ranks on one GPU would wait for ever.

        The ranks wait for each other, but autograd runs all their backwards in its only thread of that GPU.
        """
        if self._thread_ranks_on_gpu and threading.get_ident() != self._thread:
            raise RuntimeError(
                f"backward runs in autograd's own thread of {self._device}, where the ranks of a local group "
                "would wait for each other for ever; run it inside torch.autograd.set_multithreading_enabled(False)"
            )

    def _post_backward(self, unit: ShardedUnit, certain: bool) -> None:
        if unit.state is not BACKWARD:  # no output has announced its backward
            if not certain:
                return
            self._on_gradient(unit)
        self._release_from_backward(unit)

    def _on_gradient(self, unit: ShardedUnit, _param: object = None) -> None:
        """A gradient is complete in a unit whose outputs cannot announce its backward."""
        if unit.state is IDLE:
            unit.check_unmarked_backward()
        if unit.state is not BACKWARD:
            self._pre_backward(unit)

    def _release_from_backward(self, unit: ShardedUnit) -> None:
        if unit.began is not None:
            self._actions.end_compute(unit, unit.began, "backward")
        self._leave_backward(unit)
        self._fire(unit.post_backward)

    def _end_recomputed(self, unit: ShardedUnit) -> None:
        """Ends the backward of the unit in the slot of `unit` if it was in a backward of its own, which has ended.

        Such a backward is inside of another one, in a checkpoint that is reentrant.
        """
        occupant = self._actions.occupant(unit)
        if (
            occupant is not None
            and occupant.state is BACKWARD
            and occupant.backward_in > now.backward()
        ):
            self._release_from_backward(occupant)

    def _leave_backward(self, unit: ShardedUnit) -> None:
        if unit.forward.thread is None:
            unit.show_shard()
            unit.state = IDLE
        else:  # the backward was inside of the unit's forward, which goes on
            unit.state = FORWARD

    def _end_of_backward(self) -> None:
        for unit in self._units:
            unit.gradients.end_backward()
            if unit.gradients.came_unannounced:
                if unit.state is IDLE:
                    unit.check_unmarked_backward()
                unit.gradients.begin()
            if unit.state is BACKWARD:
                self._leave_backward(unit)
        for unit in self._may_be_left_out:
            unit.gradients.join()
        self._actions.reduce_waiting()
        # In the order in which a backward would have come to the units: it is the same on every rank.
        for unit in reversed(self._units):
            if unit.gradients.complete:
                self._actions.reduce(unit)
            if unit.gradients.awaits_replicas:
                self._actions.all_reduce(unit)
        self._fire(Trigger(Phase.END_OF_BACKWARD, -1))
        self._actions.wait_all()  # also for prefetched units to which backward did not come
        self._outdate()
        self._in_backward = False
        if self._actions.sync and self._actions.all_reduces:
            self._gradients.publish()
            self._check_memory()
        else:
            for unit in self._units:
                unit.gradients.keep()

    def _outdate(self) -> None:
        """After a backward: the optimizer may step now, but not if the backward was inside of a forward."""
        if all([unit.forward.thread is None for unit in self._units]):
            for unit in self._units:
                unit.full.outdate()
        for unit in self._units:
            if unit.unsharded is not None:
                self.unsharding.reshard(unit)

    def _fire(self, trigger: Trigger) -> None:
        for act, unit in self._current.get(trigger, ()):
            act(unit)

    # What an exception leaves of a step.

    def forward_failed(self, unit: ShardedUnit) -> None:
        """A forward of the unit was ended by an exception, which the model itself may catch: it shows rows again."""
        unit.forward.entered = None
        # Shown by `gathered`; or recomputed, as far as its backward needs.
        if unit.apart is not None or unit.state is BACKWARD:
            return
        if unit.state is FORWARD:  # what it has come to so far is not part of the step's order
            reached = len(self._seen)
            while reached and self._seen[reached - 1] != unit.pre_forward:
                reached -= 1
            del self._seen[max(reached - 1, 0) :]
        unit.state = IDLE
        unit.full.take_change()
        self.unsharding.end_transform(unit)
        unit.show_shard()

    def _backward_is_gone(self, _at_end: object) -> None:
        """Autograd has dropped its callback, since a backward has ended.

        A backward that raised has left full parameters in the model. The user's `zero_grad` comes next, and must see
        this rank's rows.
        """
        if self._in_backward:
            self._backward_failed = True
            for unit in self._units:
                if unit.state is BACKWARD:
                    self._leave_backward(unit)

    def settle(self) -> None:
        """Waits for what is queued, and forgets a step that an exception ended, with the gradients of its backward."""
        for unit in self._units:
            # After a backward that failed inside of a unit's forward, that may go on.
            goes_on = self._backward_failed and unit.forward.thread is not None
            if unit.state is not IDLE and not goes_on:
                unit.show_shard()
                unit.state = IDLE
                unit.forward.entered = None
            if self._in_backward:
                unit.gradients.forget()
        self._actions.forget_waiting()
        self._in_backward = self._backward_failed = False
        # Results are dropped here. If a rank has failed, the next collective says so.
        with contextlib.suppress(CommError):
            self._actions.wait_all()

    # Forwards that are no part of a step.

    def _check_apart(self, unit: ShardedUnit, apart: Apart) -> None:
        """Raises RuntimeError if a forward of `unit` inside of `gathered` cannot be right."""
        if torch.is_grad_enabled() and apart.is_shown:
            raise nobodys_gradient("a forward with gradients enabled", unit)
        if unit is not self._root and self._root.state is not FORWARD:
            return
        if any(u.converts and u.apart is None for u in self._units):
            raise RuntimeError(
                "a forward of the model inside of engine.gathered() of a part of it: with mixed precision the rest "
                "computes in another dtype; gather the whole model by engine.gathered()"
            )


run_eagerly(
    Step.pre_forward,
    Step.post_forward,
    Step._pre_backward,
    Step._post_backward,
    Step._on_gradient,
    Step._end_of_backward,
    Step._backward_is_gone,
)
