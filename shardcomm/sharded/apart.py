"""Full parameters in memory of their own: for `engine.gathered()` and `unit.unshard()`.

Each bucket is gathered into a new tensor; the units' slots are not touched, and autograd may keep the tensor::

    shard of each rank ──all-gather──► full parameters, shown in the model ──► gradients, if somebody takes them
                       ◄──own rows───  at the end, if they are to be written
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardcomm.comm.mesh import FailingTogether
from shardcomm.layout.layout import Piece, Placement
from shardcomm.layout.views import rows
from shardcomm.parameter.optimizer_steps import shown_for_a_while
from shardcomm.parameter.plain import plain
from shardcomm.parameter.tensor_parallel import local, shown
from shardcomm.sharded.sharded_unit import ShardedParam, ShardedUnit

OnGradient = Callable[[ShardedUnit, ShardedParam, torch.Tensor], None]
"""Takes the gradient of a full parameter, when a backward has all of it."""


class Apart:
    """The full parameters of `unit`, shown in the model until `end()`; collective.

    Args:
        write: whether `end` takes what they are then; else it raises if they were changed.
        to_compute: in the dtype that the unit computes in, else in that of the shards.
        on_gradient: what their gradients are given to.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        together: FailingTogether,
        *,
        write: bool = False,
        to_compute: bool = False,
        on_gradient: OnGradient,
    ) -> None:
        self.write = write
        self._full: list[_Full] = []
        for bucket, params in unit.buckets:
            numel, device = bucket.layout.flat_numel, bucket.comm.device
            flat = torch.empty(numel, dtype=bucket.shard.dtype, device=device)
            with together:
                values = bucket.gathered_shards(flat)
            for index, (param, value) in enumerate(zip(params, values, strict=True)):
                param.owned.check(param.shard, param.full)
                placement = bucket.layout.placements[index]
                piece = bucket.layout.piece(bucket.comm.rank, index)
                cast = value.to(bucket.param_dtype) if to_compute else value
                self._full.append(_Full(param, cast, placement, piece))
        for full in self._full:
            full.show(lambda param, grad: on_gradient(unit, param, grad))

    @property
    def is_shown(self) -> bool:
        """Whether the model has one of them: `functional_call` puts others there."""
        return any(full.is_shown(any) for full in self._full)

    def check(self) -> None:
        """RuntimeError if what was done to them, or to the rows, would be lost."""
        for full in self._full:
            full.check(write=self.write)

    def take_rows(self) -> None:
        """This rank's rows of the values that they have now, if they are to be written."""
        for full in self._full if self.write else ():
            full.take_rows()


@contextlib.contextmanager
def gathered(
    units: Sequence[ShardedUnit], together: FailingTogether, *, write: bool
) -> Iterator[None]:
    """See `Engine.gathered`; `units` are whose parameters are shown. Those that are shown so already stay as they are.

    Raises:
        ValueError: they are to be written inside of a context in which they are only to be read.
        RuntimeError: at the end, what was done to them would be lost.
    """
    for unit in units:
        if write and unit.apart is not None and not unit.apart.write:
            raise ValueError(
                f"gathered: write=True inside of a gathered() of unit {unit.name!r} that is not to be written; give "
                "write=True to the outer one"
            )
    units = [unit for unit in units if unit.apart is None]
    aparts: list[Apart] = []
    try:
        for unit in units:
            unit.apart = Apart(unit, together, write=write, on_gradient=_refuse_gradient)
            aparts.append(unit.apart)
        yield
        for apart in aparts:
            apart.check()
        for apart in aparts:
            apart.take_rows()
    finally:
        for unit in units:
            unit.show_shard()
            unit.apart = None


def nobodys_gradient(what: str, unit: ShardedUnit) -> RuntimeError:
    """The error for `what`, in a `gathered()` of `unit`."""
    return RuntimeError(
        f"{what} of unit {unit.name!r} inside of engine.gathered(), where its full parameters are copies whose "
        "gradients nobody reduces: compute under torch.no_grad() there, and train outside of it"
    )


def _refuse_gradient(unit: ShardedUnit, param: ShardedParam, grad: torch.Tensor) -> None:
    raise nobodys_gradient(f"a gradient of {param.name!r}", unit)


@dataclass
class _Full:
    """A full parameter while the model shows it, and what tells whether it, or its shard, was changed."""

    param: ShardedParam
    value: torch.Tensor
    placement: Placement
    piece: Piece

    def __post_init__(self) -> None:
        shard = self.param.shard
        self.shown = shown(self.value, self.param.distribution, requires_grad=shard.requires_grad)
        self._shape = self.shown.shape
        shown_for_a_while(self.shown, self.param.name)
        with plain():
            self._version, self._shard_version = self._shown_version(), shard._version

    def show(self, on_gradient: Callable[[ShardedParam, torch.Tensor], None]) -> None:
        """In the model; its gradients are given to `on_gradient`."""
        param = self.param  # all that the hook keeps, which may outlive this

        def hook(shown: torch.Tensor) -> None:
            grad, shown.grad = shown.grad, None
            assert grad is not None
            on_gradient(param, grad)

        if self.shown.requires_grad:
            self.shown.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.param.owned.show(self.shown)

    def is_shown(self, where: Callable[[Iterator[bool]], bool]) -> bool:
        """In `any`, or in `all`, of the parameter's places."""
        return where(m._parameters.get(a) is self.shown for m, a in self.param.owned.places)

    def check(self, *, write: bool) -> None:
        """RuntimeError if what was done to the parameter, or to its rows, would be lost."""
        name, shown, shard = self.param.name, self.shown, self.param.shard
        if not self.is_shown(all):
            raise RuntimeError(
                f"parameter {name!r} was replaced while the full one was shown; write its values in place, by "
                "engine.gathered(write=True), or replace parameters before fully_shard"
            )
        with plain():
            shard_version = shard._version
        if shard_version != self._shard_version:
            raise RuntimeError(
                f"this rank's rows of {name!r} were changed while the full parameter was shown, by an optimizer's step "
                "for instance; do that outside of engine.gathered(), and after unit.reshard()"
            )
        if (shown.shape, shown.dtype) != (self._shape, self.value.dtype):
            raise RuntimeError(
                f"parameter {name!r} became {shown.dtype} of shape {tuple(shown.shape)} while the full one was shown; "
                f"it is {self.value.dtype} of shape {tuple(self._shape)}. Convert a model before fully_shard"
            )
        if not write and self._was_changed():
            raise RuntimeError(
                f"the full parameter {name!r} was changed, which is lost; use engine.gathered(write=True) for that, in "
                "which every rank writes the same values"
            )
        shard.requires_grad = shown.requires_grad

    def _shown_version(self) -> tuple[int, int]:
        """Of a DTensor, its local tensor has its own."""
        return self.shown._version, local(self.shown)._version

    def _was_changed(self) -> bool:
        if (
            self._shown_version() != self._version
            or local(self.shown).data_ptr() != self.value.data_ptr()
        ):
            return True
        # What was done to its `.data` left no trace but the values.
        with plain():
            now = self._rows()
            before = self.param.shard.detach().to(now.dtype)
            return not bool(((now == before) | (now.isnan() & before.isnan())).all())

    def take_rows(self) -> None:
        """This rank's rows of the values that the full parameter has now."""
        with plain(), torch.no_grad():
            self.param.shard.copy_(self._rows())

    def _rows(self) -> torch.Tensor:
        return rows(local(self.shown).detach(), self.placement, self.piece).to(
            self.param.shard.device
        )
