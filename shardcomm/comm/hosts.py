"""The `hosts` transport: several hosts with equally many ranks, which share memory on each host.

Between hosts, the ranks with one index on their hosts are a ProcessGroup, and lead for that index: each byte enters a
host once, and one partial sum a host leaves it. csrc/include/shardcomm/hosts.h has a picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from shardcomm import _C


class Place(NamedTuple):
    """Where a rank is among several hosts."""

    host: int
    hosts: int
    on_host: list[int]  # the ranks of its host
    across: list[int]  # the rank with its index, of each host


def place_of(rank: int, hosts: Sequence[object]) -> Place | str:
    """The rank's place, if `hosts`, the host of each rank, serve for this transport; else why they do not."""
    names = list(dict.fromkeys(hosts))
    ranks = [[r for r, host in enumerate(hosts) if host == name] for name in names]
    if any(len(each) != len(ranks[0]) for each in ranks):
        counts = ", ".join(str(len(each)) for each in ranks)
        return f"the hosts have different numbers of ranks: {counts}"
    if len(ranks[0]) == 1:
        return "each host has one rank"
    if list(itertools.chain(*ranks)) != list(range(len(hosts))):
        return "the ranks of a host are not numbered one after another"
    host = names.index(hosts[rank])
    index = ranks[host].index(rank)
    return Place(host, len(names), ranks[host], [each[index] for each in ranks])


class GroupAcross:
    """What the core calls for bytes between hosts: collectives of two groups, one a channel. Of `Across` in hosts.h.

    The groups are this object's alone from now on: nobody else may have them.
    """

    def __init__(self, gathers: dist.ProcessGroup, reduces: dist.ProcessGroup) -> None:
        self._hosts = gathers.size()
        self._groups = tuple(_taken(group) for group in (gathers, reduces))

    def all_gather(self, channel: int, send: int, recv: int, nbytes: int) -> None:
        """`recv` gets the `nbytes` of each host, in the order of hosts."""
        group = self._group(channel)
        group._allgather_base(_at(recv, nbytes * self._hosts), _at(send, nbytes)).wait()

    def all_to_all(self, channel: int, send: int, recv: int, nbytes: int) -> None:
        """Both have `nbytes` for each host."""
        total = nbytes * self._hosts
        group = self._group(channel)
        group.alltoall_base(_at(recv, total), _at(send, total), [], []).wait()

    def broadcast(self, channel: int, buffer: int, nbytes: int, root: int) -> None:
        """`root` is a host."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group(channel).broadcast([_at(buffer, nbytes)], options).wait()

    def leave(self) -> None:
        """Lets go of the groups. A group of Gloo then closes its connections, and the other ranks hear of that."""
        self._groups = ()

    def _group(self, channel: int) -> Any:
        groups = self._groups  # another thread may let go of them meanwhile
        if not groups:
            raise RuntimeError("this rank has left them")
        return groups[channel]


def _taken(group: dist.ProcessGroup) -> Any:
    """Takes `group` from torch.distributed; returns what carries its bytes, which ends when its last owner drops it."""
    if not isinstance(group, dist.ProcessGroup):
        return group  # is one already, and torch.distributed never knew it
    backend = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(group)
    return backend


def _at(address: int, nbytes: int) -> torch.Tensor:
    return from_dlpack(_C.bytes_at(address, nbytes))
