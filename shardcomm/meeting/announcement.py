"""How rank 0 tells the other ranks of its host at which port the store is, if the launcher has not told them.

It listens on a socket whose name is that of the launcher's run, in Linux' abstract namespace. That is no file, and
nothing is left of it when the process ends. A rank that connects reads the port::

    rank 0    listens at @shardcomm/USER/RUN    ── "40123\n" ──►    ranks 1, 2, ...

A rank connects once. When all have connected, the name is free again, and the next program of the same run may take it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from hashlib import blake2b

from shardcomm._C import CommError
from shardcomm.meeting.comm_error import comm_error

_PAUSE_S = 0.02  # between attempts to connect, until rank 0 is there


def announce(run: str, port: int, others: int) -> None:
    """Begins to tell `port` to the `others` ranks of `run`.

    Raises:
        CommError: Another process of this user already does so for the same run.
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
        left = others
        with listening:
            while left:
                peer, _ = listening.accept()
                with peer:
                    if _user_of(peer) != os.getuid():
                        continue
                    left -= 1
                    if not left:
                        listening.close()  # who has the last answer may announce the next program's port
                    with suppress(OSError):  # the rank may have ended
                        peer.sendall(b"%d\n" % port)

    threading.Thread(target=tell_all, daemon=True).start()


def ask(run: str, timeout_s: float) -> int:
    """The port that rank 0 of `run` announces.

    Raises:
        CommError: Rank 0 did not announce it within `timeout_s`, or another user's process announces one.
    """
    end = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(max(0.0, end - time.monotonic()) + _PAUSE_S)
            try:
                connection.connect(_name(run))
                if _user_of(connection) != os.getuid():
                    raise CommError(f"user {_user_of(connection)} announces a port for {run}")
                line = connection.makefile("rb").readline()
                if line.endswith(b"\n"):
                    return int(line)
            except OSError:  # rank 0 is not there yet, or was the program's before, and has ended
                pass
        if time.monotonic() > end:
            raise comm_error("late", "rank 0 did not announce its port", rank=0)
        time.sleep(_PAUSE_S)


def _name(run: str) -> str:
    digest = blake2b(run.encode(), digest_size=16).hexdigest()  # a name has 107 bytes at most
    return f"\0shardcomm/{os.getuid()}/{digest}"


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(user)
