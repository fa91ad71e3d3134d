"""The words that callers of collectives choose from, and the deadline unless they choose one."""

from __future__ import annotations

from typing import Literal

ReduceOp = Literal["sum", "avg", "max", "min"]
"""How a reduce combines the ranks' elements; "avg" is the sum divided by the number of ranks."""

Use = Literal["gather", "reduce"]
"""What communication memory is for; see `Communicator.allocate`."""

Transport = Literal["auto", "shm", "nccl", "hosts", "c10d", "local"]
"""What carries collectives; "auto" takes the fastest that all ranks can use. See `Communicator.from_env`."""

CtaPolicy = Literal["default", "efficiency", "zero"]
"""How much of a GPU NCCL may take; see `Communicator.from_env`."""

Sums = Literal["fast", "exact"]
"""How sums and averages of floats are rounded: at each addition, or once; see `Communicator.from_env`."""

DEADLINE_S = 300.0
"""How long a rank waits for another one unless told otherwise, in seconds."""

FIRST_NAMED_TAG = 1 << 32
"""The first of the tags that `Communicator.tag` gives; tags that callers choose themselves are smaller."""
