"""What a rank's rows of a parameter are a part of, and the sentences against what rows alone would do wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn

from shardcomm.parameter.draws import DRAWS, refusals
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.plain import plain
from shardcomm.parameter.shard_tensor import Part

_T = TypeVar("_T", bound=torch.Tensor)

awaiting: WeakSet[Any] = WeakSet()
"""What has set `awaits_reduce` of a parameter. While it is empty, an optimizer's step need not look at each."""

elsewhere: WeakSet[Whole] = WeakSet()
"""The parameters of which another rank has everything. While it is empty, a `zero_grad` need not look at each."""

_OF_MATRICES = (
    'an optimizer of whole matrices needs fully_shard(granularity="tensor"), and no DTensors'
)
_DRAWN_LIKE = ("rand_like", "randn_like", "randint_like")
_OF_MEMORY = ("data_ptr", "storage", "untyped_storage")


def is_in_place(name: str) -> bool:
    """Whether torch's function `name` writes into its first argument."""
    return name.endswith("_") and not name.startswith("__")


class Held(Enum):
    """How much of a parameter a rank has."""

    ROWS = "some of its rows, or none"
    WHOLE = "all of it"
    ELSEWHERE = "nothing, and another rank owns all of it"


class Owned(Enum):
    """Whether one rank owns a parameter by its granularity, and does not just happen to have all of its rows."""

    NOT = "ranks share its rows out"
    WHOLE = "one rank owns all of it"
    PART = "one rank owns the part of a DTensor of which others have other parts"
    """Then nobody has the whole, and not all ranks that have some of it would call for its norm."""


@dataclass(eq=False)
class Whole:
    """The whole parameter of which a rank has rows.

    Attributes:
        name: The parameter's name in the model.
        unit: The name of the unit in whose forward the whole parameter is there.
        holders: The ranks that hold the other rows.
        rows: This rank's rows, as a plain tensor.
        part: Which part of the whole they are.
        is_part: Whether other ranks hold other rows of the parameter, or other parameters of the model.
        held: How much of the parameter this rank has.
        owned: Whether the parameter has an owner.
        gather: A function that gathers the whole of a tensor of the rows' shape; collective.
        counts: Whether norms count these rows on this rank; several tensor-parallel ranks may have the same rows.
        address: The address of the rows.
        outline: A tensor of the whole's shape, without memory.
        grad_elsewhere: Guarded rows that `.grad` shows on a rank without a gradient, if the parameter's owner has one.
        in_step: Whether an optimizer's step is under way, in which sizes are those of the rows; see `sizes.py`.
        awaits_reduce: Whether backwards have left gradients that are not reduced over all ranks yet, as in `no_sync`.
        check_names: Raises if other ranks have other parameters of the same name; see `checkpoint/elsewhere.py`.
        aliases: What `.data` and `detach()` have given to somebody, by its `id`: it is in the rows' memory.
    """

    name: str
    unit: str
    holders: Holders
    rows: torch.Tensor
    part: Part
    is_part: bool
    held: Held
    owned: Owned
    gather: Callable[[torch.Tensor], torch.Tensor]
    counts: bool = True
    grad_elsewhere: Any = None
    in_step: bool = False
    awaits_reduce: bool = False
    check_names: Callable[[str], None] | None = None
    aliases: WeakValueDictionary[int, torch.Tensor] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self.address = self.rows.data_ptr()
        self.outline = torch.empty(self.part.shape, dtype=self.rows.dtype, device="meta")
        if self.part.elsewhere:
            elsewhere.add(self)

    def adopt(self, param: nn.Parameter) -> None:
        """Copies back the values of `param` if somebody has given it other memory than the rows'."""
        with plain():
            values, param.data = param.data, self.rows
        self.take(values)

    @cached_property
    def draws(self) -> dict[str, Any]:
        """The attributes of a tensor by which draws into it are refused; see `draws.py`."""
        return refusals(self)

    def given(self, alias: _T) -> _T:
        """Notes that somebody is given `alias`, which is in the rows' memory; returns it."""
        self.aliases[id(alias)] = alias
        return alias

    def take(self, values: torch.Tensor) -> None:
        """Does what `param.data = values` does: the rows have these values, and earlier aliases keep the old ones.

        The rows' memory stays, since other tensors, such as the flat shard, have it too. So the aliases move:
        `old = p.data; p.data = new; p.data = old` swaps values, and swaps them back.
        """
        self.check(values)
        with plain():
            if values.data_ptr() == self.address and values.stride() == self.rows.stride():
                return  # a conversion that changes nothing, as by `.float()`
            values = values.clone()  # it may be a view of the rows
            for alias in self.aliases.values():
                alias.data = alias.clone()
            self.aliases.clear()
            self.rows.copy_(values)

    def check(self, values: torch.Tensor) -> None:
        """RuntimeError unless `values` can take the rows' place: they need the same shape, dtype and device."""
        rows = self.rows
        with plain():
            if values.shape == rows.shape and (values.dtype, values.device) == (
                rows.dtype,
                rows.device,
            ):
                return
        raise RuntimeError(
            f"parameter {self.name!r} was given {values.dtype} of shape {tuple(values.shape)} on {values.device} after "
            f"fully_shard; this rank's rows are {rows.dtype} of shape {tuple(rows.shape)} on {rows.device}. Convert "
            "and move a model before fully_shard, compute in another dtype by mixed_precision=, and load values by "
            "load_state_dict"
        )

    def refuse(
        self, name: str, given: str = "", *, given_whole: bool = False, of_values: bool = True
    ) -> NoReturn:
        """Raises the RuntimeError which says that the function `name` would be computed from rows alone.

        Args:
            name: The function or attribute.
            given: What it was given, for the message, such as "with a tensor of shape (3,)".
            given_whole: Whether that has the whole parameter's shape, as a parameter of a copy of the model.
            of_values: Whether it is a function of the parameter's values, and not of a gradient or the like.
        """
        if self.in_step:
            instead = _OF_MATRICES
        elif given_whole and of_values and name == "copy_":
            instead = (
                "give the model values by load_state_dict, or inside of engine.gathered(write=True); for an average "
                "use shardcomm.ExponentialMovingAverage, or update the AveragedModel inside of engine.gathered()"
            )
        elif given_whole:
            instead = (
                "for an average use shardcomm.ExponentialMovingAverage, or update the AveragedModel, or the copy from "
                "before fully_shard, inside of engine.gathered(); compute there, too, what needs whole tensors, inside "
                "of engine.gathered(write=True) to change the parameter"
            )
        elif name in DRAWS or name in _DRAWN_LIKE:
            instead = (
                "for noise draw values of the shape of to_local(), the parameter's or the gradient's, with another "
                "seed on each rank, and add them to to_local(); new values write inside of engine.gathered(write=True)"
            )
        elif is_in_place(name) or name == "__setitem__":
            instead = "write inside of engine.gathered(write=True), or elementwise, the same on every rank"
        elif name in _OF_MEMORY:
            instead = (
                "take to_local() for the rows' memory, and full_tensor() for the whole; torch.export asks for memory, "
                "and is right inside of engine.gathered(), under torch.no_grad()"
            )
        elif not of_values:
            instead = (
                "take full_tensor() of this gradient, or of what was computed from rows, for the whole, or to_local() "
                "for the rows"
            )
        else:
            instead = (
                "compute in that forward, begun by module(...) and not by module.forward(...), in a method given to "
                "engine.register_forward_method, or between unshard() and reshard() of the unit; or take full_tensor() "
                "for the whole, to_local() for the rows, engine.gathered(write=True) to write through a view"
            )
        self._refuse_rows(f"{name} {given}".rstrip(), instead)

    def refuse_matrices(self, optimizer: str) -> NoReturn:
        """Raises the RuntimeError against a step of an `optimizer` that computes with whole parameters."""
        self._refuse_rows(f"{optimizer}.step", _OF_MATRICES)

    def _refuse_rows(self, what: str, instead: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of {self.name!r}: outside of the forward of unit {self.unit!r} this rank has only its rows of it; "
            f"{instead}"
        )

    def refuse_derivative(self, what: str) -> NoReturn:
        """Raises the RuntimeError which says that the derivative of `what` would be of rows alone."""
        raise RuntimeError(
            f"{what} of {self.name!r}: outside of the forward of unit {self.unit!r} this rank has only its rows of it; "
            "take one to look at of param.detach(), or under torch.no_grad(), and one to train with between unshard() "
            "and reshard() of the unit"
        )

    def refuse_leaf(self) -> NoReturn:
        """Raises the RuntimeError against nn.Parameter of a parameter, and against requires_grad_() of its detach()."""
        of = "full_tensor(), or of " if self.is_part else ""
        raise RuntimeError(
            f"nn.Parameter of {self.name!r}, a parameter of fully_shard: the engine would not have the new one; make "
            f"it before fully_shard, of {of}param.detach().clone() for an average or a copy of what this rank has"
        )

    def refuse_compile(self) -> NoReturn:
        """Raises the RuntimeError against torch.compile of what computes with rows, of which it knows nothing."""
        raise RuntimeError(
            f"torch.compile of a function that computes with {self.name!r} outside of the forward of unit "
            f"{self.unit!r}, such as an optimizer's step: this rank has only its rows of it; compile the model or its "
            "blocks, and call the step as it is, with fused=True for speed"
        )

    def refuse_draw(self, name: str) -> NoReturn:
        """Raises the RuntimeError against random values, which each rank would draw by its own generator."""
        raise RuntimeError(
            f"{name} of {self.name!r}, which every rank has: each would draw by its own generator, and they would "
            "train apart; initialise before fully_shard, which sends rank 0's values, or inside of "
            "engine.gathered(write=True), with the same seed on every rank"
        )

    def refuse_grad(self, shape: tuple[int, ...]) -> NoReturn:
        """Raises the RuntimeError against a `.grad` of another `shape` than the rows'."""
        raise RuntimeError(
            f".grad of {self.name!r} was given a tensor of shape {shape}; accepted: this rank's rows of the gradient, "
            f"of shape {tuple(self.rows.shape)}, as torch.zeros_like(param) has them. Scale or add to param.grad in "
            "place, or let loss.backward() set it"
        )

    def refuse_step(self, optimizer: str) -> NoReturn:
        """Raises the RuntimeError against a step that would pass over gradients which are on their way."""
        raise RuntimeError(
            f"{optimizer}.step: gradients of {self.name!r} are not reduced over the ranks yet, since all backwards "
            "since the last step were in engine.no_sync(), or after engine.set_requires_all_reduce(False); leave the "
            "last backward before a step outside of these"
        )

    def refuse_autograd_grad(self) -> NoReturn:
        """Raises the RuntimeError against torch.autograd.grad, whose gradient is that of this rank alone."""
        raise RuntimeError(
            f"torch.autograd.grad with respect to {self.name!r}, a parameter of fully_shard: autograd's gradient is "
            "this rank's gradient of the whole parameter, which is reduced over the ranks before it is the .grad; "
            "call loss.backward() and read .grad"
        )

    def refuse_backward_inputs(self) -> NoReturn:
        """Raises the RuntimeError against backward(inputs=...), in which autograd would not come to the parameter."""
        raise RuntimeError(
            f"backward(inputs=) with {self.name!r}, a parameter of fully_shard: autograd computes with the full "
            "parameter, and would leave this one without a gradient; call loss.backward() without inputs, and "
            "requires_grad_(False) of parameters that are to have none before the forward"
        )

    def refuse_other_memory(self, what: str) -> NoReturn:
        """Raises the RuntimeError against `what`, after which the engine would not know an optimizer's memory."""
        raise RuntimeError(
            f"{what} of {self.name!r}, a parameter of fully_shard, whose memory belongs to the engine; call it before "
            "fully_shard, and give the parameter values by copy_ or load_state_dict"
        )

    def refuse_swap(self) -> NoReturn:
        """Raises the RuntimeError against torch.utils.swap_tensors, which gives a parameter another's memory."""
        self.refuse_other_memory(
            "torch.utils.swap_tensors, as by torch.__future__.set_swap_module_params_on_conversion,"
        )

    def refuse_hook(self) -> NoReturn:
        """Raises the RuntimeError against `register_hook`: autograd never comes to the parameters of an optimizer."""
        self._refuse_gradient("register_hook on")

    def refuse_node(self, name: str) -> NoReturn:
        """Raises the RuntimeError against `param.view_as(param)`, from whose graph others take a node to hook on.

        Args:
            name: The method, "view_as" or "expand_as".
        """
        self._refuse_gradient(
            f"{name} to get the node of autograd, as torch.autograd.graph does, of"
        )

    def _refuse_gradient(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} {self.name!r}, a parameter of fully_shard: autograd's gradient is this rank's gradient "
            "of the whole parameter, which is reduced over the ranks before rows of it are the .grad; use "
            "register_post_accumulate_grad_hook, or loss.backward() and .grad"
        )

    def refuse_collective(self, operation: str) -> NoReturn:
        """Raises the RuntimeError which says that `operation` would mix this rank's rows with other rows."""
        raise RuntimeError(
            f"{operation} of {self.name!r}, of which each rank has other rows: fully_shard makes parameters the same "
            "on all ranks, and averages gradients over them in backward; leave the call out, take full_tensor() for "
            "the whole, or to_local() for the rows as a plain tensor"
        )
