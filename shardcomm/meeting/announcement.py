"""How rank 0 tells the other ranks of its host at which port the store is, where nobody has told them before.

It listens on a socket whose name is that of the launcher's run, in Linux' abstract namespace: no file, and nothing is
left of it when the process ends. Who connects reads the port::

    rank 0    listens at @shardcomm/USER/RUN    ── "40123\n" ──►    ranks 1, 2, ...

A rank connects once. When all have, the name is free again: the next program of the same run may take it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from hashlib import blake2b

from shardcomm._C import CommError
from shardcomm.meeting.background import Background
from shardcomm.meeting.comm_error import comm_error

_PAUSE_S = 0.02  # between attempts, until rank 0 is there


def announce(run: str, port: int, others: int) -> None:
    """Begins to tell `port` to the `others` ranks of `run`.

    Raises:
        CommError: another process of this user does so for the same run.
    """
    if not others:
        return
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(_name(run))
    except OSError as error:
        listening.close()
        raise CommError(
            f"rank 0 of another program meets its ranks under the same name ({run}); start the programs one after the "
            "other, or set MASTER_ADDR and MASTER_PORT, different for each"
        ) from error
    listening.listen(min(others, 4096))

    def tell_all() -> None:
        told = 0
        with listening:
            while told < others:
                peer, _ = listening.accept()
                with peer, suppress(OSError):  # of one that has ended
                    if _user_of(peer) == os.getuid():
                        peer.sendall(b"%d\n" % port)
                        told += 1

    Background(tell_all)


def ask(run: str, timeout_s: float) -> int:
    """The port that rank 0 of `run` announces.

    Raises:
        CommError: it did not within `timeout_s`, or another user's process does.
    """
    end = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.0, end - time.monotonic()) + _PAUSE_S)
            try:
                connection.connect(_name(run))
                if _user_of(connection) != os.getuid():
                    raise CommError(f"user {_user_of(connection)} announces a port for {run}")
                told = connection.makefile("rb").readline()
                if told.endswith(b"\n"):
                    return int(told)
            except OSError:  # it is not there yet, or was the one of the program before
                pass
        if time.monotonic() > end:
            raise comm_error("late", "rank 0 did not announce its port", rank=0)
        time.sleep(_PAUSE_S)


def _name(run: str) -> str:
    digest = blake2b(run.encode(), digest_size=16).hexdigest()  # a name has 107 bytes at most
    return f"\0shardcomm/{os.getuid()}/{digest}"


def _user_of(connection: socket.socket) -> int:
    """Of the process at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(user)
