"""The torch Store over which ranks meet: who keeps it, who can reach it, and how a run's keys begin.

A TCPStore answers everybody who connects. A store of shardcomm's listens on the loopback interface only, if that is the
address of the rendezvous. If a run has a secret, the secret keeps other runs' keys apart and seals what ranks show each
other (see `shardcomm.meeting.exchange`).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardcomm._C import CommError
from shardcomm.meeting.announcement import announce, ask
from shardcomm.meeting.background import Background
from shardcomm.meeting.comm_error import comm_error, like
from shardcomm.meeting.launchers import Launched, launched, meeting_point, run_on_this_host

SECRET = "SHARDCOMM_RUN_SECRET"
"""The environment variable that holds a run's secret: any string, the same on all its ranks."""

_RETRY_S = 0.1  # between attempts to connect
_ANSWER_S = 1.0  # for a store's answer, once it is connected to

# The stores of this process by port. They are kept until it ends: ranks that come to another rendezvous at the same
# port must find a store there.
_kept: dict[int, TCPStore] = {}

# The port at which rank 0 announced its store, by the launcher's run; kept until the process ends.
_announced: dict[str, int] = {}


def seal(text: bytes) -> bytes:
    """16 bytes that only processes with the run's secret can compute from `text`; a checksum if there is no secret."""
    return hmac.digest(os.environ.get(SECRET, "").encode(), text, "sha256")[:16]


def serve_on_loopback() -> TCPStore:
    """A store on a free port of this host, for processes of this host."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return _serve("127.0.0.1", port, listening, timedelta(seconds=60))


def env_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store that the launcher's environment describes, this rank, and the number of ranks.

    torchrun keeps one store over all its restarts. So keys have a prefix, without which ranks would read what the ranks
    before them wrote.

    Raises:
        ValueError: An environment variable is missing or wrong.
        CommError: The store was not reached within `timeout`.
    """
    own = launched()
    rank, size = own.rank, own.size
    point = meeting_point(own)
    launcher_keeps_it = own.by_torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def reach() -> TCPStore:
        host, at = point or ("127.0.0.1", _announced_port(own, timeout))
        if point is not None and rank == 0 and not launcher_keeps_it:
            if at not in _kept:
                listening = _loopback_socket(host, at)
                # Torch connects to a store that it makes. Where `host` is not this one, or no name that is known, its
                # attempts would outlive the deadline, and may abort a process that ends meanwhile.
                own_host = "127.0.0.1" if listening is None else host
                _kept[at] = _serve(own_host, at, listening, timeout)
            at = _kept[at].port
        _await_listener(host, at, until)
        # The first exchange waits for the others, and says who has not come.
        return TCPStore(host, at, size, False, timeout, wait_for_workers=False)

    who = "the launcher" if launcher_keeps_it else "rank 0"
    where = "at a port of this host" if point is None else f"at {point[0]}:{point[1]}"
    failure = f"rank {rank} of {size}: no rendezvous: {who} keeps the store {where}, which was not reached"
    until = time.monotonic() + timeout.total_seconds()
    begun = Background(reach)
    try:
        if not begun.ended(timeout.total_seconds() + _ANSWER_S):
            raise TimeoutError("the store does not answer")
        store = begun.result()
    except TimeoutError as error:
        text = f"{failure} within {timeout.total_seconds():g} s: {error}"
        raise comm_error(
            "late", text, rank=None if launcher_keeps_it else 0, reporter=rank
        ) from None
    except (dist.DistError, CommError) as error:  # the connection failed, at once or in time
        text = f"{failure}: {first_line(error)}"
        refused = comm_error("backend", text, reporter=rank)
        raise (like(error, text) if isinstance(error, CommError) else refused) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Not the secret itself, since a store lists its keys to everybody who asks.
    run = f"run {seal(b'keys').hex()}/" if SECRET in os.environ else ""
    job = f"job {own.job}/" if own.job else ""
    return PrefixStore(f"{run}{job}attempt {attempt}", store), rank, size


def _announced_port(own: Launched, timeout: timedelta) -> int:
    """The port of rank 0's store on this host, which rank 0 makes when it first comes here."""
    run = run_on_this_host(own)
    if run not in _announced:
        if own.rank > 0:
            _announced[run] = ask(run, timeout.total_seconds())
        else:
            store = serve_on_loopback()
            announce(run, store.port, own.size - 1)
            _kept[store.port] = store
            _announced[run] = store.port
    return _announced[run]


def _await_listener(host: str, port: int, until: float) -> None:
    """Waits until a connection to `port` of `host` is accepted, at most until `time.monotonic()` is `until`.

    Torch's attempts to connect, when given up, write C++ stacks and may abort a process that ends meanwhile.

    Raises:
        TimeoutError: There was none; the message is the last attempt's error.
    """
    while True:
        left_s = until - time.monotonic()
        try:
            socket.create_connection((host, port), max(left_s, _RETRY_S)).close()
        except OSError as error:
            if left_s <= _RETRY_S:
                raise TimeoutError(error.strerror or str(error)) from None
            time.sleep(_RETRY_S)
        else:
            return


def first_line(error: BaseException) -> str:
    """The text of one of torch's errors, without the C++ stack that may follow."""
    return str(error).partition("\n")[0]


def _serve(host: str, port: int, listening: socket.socket | None, timeout: timedelta) -> TCPStore:
    """A store that this process keeps, and that torch shares if it opens one at the same port later."""
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _loopback_socket(host: str, port: int) -> socket.socket | None:
    """A socket that listens at `host` alone, if that is a loopback address; torch would listen on every interface.

    None if it is another address, or if the port is taken: by a store of this process, which torch then shares, or by
    another process, which torch's error then says.
    """
    try:
        if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            return None
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (ValueError, OSError):  # a host's name; a port that is taken
        return None
