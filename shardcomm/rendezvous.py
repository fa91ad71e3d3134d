"""How ranks find each other: each shows all others a few bytes, and from these the transport is chosen.

The bytes travel over a torch Store (torchrun's environment) or a ProcessGroup, once, at set-up.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from shardcomm import _C
from shardcomm.c10d import C10dCommunicator
from shardcomm.communicator import Communicator, CoreCommunicator, Transport

# Shows `payload` to all ranks and returns everybody's, in rank order. Every rank calls it equally often.
Exchange = Callable[[bytes], list[bytes]]

_groups = itertools.count()  # keeps the keys of several communicators over one store apart


def from_env(deadline_s: float, transport: Transport) -> Communicator:
    """See `Communicator.from_env`."""
    check_transport(transport)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Communicator.local_group(1, deadline_s=deadline_s)[0]
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(
            f"from_env: {', '.join(missing)} not set; torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT, and without any of them the group is this process alone"
        )
    timeout = timedelta(seconds=deadline_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        raise _C.CommError(f"rank {os.environ['RANK']}: no rendezvous: {error}") from error
    store = PrefixStore(f"shardcomm/{next(_groups)}", store)
    store.set_timeout(timeout)
    rounds = itertools.count()

    def exchange(payload: bytes) -> list[bytes]:
        turn = next(rounds)
        store.set(f"{turn}/{rank}", payload.hex())
        try:
            return [bytes.fromhex(store.get(f"{turn}/{peer}").decode()) for peer in range(size)]
        except dist.DistError as error:
            raise _C.CommError(
                f"rank {rank} of {size}: not all ranks came to the rendezvous within {deadline_s:g} s: {error}"
            ) from error

    def gloo() -> Communicator:
        groups = [
            ProcessGroupGloo(PrefixStore(use, store), rank, size, timeout)
            for use in ("gathers", "reduces")
        ]
        # A backend has the collectives of a ProcessGroup, without being one to the type checker.
        gathers, reduces = cast("list[dist.ProcessGroup]", groups)
        return C10dCommunicator(gathers, reduces, torch.device("cpu"))

    return connect(exchange, rank, size, deadline_s, transport, gloo)


def from_process_group(
    group: dist.ProcessGroup | None, deadline_s: float, transport: Transport
) -> Communicator:
    """See `Communicator.from_process_group`."""
    check_transport(transport)
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "from_process_group: there is no default group; call torch.distributed.init_process_group, "
                "or use Communicator.from_env"
            )
        group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()

    def exchange(payload: bytes) -> list[bytes]:
        everybody: list[bytes] = [b""] * size
        dist.all_gather_object(everybody, payload, group=group)
        return everybody

    def c10d() -> Communicator:
        gathers = dist.new_group(
            dist.get_process_group_ranks(group),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
        )
        return C10dCommunicator(gathers, group, torch.device("cpu"))

    return connect(exchange, rank, size, deadline_s, transport, c10d)


def connect(
    exchange: Exchange,
    rank: int,
    size: int,
    deadline_s: float,
    transport: Transport,
    c10d: Callable[[], Communicator],
) -> Communicator:
    """Chooses the transport that all ranks can use, and opens it."""
    hosts = set(exchange(host_identity()))
    if transport == "shm" and len(hosts) > 1:
        raise ValueError(
            f"transport is 'shm', but the {size} ranks are on {len(hosts)} hosts (or in containers that do not "
            "see each other's processes); use 'c10d' or 'auto'"
        )
    if transport == "c10d" or len(hosts) > 1:
        return c10d()
    # Rank 0's session lives until all have attached, which make_shm waits for.
    session = _C.ShmSession(size) if rank == 0 else None
    address = exchange(session.address.encode() if session else b"")[0].decode()
    return CoreCommunicator(_C.make_shm(address, rank, size, deadline_s))


def host_identity() -> bytes:
    """Equal for two processes if they can map each other's memory: same boot, same process namespace."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:
        return boot.read().strip() + os.readlink("/proc/self/ns/pid").encode()


def check_transport(transport: str) -> None:
    """ValueError unless `transport` is one of the names."""
    if transport not in ("auto", "shm", "c10d"):
        raise ValueError(f"transport is {transport!r}; accepted: 'auto', 'shm', 'c10d'")
