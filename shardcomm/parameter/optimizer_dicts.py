"""An optimizer's own state dict for sharded parameters: it has ShardTensors, and loads these or full tensors.

`optimizer.state` is of this rank's rows. Torch calls an optimizer's hooks where it makes a state dict, and where it
loads one. But no hook tells when an optimizer gets its parameters, which may be put into its groups by hand, and a copy
of an optimizer has none of its hooks. So `Optimizer.state_dict` and `load_state_dict` are wrapped: they look at the
optimizer's parameters first, and add the hooks that are missing.
"""

from __future__ import annotations

import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn, optim
from torch.utils._pytree import tree_leaves, tree_map_only

from shardcomm.layout.param_spec import ParamSpec
from shardcomm.layout.placement import Piece, Placement
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import Part, ShardTensor, check_value, load_value
from shardcomm.parameter.whole import Held, Owned, Whole

_NUMBERS = {"step", "eta", "mu", "mu_product"}
"""The numbers in the state of torch's optimizers. The names tell them from moments, which may be numbers too."""

_OF_NUMBERS = ((), (1,))
"""The shapes that optimizers give to numbers. A moment has such a shape if its parameter has as many dims."""


@dataclass(frozen=True)
class ParamState:
    """The state of one parameter: an optimizer has it for this rank's `rows`, a state dict for the whole.

    Attributes:
        name: The parameter's name in the model.
        rows: This rank's rows.
        part: Which part of the whole they are.
        is_whole: Whether they are all of it on the only rank that has any, which may have state of any shape. Not where
            ranks share rows out, and this one happens to have them all: others refuse such state.
        check_names: Raises if other ranks have other parameters of this name; None: they have not.
    """

    name: str
    rows: torch.Tensor
    part: Part
    is_whole: bool
    check_names: Callable[[str], None] | None

    @staticmethod
    def of(param: nn.Parameter) -> ParamState | None:
        """The state of `param`; None where this rank holds the whole model.

        It works in an optimizer's step, too, in which `param` has the class of a plain parameter.
        """
        with plain():
            whole = getattr(param, "whole", None)
        if not isinstance(whole, Whole) or not whole.is_part:
            return None
        is_shared = whole.owned is Owned.NOT and whole.holders.mesh.size > 1
        is_whole = whole.held is Held.WHOLE and not is_shared
        return ParamState(whole.name, whole.rows, whole.part, is_whole, whole.check_names)

    def shown(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` as a state dict has it: tensors of the rows' shape as ShardTensors, which are views; the rest as is.

        Raises:
            ValueError: The rest has a tensor that was computed from some rows alone.
        """
        return _mapped(self._shown, state)

    def numbers(self, state: Mapping[str, Any], *, of_number: bool) -> dict[str, torch.Tensor]:
        """The entries of `state` that are numbers, such as a step counter.

        With `of_number`, for a parameter that is a number itself, moments count as numbers, too.
        """
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        with plain():  # a moment may be of guarded rows
            numbers = {key: value for key, value in tensors.items() if self._is_number(key, value)}
            if not of_number:
                return numbers
            moments = {k: v.new_empty(()) for k, v in tensors.items() if v.shape == self.rows.shape}
        return {**moments, **numbers}

    def nothing(self, numbers: Mapping[str, torch.Tensor]) -> dict[str, ShardTensor]:
        """`numbers` without values, for a state dict on a rank when another rank owns the parameter and its numbers."""
        nothing = {}
        for key, value in numbers.items():
            shape = tuple(value.shape)
            placement = Placement(ParamSpec(self.name, shape), 0, 0, 1, shape)
            part = Part(placement, Piece(0, 0, 0, 0, (0,)), self.part.ranks)
            nothing[key] = part.of(value.new_empty(0))
        return nothing

    def taken(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` as the optimizer has it: this rank's rows of ShardTensors and of full tensors, and the rest as is.

        Raises:
            ValueError: A tensor has another shape than the whole, or has other rows.
        """
        return _mapped(self._taken, state)

    def _shown(self, key: str, value: torch.Tensor) -> torch.Tensor:
        if self._is_number(key, value):
            return value
        if value.shape == self.rows.shape:
            return self.part.of(value)
        if value.dim() == 0 or self.is_whole:
            return value
        raise ValueError(
            f"state_dict: {key!r} of {self.name!r} has shape {tuple(value.shape)}, this rank's rows "
            f"{tuple(self.rows.shape)}: it was computed from these rows alone, and is no part of the state that the "
            "whole parameter would have; for an optimizer that looks at whole parameters, call fully_shard with "
            'granularity="tensor"'
        )

    def _taken(self, key: str, value: torch.Tensor) -> torch.Tensor:
        is_number = self._is_number(key, value)
        if self.part.elsewhere:
            # Nothing computes with it, but some optimizers look for the names of what they keep.
            if is_number:
                if isinstance(value, ShardTensor):
                    return value.held.new_zeros(value.shape)
                return value
            return torch.empty_like(self.rows, dtype=value.dtype, device=value.device)
        if not isinstance(value, ShardTensor) and (is_number or self.is_whole):
            return value
        check_value("load_state_dict", f"{key!r} of {self.name!r}", self.part.of(self.rows), value)
        if isinstance(value, ShardTensor) and value.held.shape == self.rows.shape:
            return value.held
        rows = torch.empty_like(self.rows, dtype=value.dtype, device=value.device)
        load_value(self.part.of(rows), value)
        return rows

    def _is_number(self, key: str, value: torch.Tensor) -> bool:
        if key in _NUMBERS:
            return value.shape in _OF_NUMBERS
        return value.shape in _OF_NUMBERS and value.dim() != len(self.part.shape)


def _mapped(
    change: Callable[[str, torch.Tensor], torch.Tensor], state: Mapping[str, Any]
) -> dict[str, Any]:
    """`state` with `change` applied to each tensor, also in the lists and dicts that some optimizers (Shampoo) keep."""
    with plain():  # some may be guarded rows
        return {
            key: tree_map_only(torch.Tensor, partial(change, key), value)
            for key, value in state.items()
        }


_attached: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()


@cache
def install() -> None:
    """Wraps the two methods of all optimizers of the process, once."""
    show, load = optim.Optimizer.state_dict, optim.Optimizer.load_state_dict

    @wraps(show)
    def attach_and_show(self: optim.Optimizer) -> dict[str, Any]:
        _attach(self)
        return show(self)

    @wraps(load)
    def attach_and_load(self: optim.Optimizer, state_dict: dict[str, Any]) -> None:
        _attach(self)
        _refuse_parts(self, state_dict)
        load(self, state_dict)

    optim.Optimizer.state_dict = attach_and_show  # type: ignore[method-assign]
    optim.Optimizer.load_state_dict = attach_and_load  # type: ignore[method-assign]


def _attach(optimizer: optim.Optimizer) -> None:
    """Makes the state dicts of `optimizer` have ShardTensors from now on, if parameters of it are sharded."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    if optimizer not in _attached and any(ParamState.of(param) for param in params):
        # Before the user's own hooks: these then see what the state dict's reader sees, and rows in one to be loaded.
        optimizer.register_state_dict_post_hook(_show, prepend=True)
        optimizer.register_load_state_dict_pre_hook(_take, prepend=True)
        _attached.add(optimizer)


def _refuse_parts(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """ValueError if a parameter that is not sharded would get a part of a sharded parameter's state."""
    for number, param in _pairs(optimizer, state_dict):
        if ParamState.of(param) is None:
            for key, value in state_dict["state"].get(number, {}).items():
                if any(isinstance(leaf, ShardTensor) for leaf in tree_leaves(value)):
                    raise ValueError(
                        f"load_state_dict: {key!r} of parameter {number!r} is this rank's part of what a sharded "
                        f"optimizer keeps, and this {type(optimizer).__name__} has the whole parameter; save the "
                        "sharded one by torch.distributed.checkpoint, and load that, or the one file that "
                        "dcp_to_torch_save makes of it"
                    )


def _show(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
    state = state_dict["state"]
    held = [(of, state[key]) for key, _, of in _numbered(optimizer, state_dict) if key in state]
    for of, _ in held:
        if of.check_names is not None:
            of.check_names("optimizer.state_dict")
    names = {
        of_number: dict(ChainMap(*(of.numbers(kept, of_number=of_number) for of, kept in held)))
        for of_number in (False, True)
    }
    for number, param, of in _numbered(optimizer, state_dict):
        if not of.part.elsewhere:
            if number in state:
                state[number] = of.shown(state[number])
        elif param.requires_grad and state:
            # Torch's functions expect entries for all parameters, and in full state dicts for all numbers.
            state[number] = of.nothing(names[of.part.shape == ()])


def _take(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replaces tensors of the whole by this rank's rows. `state_dict` is torch's shallow copy of the caller's."""
    state = state_dict["state"] = dict(state_dict["state"])
    for number, _, of in _numbered(optimizer, state_dict):
        if number in state:
            state[number] = of.taken(state[number])


def _numbered(
    optimizer: optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, nn.Parameter, ParamState]]:
    """The sharded parameters with their keys in `state_dict`: numbers, or names in those of DCP."""
    for number, param in _pairs(optimizer, state_dict):
        if (of := ParamState.of(param)) is not None:
            yield number, param, of


def _pairs(
    optimizer: optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, nn.Parameter]]:
    # If the groups are not the optimizer's, torch refuses them after this.
    for given, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(given["params"], own["params"], strict=False)
