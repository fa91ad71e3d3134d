"""Full parameters in memory of their own: for `engine.gathered()` and `unit.unshard()`.

Each bucket is gathered into a new tensor; the units' slots are not touched, and autograd may keep the tensor::

    shard of each rank ──all-gather──► full parameters, shown in the model ──► gradients, if somebody takes them
                       ◄──own rows───  at the end, if they are to be written
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardcomm.comm.mesh import FailingTogether
from shardcomm.layout.placement import Piece, Placement
from shardcomm.layout.views import rows
from shardcomm.parameter.optimizer_steps import shown_for_a_while
from shardcomm.parameter.plain import plain
from shardcomm.parameter.tensor_parallel import local, shown
from shardcomm.parameter.versions import version_of
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.sharded.unit_param import UnitParam

OnGradient = Callable[[ShardedUnit, UnitParam, torch.Tensor], None]
"""Takes the gradient of a full parameter, when a backward has all of it."""


class Apart:
    """The full parameters of a unit, which it gathers and shows in the model until the unit shows others; collective.

    Args:
        unit: The unit.
        together: Ends the other groups if a gather fails.
        write: Whether changes are kept; else `check` raises if the parameters were changed.
        to_compute: Whether they have the dtype in which the unit computes; else they have that of the shards.
        on_gradient: The function that gets their gradients.
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
        # Tensors of inference mode have no versions, and a backward after it could not use them.
        with torch.inference_mode(False), torch.no_grad():
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
                full.show(unit, on_gradient)

    @property
    def is_shown(self) -> bool:
        """Whether the model shows one of them. `functional_call` shows other tensors in their places."""
        return any(full.is_shown(any) for full in self._full)

    def check(self) -> None:
        """RuntimeError if a change of the parameters, or of the rows, would be lost."""
        for full in self._full:
            full.check(write=self.write)

    def take_rows(self) -> None:
        """Copies this rank's rows of their current values to the shard, if changes are kept."""
        for full in self._full if self.write else ():
            full.take_rows()


@contextlib.contextmanager
def gathered(
    units: Sequence[ShardedUnit], together: FailingTogether, *, write: bool
) -> Iterator[None]:
    """A context in which the full parameters of `units` are shown; see `Engine.gathered`.

    Units whose parameters are shown already stay as they are.

    Raises:
        ValueError: Parameters would be written inside of a context in which they may only be read.
        RuntimeError: At the end, a change of the parameters would be lost.
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
            unit.callbacks.keep_out_of_graphs(False)
        yield
        for apart in aparts:
            apart.check()
        for apart in aparts:
            apart.take_rows()
    finally:
        for unit in units:
            unit.show_shard()
            unit.apart = None
            unit.callbacks.keep_out_of_graphs(True)


def nobodys_gradient(what: str, unit: ShardedUnit) -> RuntimeError:
    """The error about `what` in a `gathered()` of `unit`."""
    return RuntimeError(
        f"{what} of unit {unit.name!r} inside of engine.gathered(), where its full parameters are copies whose "
        "gradients nobody reduces: compute under torch.no_grad() there, and train outside of it"
    )


def _refuse_gradient(unit: ShardedUnit, param: UnitParam, grad: torch.Tensor) -> None:
    raise nobodys_gradient(f"a gradient of {param.name!r}", unit)


@dataclass
class _Full:
    """A full parameter while the model shows it. It notices whether the parameter, or its shard, is changed."""

    param: UnitParam
    value: torch.Tensor
    placement: Placement
    piece: Piece

    def __post_init__(self) -> None:
        shard = self.param.shard
        self.shown = shown(self.value, self.param.distribution, requires_grad=shard.requires_grad)
        self._shape = self.shown.shape
        shown_for_a_while(self.shown, self.param.name, shard)
        with plain():
            self._version, self._shard_version = self._shown_version(), version_of(shard)

    def show(self, unit: ShardedUnit, on_gradient: OnGradient) -> None:
        """Shows the parameter in the model, and passes its gradients to `on_gradient`."""
        # Garbage collection does not see through autograd, so its hook keeps nothing alive.
        unit_of, param_of = weakref.ref(unit), weakref.ref(self.param)

        def hook(shown: torch.Tensor) -> None:
            grad, shown.grad = shown.grad, None
            unit, param = unit_of(), param_of()
            if grad is not None and unit is not None and param is not None:
                on_gradient(unit, param, grad)

        if self.shown.requires_grad:
            self.shown.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.param.owned.show(self.shown)

    def is_shown(self, where: Callable[[Iterator[bool]], bool]) -> bool:
        """Whether the model shows it in `any`, or in `all`, of the parameter's places."""
        return where(m._parameters.get(a) is self.shown for m, a in self.param.owned.places)

    def check(self, *, write: bool) -> None:
        """RuntimeError if a change of the parameter, or of its rows, would be lost."""
        name, shown, shard = self.param.name, self.shown, self.param.shard
        if not self.is_shown(all):
            raise RuntimeError(
                f"parameter {name!r} was replaced while the full one was shown; write its values in place, by "
                "engine.gathered(write=True), or replace parameters before fully_shard"
            )
        with plain():
            shard_version = version_of(shard)
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
        """The versions of the parameter and of its local tensor, which for a DTensor are two."""
        return self.shown._version, local(self.shown)._version

    def _was_changed(self) -> bool:
        if (
            self._shown_version() != self._version
            or local(self.shown).data_ptr() != self.value.data_ptr()
        ):
            return True
        # A change through `.data` leaves no trace but the values.
        with plain():
            now = self._rows()
            before = self.param.shard.detach().to(now.dtype)
            return not bool(((now == before) | (now.isnan() & before.isnan())).all())

    def take_rows(self) -> None:
        """Copies this rank's rows of the full parameter's current values to the shard."""
        with plain(), torch.no_grad():
            self.param.shard.copy_(self._rows())

    def _rows(self) -> torch.Tensor:
        return rows(local(self.shown).detach(), self.placement, self.piece).to(
            self.param.shard.device
        )
