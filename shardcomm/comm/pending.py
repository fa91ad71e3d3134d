"""The calls that ranks are in: a `Pending` for each, sentences about them, and the groups of this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, cast
from weakref import WeakValueDictionary

Channel = Literal["gather", "reduce", "message"]


def channel_of(operation: str) -> Channel:
    """The channel of a collective, by its name."""
    return "reduce" if "reduce" in operation else "gather"


# As the core has it: rank, pid, channel, call, sequence, waiting_s, waits_for.
CorePending = tuple[int, int, str, str, int, float | None, tuple[int, ...]]


class Pending(NamedTuple):
    """A collective that a rank has called and that has not ended well. `Communicator.pending` returns them.

    A rank that is in no collective has an entry, too, with only `rank` and `pid`. `str()` of an entry is a sentence.

    Attributes:
        rank: The rank's number in the group.
        pid: The rank's process; None where it has not attached yet.
        channel: "gather" or "reduce", which are ordered apart; "message": the rank is asleep in a send or a receive
            of the C interface; None: the rank is in no collective.
        call: The call, as "all_gather(f32, count 4)", with " of unit 'blocks.3'" where its tag has a name (see
            `Communicator.tag`). Over `c10d` it is without the part in brackets.
        sequence: The call's number among those of its channel, or of a rank's sends and receives; `c10d` has one
            count for both channels.
        waiting_s: How long the rank has waited for other ranks, in seconds. None: it moves bytes, or the group has
            failed. `nccl` and `c10d` cannot tell waiting from moving: over these it is how long the rank has been in
            the call (over `nccl`, since the call's turn on its stream came, and None before).
        waits_for: The ranks that have not come, or that had not come when the group failed. Of other hosts (`hosts`)
            they are those with which this rank exchanges, some of which have not come. Empty over `nccl` and `c10d`.
    """

    rank: int
    pid: int | None
    channel: Channel | None = None
    call: str | None = None
    sequence: int | None = None
    waiting_s: float | None = None
    waits_for: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.call is None:
            return "in no collective"
        text = f"in {self.call} #{self.sequence}"
        if self.waiting_s is None:
            missing = _ranks(self.waits_for)
            return f"was {text} when the group failed; {missing} had not come" if missing else text
        if not self.waits_for:
            return f"{text} for {self.waiting_s:.1f} s"
        return f"{text}, has waited {self.waiting_s:.1f} s for {_ranks(self.waits_for)}"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def from_core(entries: Iterable[CorePending], own_pid: int | None = None) -> list[Pending]:
    """`entries` of the core as Pendings; `own_pid` is the process of ranks that are its threads."""
    return [
        Pending(
            rank,
            pid or own_pid,
            cast(Channel, channel) if call else None,
            call or None,
            sequence if call else None,
            waiting_s,
            waits_for,
        )
        for rank, pid, channel, call, sequence, waiting_s, waits_for in entries
    ]


class HasPending(Protocol):
    """The part of a Communicator that this module needs."""

    rank: int
    size: int
    transport: str

    def pending(self) -> list[Pending]:
        """See `Communicator.pending`."""


_open: WeakValueDictionary[int, HasPending] = WeakValueDictionary()
os.register_at_fork(after_in_child=_open.clear)  # a child is no rank of its parent's groups


def opened(group: HasPending) -> None:
    """Makes `report` tell of `group`, until `group` is closed or nobody refers to it.

    Not of one whose ranks share memory that is a file: the file tells, see `process.own_groups`.
    """
    # Ranks that are threads of this process see the same, so that one of them will do. A rank alone waits for nobody.
    in_files = group.transport in ("shm", "hosts")
    if group.size > 1 and not in_files and (group.transport != "local" or group.rank == 0):
        _open[id(group)] = group


def closed(group: HasPending) -> None:
    """Makes `report` leave out `group` from now on."""
    _open.pop(id(group), None)


def report() -> Iterator[str]:
    """What the ranks of the groups that are `opened` are in, one line for each rank; it takes no lock."""
    for reference in _open.valuerefs():
        if (group := reference()) is None:
            continue
        own = "threads of this process" if group.transport == "local" else f"this is {group.rank}"
        yield from lines(group.transport, group.size, own, group.pending())


def lines(transport: str, size: int, own: str, calls: Iterable[Pending]) -> Iterator[str]:
    """A line that names the group, and one for each of the `calls` of its ranks."""
    yield f"{transport} group of {size} ranks, {own}:"
    for call in calls:
        yield f"  rank {call.rank} (pid {call.pid or 'not known yet'}): {call}"
