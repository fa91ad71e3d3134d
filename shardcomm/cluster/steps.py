"""Steps that a program announces, so that a kill "at step 7" strikes at a known place of the program.

The ranks know from the environment which steps are deadly. A rank that comes to one writes to the pipe that the first
process of its host has as its output, and which the cluster's maker reads; then it goes no further.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from shardcomm.arguments.scalars import is_whole
from shardcomm.cluster.kills import Kill

_VARIABLE = "SHARDCOMM_CLUSTER_KILLS"


class _Deadly(NamedTuple):
    """A kill of this host (rank None) or of one of its ranks."""

    number: int
    rank: int | None
    step: int


def step(number: int) -> None:
    """Announces that this rank begins a step, for a kill such as "host1 at step 7" of a cluster.

    A rank that is to be killed at this step ends in this call. A host that is to be killed at this step ends as soon as
    one of its ranks makes this call, and that rank does not return from it. In all other cases the call does nothing,
    and takes less than a microsecond.

    Args:
        number: The step, 0 or more.

    Raises:
        ValueError: `number` is no whole number from 0.
    """
    if not is_whole(number, 0):
        raise ValueError(f"step: number is {number!r}; it must be a whole number from 0")
    for deadly in _of_this_host():
        if deadly.step == number and deadly.rank in (None, int(os.environ.get("RANK", "-1"))):
            _die(deadly)


def variables(kills: Sequence[Kill], host: int, ranks_a_host: int) -> dict[str, str]:
    """The environment in which the ranks of a host know which steps are deadly."""
    deadly = [
        _Deadly(i, kill.rank, kill.step)
        for i, kill in enumerate(kills)
        if kill.step is not None and kill.host_of(ranks_a_host) == host
    ]
    return {_VARIABLE: json.dumps(deadly)}


@functools.cache
def _of_this_host() -> list[_Deadly]:
    return [_Deadly(*each) for each in json.loads(os.environ.get(_VARIABLE, "[]"))]


def _die(deadly: _Deadly) -> NoReturn:
    with open("/proc/1/fd/1", "wb", buffering=0) as outside:
        outside.write(b"%d\n" % deadly.number)
    if deadly.rank is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the host ends
        signal.pause()
