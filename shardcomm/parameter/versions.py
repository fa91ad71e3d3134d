"""Versions: by which autograd tells whether the values that it saved for backward are still those in memory.

A full parameter has the version of the rows that were gathered into it. An optimizer's step, a load, or whatever else
changes rows gives them a version of their own, on every rank alike; a gather of unchanged rows gives back the old one::

    rows                     v5 ─────────────────────────────────────► v6
    full parameter           v5        GONE: another unit's       v5   v6
                                       are in the slot
    backward of a            right     autograd raises         right   autograd raises, as without sharding
    graph made at v5
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

GONE = 2**31 - 1
"""The version while other values are in the memory."""

changes = 0
"""How often rows have got other values, of any model: while it stays the same, what was gathered is what would be."""

_set_versions = torch._C._autograd._unsafe_set_version_counter


def written(rows: Iterable[torch.Tensor]) -> None:
    """`rows` have other values, of which torch does not know; or other ranks' rows of the same parameters have."""
    global changes  # noqa: PLW0603  (of the process)
    changes += 1
    torch.autograd.graph.increment_version(rows)


class Versions:
    """Those of full parameters; of each its name, itself, and this rank's rows."""

    def __init__(self, params: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        # Tensors of inference have no versions, and are in no graph.
        tracked = [each for each in params if not each[2].is_inference()]
        self._names = [name for name, _, _ in tracked]
        self._full = tuple(full for _, full, _ in tracked)
        self._rows = tuple(rows for _, _, rows in tracked)
        self._gone = (GONE,) * len(tracked)
        self._now = self._gathered = _of(self._full)
        self._is_coming = False

    def gather(self) -> None:
        """The rows of now are on their way to the full parameters."""
        self._gathered = _of(self._rows)
        self._is_coming = True

    def gather_again(self) -> None:
        """What was gathered before is on its way there."""
        self._is_coming = True

    def arrive(self) -> None:
        """What was on its way, if anything, is there."""
        if self._is_coming:
            self._is_coming = False
            self._become(self._gathered)

    @property
    def are_old(self) -> bool:
        """Whether the rows have changed since they were gathered; on every rank alike."""
        return self._gathered != _of(self._rows)

    def leave(self) -> None:
        """Other values are on their way to the same memory."""
        self._is_coming = False
        self._become(self._gone)

    def changed(self) -> str | None:
        """The name of a full parameter that somebody has written into; until the next gather autograd refuses all."""
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
