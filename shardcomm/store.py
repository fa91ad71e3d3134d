"""The torch Store that ranks meet over: who keeps it, who can reach it, and what a run's keys begin with.

A TCPStore answers whoever connects. One that is ours listens on the loopback interface alone where that is the address
of the rendezvous. A run's secret, where there is one, keeps other runs' keys apart and seals what ranks show each other
(see `shardcomm.exchange`).
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
from shardcomm.background import Background

SECRET = "SHARDCOMM_RUN_SECRET"
"""The environment variable that holds a run's secret: any string, the same on all its ranks."""

# By port, as long as this process: ranks that come to a next rendezvous must not meet the end of the one before.
_kept: dict[int, TCPStore] = {}

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    size = whole_variable("WORLD_SIZE", 1, 2**31 - 1)
    rank = whole_variable("RANK", 0, size - 1)
    host, port = os.environ["MASTER_ADDR"], whole_variable("MASTER_PORT", 0, 2**16 - 1)
    launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def reach() -> TCPStore:
        at = port
        if rank == 0 and not launcher_keeps_it:
            if port not in _kept:
                _kept[port] = _serve(host, port, _loopback_socket(host, port), timeout)
            at = _kept[port].port
        # The first exchange waits for the others, and says who has not come.
        return TCPStore(host, at, size, False, timeout, wait_for_workers=False)

    who = "the launcher" if launcher_keeps_it else "rank 0"
    begun = Background(reach)
    failure = f"rank {rank} of {size}: no rendezvous: {who} keeps the store at {host}:{port}, which was not reached"
    if not begun.ended(timeout.total_seconds()):
        raise CommError(f"{failure} within {timeout.total_seconds():g} s")
    try:
        store = begun.result()
    except dist.DistError as error:  # by then, or at once
        raise CommError(f"{failure}: {first_line(error)}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Not the secret itself: a store lists its keys to whoever asks.
    run = f"run {seal(b'keys').hex()}/" if SECRET in os.environ else ""
    return PrefixStore(f"{run}attempt {attempt}", store), rank, size


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


def whole_variable(name: str, first: int, last: int, *, default: int = 0) -> int:
    """Of the environment; `default` where it is not set. ValueError if it is none from `first` to `last`."""
    given = os.environ.get(name, str(default))
    if not (given.isascii() and given.isdigit() and first <= int(given) <= last):
        raise ValueError(
            f"environment variable {name} is {given!r}; it must be a whole number from {first} to {last}"
        )
    return int(given)
