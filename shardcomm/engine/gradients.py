"""The reduced gradients of all units: they are checked for NaN and Inf, shown as `.grad`, and clipped by their norm."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice
from typing import Literal

import torch

from shardcomm.comm.mesh import Mesh
from shardcomm.comm.texts import all_gather_text
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.norms import wide
from shardcomm.parameter.plain import grad_of, plain
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.sharded.unit_gradients import READY, REDUCING

_NAMED = 8  # parameters that a sentence names: of the last units, to which backward comes first
OnNonfinite = Literal["raise", "skip"] | None
"""What a backward does about a gradient that is NaN or Inf; see `fully_shard`."""


class Gradients:
    """The gradients of a model's sharded parameters, over the ranks of `mesh`.

    Attributes:
        nonfinite: The units in whose gradients the latest backward that was reduced left NaN or Inf, on any rank; empty
            where `on_nonfinite` is None.
    """

    def __init__(self, units: Sequence[ShardedUnit], mesh: Mesh, on_nonfinite: OnNonfinite) -> None:
        self.nonfinite: tuple[str, ...] = ()
        self._units = units
        self._params = [param for unit in units for param in unit.params]
        self._mesh = mesh
        doubles = (torch.float64, torch.complex128)
        is_double = any(param.shard.dtype in doubles for param in self._params)
        self._norm_dtype = torch.float64 if is_double else torch.float32
        self._params_of: dict[Holders, list[int]] = defaultdict(list)
        number = count()
        for unit in units:
            self._params_of[unit.holders] += islice(number, len(unit.params))
        self._on_nonfinite = on_nonfinite
        # Whether other ranks may wait to hear which parameters this one has used, or whether it found NaN.
        self._is_asked = bool(on_nonfinite) or any(h.mesh.size > 1 for h in self._params_of)
        self._all_used = {
            holders: torch.ones(len(where), dtype=torch.int32, device=mesh.device)
            for holders, where in self._params_of.items()
        }
        # A flag for each unit, set by the kernel that writes its gradients.
        self._nonfinite = torch.zeros(
            len(units) if on_nonfinite else 0, dtype=torch.int32, device=mesh.device
        )
        for unit in units:  # for offloaded gradients the host waits when backward has ended
            offloaded = any(bucket.offload for bucket, _ in unit.buckets)
            unit.gradients.early = on_nonfinite is None and not offloaded
        if on_nonfinite:
            for unit, flag in zip(units, torch.split(self._nonfinite, 1), strict=True):
                for bucket, _ in unit.buckets:
                    bucket.nonfinite = flag

    def begin_backward(self) -> None:
        """Forgets what the reduces of the backward before left."""
        for unit in self._units:
            unit.gradients.reset()
        if self._on_nonfinite is not None:
            self._nonfinite.zero_()

    def publish(self) -> None:
        """Sets `.grad` of parameters that any rank has used; a parameter that no rank used keeps None, as under DDP.

        Raises:
            FloatingPointError: Gradients are not finite, and `on_nonfinite` is "raise".
        """
        stages = [unit.gradients.stage for unit in self._units]
        if not (REDUCING in stages or (READY in stages and self._is_asked)):
            return
        known = [unit.gradients.known() for unit in self._units]
        used = iter(self._of_any_rank([flag for of_unit in known for flag in of_unit]))
        self.nonfinite = () if self._on_nonfinite is None else self._nonfinite_units()
        if self.nonfinite:
            self._leave_out()
            return
        try:
            for unit, of_unit in zip(self._units, known, strict=True):
                used_anywhere = list(islice(used, len(of_unit)))
                if unit.gradients.stage is REDUCING:
                    unit.gradients.publish(used_anywhere)
        except BaseException:  # that a hook has raised
            # Gradients that are not shown yet would be added to the next backward's.
            for unit in self._units:
                unit.gradients.forget()
            raise

    def clip_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients so that their global L2 norm is at most `max_norm`; returns the norm before."""
        with plain():
            every: list[torch.Tensor] = []
            square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
            for holders, where in self._params_of.items():
                alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(
                    list
                )
                for param in (self._params[i] for i in where):
                    if (grad := grad_of(param.shard)) is not None:
                        every.append(grad)
                        if param.counts:
                            alike[grad.device, grad.dtype].append(grad)
                theirs = torch.zeros_like(square)
                for (_, dtype), grads in alike.items():
                    norms = torch._foreach_norm(grads, dtype=wide(dtype))
                    theirs += torch.stack(norms).double().square().sum().to(theirs.device)
                holders.combine(theirs, "sum")
                square += theirs
            norm = square.sqrt().to(self._norm_dtype)
            if every:
                scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                torch._foreach_mul_(every, scale.to(every[0].device))
        return norm

    def _of_any_rank(self, used: list[bool]) -> list[bool]:
        """For each parameter, whether a rank used it; collective."""
        known = list(used)
        for holders, where in self._params_of.items():
            theirs = [used[i] for i in where]
            if holders.mesh.size > 1:
                # A rank that used every parameter already knows the maximum, and need not read it back. The other ranks
                # read it, and wait for that.
                flags = self._all_used[holders]
                if not all(theirs):
                    flags = flags.new_tensor(theirs)
                holders.mesh.all_reduce(flags, "max")
                if not all(theirs):
                    theirs = [bool(flag) for flag in flags.tolist()]
            for i, flag in zip(where, theirs, strict=True):
                known[i] = flag
        return known

    def _nonfinite_units(self) -> tuple[str, ...]:
        """The names of units in whose gradients any rank has found NaN or Inf, in this rank's order; collective."""
        # One flag, since ranks with other experts have other units.
        found = self._nonfinite.max().view(1)
        self._mesh.all_reduce(found, "max")
        if not found.item():
            return ()
        names = [unit.name for unit in self._units]
        mine = [name for name, bad in zip(names, self._nonfinite.tolist(), strict=True) if bad]
        return tuple(self._of_all(mine, names))

    def _leave_out(self) -> None:
        """Drops all gradients, also those of earlier backwards, to which the nonfinite ones were added."""
        bad = self._nonfinite_params() if self._on_nonfinite == "raise" else []
        for unit in self._units:
            unit.gradients.forget()
        for param in self._params:
            param.shard.grad = None
        if self._on_nonfinite == "raise":
            named = ", ".join(map(repr, bad[-_NAMED:]))
            others = f" and {len(bad) - _NAMED} others" if len(bad) > _NAMED else ""
            raise FloatingPointError(
                f"backward: gradients of {', '.join(map(repr, self.nonfinite))} are NaN or Inf after their reduce, "
                f"those of {named}{others}; no parameter has a .grad now. Look for the cause there, or train on with "
                "on_nonfinite='skip'"
            )

    def _nonfinite_params(self) -> list[str]:
        """The names of parameters of which any rank has a nonfinite gradient, in this rank's order; collective."""
        mine = []
        for unit in self._units:
            for bucket, params in unit.buckets:
                if unit.name not in self.nonfinite or not bucket.gradients.nbytes:
                    continue
                with plain():
                    finite = [bool(rows.isfinite().all()) for rows in bucket.gradients.rows]
                mine += [p.name for p, f in zip(params, finite, strict=True) if not f]
        return self._of_all(mine, [param.name for param in self._params])

    def _of_all(self, mine: Sequence[str], order: Sequence[str]) -> list[str]:
        """The names that any rank gives, in this `order`, those that it lacks first; collective."""
        groups = [self._mesh.shard, self._mesh.replicate, *self._mesh.inner.values()]
        with self._mesh.failing_together:
            everybody = all_gather_text([g for g in groups if g.size > 1], json.dumps(mine))
        found = {name for text in everybody for name in json.loads(text)}
        place = {name: index for index, name in enumerate(order)}
        return sorted(found, key=lambda name: (place.get(name, -1), name))
