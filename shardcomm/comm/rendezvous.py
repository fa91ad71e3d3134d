"""How ranks find each other: each introduces itself to all others, and from that they choose the transport.

Introductions travel over a torch Store (torchrun's environment) or a ProcessGroup, a few times at set-up.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from shardcomm import _C
from shardcomm.arguments.checks import check_seconds, check_type
from shardcomm.arguments.scalars import is_whole
from shardcomm.comm import nccl
from shardcomm.comm.c10d import C10dCommunicator
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.core import CoreCommunicator, core_device
from shardcomm.comm.hosts import GroupAcross, Place, place_of
from shardcomm.comm.own_device import check_sums, check_transport, checked_device
from shardcomm.comm.words import DEADLINE_S, CtaPolicy, Sums, Transport
from shardcomm.meeting.comm_error import comm_error
from shardcomm.meeting.exchange import Exchange, GroupExchange, StoreExchange, Watched
from shardcomm.meeting.launchers import Launched, launched, refuse_batch_script
from shardcomm.meeting.mpi import MpiExchange, check_mpi
from shardcomm.meeting.store import env_store

# Makes two groups of these ranks, of which this rank is one: for gathers, and for reduces. Collective among them.
MakeGroups = Callable[[Sequence[int]], tuple[dist.ProcessGroup, dist.ProcessGroup]]

_CPU = torch.device("cpu")
_ENDED_S = 0.5  # within this time the end of a process is seen, after its memory has gone

_groups = itertools.count()  # keeps the keys of several communicators over one store apart
_local: dict[bytes, list[Communicator]] = {}  # groups that one thread has made for all of theirs


class SeveralHostsError(ValueError):
    """The transport is for ranks of one host, and the ranks are on several."""


class SharedMemoryError(_C.CommError):
    """A rank cannot map the memory of the other ranks, although it is on their host."""


@dataclass(frozen=True)
class _Introduction:
    """What a rank shows all others first."""

    version: str
    transport: str
    device: str
    cta_policy: str
    sums: str
    host: str
    pid: int
    start_time: int


def from_env(
    deadline_s: float,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
    sums: Sums,
) -> Communicator:
    """See `Communicator.from_env`."""
    check_seconds("from_env", "deadline_s", deadline_s)
    own = launched()
    if not own.launcher:
        refuse_batch_script()
    if own.size == 1 and not own.by_torchrun:
        where = checked_device("from_env", own, transport, device, cta_policy, sums)
        return Communicator.local_group(1, deadline_s=deadline_s, device=where, sums=sums)[0]
    timeout = timedelta(seconds=deadline_s)
    store, rank, size = env_store(timeout)
    name = f"shardcomm/{next(_groups)}"
    exchange = StoreExchange(store, name, rank, size, deadline_s)

    with exchange.telling():
        where = checked_device("from_env", own, transport, device, cta_policy, sums)
        over = _Store("from_env", store, name, where)
        return choose_transport(
            exchange,
            transport,
            where,
            lambda ranks: _gloo_groups(exchange, over, ranks),
            cta_policy,
            sums,
        )


def from_mpi(
    mpi: Any,
    deadline_s: float,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
    sums: Sums,
) -> Communicator:
    """See `shardcomm.connect`."""
    check_mpi("connect", mpi)
    check_seconds("connect", "deadline_s", deadline_s)
    exchange = MpiExchange(mpi, deadline_s)
    rank, size = exchange.rank, exchange.size
    hosts = exchange(host_identity().encode())
    here = hosts[rank]
    own = Launched("MPI", rank, size, hosts[:rank].count(here), hosts.count(here))
    where = checked_device("connect", own, transport, device, cta_policy, sums)

    def gloo(ranks: Sequence[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        address, timeout = socket.gethostname(), timedelta(seconds=deadline_s)
        store = None
        if rank == 0:
            store = TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        port = int(exchange(str(store.port).encode() if store else b"")[0])
        address = exchange(address.encode())[0].decode()
        store = store or TCPStore(address, port, timeout=timeout, wait_for_workers=False)
        return _gloo_groups(exchange, _Store("connect", store, "shardcomm", where), ranks)

    return choose_transport(exchange, transport, where, gloo, cta_policy, sums)


class _Store(NamedTuple):
    """Where the ranks of a Gloo group meet, for which function, and on which device they work."""

    operation: str
    store: Store
    name: str
    device: torch.device


def _gloo_groups(
    exchange: Exchange, over: _Store, ranks: Sequence[int]
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    if over.device.type != "cpu":
        raise ValueError(
            f"{over.operation}: transport is 'c10d', which is Gloo here, and device is {over.device}; accepted: 'cpu', "
            "or from_process_group with a group of that device"
        )
    timeout = timedelta(seconds=exchange.deadline_s)
    name = f"{over.name}/{len(ranks)} from {ranks[0]}"
    own = ranks.index(exchange.rank)
    groups = [
        ProcessGroupGloo(PrefixStore(f"{name}/{use}", over.store), own, len(ranks), timeout)
        for use in ("gathers", "reduces")
    ]
    # A backend has the collectives of a ProcessGroup, without being one to the type checker.
    gathers, reduces = cast("list[dist.ProcessGroup]", groups)
    return gathers, reduces


def local_group(
    size: int, deadline_s: float, device: torch.device | str, sums: Sums = "fast"
) -> list[Communicator]:
    """See `Communicator.local_group`."""
    if not is_whole(size, 1):
        raise ValueError(f"local_group: size is {size!r}; it must be at least 1")
    check_seconds("local_group", "deadline_s", deadline_s)
    where = core_device("local_group", device)
    check_sums("local_group", sums, where)
    index = -1 if where.type == "cpu" else where.index
    group = _C.make_local_group(size, deadline_s, index, sums == "exact")
    return [CoreCommunicator(core, where) for core in group]


def from_process_group(
    group: dist.ProcessGroup | None,
    deadline_s: float | None,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
    sums: Sums,
) -> Communicator:
    """See `Communicator.from_process_group`."""
    check_transport(transport)
    nccl.check_cta_policy(cta_policy)
    if deadline_s is not None:
        check_seconds("from_process_group", "deadline_s", deadline_s)
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "from_process_group: there is no default group; call torch.distributed.init_process_group, "
                "or use Communicator.from_env"
            )
        group = dist.group.WORLD
    assert group is not None
    accepted = "a torch.distributed.ProcessGroup of this rank"
    check_type("from_process_group", "group", group, dist.ProcessGroup, accepted)
    if device is None:
        device = "cuda" if transport == "nccl" or dist.get_backend(group) == "nccl" else "cpu"
    where = (
        _any_device(device) if transport == "c10d" else core_device("from_process_group", device)
    )
    check_sums("from_process_group", sums, where, transport)
    patience_s = timeout_s(group, where) if deadline_s is None else deadline_s
    exchange = GroupExchange(group, patience_s)

    def groups(ranks: Sequence[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if where.type == "cpu" and isinstance(group._get_backend(where), ProcessGroupGloo):
            # Under a name of their own. torch.distributed names groups by their ranks and by how many groups a rank is
            # in. Ranks may be in different numbers, and after `close` a name comes again, with the addresses of before.
            name = exchange(secrets.token_hex(8).encode())[0].decode()
            over = _Store("from_process_group", group.get_group_store(), f"shardcomm/{name}", where)
            return _gloo_groups(exchange, over, ranks)
        world = dist.get_process_group_ranks(group)
        gathers, reduces = (
            dist.new_group(
                [world[rank] for rank in ranks],
                timedelta(seconds=patience_s),
                dist.get_backend(group),
                use_local_synchronization=True,
            )
            for _ in range(2)
        )
        return gathers, reduces

    return choose_transport(exchange, transport, where, groups, cta_policy, sums)


def _any_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"from_process_group: device is {device}; it must be a torch.device or the name of one"
        ) from None


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective of `group` waits for a rank, in seconds."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except RuntimeError:  # not every backend has one
        return DEADLINE_S
    return timeout.total_seconds()


def choose_transport(
    exchange: Exchange,
    transport: Transport,
    device: torch.device,
    groups: MakeGroups,
    cta_policy: CtaPolicy = "default",
    sums: Sums = "fast",
) -> Communicator:
    """Chooses the transport that all ranks can use, and opens it; collective.

    Args:
        exchange: Reaches all ranks.
        transport: As in `from_env`.
        device: Where this rank's operands are.
        groups: Makes what carries bytes where the core does not.
        cta_policy: As in `from_env`.
        sums: As in `from_env`.
    """
    rank, size, deadline_s = exchange.rank, exchange.size, exchange.deadline_s
    everybody = _introduce(exchange, transport, device, cta_policy, sums)
    transports = [each.transport for each in everybody]
    if len(set(transports)) > 1:
        raise ValueError(
            f"transport is {transport!r}, but the ranks gave different ones: {', '.join(transports)}"
        )
    policies = [each.cta_policy for each in everybody]
    if len(set(policies)) > 1:
        raise ValueError(
            f"cta_policy is {cta_policy!r}, but the ranks gave different ones: {', '.join(policies)}"
        )
    ways = [each.sums for each in everybody]
    if len(set(ways)) > 1:
        raise ValueError(f"sums is {sums!r}, but the ranks gave different ones: {', '.join(ways)}")
    devices = [each.device for each in everybody]
    if len(set(devices)) > 1:
        raise ValueError(
            f"device is {device}, but the ranks have different kinds: {', '.join(devices)}"
        )
    kinds = {"shm": "cpu", "hosts": "cpu", "nccl": "cuda"}
    if kinds.get(transport, device.type) != device.type:
        raise ValueError(
            f"transport is {transport!r} and device is {device}; 'shm' and 'hosts' are for 'cpu', 'nccl' for 'cuda', "
            "'auto' for both"
        )
    if cta_policy != "default" and (device.type != "cuda" or transport in ("c10d", "local")):
        raise ValueError(
            f"cta_policy is {cta_policy!r}, which is NCCL's, but transport is {transport!r} and device is {device}"
        )
    unwatched = _watch(exchange, everybody)
    if transport == "c10d":
        return _over_groups(exchange, device, groups, "")
    if transport == "local":
        return _thread_rank(exchange, everybody, device, sums)
    if device.type == "cuda":
        if size == 1:
            return Communicator.local_group(1, deadline_s=deadline_s, device=device)[0]
        return CoreCommunicator(
            nccl.connect(exchange, rank, size, device.index, deadline_s, cta_policy), device
        )
    return _on_cpus(exchange, everybody, unwatched, transport, groups, sums)


def _over_groups(
    exchange: Exchange, device: torch.device, groups: MakeGroups, reason: str
) -> Communicator:
    """Over groups of all ranks; `reason` says why shared memory is not taken, "" if nobody asked for it."""
    gathers, reduces = exchange.wait_for(lambda: groups(range(exchange.size)))
    return C10dCommunicator(gathers, reduces, device, reason)


def _on_cpus(
    exchange: Exchange,
    everybody: list[_Introduction],
    unwatched: str,
    transport: Transport,
    groups: MakeGroups,
    sums: Sums,
) -> Communicator:
    """Takes shared memory where ranks can have it, and groups for the rest; collective."""
    hosts = [each.host for each in everybody]
    number = len(set(hosts))
    if number > 1 and transport == "shm":
        raise SeveralHostsError(
            f"transport is 'shm', but the {exchange.size} ranks are on {number} hosts (or in containers that do not "
            "see each other's processes); use 'hosts', 'c10d' or 'auto'"
        )
    if number > 1 and sums == "exact":
        raise ValueError(
            f"sums is 'exact', but the {exchange.size} ranks are on {number} hosts, between which sums are rounded; "
            "use 'fast', or put all ranks on one host"
        )
    place = place_of(exchange.rank, hosts) if number > 1 else "the ranks are on one host"
    if transport == "hosts" and isinstance(place, str):
        raise ValueError(f"transport is 'hosts', but {place}; use 'auto'")
    if number > 1 and isinstance(place, str):
        return _over_groups(exchange, _CPU, groups, f"the ranks are on several hosts, and {place}")
    members = list(range(exchange.size)) if isinstance(place, str) else place.on_host
    core, reason = _share_memory(exchange, everybody, unwatched, members, sums)
    if core is not None:
        return CoreCommunicator(
            core if isinstance(place, str) else _join(exchange, core, place, groups)
        )
    if sums == "exact":
        raise SharedMemoryError(f"sums is 'exact', which needs 'shm', but {reason}; use 'fast'")
    if transport in ("shm", "hosts"):
        raise SharedMemoryError(f"transport is {transport!r}, but {reason}; use 'c10d' or 'auto'")
    warnings.warn(f"collectives go through c10d: {reason}", RuntimeWarning, stacklevel=5)
    return _over_groups(exchange, _CPU, groups, reason)


def _join(
    exchange: Exchange, on_host: _C.Communicator, place: Place, groups: MakeGroups
) -> _C.Communicator:
    """Joins the hosts; collective."""
    across = GroupAcross(*exchange.wait_for(lambda: groups(place.across)))
    return _C.make_hosts(on_host, across, place.host, place.hosts)


def _introduce(
    exchange: Exchange, transport: str, device: torch.device, cta_policy: str, sums: str
) -> list[_Introduction]:
    """Shows all ranks who this one is, and returns who they are; collective."""
    pid, start_time = _C.own_process()
    own = _Introduction(
        version("shardcomm"),
        transport,
        device.type,
        cta_policy,
        sums,
        host_identity(),
        pid,
        start_time,
    )
    everybody = []
    for peer, shown in enumerate(exchange(json.dumps(asdict(own)).encode())):
        try:
            other = _Introduction(**json.loads(shown))
        except (ValueError, TypeError):
            other = None
        if other is None or other.version != own.version:
            raise comm_error(
                "mismatch",
                f"rank {peer} introduced itself as {shown[:80]!r}; all ranks need the same version of shardcomm, which "
                f"is {own.version} on rank {exchange.rank}",
                rank=peer,
                reporter=exchange.rank,
            )
        everybody.append(other)
    return everybody


def _watch(exchange: Exchange, everybody: list[_Introduction]) -> str:
    """Watches the other ranks' processes on this host: from now on the death of one ends a wait.

    Returns:
        The reason why they cannot be watched; "" if they are.
    """
    own = everybody[exchange.rank]
    try:
        for peer, other in enumerate(everybody):
            if other.host == own.host and other.pid != own.pid:
                watch = _C.ProcessWatch(other.pid, other.start_time)
                exchange.processes[peer] = Watched(other.pid, watch)
    except _C.CommError as error:
        return str(error)
    return ""


def _share_memory(
    exchange: Exchange,
    everybody: list[_Introduction],
    refusal: str,
    members: Sequence[int],
    sums: Sums,
) -> tuple[_C.Communicator | None, str]:
    """Connects the ranks of each host through memory that the first of them makes, if all can map it; collective.

    Args:
        exchange: Reaches all ranks.
        everybody: Who they are.
        refusal: Why this rank cannot share memory; "" if it may be able to.
        members: The ranks of this rank's host.
        sums: How they sum.

    Returns:
        The communicator, or None and the reason.
    """
    session = member = None  # the first rank's session lives until all have attached
    first = members[0]
    if exchange.rank == first and not refusal:
        processes = [(everybody[rank].pid, everybody[rank].start_time) for rank in members]
        try:
            session = _C.ShmSession(len(members), processes)
        except _C.CommError as error:
            refusal = str(error)
    address = exchange(session.address.encode() if session else b"")[first].decode()
    if address and not refusal:
        try:
            member = _C.ShmMember(address, members.index(exchange.rank), len(members))
        except _C.CommError as error:
            refusal = str(error)
    refusals = [each.decode() for each in exchange(refusal.encode())]
    said = [f"rank {rank}: {text}" for rank, text in enumerate(refusals) if text]
    if member is None or said:
        # A rank may have been refused because another rank's process had ended.
        if trouble := exchange.trouble(within_s=_ENDED_S):
            raise trouble
        return None, f"not all ranks can share memory ({'; '.join(said)})"
    return member.attach(exchange.deadline_s, sums == "exact"), ""


def host_identity() -> str:
    """An identity that two processes share if they can map each other's memory: same boot, same process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip() + os.readlink("/proc/self/ns/pid")


def _thread_rank(
    exchange: Exchange, everybody: list[_Introduction], device: torch.device, sums: Sums
) -> Communicator:
    """This thread's communicator of a local group, which the thread of rank 0 makes; collective."""
    rank, size = exchange.rank, exchange.size
    processes = {(each.host, each.pid) for each in everybody}
    if len(processes) > 1:
        raise ValueError(
            f"transport is 'local', but the {size} ranks are {len(processes)} processes; 'local' is for threads "
            "of one, use 'auto'"
        )
    key = b""
    if rank == 0:
        key = str(next(_groups)).encode()
        _local[key] = Communicator.local_group(
            size, deadline_s=exchange.deadline_s, device=device, sums=sums
        )
    key = exchange(key)[0]
    own = _local[key][rank]
    exchange(b"")  # all have theirs
    if rank == 0:
        del _local[key]
    return own
