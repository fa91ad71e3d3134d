"""How ranks find each other: through a launcher's store, a ProcessGroup, or MPI.

Over that they introduce themselves to each other (`introduction`), and choose a transport (`transport_choice`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d

from shardcomm import _C
from shardcomm.arguments.checks import MOST_SECONDS, check_seconds, check_type, is_seconds
from shardcomm.arguments.scalars import is_whole
from shardcomm.comm import nccl
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.core import CoreCommunicator, core_device
from shardcomm.comm.introduction import host_identity
from shardcomm.comm.own_device import check_sums, check_transport, checked_device, take
from shardcomm.comm.transport_choice import MakeGroups, choose_transport
from shardcomm.comm.words import DEADLINE_S, CtaPolicy, Sums, Transport
from shardcomm.meeting.exchange import Exchange, GroupExchange
from shardcomm.meeting.launchers import Launched, launched, refuse_batch_script
from shardcomm.meeting.mpi import check_mpi, mpi_store
from shardcomm.meeting.store import env_store

_groups = itertools.count()  # keeps the keys of several communicators over one store apart


def from_env(
    deadline_s: float,
    transport: Transport,
    device: torch.device | str | None,
    cta_policy: CtaPolicy,
    sums: Sums,
) -> Communicator:
    """See `Communicator.from_env`."""
    own = launched()
    if not own.launcher:
        refuse_batch_script()
    if own.size == 1 and not own.by_torchrun:
        check_seconds("from_env", "deadline_s", deadline_s)
        where = checked_device("from_env", own, transport, device, cta_policy, sums)
        take(where)
        return Communicator.local_group(1, deadline_s=deadline_s, device=where, sums=sums)[0]
    patience_s = _patience_s(deadline_s)
    store, rank, size = env_store(timedelta(seconds=patience_s))
    name = f"shardcomm/{next(_groups)}"
    exchange = Exchange(store, name, rank, size, patience_s)

    with exchange.telling():
        check_seconds("from_env", "deadline_s", deadline_s)
        where = checked_device("from_env", own, transport, device, cta_policy, sums)
        take(where)
        over = _Store("from_env", store, name, where)
        return choose_transport(
            exchange,
            transport,
            where,
            lambda: _gloo_groups(exchange, over),
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
    patience_s = _patience_s(deadline_s)
    store, hosts = mpi_store(mpi, host_identity(), patience_s)
    rank, size = mpi.Get_rank(), mpi.Get_size()
    exchange = Exchange(store, "shardcomm", rank, size, patience_s)

    with exchange.telling():
        check_seconds("connect", "deadline_s", deadline_s)
        here = hosts[rank]
        own = Launched("MPI", rank, size, hosts[:rank].count(here), hosts.count(here))
        where = checked_device("connect", own, transport, device, cta_policy, sums)
        take(where)
        over = _Store("connect", store, "shardcomm", where)
        return choose_transport(
            exchange,
            transport,
            where,
            lambda: _gloo_groups(exchange, over),
            cta_policy,
            sums,
        )


def _patience_s(deadline_s: float) -> float:
    """How long this rank waits for the others, also to tell them that its deadline is refused."""
    return deadline_s if is_seconds(deadline_s) else DEADLINE_S


class _Store(NamedTuple):
    """Where the ranks of a Gloo group meet, for which function, and on which device they work."""

    operation: str
    store: Store
    name: str
    device: torch.device


def _gloo_groups(exchange: Exchange, over: _Store) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    if over.device.type != "cpu":
        raise ValueError(
            f"{over.operation}: transport is 'c10d', which is Gloo here, and device is {over.device}; accepted: 'cpu', "
            "or from_process_group with a group of that device"
        )
    timeout = timedelta(seconds=exchange.deadline_s)
    rank, size = exchange.rank, exchange.size
    groups = [
        ProcessGroupGloo(PrefixStore(f"{over.name}/{use}", over.store), rank, size, timeout)
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
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "from_process_group: there is no default group; call torch.distributed.init_process_group, "
                "or use Communicator.from_env"
            )
        group = dist.group.WORLD
    assert group is not None
    check_member("from_process_group", group)
    accepted = "a torch.distributed.ProcessGroup of this rank"
    check_type("from_process_group", "group", group, dist.ProcessGroup, accepted)
    kinds = backend_names("from_process_group", group)
    own_s = timeout_s(group, torch.device(next(iter(kinds))))
    exchange = GroupExchange(group, deadline_s if is_seconds(deadline_s) else own_s)
    # The other arguments are checked when all ranks have met, so that all hear of what one rank is refused.
    with exchange.telling():
        check_transport(transport)
        if deadline_s is not None:
            check_seconds("from_process_group", "deadline_s", deadline_s)
        nccl.check_cta_policy(cta_policy)
        where = _checked_device(group, kinds, transport, device, sums)
        if deadline_s is None:
            exchange.deadline_s = timeout_s(group, where)
        groups = _groups_of(group, range(group.size()), exchange, where)
        return choose_transport(exchange, transport, where, groups, cta_policy, sums)


def _checked_device(
    group: dist.ProcessGroup,
    kinds: dict[str, str],
    transport: Transport,
    device: torch.device | str | None,
    sums: Sums,
) -> torch.device:
    """The device of this rank of a group with these backends, where it can sum so over the transport."""
    found = _device_of(group, kinds, transport) if device is None else _bound(group, device)
    try:
        where = (
            _any_device(found, kinds)
            if transport == "c10d"
            else core_device("from_process_group", found)
        )
        check_sums("from_process_group", sums, where, transport)
    except (ValueError, _C.CudaError) as error:
        if device is not None or transport == "nccl" or "cpu" not in kinds:
            raise
        raise type(error)(
            f"{error}; device was left out, and the group's tensors of GPUs are NCCL's: give device='cpu' to exchange "
            "those of CPUs"
        ) from None
    return where


def from_mesh_group(group: dist.ProcessGroup, device: torch.device | str) -> Communicator:
    """The communicator of a dim of a DeviceMesh, whose group this is; collective."""
    deadline_s = _mesh_deadline_s(group, torch.device(device))
    return from_process_group(group, deadline_s, "auto", device, "default", "fast")


def _mesh_deadline_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long ranks of a DeviceMesh wait: as long as its group does, but no longer than the default group.

    Torch gives such groups its own 30 minutes, whatever `init_process_group(timeout=...)` says.
    """
    own_s, world = min(timeout_s(group, device), MOST_SECONDS), dist.group.WORLD
    return own_s if world is None else min(own_s, timeout_s(world, device, otherwise=own_s))


def from_ranks_of(
    group: dist.ProcessGroup, members: Sequence[int], device: torch.device | str
) -> Communicator:
    """The communicator of some ranks of `group`, of a dim of a DeviceMesh, of which this rank is one; collective.

    All ranks of the group call it, each with the members that it belongs to. These meet in the group's store, so that
    torch makes no group of them.
    """
    found = _bound(group, device)
    exchange = GroupExchange(group, _mesh_deadline_s(group, torch.device(found)), members)
    with exchange.telling():
        where = core_device("fully_shard", found)
        groups = _groups_of(group, members, exchange, where)
        return choose_transport(exchange, "auto", where, groups)


def _groups_of(
    group: dist.ProcessGroup, members: Sequence[int], exchange: Exchange, where: torch.device
) -> MakeGroups:
    """What makes groups of the ranks of `exchange`, which are these members of `group`."""

    def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        name = _new_name(exchange)
        if where.type == "cpu" and isinstance(backend_of(group, where), ProcessGroupGloo):
            over = _Store("from_process_group", group.get_group_store(), name, where)
            return _gloo_groups(exchange, over)
        world = dist.get_process_group_ranks(group)
        own = [world[member] for member in members]
        gathers, reduces = (
            _new_group(group, own, f"{name}/{own[0]}/{use}", exchange.deadline_s)
            for use in ("gathers", "reduces")
        )
        return gathers, reduces

    return groups


def _new_name(exchange: Exchange) -> str:
    """A name that the ranks have never used in a store; collective."""
    return f"shardcomm/{exchange(secrets.token_hex(8).encode())[0].decode()}"


def _new_group(
    group: dist.ProcessGroup, ranks: Sequence[int], name: str, deadline_s: float
) -> dist.ProcessGroup:
    """A group of torch's under this name, with the backend of `group`; collective among its ranks.

    `torch.distributed.new_group` names a group by its ranks and by how many groups a rank is in. Ranks may be in
    different numbers, and once a group is destroyed its name comes again, with the addresses of before.
    """
    make: Any = distributed_c10d._new_process_group_helper
    made, _ = make(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.get_backend(group),
        group.get_group_store(),
        name,
        timeout=timedelta(seconds=deadline_s),
        device_id=group.bound_device_id,
    )
    distributed_c10d._world.pg_group_ranks[made] = {rank: own for own, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", made)


def check_member(operation: str, group: object) -> None:
    """ValueError if `group` is what `torch.distributed.new_group` returns on ranks that are not in the new group."""
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{operation}: this rank is not in the group; call it on the group's own ranks alone"
        )


def backend_names(operation: str, group: dist.ProcessGroup) -> dict[str, str]:
    """The group's backend for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}.

    Where no backend was named, it is the accelerator's, which `torch.distributed.get_backend` calls "undefined".

    Raises:
        ValueError: torch.distributed does not know the group, or keeps no store for it.
    """
    if group not in distributed_c10d._world.pg_map:
        raise ValueError(
            f"{operation}: group is a ProcessGroup that was destroyed, or that torch.distributed did not make; call "
            "this before destroy_process_group, or give a group of init_process_group or new_group"
        )
    if distributed_c10d._world.pg_map[group][1] is None:
        raise ValueError(
            f"{operation}: group is of backend {dist.get_backend(group)!r}, which keeps no store over which ranks can "
            "meet; give a group of another backend, or call shardcomm.connect(mpi=...)"
        )
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def _device_of(
    group: dist.ProcessGroup, kinds: dict[str, str], transport: Transport
) -> torch.device | str:
    """The device of ranks of a group with these backends, if nobody has named one."""
    has_nccl = kinds.get("cuda") == "nccl" and transport not in ("shm", "hosts")
    if transport != "nccl" and not has_nccl:
        return "cpu"
    return _bound(group, "cuda")


def _bound(group: dist.ProcessGroup, device: torch.device | str) -> torch.device | str:
    """The GPU that `group` is bound to, where `device` is "cuda" without saying which; else `device`."""
    bound: torch.device | None = group.bound_device_id
    return bound if bound is not None and str(device) == bound.type else device


def _any_device(device: torch.device | str, kinds: dict[str, str]) -> torch.device:
    """`device` with its index, as tensors there have it, for a group with these backends."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"from_process_group: device is {device}; it must be a torch.device or the name of one"
        ) from None
    # Without the check, a CUDA build of torch names "cuda" where there is no GPU, too.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if where.type == "cuda" and (accelerator is None or accelerator.type != "cuda"):
        raise ValueError(f"from_process_group: device is {device}, and torch sees no GPU here")
    if where.type not in kinds:
        raise ValueError(
            f"from_process_group: device is {device}, for which the group has no backend; it has one for "
            f"{', '.join(map(repr, kinds))}"
        )
    if where.index is None and accelerator is not None and accelerator.type == where.type:
        return torch.device(where.type, torch.accelerator.current_device_index())
    return where


def timeout_s(
    group: dist.ProcessGroup, device: torch.device, otherwise: float = DEADLINE_S
) -> float:
    """How long a collective of `group` waits for a rank, in seconds; `otherwise` if its backend does not say."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # not every backend has one
        return otherwise
    return timeout.total_seconds()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for tensors on `device`: with TORCH_DISTRIBUTED_DEBUG=DETAIL, the one that torch wraps."""
    backend: Any = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)
