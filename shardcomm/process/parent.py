"""The death of this process's parent, as a signal from the kernel (Linux's PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def signal_at_its_end(number: signal.Signals) -> None:
    """Has the kernel send this process a signal when the thread that started it ends.

    Processes that this one forks do not inherit that.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
