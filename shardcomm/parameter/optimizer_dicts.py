"""An optimizer's own state dict, of sharded parameters: ShardTensors, and loaded from these or from full tensors.

`optimizer.state` is of this rank's rows. Torch calls an optimizer's hooks where it makes a state dict, and where it
loads one. It has no hook where an optimizer gets its parameters, which may be put into its groups by hand, and a copy
of an optimizer has none of its hooks: so `Optimizer.state_dict` and `load_state_dict` are wrapped, and look first.
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

from shardcomm.layout.layout import ParamSpec, Piece, Placement
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import Part, ShardTensor, check_value, load_value
from shardcomm.parameter.sharded_parameter import Whole

_NUMBERS = {"step", "eta", "mu", "mu_product"}
"""Of torch's optimizers: told by their names where a moment is a number too."""

_OF_NUMBERS = ((), (1,))
"""The shapes that optimizers give them; a moment of these is that of a parameter with as many dims."""


@dataclass(frozen=True)
class ParamState:
    """The state of one parameter: of this rank's `rows` in the optimizer, of the whole in a state dict."""

    name: str
    rows: torch.Tensor
    part: Part
    check_names: Callable[[str], None] | None

    @staticmethod
    def of(param: nn.Parameter) -> ParamState | None:
        """None where the rank holds the whole model; also in a step, where `param` is a plain one by its class."""
        with plain():
            whole = getattr(param, "whole", None)
        if not isinstance(whole, Whole) or not whole.is_part:
            return None
        return ParamState(whole.name, whole.rows, whole.part, whole.check_names)

    def shown(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """For a state dict: what has the rows' shape as ShardTensors, views of it; the rest as it is.

        Raises:
            ValueError: the rest has a tensor that was computed from some rows alone.
        """
        return _mapped(self._shown, state)

    def numbers(self, state: Mapping[str, Any], *, of_number: bool) -> dict[str, torch.Tensor]:
        """What is one number, such as a step counter; with `of_number` also what is where the parameter is: moments."""
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        numbers = {key: value for key, value in tensors.items() if self._is_number(key, value)}
        if not of_number:
            return numbers
        moments = {k: v.new_empty(()) for k, v in tensors.items() if v.shape == self.rows.shape}
        return {**moments, **numbers}

    def nothing(self, numbers: Mapping[str, torch.Tensor]) -> dict[str, ShardTensor]:
        """For a state dict, where another rank owns the parameter and counts its steps: `numbers`, without values."""
        nothing = {}
        for key, value in numbers.items():
            shape = tuple(value.shape)
            placement = Placement(ParamSpec(self.name, shape), 0, 0, 1, shape)
            part = Part(placement, Piece(0, 0, 0, 0, (0,)), self.part.ranks)
            nothing[key] = part.of(value.new_empty(0))
        return nothing

    def taken(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """For the optimizer: this rank's rows of ShardTensors and of full tensors; the rest as it is.

        Raises:
            ValueError: a tensor is of another shape than the whole, or has other rows.
        """
        return _mapped(self._taken, state)

    def _shown(self, key: str, value: torch.Tensor) -> torch.Tensor:
        if self._is_number(key, value):
            return value
        if value.shape == self.rows.shape:
            return self.part.of(value)
        if value.dim() == 0 or self.rows.shape == self.part.shape:
            return value
        raise ValueError(
            f"state_dict: {key!r} of {self.name!r} has shape {tuple(value.shape)}, this rank's rows "
            f"{tuple(self.rows.shape)}: it was computed from these rows alone and is no part of what the whole "
            "parameter's would be; for an optimizer that looks at whole parameters, fully_shard with "
            'granularity="tensor"'
        )

    def _taken(self, key: str, value: torch.Tensor) -> torch.Tensor:
        is_number = self._is_number(key, value)
        if self.part.elsewhere:
            # Never computed with; but some optimizers look for the names of what they keep.
            if is_number:
                if isinstance(value, ShardTensor):
                    return value.held.new_zeros(value.shape)
                return value
            return torch.empty_like(self.rows, dtype=value.dtype, device=value.device)
        if not isinstance(value, ShardTensor) and (is_number or self.rows.shape == self.part.shape):
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
    """Each tensor, also in the lists and dicts of an optimizer such as Shampoo."""
    return {
        key: tree_map_only(torch.Tensor, partial(change, key), value)
        for key, value in state.items()
    }


_attached: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()


@cache
def install() -> None:
    """From now on; once a process."""
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
    """If parameters of `optimizer` are sharded, its state dicts have ShardTensors from now on."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    if optimizer not in _attached and any(ParamState.of(param) for param in params):
        # Before hooks of the user's own, which see in a state dict what its reader does, and rows in one to load.
        optimizer.register_state_dict_post_hook(_show, prepend=True)
        optimizer.register_load_state_dict_pre_hook(_take, prepend=True)
        _attached.add(optimizer)


def _refuse_parts(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """ValueError if the state of a parameter which is not sharded would be a part of a sharded one's."""
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
            # Torch's functions want the names of all parameters, and those of all numbers in full state dicts.
            state[number] = of.nothing(names[of.part.shape == ()])


def _take(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """`state_dict` is torch's shallow copy of what the caller gave."""
    state = state_dict["state"] = dict(state_dict["state"])
    for number, _, of in _numbered(optimizer, state_dict):
        if number in state:
            state[number] = of.taken(state[number])


def _numbered(
    optimizer: optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, nn.Parameter, ParamState]]:
    """The sharded parameters by their keys in `state_dict`: numbers, or names in torch.distributed.checkpoint's."""
    for number, param in _pairs(optimizer, state_dict):
        if (of := ParamState.of(param)) is not None:
            yield number, param, of


def _pairs(
    optimizer: optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, nn.Parameter]]:
    # Other groups than the optimizer's are refused by torch, after this.
    for given, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(given["params"], own["params"], strict=False)
