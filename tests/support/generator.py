"""Torch's random generator, which the thread ranks of a process share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_in_use = threading.RLock()  # a model that is made in here may seed for itself: twins(nets.make)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """What this thread draws in here depends on the seed alone; afterwards all is as it was."""
    with _in_use, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
