"""The torch Store that ranks meet over: who keeps it, who can reach it, and what a run's keys begin with.

A TCPStore answers whoever connects. One that is ours listens on the loopback interface alone where that is the address
of the rendezvous. A run's secret, where there is one, keeps other runs' keys apart and seals what ranks show each other
(see `shardcomm.meeting.exchange`).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
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

# By port, as long as this process: ranks that come to a next rendezvous must not meet the end of the one before.
_kept: dict[int, TCPStore] = {}

# By the launcher's run, as long as this process: where rank 0 announced its store.
_announced: dict[str, int] = {}


def seal(text: bytes) -> bytes:
    """16 bytes that only who has the run's secret can compute from `text`; a checksum, where there is no secret."""
    return hmac.digest(os.environ.get(SECRET, "").encode(), text, "sha256")[:16]


def serve_on_loopback() -> TCPStore:
    """A store on a free port of this host, for processes of this host."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return _serve("127.0.0.1", port, listening, timedelta(seconds=60))


def env_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store that the launcher's environment describes, this rank, and the number of ranks.

    torchrun keeps one store over all its restarts: without a prefix, ranks would read what those before them wrote.

    Raises:
        ValueError: a variable of the environment is not what it must be.
        CommError: the store was not reached within `timeout`.
    """
    own = launched()
    rank, size = own.rank, own.size
    point = meeting_point(own)
    launcher_keeps_it = own.by_torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def reach() -> TCPStore:
        host, at = point or ("127.0.0.1", _announced_port(own, timeout))
        if point is not None and rank == 0 and not launcher_keeps_it:
            if at not in _kept:
                _kept[at] = _serve(host, at, _loopback_socket(host, at), timeout)
            at = _kept[at].port
        # The first exchange waits for the others, and says who has not come.
        return TCPStore(host, at, size, False, timeout, wait_for_workers=False)

    who = "the launcher" if launcher_keeps_it else "rank 0"
    where = "at a port of this host" if point is None else f"at {point[0]}:{point[1]}"
    begun = Background(reach)
    failure = f"rank {rank} of {size}: no rendezvous: {who} keeps the store {where}, which was not reached"
    if not begun.ended(timeout.total_seconds()):
        text = f"{failure} within {timeout.total_seconds():g} s"
        raise comm_error("late", text, rank=None if launcher_keeps_it else 0, reporter=rank)
    try:
        store = begun.result()
    except (dist.DistError, CommError) as error:  # by then, or at once
        text = f"{failure}: {first_line(error)}"
        refused = comm_error("backend", text, reporter=rank)
        raise (like(error, text) if isinstance(error, CommError) else refused) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Not the secret itself: a store lists its keys to whoever asks.
    run = f"run {seal(b'keys').hex()}/" if SECRET in os.environ else ""
    job = f"job {own.job}/" if own.job else ""
    return PrefixStore(f"{run}{job}attempt {attempt}", store), rank, size


def _announced_port(own: Launched, timeout: timedelta) -> int:
    """That of rank 0's store on this host, which rank 0 makes when it first comes here."""
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


def first_line(error: BaseException) -> str:
    """What an error of torch's says, without the C++ stack that may follow."""
    return str(error).partition("\n")[0]


def _serve(host: str, port: int, listening: socket.socket | None, timeout: timedelta) -> TCPStore:
    """A store that this process keeps, and shares with what torch opens at the same port later."""
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
    """Listens at `host` alone, if that is a loopback address; torch would listen on every interface.

    None too where the port is taken: by a store of this process, which torch then shares, or by another's, which torch
    then says.
    """
    try:
        if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            return None
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (ValueError, OSError):  # a host's name; a port that is taken
        return None
