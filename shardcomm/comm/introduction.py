"""How ranks introduce themselves to each other, before they choose a transport."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

from shardcomm import _C
from shardcomm.meeting.comm_error import comm_error
from shardcomm.meeting.exchange import Exchange, Watched


@dataclass(frozen=True)
class Introduction:
    """What a rank shows all others first."""

    version: str
    transport: str
    device: str
    cta_policy: str
    sums: str
    host: str
    pid: int
    start_time: int


def introduce(
    exchange: Exchange, transport: str, device: torch.device, cta_policy: str, sums: str
) -> list[Introduction]:
    """Shows all ranks who this one is, and returns who they are; collective."""
    pid, start_time = _C.own_process()
    own = Introduction(
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
            other = Introduction(**json.loads(shown))
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


def watch(exchange: Exchange, everybody: list[Introduction]) -> str:
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


def host_identity() -> str:
    """An identity that two processes share if they can map each other's memory: same boot, same process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip() + os.readlink("/proc/self/ns/pid")
