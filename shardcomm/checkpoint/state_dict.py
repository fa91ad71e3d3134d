"""A model's state dict, with its own names: this rank's part of it, or full tensors, gathered unit by unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcomm.arguments.checks import check_type
from shardcomm.checkpoint.elsewhere import Elsewhere
from shardcomm.comm.mesh import FailingTogether
from shardcomm.parameter.shard_tensor import Part, ShardTensor, check_value, load_value
from shardcomm.parameter.sharded_parameter import ShardedParameter, ShardedRows
from shardcomm.parameter.tensor_parallel import full as full_of
from shardcomm.parameter.tensor_parallel import local
from shardcomm.parameter.versions import written
from shardcomm.sharded.hooks import Hooks
from shardcomm.sharded.sharded_unit import ShardedUnit

Parts = Mapping[nn.Parameter, Part]


def parts_of(units: Iterable[ShardedUnit]) -> Parts:
    """The part of each of the model's parameters that this rank holds."""
    return {param.shard: param.whole.part for unit in units for param in unit.params}


def state_dict(model: nn.Module, parts: Parts) -> dict[str, Any]:
    """`model.state_dict()` with ShardTensors for parameters. Its tensors are views, which DCP reads and writes."""
    return {
        name: value if _is_extra(name, value) else _held(value, parts)
        for name, value in model.state_dict(keep_vars=True).items()
    }


def install_hooks(units: Iterable[ShardedUnit], parts: Parts, settle: Callable[[], None]) -> None:
    """Makes the state dicts of the model and of its modules like those of the engine: of ShardTensors, and loaded so.

    `settle` is called before a state dict is made or loaded, and waits for communication that is under way.
    """
    shown: dict[nn.Module, dict[str, nn.Parameter]] = defaultdict(dict)
    sharded = False
    for unit in units:
        for bucket, params in unit.buckets:
            for param in params:
                sharded |= bucket.layout.world_size > 1 or param.distribution is not None
                sharded |= unit.mesh.size < unit.holders.everyone.size
                for module, attribute in param.owned.places:
                    shown[module][attribute] = param.shard
    for module, held in shown.items():
        hooks = _Hooks(held, parts, settle)
        module.register_load_state_dict_pre_hook(hooks.load)  # type: ignore[no-untyped-call]
        if sharded:  # else torch's own state dict is full, and the same on each rank
            module.register_state_dict_pre_hook(hooks.before)  # type: ignore[no-untyped-call]
            # A partial, because torch sets an attribute of the hook, which a method does not allow.
            module.register_state_dict_post_hook(partial(hooks.after))  # type: ignore[no-untyped-call]


class _Hooks(Hooks):
    """The state dict hooks of one module, whose parameters `held` are sharded."""

    def __init__(
        self, held: Mapping[str, nn.Parameter], parts: Parts, settle: Callable[[], None]
    ) -> None:
        self._held = held
        self._parts = parts
        self._settle = settle

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._settle()

    def after(
        self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object
    ) -> None:
        for attribute, param in self._held.items():
            if module._parameters.get(attribute) is not param:
                continue  # inside of engine.gathered() the full parameter stays
            # With keep_vars the caller wants the parameters themselves.
            if (given := state.get(prefix + attribute)) is not None and given is not param:
                state[prefix + attribute] = self._parts[param].of(param)

    @torch.no_grad()
    def load(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        errors: list[str],
    ) -> None:
        self._settle()
        for attribute, param in self._held.items():
            name = prefix + attribute
            if name not in state or module._parameters.get(attribute) is not param:
                continue  # inside of engine.gathered() torch loads the full parameter
            current, value = self._parts[param].of(param), state[name]
            if value is not param:
                value = _given(value)
                try:
                    check_value("load_state_dict", name, current, value)
                except ValueError as error:
                    errors.append(str(error))
                else:
                    load_value(current, value)
                    written([param])  # also where this rank has no rows
            state[name] = param  # torch then copies the parameter to itself


def full_state_dict(
    model: nn.Module,
    units: Iterable[ShardedUnit],
    parts: Parts,
    elsewhere: Elsewhere,
    together: FailingTogether,
    rank: int | None,
) -> dict[str, Any]:
    """`model.state_dict()` as it would be without sharding, copied to the CPU, on all ranks or on one; collective.

    Extra state of modules (`get_extra_state`), and what is no tensor, are passed on as they are.

    Raises:
        ValueError: `rank` is neither None nor a rank of the mesh; nothing is gathered then.
        RuntimeError: A module that not all ranks have gives extra state that is no tensor. Or an entry was made of this
            rank's rows, by a cast in a hook for instance; nothing is gathered then.
    """
    mesh = elsewhere.mesh
    if rank is not None and rank not in range(mesh.size):
        raise ValueError(
            f"full_state_dict: rank is {rank!r}; it must be None, for all, or a rank from 0 to {mesh.size - 1}"
        )
    state: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    for name, value in state.items():
        if isinstance(value, ShardedRows | ShardTensor) or (
            isinstance(value, ShardedParameter) and _is_modules(name)
        ):
            raise RuntimeError(
                f"full_state_dict: {name!r} was made of this rank's rows of a parameter, by a hook of the model's "
                "state_dict, an override of it, or get_extra_state; call model.state_dict() inside of "
                "engine.gathered(), where parameters are whole, and copy what it gives"
            )
    with together:
        survey = elsewhere.survey(
            {n: v if _is_extra(n, v) else _held(v, parts) for n, v in state.items()}
        )
    wanted = rank in (None, mesh.rank)
    state = {name: v for name, v in state.items() if wanted or survey.sends(name, mesh.rank)}
    kept = {value for value in state.values() if isinstance(value, nn.Parameter)}
    full: dict[nn.Parameter, torch.Tensor] = {}
    buckets = [entry for unit in units for entry in unit.buckets]
    # One buffer serves all buckets. A buffer for each would leave holes in memory between the values that are kept.
    sizes = [bucket.layout.flat_numel * bucket.shard.itemsize for bucket, _ in buckets]
    buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=mesh.device)
    for bucket, params in buckets:
        flat = buffer[: bucket.layout.flat_numel * bucket.shard.itemsize].view(bucket.shard.dtype)
        with together:
            values = bucket.gathered_shards(flat)
        for param, value in zip(params, values, strict=True):
            how = param.distribution
            whole = value if how is None else how.whole(value)
            if param.shard in kept:
                full[param.shard] = _copied(whole)
    for name, value in state.items():
        if not _is_extra(name, value):
            state[name] = full[value] if value in full else _copied(full_of(value.detach()))
    with together:
        return survey.completed(state, mesh, wanted=wanted)


@torch.no_grad()
def load_state_dict(
    model: nn.Module, parts: Parts, given: Mapping[str, Any], elsewhere: Collection[str]
) -> None:
    """Loads this rank's parts, the buffers and the extra state from `given`; no communication.

    Args:
        model: The model.
        parts: The part of each parameter that this rank holds.
        given: The state dict.
        elsewhere: Names of entries for other ranks' experts, which `given` may have.

    Raises:
        TypeError: `given` is no mapping.
        ValueError: A name is missing or unknown, or a value does not fit the model; nothing is changed then.
        RuntimeError: A hook of the model's state dict makes an entry anew; nothing is changed then.
    """
    check_type("load_state_dict", "state_dict", given, Mapping, "a mapping of names to values")
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    missing = state.keys() - given.keys()
    unknown = given.keys() - state.keys() - set(elsewhere)
    if missing or unknown:
        raise ValueError(
            f"load_state_dict: state_dict lacks {sorted(missing)} and has unknown {sorted(unknown)}"
        )
    # A second one beside the first: what is made anew has other memory in it.
    again = model.state_dict(keep_vars=True)
    for name, current in state.items():
        if _is_extra(name, current):
            continue
        into = _held(current, parts)
        if _address(into) != _address(_held(again[name], parts)):
            raise RuntimeError(
                f"load_state_dict: {name!r} is made anew by a hook of the model's state_dict, or an override of it, so "
                "that nothing can be loaded into it; call model.load_state_dict, which calls the hooks for loading"
            )
        check_value("load_state_dict", name, into, _given(given[name]))
    loaded = set()  # parts of parameters, also where this rank has no rows
    for name, current in state.items():
        if _is_modules(name):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(given[name])
        elif not _is_extra(name, current):
            into = _held(current, parts)
            load_value(into, _given(given[name]))
            if isinstance(into, ShardTensor):  # not inside of engine.gathered()
                loaded.add(id(into.part))
    written([param for param, part in parts.items() if id(part) in loaded])


def _held(value: torch.Tensor, parts: Parts) -> torch.Tensor:
    if value in parts:
        return parts[value].of(value)  # type: ignore[index]
    if isinstance(value, ShardedRows):  # made by a hook of the model's state dict
        return value.whole.part.of(value)
    return value.detach()


def _given(value: Any) -> Any:
    """`value`; of a sharded parameter, or of its copy by `param.detach().clone()`, the ShardTensor of the same rows."""
    is_rows = isinstance(value, ShardedParameter | ShardedRows)
    return value.whole.part.of(value) if is_rows else value


def _address(value: torch.Tensor) -> int:
    return (value.held if isinstance(value, ShardTensor) else local(value)).data_ptr()


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _is_extra(name: str, value: object) -> bool:
    """Whether an entry is extra state: a module's, or of a hook of the model's state dict."""
    return _is_modules(name) or not isinstance(value, torch.Tensor)


def _is_modules(name: str) -> bool:
    return name.rpartition(".")[2] == nn.modules.module._EXTRA_STATE_KEY_SUFFIX
