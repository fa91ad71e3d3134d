"""What becomes of the reduced gradients of all units: they are checked, shown as `.grad`, and clipped by their norm."""

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
from shardcomm.parameter.plain import grad_of, plain
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.sharded.unit_gradients import READY, REDUCING

_NAMED = 8  # parameters in a sentence: of the last units, to which backward comes first
OnNonfinite = Literal["raise", "skip"] | None


class Gradients:
    """The gradients of a model's sharded parameters, over the ranks of `mesh`.

    Attributes:
        nonfinite: the units in whose gradients the latest backward that was reduced left NaN or Inf, on any rank;
            found where `on_nonfinite` is not None.
    """

    def __init__(self, units: Sequence[ShardedUnit], mesh: Mesh, on_nonfinite: OnNonfinite) -> None:
        self.nonfinite: tuple[str, ...] = ()
        self._units = units
        self._params = [param for unit in units for param in unit.params]
        self._mesh = mesh
        self._params_of: dict[Holders, list[int]] = defaultdict(list)
        number = count()
        for unit in units:
            self._params_of[unit.holders] += islice(number, len(unit.params))
        self._on_nonfinite = on_nonfinite
        # Other ranks may wait to hear what this one has used, or whether it found NaN.
        self._is_asked = bool(on_nonfinite) or any(h.mesh.size > 1 for h in self._params_of)
        self._all_used = {
            holders: torch.ones(len(where), dtype=torch.int32, device=mesh.device)
            for holders, where in self._params_of.items()
        }
        # One a unit, set by whatever writes its gradients.
        self._nonfinite = torch.zeros(
            len(units) if on_nonfinite else 0, dtype=torch.int32, device=mesh.device
        )
        for unit in units:  # what is offloaded, the host waits for when backward has ended
            offloaded = any(bucket.offload for bucket, _ in unit.buckets)
            unit.gradients.early = on_nonfinite is None and not offloaded
        if on_nonfinite:
            for unit, flag in zip(units, torch.split(self._nonfinite, 1), strict=True):
                for bucket, _ in unit.buckets:
                    bucket.nonfinite = flag

    def begin_backward(self) -> None:
        """Forgets what the reduces of the one before left."""
        for unit in self._units:
            unit.gradients.end()
        if self._on_nonfinite is not None:
            self._nonfinite.zero_()

    def publish(self) -> None:
        """Sets `.grad` of what any rank had a gradient for; what no rank used keeps None, as under DDP.

        Raises:
            FloatingPointError: they are not finite, where that is to raise.
        """
        stages = [unit.gradients.stage for unit in self._units]
        if not (REDUCING in stages or (READY in stages and self._is_asked)):
            return
        known = [unit.gradients.known() for unit in self._units]
        flags = self._of_any_rank([flag for of_unit in known for flag in of_unit])
        used, nonfinite = iter(flags), flags[len(self._params) :]
        self.nonfinite = tuple(
            unit.name for unit, bad in zip(self._units, nonfinite, strict=False) if bad
        )
        if self.nonfinite:
            self._leave_out()
            return
        try:
            for unit, of_unit in zip(self._units, known, strict=True):
                used_anywhere = list(islice(used, len(of_unit)))
                if unit.gradients.stage is REDUCING:
                    unit.gradients.publish(used_anywhere)
        except BaseException:  # of a hook
            # What is not shown yet would be added to the next backward's.
            for unit in self._units:
                unit.gradients.forget()
            raise

    def clip_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales them so that their global L2 norm is at most `max_norm`; returns the norm before."""
        with plain():
            every: list[torch.Tensor] = []
            square = torch.zeros((), device=self._mesh.device)
            for holders, where in self._params_of.items():
                params = [self._params[i] for i in where]
                shown = [(grad_of(p.shard), p.counts) for p in params]
                every += [grad for grad, _ in shown if grad is not None]
                counted = [grad for grad, counts in shown if grad is not None and counts]
                norms = torch._foreach_norm(counted) if counted else []
                theirs = sum((norm.float().square() for norm in norms), torch.zeros(()))
                theirs = theirs.to(square.device)
                holders.combine(theirs, "sum")
                square += theirs
            norm = square.sqrt()
            if every:
                scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                torch._foreach_mul_(every, scale.to(every[0].device))
        return norm

    def _of_any_rank(self, used: list[bool]) -> list[bool]:
        """For each parameter whether a rank used it; then for each unit whether its gradients have NaN or Inf."""
        known = list(used)
        for holders, where in self._params_of.items():
            theirs = [used[i] for i in where]
            if holders.mesh.size > 1:
                # Who used all of them knows the result; it is the others who read it, and wait for it.
                flags = self._all_used[holders]
                if not all(theirs):
                    flags = flags.new_tensor(theirs)
                holders.mesh.all_reduce(flags, "max")
                if not all(theirs):
                    theirs = [bool(flag) for flag in flags.tolist()]
            for i, flag in zip(where, theirs, strict=True):
                known[i] = flag
        if self._on_nonfinite is None:
            return known
        self._mesh.all_reduce(self._nonfinite, "max")
        return [*known, *(bool(flag) for flag in self._nonfinite.tolist())]

    def _leave_out(self) -> None:
        """Drops all gradients: those of earlier backwards too, which these were added to."""
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
        """Names of parameters of which any rank has such a gradient, in this rank's order; collective."""
        mine = []
        for unit in self._units:
            for bucket, params in unit.buckets:
                if unit.name not in self.nonfinite or not bucket.gradients.nbytes:
                    continue
                with plain():
                    finite = [bool(rows.isfinite().all()) for rows in bucket.gradients.rows]
                mine += [p.name for p, f in zip(params, finite, strict=True) if not f]
        groups = [self._mesh.shard, self._mesh.replicate, *self._mesh.inner.values()]
        with self._mesh.failing_together:
            everybody = all_gather_text([g for g in groups if g.size > 1], json.dumps(mine))
        found = {name for text in everybody for name in json.loads(text)}
        order = {param.name: index for index, param in enumerate(self._params)}
        return sorted(found, key=lambda name: order.get(name, -1))
