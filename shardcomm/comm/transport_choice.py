"""Which transport carries the collectives of ranks that have just met, and opening it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardcomm import _C
from shardcomm.comm import nccl
from shardcomm.comm.c10d import C10dCommunicator
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.core import CoreCommunicator
from shardcomm.comm.hosts import Place, place_of
from shardcomm.comm.introduction import Introduction, introduce, watch
from shardcomm.comm.words import CtaPolicy, Sums, Transport
from shardcomm.meeting.connections import connect
from shardcomm.meeting.exchange import Exchange

# Makes two groups of all ranks: for gathers, and for reduces. Collective.
MakeGroups = Callable[[], tuple[dist.ProcessGroup, dist.ProcessGroup]]

_CPU = torch.device("cpu")
_ENDED_S = 0.5  # within this time the end of a process is seen, after its memory has gone

_made = itertools.count()  # keeps the groups of threads apart
_local: dict[bytes, list[Communicator]] = {}  # groups that one thread has made for all of theirs


class SeveralHostsError(ValueError):
    """The transport is for ranks of one host, and the ranks are on several."""


class SharedMemoryError(_C.CommError):
    """A rank cannot map the memory of the other ranks, although it is on their host."""


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
    everybody = introduce(exchange, transport, device, cta_policy, sums)
    own: dict[str, str] = {
        "transport": transport,
        "cta_policy": cta_policy,
        "sums": sums,
        "device": device.type,
    }
    for name, value in own.items():
        given: list[str] = [getattr(each, name) for each in everybody]
        if len(set(given)) > 1:
            raise ValueError(
                f"{name} is {value!r}, but the ranks gave different ones: {', '.join(given)}"
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
    unwatched = watch(exchange, everybody)
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
    gathers, reduces = exchange.wait_for(groups)
    return C10dCommunicator(gathers, reduces, device, reason)


def _on_cpus(
    exchange: Exchange,
    everybody: list[Introduction],
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
        return CoreCommunicator(core if isinstance(place, str) else _join(exchange, core, place))
    if sums == "exact":
        raise SharedMemoryError(f"sums is 'exact', which needs 'shm', but {reason}; use 'fast'")
    if transport in ("shm", "hosts"):
        raise SharedMemoryError(f"transport is {transport!r}, but {reason}; use 'c10d' or 'auto'")
    warnings.warn(f"collectives go through c10d: {reason}", RuntimeWarning, stacklevel=5)
    return _over_groups(exchange, _CPU, groups, reason)


def _join(exchange: Exchange, on_host: _C.Communicator, place: Place) -> _C.Communicator:
    """Joins the hosts; collective."""
    try:
        sockets = connect(exchange, place.across)
    except BaseException:
        on_host.close()
        raise
    return _C.make_hosts(on_host, sockets, place.host, place.hosts)


def _share_memory(
    exchange: Exchange,
    everybody: list[Introduction],
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


def _thread_rank(
    exchange: Exchange, everybody: list[Introduction], device: torch.device, sums: Sums
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
        key = str(next(_made)).encode()
        _local[key] = Communicator.local_group(
            size, deadline_s=exchange.deadline_s, device=device, sums=sums
        )
    key = exchange(key)[0]
    own = _local[key][rank]
    exchange(b"")  # all have theirs
    if rank == 0:
        del _local[key]
    return own
