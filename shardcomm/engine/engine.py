"""The engine: what a training loop calls of a sharded model, beside the model itself.

What the model's hooks call stands in `step.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import nn

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
from shardcomm.comm.words import Use
from shardcomm.copy.wire_stats import WireError
from shardcomm.engine import encoder_fast_path, forward_methods, fsdp2_names
from shardcomm.engine.actions import Actions
from shardcomm.engine.gradients import Gradients, OnNonfinite
from shardcomm.engine.sharded_modules import unmark
from shardcomm.engine.step import Step
from shardcomm.planner.footprint import Footprint
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.triggers import Trigger
from shardcomm.sharded import now
from shardcomm.sharded.apart import gathered
from shardcomm.sharded.measured import measured
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.trace.recording import Trace
from shardcomm.trace.traffic import Traffic


class Engine:
    """Drives the communication of one sharded model. [`fully_shard`][shardcomm.fully_shard] makes it.

    A training loop calls the model as before. It calls the engine to clip gradients, to accumulate them, to save and
    load state, and to look at parameters in full.

    Attributes:
        model: The model, whose parameters are this rank's rows.
        mesh: The ranks, as a [`Mesh`][shardcomm.Mesh]; this rank is `mesh.rank` of `mesh.size`.
        units: The modules whose parameters are gathered and reduced together. The first is the model itself, by the
            name "(root)".
        elsewhere: What other ranks hold of the model, where they have other experts.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        units: Sequence[ShardedUnit],
        plan: Callable[[Sequence[Trigger], bool], Schedule],
        order: Sequence[Trigger],
        check_memory: Callable[[], None],
        on_nonfinite: OnNonfinite,
        *,
        strategy: str,
        may_be_left_out: Sequence[ShardedUnit],
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
        self._streams = mesh.streams
        self._actions = Actions(units, self._together)
        self._gradients = Gradients(units, mesh, on_nonfinite)
        self._divide_gradients(mesh.size)

        self._step = Step(
            units,
            mesh,
            self._actions,
            self._gradients,
            self._together,
            plan,
            order,
            check_memory,
            may_be_left_out,
        )
        self._hooks = [hook for unit in units for hook in self._step.install(unit)]
        self._hooks += encoder_fast_path.install(units)
        install_hooks(units, self._parts, self._begin_state_dict)
        for param in self._parts if elsewhere.ambiguous else ():
            param.whole.check_names = elsewhere.check  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises TypeError: a forward is a call of the model."""
        raise TypeError(
            "an Engine cannot be called: fully_shard changes the model in place, and returns its engine. Write "
            "engine = fully_shard(model, ...), and call the model, which is also engine.model"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name in fsdp2_names.METHODS:
            raise AttributeError(
                f"Engine.{name}, of PyTorch's FSDP2, is here: {fsdp2_names.METHODS[name]}"
            )
        of_model = " The model has it: engine.model." + name if hasattr(nn.Module, name) else ""
        raise AttributeError(f"an Engine has no {name!r}.{of_model}")

    # What a training loop calls.

    @property
    def traffic(self) -> Traffic:
        """Counters since the start: bytes gathered, bytes reduced, and seconds waited.

        Waits are timed once `traffic.time_waits()` has been called.
        """
        return self._actions.traffic

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for gradient accumulation: backwards in it do not reduce their gradients.

        The gradients stay on this rank, unsharded, and the next backward outside reduces their sum. The sum is taken in
        `reduce_dtype` where that is wider than `param_dtype`. It is not in `.grad`, so that `zero_grad()` does not drop
        it (as in PyTorch FSDP2); an exception in a backward drops it.

        Yields:
            Nothing.

        Example:
            ```python
            model = torch.nn.Linear(64, 64)
            engine = shardcomm.fully_shard(model, comm)
            with engine.no_sync():
                model(torch.randn(8, 64)).sum().backward()  # no communication of gradients
            model(torch.randn(8, 64)).sum().backward()  # reduces the sum of both
            ```
        """
        before, self._actions.sync = self._actions.sync, False
        try:
            yield
        finally:
            self._actions.sync = before

    def set_requires_all_reduce(self, requires: bool) -> None:
        """Says whether the next backwards all-reduce gradients among replicas.

        For accumulation with strategy "hybrid_shard": it takes less memory than `no_sync`, and less communication than
        a full reduce at each backward. After False, backwards reduce gradients to shards and leave out the all-reduce.
        Their sums are kept as shards, in the parameters' dtype. The first backward after True all-reduces them with its
        own, and shows the `.grad`. As PyTorch FSDP2's method of this name. Without replicas nothing changes.

        Args:
            requires: Whether backwards all-reduce, from now on.

        Raises:
            ValueError: `requires` is no bool.
        """
        check_flag("set_requires_all_reduce", "requires", requires)
        self._actions.all_reduces = requires or all(
            unit.mesh.replicate.size == 1 for unit in self.units
        )

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """The names of units in whose gradients the latest backward left NaN or Inf.

        Filled where `fully_shard` was given `on_nonfinite`; empty otherwise.
        """
        return self._gradients.nonfinite

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides sums of gradients over all ranks by `factor` from now on, instead of by the number of ranks.

        As PyTorch FSDP2's method of this name. With 1.0 gradients are sums.

        Args:
            factor: The divisor, from 1e-30 to 1e30, so that float32 can hold the quotients.

        Raises:
            ValueError: `factor` is no such number.
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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their global L2 norm is at most `max_norm`; collective.

        As `torch.nn.utils.clip_grad_norm_` on the whole model, with one all-reduce of one number. Gradients of
        `ignored_params`, which are each rank's own, are neither counted nor scaled.

        Args:
            max_norm: The largest norm, at least 0. `math.inf` scales nothing.
            norm_type: 2. `torch.nn.utils.clip_grad_norm_(engine.model.parameters(), ...)` takes other norms.

        Returns:
            The norm before scaling, of no dims, in float32, or in float64 if a parameter is. It is on the device of
            `mesh`.

        Raises:
            TypeError: `max_norm` is a list, as of parameters.
            ValueError: `max_norm` is not a number of at least 0, or `norm_type` is not 2.
        """
        if isinstance(max_norm, Iterable) and not isinstance(max_norm, (str, torch.Tensor)):
            raise TypeError(
                "clip_grad_norm_: max_norm is a list of parameters; it must be a number of at least 0. The "
                "engine clips all parameters of its model; torch.nn.utils.clip_grad_norm_ takes a list"
            )
        if norm_type != 2:
            raise ValueError(
                f"clip_grad_norm_: norm_type is {norm_type!r}; it must be 2. "
                f"torch.nn.utils.clip_grad_norm_(engine.model.parameters(), ...) takes other norms"
            )
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
        """A context in which the parameters of `module`, and of the modules in it, are the full ones; collective.

        The full parameters are copies, in memory of their own and in the dtype of this rank's rows. Other parameters of
        the same units are shown in full, too. State dicts that are taken in the context are full ones. A forward under
        `torch.no_grad()` computes with the full parameters; a forward with gradients is refused.

        Args:
            module: A module of the model. None: the whole model.
            write: Whether changes are kept: at the end each rank takes its rows of the values that the full parameters
                then have, unless an exception ends the context. Every rank must write the same values, for instance to
                merge adapters or to initialise. Without `write` a change raises.

        Yields:
            Nothing; the parameters of the modules are the full ones meanwhile.

        Raises:
            TypeError: `module` is no module.
            ValueError: `module` is none of the model's, or `write` is no bool, or `write` is True inside of another
                `gathered` without it.
            RuntimeError: Autograd runs. Or, at the end: a parameter was changed without `write`, replaced or
                converted, or rows were changed meanwhile, by an optimizer's step for instance.

        Example:
            ```python
            model = torch.nn.Linear(64, 64)
            engine = shardcomm.fully_shard(model, comm)
            with engine.gathered(write=True):
                torch.nn.init.eye_(model.weight)  # the whole matrix; the same on every rank
            ```
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
        units = [unit for unit in self.units if unit.owns_any(inside) or unit.module in inside]
        with gathered(units, self._together, write=write):
            yield

    def unit(self, module: nn.Module) -> ShardedUnit:
        """The unit whose parameters are gathered for the forward of `module`.

        Its `unshard()` gathers the unit's parameters and keeps them in full until `reshard()`, for code that uses them
        outside of the unit's forward.

        Args:
            module: The module of a unit, as `units` of `fully_shard` names them; the model itself is one.

        Returns:
            The unit, with `unshard()` and `reshard()`.

        Raises:
            ValueError: `module` is not a unit's; the message names the unit around it.
        """
        for unit in self.units:
            if unit.module is module:
                return unit
        around = [unit.name for unit in self.units if module in unit.module.modules()]
        where = f"is part of unit {around[-1]!r}" if around else "is none of the model's modules"
        raise ValueError(
            f"module is a {type(module).__name__}, which {where}; give the module of one of the units "
            f"{', '.join(repr(unit.name) for unit in self.units)}, or make it one by fully_shard(..., units=)"
        )

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Makes a method of a unit's module, such as `generate`, gather the unit's parameters as its forward does.

        Inputs and outputs are cast as a forward's are, and gradients flow. If the method calls other methods of the
        module, or its forward, these are part of the same use; units inside of the module are gathered call by call.
        Every rank must call the method, and come to the same units in it. As PyTorch's `register_fsdp_forward_method`.

        Args:
            module: The module of a unit.
            name: The method's name.

        Raises:
            ValueError: `module` is not a unit's, or has no such method.
        """
        self._hooks.append(forward_methods.install(self.unit(module), name, self._step))

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the model, with the model's own names, for `torch.distributed.checkpoint` (DCP).

        Parameters are ShardTensors: views of the shards, from which DCP saves and into which it loads. No rank sends
        parameters, so that this works after a CommError, too. Together with `load_state_dict` it makes the engine a
        `Stateful` of DCP, so that the engine itself can stand in a state that is saved.

        DCP needs a torch process group of the same ranks (Gloo is enough), over which the ranks agree on what is where.
        A checkpoint can be loaded with any number of ranks, strategy, granularity and dims, by PyTorch's FSDP2 and by a
        plain model. Checkpoints of these can be loaded here; `torch.distributed.checkpoint.state_dict.get_state_dict`
        gives the same names. What a hook of the model's state dict makes anew, by a cast for instance, is saved, but is
        no view: load it by `model.load_state_dict`.

        Returns:
            A flat dict by the names of the model's own state dict: ShardTensors for parameters, and buffers and extra
            state as they are.

        Raises:
            RuntimeError: Autograd runs, or other ranks have other parameters of the same names.

        Example:
            ```python
            import torch.distributed.checkpoint as dcp

            model = torch.nn.Linear(64, 64)
            engine = shardcomm.fully_shard(model, comm)
            optimizer = torch.optim.AdamW(model.parameters())
            state = {"model": engine, "optimizer": engine.optimizer_state(optimizer)}
            dcp.save(state, checkpoint_id="checkpoint")
            dcp.load(state, checkpoint_id="checkpoint")
            ```
        """
        self._begin_state_dict()
        return state_dict(self.model, self._parts)

    def _begin_state_dict(self) -> None:
        """RuntimeError if other ranks have other parameters of the same names."""
        self.elsewhere.check("state_dict")
        self.release()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part of the model. No communication.

        Entries of experts that only other ranks have are passed over.

        Args:
            state_dict: What `state_dict()` gave, or full tensors by the model's names.

        Raises:
            ValueError: A name is missing or unknown, or a shape differs; nothing is changed then.
            RuntimeError: Autograd runs; or a hook of the model's state dict makes an entry anew, as a cast does, and
                nothing can be loaded into it. `model.load_state_dict` calls the hooks for loading.
        """
        self.release()
        load_state_dict(self.model, self._parts, state_dict, self.elsewhere.names)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """The state of an optimizer of this model, as a `Stateful` that DCP saves and loads; see `state_dict`.

        Args:
            optimizer: An optimizer of `model.parameters()`, or of some of them.

        Returns:
            The state, for the dict that is given to `dcp.save` or `dcp.load`.

        Raises:
            ValueError: The optimizer has a parameter that is not the model's.
            RuntimeError: Other ranks have other parameters of the same names.
        """
        self.elsewhere.check("optimizer_state")
        return OptimizerState(optimizer, self.model, self.elsewhere)

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The model's state dict with full parameters, original names and order, in CPU memory; collective.

        Parameters are gathered unit by unit: at any moment at most one unit exists in full besides the result. If ranks
        have other experts, the result is the whole model with all experts, and each rank holds a copy of its own
        experts meanwhile.

        Args:
            rank: The rank of the mesh that gets the state dict; the other ranks get {}. Where parameters are DTensors,
                that rank of each mesh gets it. None: every rank.

        Returns:
            The state dict, which a model without sharding loads; {} on ranks that do not get it.

        Raises:
            ValueError: `rank` is no rank of the mesh.
            RuntimeError: Autograd runs, or other ranks have other parameters of the same names, or extra state that is
                no tensor. Or an entry was made of this rank's rows, by a hook of the model's state dict for instance;
                then take `model.state_dict()` inside of `gathered()`.
        """
        self.elsewhere.check("full_state_dict")
        self.release()
        return full_state_dict(
            self.model, self.units, self._parts, self.elsewhere, self._together, rank
        )

    def release(self) -> None:
        """Waits for all communication that is queued, and drops full parameters, so that the next use gathers anew.

        Call it before you write the memory of shards by another way than the model's parameters. If a rank has failed,
        this does not raise; the next collective raises the CommError.

        Raises:
            RuntimeError: Autograd runs, and needs the full parameters.
        """
        if now.in_backward():
            raise RuntimeError(
                "a state dict, engine.gathered() or engine.release(): autograd runs; call it before or after a backward"
            )
        self._step.settle()
        for unit in self.units:
            unit.full.outdate()
            self._step.unsharding.reshard(unit)

    @functools.cached_property
    def _parts(self) -> Parts:
        return parts_of(self.units)

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """A context that records what this rank computes, gathers, reduces and waits for, and gives the recording.

        `timeline()` of the recording, which is collective, has it of all ranks. The timeline's `save(path)` writes a
        file which Perfetto (https://ui.perfetto.dev) and `shardcomm trace` show.

        Yields:
            The recording, which is complete when the context has ended.

        Example:
            ```python
            model = torch.nn.Linear(64, 64)
            engine = shardcomm.fully_shard(model, comm)
            with engine.trace() as trace:
                model(torch.randn(8, 64)).sum().backward()
            timeline = trace.timeline()
            if engine.mesh.rank == 0:
                timeline.save("timeline.json")
            ```
        """
        numels = {u.name: sum(b.layout.numel for b, _ in u.buckets) for u in self.units}
        self._actions.trace = Trace(self.mesh, self._streams, numels)
        try:
            yield self._actions.trace
        finally:
            self._actions.trace = None

    def footprint(self) -> Footprint:
        """The bytes that this rank holds of the model: parameters, gradients, slots and buffers.

        [`MemoryPlan.footprint`][shardcomm.MemoryPlan.footprint] says the same before anything is allocated.

        Returns:
            The figures, each in bytes.
        """
        return measured(self.units)

    def wire_error(self, use: Use = "gather") -> dict[str, WireError]:
        """What `gather_format` or `reduce_format` has cost since the last call, or since `fully_shard`.

        Not collective: it is of the elements that this rank has sent. The largest over the ranks is that of the whole
        unit. Call it after a step, for example: every gather encodes the same shard until the optimizer changes it.

        Args:
            use: "gather" for `gather_format`, whose elements are parameters. "reduce" for `reduce_format`, whose
                elements are sums of a host's gradients, before they are divided by the number of ranks. An element of
                the mean gradient is then at most bound * hosts / ranks away from what it would be without the format,
                and from float32's roundings.

        Returns:
            For each unit with such a format, by name, the bound that the format guarantees, the largest error seen, and
            how many blocks had NaN or Inf. On a rank alone, which sends nothing, all are 0.

        Raises:
            ValueError: `use` is neither "gather" nor "reduce".
            CommError: The latest gather, or reduce, has failed.

        Example:
            ```python
            wire = shardcomm.MixedPrecision(gather_format=shardcomm.BlockFormat("mxint8"))
            engine = shardcomm.fully_shard(torch.nn.Linear(64, 64), comm, mixed_precision=wire)
            engine.model(torch.ones(2, 64)).sum().backward()
            for unit, error in engine.wire_error().items():
                assert error.seen <= error.bound and not error.flagged
            ```
        """
        if use not in ("gather", "reduce"):
            raise ValueError(f'wire_error: use is {use!r}; accepted: "gather" and "reduce"')
        errors = {unit.name: unit.wire_error(use) for unit in self.units}
        return {name: error for name, error in errors.items() if error is not None}

    def close(self) -> None:
        """Ends training: removes the hooks, and leaves the groups that were made of a DeviceMesh.

        It may be called after a CommError, too. The model keeps this rank's rows. State dicts can still be saved and
        loaded, except `full_state_dict` over a DeviceMesh, since that gathers. A forward raises RuntimeError, unless
        each rank has the whole model ("no_shard"): that one is a plain model again, whose gradients are this rank's.
        """
        if not self._hooks:  # closed already
            return
        while self._hooks:
            self._hooks.pop().remove()
        unmark(self.model)
        for unit in self.units:
            unit.refuse_forward()
            unit.stop_watching()
        with contextlib.ExitStack() as leaving:  # the groups are left whatever `release` raises
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
