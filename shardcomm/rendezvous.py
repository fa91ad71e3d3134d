"""How ranks find each other: each shows all others a few bytes, and from these the transport is chosen.

The bytes travel over a torch Store (torchrun's environment) or a ProcessGroup, a few times at set-up.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import cast, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from shardcomm import _C, nccl
from shardcomm.c10d import C10dCommunicator
from shardcomm.communicator import DEADLINE_S, Communicator, CtaPolicy, Transport
from shardcomm.core_communicator import CoreCommunicator, core_device

# Shows `payload` to all ranks and returns everybody's, in rank order. Every rank calls it equally often.
Exchange = Callable[[bytes], list[bytes]]

MOST_SECONDS = 1e9  # that a timedelta, and a wait, can take

_groups = itertools.count()  # keeps the keys of several communicators over one store apart
_local: dict[bytes, list[Communicator]] = {}  # made by one thread for all


class SeveralHostsError(ValueError):
    """The transport is for ranks of one host."""


def from_env(
    deadline_s: float,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
) -> Communicator:
    """See `Communicator.from_env`."""
    check_transport(transport)
    nccl.check_cta_policy(cta_policy)
    check_deadline("from_env", deadline_s)
    where = _own_device(transport) if device is None else _given_device(device)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Communicator.local_group(1, deadline_s=deadline_s, device=where)[0]
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
    store, rank, size = env_store(timeout)
    store = PrefixStore(f"shardcomm/{next(_groups)}", store)

    def gloo() -> Communicator:
        if where.type != "cpu":
            raise ValueError(
                f"from_env: transport is 'c10d', which is Gloo here, and device is {where}; accepted: 'cpu', or "
                "from_process_group with a group of that device"
            )
        groups = [
            ProcessGroupGloo(PrefixStore(use, store), rank, size, timeout)
            for use in ("gathers", "reduces")
        ]
        # A backend has the collectives of a ProcessGroup, without being one to the type checker.
        gathers, reduces = cast("list[dist.ProcessGroup]", groups)
        return C10dCommunicator(gathers, reduces, where)

    exchange = over_store(store, rank, size, deadline_s)
    return connect(exchange, rank, size, deadline_s, transport, where, gloo, cta_policy)


def env_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store that the launcher's environment describes, this rank, and the number of ranks.

    torchrun keeps one store over all its restarts: without a prefix, ranks would read what those before them wrote.
    """
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        raise _C.CommError(f"rank {os.environ['RANK']}: no rendezvous: {error}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}", store), rank, size


def local_group(size: int, deadline_s: float, device: torch.device | str) -> list[Communicator]:
    """See `Communicator.local_group`."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"local_group: size is {size!r}; it must be at least 1")
    check_deadline("local_group", deadline_s)
    where = core_device("local_group", device)
    index = -1 if where.type == "cpu" else where.index
    return [CoreCommunicator(core, where) for core in _C.make_local_group(size, deadline_s, index)]


def from_process_group(
    group: dist.ProcessGroup | None,
    deadline_s: float | None,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
) -> Communicator:
    """See `Communicator.from_process_group`."""
    check_transport(transport)
    nccl.check_cta_policy(cta_policy)
    if deadline_s is not None:
        check_deadline("from_process_group", deadline_s)
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "from_process_group: there is no default group; call torch.distributed.init_process_group, "
                "or use Communicator.from_env"
            )
        group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    if device is None:
        device = "cuda" if transport == "nccl" or dist.get_backend(group) == "nccl" else "cpu"
    where = (
        torch.device(device) if transport == "c10d" else core_device("from_process_group", device)
    )
    patience_s = _timeout_s(group, where) if deadline_s is None else deadline_s

    def exchange(payload: bytes) -> list[bytes]:
        everybody: list[bytes] = [b""] * size
        dist.all_gather_object(everybody, payload, group=group)
        return everybody

    def c10d() -> Communicator:
        gathers, reduces = (
            dist.new_group(
                dist.get_process_group_ranks(group),
                timedelta(seconds=patience_s),
                dist.get_backend(group),
                use_local_synchronization=True,
            )
            for _ in range(2)
        )
        return C10dCommunicator(gathers, reduces, where)

    return connect(exchange, rank, size, patience_s, transport, where, c10d, cta_policy)


def _timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective of `group` waits for a rank."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except RuntimeError:  # not every backend has one
        return DEADLINE_S
    return timeout.total_seconds()


def over_store(store: Store, rank: int, size: int, deadline_s: float) -> Exchange:
    """Ranks that share a store. A rank that does not come within `deadline_s` seconds is a CommError on the others."""
    store.set_timeout(timedelta(seconds=deadline_s))
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

    return exchange


def connect(
    exchange: Exchange,
    rank: int,
    size: int,
    deadline_s: float,
    transport: Transport,
    device: torch.device,
    c10d: Callable[[], Communicator],
    cta_policy: CtaPolicy = "default",
) -> Communicator:
    """Chooses the transport that all ranks can use, and opens it."""
    everybody = exchange(f"{device.type} {cta_policy} {host_identity()}".encode())
    devices, policies, hosts = zip(
        *(each.decode().split(" ", 2) for each in everybody), strict=True
    )
    if len(set(policies)) > 1:
        raise ValueError(
            f"cta_policy is {cta_policy!r}, but the ranks gave different ones: {', '.join(policies)}"
        )
    if len(set(devices)) > 1:
        raise ValueError(
            f"device is {device}, but the ranks have different kinds: {', '.join(devices)}"
        )
    if {"shm": "cpu", "nccl": "cuda"}.get(transport, device.type) != device.type:
        raise ValueError(
            f"transport is {transport!r} and device is {device}; 'shm' is for 'cpu', 'nccl' for 'cuda', 'auto' for both"
        )
    if cta_policy != "default" and (device.type != "cuda" or transport in ("c10d", "local")):
        raise ValueError(
            f"cta_policy is {cta_policy!r}, which is NCCL's, but transport is {transport!r} and device is {device}"
        )
    if transport == "c10d":
        return c10d()
    if transport == "local":
        return _thread_rank(exchange, rank, size, deadline_s, device)
    if device.type == "cuda":
        if size == 1:
            return Communicator.local_group(1, deadline_s=deadline_s, device=device)[0]
        return CoreCommunicator(
            nccl.connect(exchange, rank, size, device.index, deadline_s, cta_policy), device
        )
    if len(set(hosts)) == 1:
        # Rank 0's session lives until all have attached, which make_shm waits for.
        session = _C.ShmSession(size) if rank == 0 else None
        address = exchange(session.address.encode() if session else b"")[0].decode()
        return CoreCommunicator(_C.make_shm(address, rank, size, deadline_s), device)
    if transport == "shm":
        raise SeveralHostsError(
            f"transport is 'shm', but the {size} ranks are on {len(set(hosts))} hosts (or in containers that do not "
            "see each other's processes); use 'c10d' or 'auto'"
        )
    return c10d()


def host_identity() -> str:
    """Equal for two processes if they can map each other's memory: same boot, same process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip() + os.readlink("/proc/self/ns/pid")


def _thread_rank(
    exchange: Exchange, rank: int, size: int, deadline_s: float, device: torch.device
) -> Communicator:
    """This thread's of a local group, which the thread of rank 0 makes."""
    processes = exchange(str(os.getpid()).encode())
    if len(set(processes)) > 1:
        raise ValueError(
            f"transport is 'local', but the {size} ranks are {len(set(processes))} processes; 'local' is for threads "
            "of one, use 'auto'"
        )
    key = b""
    if rank == 0:
        key = str(next(_groups)).encode()
        _local[key] = Communicator.local_group(size, deadline_s=deadline_s, device=device)
    key = exchange(key)[0]
    own = _local[key][rank]
    exchange(b"")  # all have theirs
    if rank == 0:
        del _local[key]
    return own


def check_deadline(operation: str, deadline_s: float) -> None:
    """ValueError unless it is a number of seconds."""
    is_number = isinstance(deadline_s, (int, float)) and not isinstance(deadline_s, bool)
    if not (is_number and 0 < deadline_s <= MOST_SECONDS):
        raise ValueError(
            f"{operation}: deadline_s is {deadline_s!r}; it must be a number above 0, at most 1e9"
        )


def check_transport(transport: str) -> None:
    """ValueError unless `transport` is one of the names."""
    if transport not in get_args(Transport):
        accepted = ", ".join(map(repr, get_args(Transport)))
        raise ValueError(f"transport is {transport!r}; accepted: {accepted}")


def _given_device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        gpus = max(1, torch.cuda.device_count())
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    return core_device("from_env", where)


def _own_device(transport: Transport) -> torch.device:
    """This rank's GPU, if NCCL is asked for, or can be had and each rank of the host has a GPU; else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    gpus = torch.cuda.device_count() if _C.cuda_built else 0
    if transport == "nccl" or (
        transport == "auto" and gpus >= ranks_here and nccl.status().available
    ):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
