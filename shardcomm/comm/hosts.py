"""The `hosts` transport: several hosts with equally many ranks, which share memory on each host.

Between hosts, the ranks with one index on their hosts are connected by TCP, and lead for that index: each byte enters a
host once, and one partial sum a host leaves it. csrc/include/shardcomm/hosts.h has a picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


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
    if list(itertools.chain(*ranks)) != list(range(len(hosts))):
        return "the ranks of a host are not numbered one after another"
    host = names.index(hosts[rank])
    index = ranks[host].index(rank)
    return Place(host, len(names), ranks[host], [each[index] for each in ranks])
