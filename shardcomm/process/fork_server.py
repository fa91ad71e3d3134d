"""How the fork server of `launch` ends, and what is left to its ranks to end. Only that server imports this module.

The server ends when its pipe from the launcher closes. A stopped server would not notice that, so the kernel continues
it (SIGCONT) when its parent ends. The kernel takes the end of the thread that started the server for the parent's end.
Then SIGCONT does no harm, while a signal that kills would. A launcher that was killed leaves its folder with the
server's socket; the server removes that.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import time
import weakref
from multiprocessing import forkserver
from pathlib import Path

from shardcomm.process.parent import signal_at_its_end

_ORPHANED_S = 1.0  # how long a parent may take to end after its descriptors are closed

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

# A rank ends what it has begun itself. Torch, which is loaded by now, takes its operators back at the end of a process:
# each rank would copy, to do so, a large part of the memory that it shares with this server.
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
