"""The process of a rank that runs a function: `python -m shardcomm.cluster.rank CALL OUTCOME`, two descriptors.

It reads what to call from one, and writes to the other what came of it. Nothing imports this module, which Python would
otherwise have loaded before it runs it.
"""

from __future__ import annotations

import os
import pickle
import sys

from shardcomm.process.failures import raised


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
