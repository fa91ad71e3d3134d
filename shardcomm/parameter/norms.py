"""Norms of sharded tensors: each rank has the norm of its rows, and the norms of many tensors are completed together.

`torch.nn.utils.clip_grad_norm_` takes a norm of each gradient, stacks the norms, and takes the norm of the stack. The
norms stay partial until then, so that one all-reduce completes all of them. There may be plain tensors among them, such
as gradients of `ignored_params`, which nobody has averaged. Their mean over the ranks counts, so that every rank scales
by the same factor.

Ranks communicate when a norm's value is needed for the first time: in `float(norm)`, `norm > 1` or `print(norm)`. So
every rank has to read it. The all-reduce has a tag of its own, so that another collective in its place is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from shardcomm.parameter.holders import Holders, complete
from shardcomm.parameter.plain import plain
from shardcomm.parameter.tensor_parallel import full

if TYPE_CHECKING:
    from shardcomm.comm.words import ReduceOp


def is_norm(func: Any) -> bool:
    """Whether `func` is a norm of torch's that `partial_norms` can take."""
    return func in _NORMS


def partial_norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func`, a norm of torch's, gives for sharded tensors: a PartialNorm, or a list of them."""
    given: _Given = _NORMS[func](*args, **kwargs)
    many = isinstance(given.tensors, list | tuple)
    norms = [_norm(t, given) for t in (given.tensors if many else [given.tensors])]
    return norms if many else norms[0]


class _Given:
    def __init__(
        self,
        tensors: Any,
        ord: Any = 2,
        dim: Any = None,
        keepdim: bool = False,
        out: Any = None,
        dtype: Any = None,
    ) -> None:
        self.tensors, self.dtype = tensors, dtype
        self.ord = 2.0 if ord in (None, "fro") else ord
        whole_only = dim is None and not keepdim and out is None and not isinstance(self.ord, str)
        what = "a norm of a matrix" if isinstance(self.ord, str) else "a norm along a dim"
        self.refused = None if whole_only else what
        if whole_only:
            self.ord = float(self.ord)


def _linalg_norm(tensors: Any, ord: Any = None, *rest: Any, **kwargs: Any) -> _Given:
    given = _Given(tensors, ord, *rest, **kwargs)
    if ord is not None and not isinstance(tensors, list) and tensors.dim() > 1 and ord != "fro":
        given.refused = "a norm of a matrix"
    return given


def _tensor_norm(input: Any, p: Any = "fro", *rest: Any, **kwargs: Any) -> _Given:
    return _Given(input, p, *rest, **kwargs)


_NORMS: dict[Any, Any] = {
    torch.linalg.vector_norm: lambda x, ord=2, *rest, **kwargs: _Given(x, ord, *rest, **kwargs),
    torch._foreach_norm: lambda tensors, ord=2, dtype=None: _Given(tensors, ord, dtype=dtype),
    torch.linalg.norm: _linalg_norm,
    torch.norm: _tensor_norm,
    torch.Tensor.norm: _tensor_norm,
}


def _norm(tensor: Any, given: _Given) -> torch.Tensor:
    whole = getattr(tensor, "whole", None)
    with plain():
        if whole is None:
            norm: torch.Tensor = torch.linalg.vector_norm(tensor, given.ord, dtype=given.dtype)
            return norm
        if given.refused:
            whole.refuse(given.refused)
        if torch.is_grad_enabled() and tensor.requires_grad:
            whole.refuse_derivative("a norm to differentiate")
        rows = tensor.detach().as_subclass(torch.Tensor)
        dtype = given.dtype or rows.abs().dtype if rows.is_complex() else given.dtype or rows.dtype
        if rows.numel() == 0 and whole.outline.numel() > 0:
            power = _power_of_nothing(given.ord, rows.device)
        else:
            power = _power(rows, given.ord).view(1)
        if not whole.counts and not math.isinf(given.ord):
            power.zero_()
        is_values = getattr(tensor, "is_values", True)
        of = repr(whole.name) if is_values else f"a gradient, or the like, of {whole.name!r}"
        return PartialNorm(power, given.ord, [whole.holders], [of], (), dtype)


def _power_of_nothing(ord: float, device: torch.device) -> torch.Tensor:
    """What changes nothing when ranks combine it: of some orders, torch knows no norm of no elements."""
    nothing = math.inf if ord == -math.inf else 0.0
    return torch.full((1,), nothing, dtype=torch.float64, device=device)


def _power(rows: torch.Tensor, ord: float) -> torch.Tensor:
    """The value that ranks combine: a sum of powers, a count, or the largest or the least element."""
    norm: torch.Tensor = torch.linalg.vector_norm(rows, ord, dtype=wide(rows.dtype))
    norm = norm.double()
    return norm if math.isinf(ord) or ord == 0 else norm.pow(ord)


def wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which a norm of tensors of `dtype` is taken; None: in their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


class PartialNorm(torch.Tensor):
    """Norms of order `ord`, of which each holder has a part. They are completed when their values are first needed."""

    powers: torch.Tensor
    ord: float
    holders: Sequence[Holders | None]  # None: the norm is of a plain tensor, and complete
    subjects: Sequence[str]  # what each norm is of; `names` is a tensor's own in torch 2.11
    given: Mapping[
        int, torch.Tensor
    ]  # by their places, plain numbers in a stack, which may be no norms
    at: int | None  # the tensor's version when it was completed; None: its memory has no values yet

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        powers: torch.Tensor,
        ord: float,
        holders: Sequence[Holders | None],
        subjects: Sequence[str],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> PartialNorm:
        with torch.inference_mode(False):  # whose tensors have no versions
            self = torch.empty(shape, dtype=dtype, device=powers.device).as_subclass(cls)
        self.powers, self.ord, self.holders, self.subjects = powers, ord, holders, subjects
        self.given = {}
        self.at = None
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with plain():
            if getattr(func, "__name__", "") == "__get__":
                return _got(func, args[0])
            if func is torch.Tensor.to and is_partial(args[0]):
                return _moved(args[0], func(*args, **kwargs))
            if func is torch.stack and len(args) == 1 and not kwargs:
                return _stacked(args[0])
            if is_norm(func):
                given: _Given = _NORMS[func](*args, **kwargs)
                stack = given.tensors
                if is_partial(stack) and given.ord == stack.ord and not given.refused:
                    return stack.total(given.dtype)
            args, kwargs = completed(args), completed(kwargs)
        # Not in `plain()`, since there may be rows among the arguments.
        return func(*args, **kwargs)

    def complete(self) -> torch.Tensor:
        """The norms of the whole tensors, as a plain tensor in the same memory; collective the first time.

        There is one all-reduce for norms with the same holders.
        """
        with plain():
            if self.at is None:
                norms = self._rooted(self._whole_powers())
                for place, number in self.given.items():
                    norms[place] = number
                self.fill(norms)
            return self.as_subclass(torch.Tensor)

    def fill(self, norms: torch.Tensor) -> None:
        """Gives the tensor its values."""
        with plain():
            self.copy_(norms.view(self.shape))
            self.at = self._version

    def _whole_powers(self) -> torch.Tensor:
        powers = self.powers.clone()
        for holders in dict.fromkeys(each for each in self.holders if each is not None):
            theirs = [i for i, each in enumerate(self.holders) if each is holders]
            part = _chosen(powers, theirs).to(holders.mesh.device)
            of = ", ".join(self.subjects[i] for i in theirs)
            complete(holders.mesh.all_reduce_shards, part, self._op, f"the norm of {of}")
            part = part.to(powers.device)
            if len(theirs) == len(powers):
                return part
            powers[theirs] = part
        return powers

    def total(self, dtype: torch.dtype | None) -> torch.Tensor:
        """The norm of all norms, the same on every rank; collective. It takes an all-reduce of one number.

        For the norm of a plain tensor the mean of all ranks' powers counts, or their largest or least.
        """
        op, powers, holders = self._op, self.powers, self.holders
        meshes = list({id(each.everyone): each.everyone for each in holders if each}.values())
        if self.ord == 0:  # torch counts the norms that are not 0
            says = [each is None or each.is_first for each in holders]
            powers = (self._whole_powers() != 0).double() * powers.new_tensor(says)
        if op == "sum" and None in holders:
            ranks = [1 if each else meshes[0].all_ranks for each in holders]
            powers = powers / powers.new_tensor(ranks)
        totals = []
        for mesh in meshes:
            theirs = [
                i
                for i, each in enumerate(holders)
                if (each.everyone is mesh and each.speaks(op) if each else mesh is meshes[0])
            ]
            total = self._combined(_chosen(powers, theirs)).to(mesh.device)
            of = "the norm of several tensors together"
            complete(mesh.all_reduce, total, op, of)
            totals.append(total.to(powers.device))
        with plain():
            return self._rooted(self._combined(torch.cat(totals))).to(dtype or self.dtype).view(())

    @property
    def _op(self) -> ReduceOp:
        return "max" if self.ord == math.inf else "min" if self.ord == -math.inf else "sum"

    def _combined(self, powers: torch.Tensor) -> torch.Tensor:
        if self._op == "sum":
            return powers.sum().view(1)
        return (powers.amax() if self._op == "max" else powers.amin()).view(1)

    def _rooted(self, powers: torch.Tensor) -> torch.Tensor:
        return powers if math.isinf(self.ord) or self.ord == 0 else powers.pow(1 / self.ord)


def _chosen(powers: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Those at `places`, which ascend. All of them where it can be: a list of places makes the host wait for a GPU."""
    return powers if len(places) == len(powers) else powers[places]


def is_partial(norm: Any) -> TypeGuard[PartialNorm]:
    """Whether `norm` is a PartialNorm into which nobody has written since."""
    return isinstance(norm, PartialNorm) and norm.at in (None, norm._version)


def _got(func: Any, norm: PartialNorm) -> Any:
    value = func(norm)
    if isinstance(value, torch.Tensor):  # `.data`, by which the values may be read and written
        value = func(norm.complete())
        norm.at = -1
    return value


def _moved(norm: PartialNorm, to: torch.Tensor) -> PartialNorm:
    if to is norm:
        return norm
    powers, shape = norm.powers.to(to.device), tuple(norm.shape)
    moved = PartialNorm(powers, norm.ord, norm.holders, norm.subjects, shape, to.dtype)
    moved.given = norm.given
    if norm.at is not None:
        moved.fill(to)
    return moved


def _stacked(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    partial = [n for n in norms if is_partial(n)]
    if len({n.ord for n in partial}) != 1 or any(n.dim() for n in norms):
        return torch.stack(completed(list(norms)))
    ord = partial[0].ord
    powers: list[torch.Tensor] = []
    holders: list[Holders | None] = []
    subjects: list[str] = []
    given = {}
    for place, norm in enumerate(norms):
        if is_partial(norm):
            powers.append(norm.powers)
            holders += norm.holders
            subjects += norm.subjects
        else:
            given[place] = full(norm)
            power = given[place].double().abs().view(1)
            powers.append(power if math.isinf(ord) or ord == 0 else power.pow(ord))
            holders.append(None)
            subjects.append("a plain tensor")
    dtype = torch.stack([torch.empty((), dtype=n.dtype) for n in norms]).dtype
    stack = PartialNorm(torch.cat(powers), ord, holders, subjects, (len(norms),), dtype)
    stack.given = given
    if all(n.at is not None for n in partial):
        stack.fill(torch.stack(completed(list(norms))))
    return stack


def completed(tree: Any) -> Any:
    """`tree` with its partial norms completed; collective if there are any that were not."""
    if isinstance(tree, PartialNorm):
        return tree.complete()
    if isinstance(tree, list | tuple):
        return type(tree)(completed(each) for each in tree)
    if isinstance(tree, dict):
        return {key: completed(value) for key, value in tree.items()}
    return tree
