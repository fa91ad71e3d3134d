"""What ranks are in: a `Pending` for each, sentences about them, and the groups that this process is in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, cast
from weakref import WeakValueDictionary

Channel = Literal["gather", "reduce"]

# As the core has it: rank, pid, channel, call, sequence, waiting_s, waits_for.
CorePending = tuple[int, int, str, str, int, float | None, tuple[int, ...]]


class Pending(NamedTuple):
    """A collective that a rank has called and that has not ended well; or, of a rank that is in none, who it is.

    Attributes:
        rank: in the group.
        pid: its process; None where it has not attached yet.
        channel: gathers and reduces are ordered apart; None: the rank is in no collective.
        call: as "all_gather(f32, count 4)", with " of unit 'blocks.3'" where its tag has a name
            (`Communicator.tag`); over `c10d` without what is in the brackets.
        sequence: its number among the calls of its channel; `c10d` has one count for both.
        waiting_s: how long it has waited for others, in seconds. None: it moves bytes, or the group has failed. `nccl`
            and `c10d` cannot tell these apart: how long it has been in the call (`nccl`: since its turn on its stream
            came, and None before).
        waits_for: the ranks that have not come, or had not when the group failed. Empty over `nccl` and `c10d`.
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
    """`entries` of the core; `own_pid` is the process of ranks that are threads of it."""
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
    """The part of a Communicator that is needed here."""

    rank: int
    size: int
    transport: str

    def pending(self) -> list[Pending]:
        """See `Communicator.pending`."""


_open: WeakValueDictionary[int, HasPending] = WeakValueDictionary()


def opened(group: HasPending) -> None:
    """Has `report` tell of `group`, until it is closed or nobody refers to it."""
    # Ranks that are threads of this process all see the same; one rank alone waits for nobody.
    if group.size > 1 and (group.transport != "local" or group.rank == 0):
        _open[id(group)] = group


def closed(group: HasPending) -> None:
    """`report` tells of `group` no more."""
    _open.pop(id(group), None)


def report() -> str:
    """What the ranks of all groups of this process are in, a line each. For signal handlers, too: it takes no lock."""
    lines = []
    for reference in _open.valuerefs():
        if (group := reference()) is None:
            continue
        own = "threads of this process" if group.transport == "local" else f"this is {group.rank}"
        lines.append(f"{group.transport} group of {group.size} ranks, {own}:")
        lines += [f"  rank {p.rank} (pid {p.pid or 'not known yet'}): {p}" for p in group.pending()]
    return "".join(f"{line}\n" for line in lines)
