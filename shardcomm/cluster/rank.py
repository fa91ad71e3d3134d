"""The process of a rank that runs a function: `python -m shardcomm.cluster.rank CALL OUTCOME`, two descriptors.

It reads what to call from one, and writes to the other what came of it. Both are files in memory, without a name.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from shardcomm.process.failures import raised


def pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """What a rank is to call, and where it finds the modules of it.

    Raises:
        TypeError: `fn` or `args` cannot be pickled.
    """
    try:
        return pickle.dumps((sys.path, pickle.dumps((fn, tuple(args)))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run: what and args must be what pickle can send to another process: {error}"
        ) from error


def unpack(outcome: bytes) -> Any:
    """What the rank's function has returned, or the `Failure` of a rank that ended with status 1."""
    return pickle.loads(outcome)


def _main(call: int, outcome: int) -> int:
    with open(call, "rb") as file:
        sys.path[:], packed = pickle.load(file)
    pid, status = os.getpid(), 0
    try:
        fn, args = pickle.loads(packed)
        written = pickle.dumps(fn(*args))
    except BaseException as error:
        if os.getpid() != pid:
            raise
        written, status = pickle.dumps(raised(error)), 1
    if os.getpid() == pid:  # not a process that fn forked, which came back from it too
        with open(outcome, "wb") as file:
            file.write(written)
    return status


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2])))
