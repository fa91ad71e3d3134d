"""For the fork server of `launch` alone, which imports this at its start: how it ends.

It ends when its pipe from the launcher closes. Stopped, it would not: so the kernel continues it when its parent ends.
(A parent thread that ends before its process does no harm so, unlike with a signal that kills.) A launcher that was
killed could not remove its folder, where the server's socket is.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

from shardcomm.parent import signal_at_its_end

_ORPHANED_S = 1.0  # that a parent may take to end after its descriptors are closed

_SERVER, _LAUNCHER = os.getpid(), os.getppid()


def _remove_folder() -> None:
    if os.getpid() != _SERVER:  # a process that a rank forked
        return
    end = time.monotonic() + _ORPHANED_S
    while os.getppid() == _LAUNCHER and time.monotonic() < end:
        time.sleep(0.01)
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if os.getppid() != _LAUNCHER and address:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


signal_at_its_end(signal.SIGCONT)
atexit.register(_remove_folder)
