"""Starts multiprocessing's servers by a fork of this process, which has loaded what they would load anew."""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import forkserver, util


def start_servers_by_forks() -> None:
    """From now on, in this process and those that are forked from it.

    Where there is a GPU nothing changes: CUDA works in no fork of a process that has used it, even to count the GPUs.
    """
    if not os.path.exists("/dev/nvidiactl"):
        util.spawnv_passfds = _fork


def _fork(_path: bytes, args: list[str], descriptors: list[int]) -> int:
    """Stands in for `util.spawnv_passfds`: runs the program that is the last of `args`; returns its pid.

    This process has one thread, and a worker of pytest-xdist two. The second waits for messages, and the child leaves
    alone what it may hold: its queues, and the streams, in whose place come new ones.
    """
    pid = os.fork()
    if pid > 0:
        return pid
    status = 1
    try:
        faulthandler.disable()  # pytest's writes to a descriptor that is closed here
        kept = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
        for before, after in itertools.pairwise(kept):
            os.closerange(before + 1, after)
        open_streams()
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # the starter holds its own
        with suppress(SystemExit):
            exec(args[-1])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def open_streams() -> None:
    """Standard streams on descriptors 0 to 2, in the place of pytest's, which capture what the starter writes."""
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
