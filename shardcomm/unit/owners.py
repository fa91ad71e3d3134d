"""Owners: which rank holds a parameter that is not cut. They are chosen over the whole model, so that all ranks hold
about as much.

The rule is longest processing time first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969): the costliest
parameter goes to the rank that has the least so far, and so does each next one. Costs 7, 5, 4, 4, 3 and 1 over two
ranks::

    rank 0   [   7    ][  4  ][1]     12
    rank 1   [  5   ][  4  ][ 3 ]     12

The most loaded rank gets at most 4/3 of what the best choice would give it, and at most its last parameter more than
the mean. A single parameter that costs more than the mean is a limit for every choice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch import nn

from shardcomm.parameter.tensor_parallel import local

OwnerCost = Callable[[str, nn.Parameter], float]
"""What it costs a rank to own a parameter, as a function of its name in the model and the parameter; in any unit."""


def in_bytes(name: str, param: nn.Parameter) -> float:
    """The default cost, bytes: of memory, and of what an elementwise optimizer reads and writes."""
    return local(param).nbytes


def choose_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank that owns each parameter, from the cost of each. All ranks that call it get the same."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, owners[index] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[index], owners[index]))
    return owners


def checked_cost(cost: OwnerCost, name: str, param: nn.Parameter) -> float:
    """What it costs to own `param`; ValueError unless that is a number of 0 or more."""
    value: Any = cost(name, param)
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ValueError(
            f"owner_cost of parameter {name!r} is {value!r}; it must be a finite number of 0 or more"
        )
    return float(value)
