"""Versions: numbers by which autograd tells whether the values that it saved for backward are still in memory.

A full parameter has the version of the rows that were gathered into it. An optimizer's step, a load, or any other
change gives rows a new version, on every rank alike. A gather of unchanged rows gives a full parameter its old version
back::

    rows                     v5 ─────────────────────────────────────► v6
    full parameter           v5        GONE: another unit's       v5   v6
                                       are in the slot
    backward of a            right     autograd raises         right   autograd raises, as without sharding
    graph made at v5
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardcomm.parameter.full_parameter import GatheredParameter, ReleasedParameter

GONE = 2**31 - 1
"""The version of a full parameter while other values are in its memory."""

changes = 0
"""How often rows of any model have changed. While it stays the same, another gather would give the same values."""

_set_versions = torch._C._autograd._unsafe_set_version_counter


def written(rows: Iterable[torch.Tensor]) -> None:
    """Tells autograd that `rows` have new values, or that other ranks' rows of the same parameters have."""
    global changes  # noqa: PLW0603  (one counter for the process)
    changes += 1
    torch.autograd.graph.increment_version(rows)


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was changed in place; 0 of one of inference mode, where autograd does not count."""
    return 0 if tensor.is_inference() else tensor._version


class Versions:
    """The versions of full parameters, and whether they may be used.

    Args:
        params: For each its name, the full parameter, and this rank's rows.
    """

    def __init__(self, params: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        params = list(params)
        # Not DTensors, which cannot have another class.
        self._classes = [
            (full, type(full)) for _, full, _ in params if isinstance(full, GatheredParameter)
        ]
        self._is_forbidden = False
        # Tensors of inference mode have no versions, and are in no graph.
        tracked = [each for each in params if not each[2].is_inference()]
        self._names = [name for name, _, _ in tracked]
        self._full = tuple(full for _, full, _ in tracked)
        self._rows = tuple(rows for _, _, rows in tracked)
        self._gone = (GONE,) * len(tracked)
        self._now = self._gathered = _of(self._full)
        self._is_coming = False

    def gather(self) -> None:
        """A gather of the current rows has been queued."""
        self._gathered = _of(self._rows)
        self._is_coming = True

    def gather_again(self) -> None:
        """A gather of the same values as before has been queued."""
        self._is_coming = True

    def arrive(self) -> None:
        """The gather that was queued, if any, has ended."""
        if self._is_coming:
            self._is_coming = False
            self._become(self._gathered)
            if self._is_forbidden:
                self._is_forbidden = False
                for full, kind in self._classes:
                    full.__class__ = kind

    def forbid(self) -> None:
        """From now to the next gather, raises where somebody computes with a full parameter that he has kept."""
        if not self._is_forbidden:
            self._is_forbidden = True
            for full, _ in self._classes:
                full.__class__ = ReleasedParameter

    @property
    def are_old(self) -> bool:
        """Whether the rows have changed since they were gathered. All ranks get the same answer."""
        return self._gathered != _of(self._rows)

    def leave(self) -> None:
        """Other values come into the memory of the full parameters."""
        self._is_coming = False
        self._become(self._gone)
        self.forbid()

    def changed(self) -> str | None:
        """The name of a full parameter into which somebody has written; None if there is none.

        If there is one, autograd refuses all of them until the next gather.
        """
        now, before = _of(self._full), self._now
        if now == before:
            return None
        self._now = now
        self.leave()
        return next(n for n, a, b in zip(self._names, now, before, strict=True) if a != b)

    def _become(self, versions: tuple[int, ...]) -> None:
        if versions != self._now:
            _set_versions(self._full, versions)
            self._now = versions


def _of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in tensors])
