"""What is to be killed, and when: "host1 at step 7", "rank 2 after 500ms"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardcomm.cluster.hosts import name_of
from shardcomm.cluster.quantities import parse_duration


@dataclass(frozen=True)
class Kill:
    """A host or a rank that is to be killed, at a step or at a time.

    Attributes:
        text: As it was given.
        host: The host; None if it is a rank.
        rank: The rank; None if it is a host.
        step: The step, as `shardcomm.cluster.step` announces it; None if it is a time.
        after_s: Seconds after the processes were started; None if it is a step.
    """

    text: str
    host: int | None
    rank: int | None
    step: int | None
    after_s: float | None

    @property
    def whom(self) -> str:
        """The name of the host or rank."""
        return f"rank {self.rank}" if self.host is None else name_of(self.host)

    def host_of(self, ranks_a_host: int) -> int:
        """The host, or that of the rank."""
        if self.rank is not None:
            return self.rank // ranks_a_host
        assert self.host is not None
        return self.host

    @property
    def why_not(self) -> str:
        """Why it has not happened, if it has not."""
        if self.step is None:
            return f"{self.whom} had ended by then"
        ranks = "it" if self.host is None else f"a rank of {self.whom}"
        return f"{ranks} has not called shardcomm.cluster.step({self.step})"


def parse_kill(text: str) -> Kill:
    """The kill that a text stands for.

    Raises:
        ValueError: It is no such text.
    """
    found = re.fullmatch(r"(host|rank) ?(\d+) (?:at step (\d+)|after (\S+))", text.strip())
    if found is None:
        raise ValueError(
            f"{text!r}; it must be a host or a rank, and a step or a time, such as 'host1 at step 7' or 'rank 2 after "
            "500ms'"
        )
    kind, number, step, after = found.groups()
    host, rank = (int(number), None) if kind == "host" else (None, int(number))
    if step is not None:
        return Kill(text, host, rank, int(step), None)
    try:
        return Kill(text, host, rank, None, parse_duration(after))
    except ValueError as error:
        raise ValueError(f"{text!r}, where the time is {error}") from None


def check_there(kills: Sequence[Kill], hosts: int, ranks: int) -> None:
    """ValueError unless there are the hosts and the ranks, `ranks` in all, and no kill is given twice."""
    seen = set()
    for kill in kills:
        if (what := replace(kill, text="")) in seen:
            raise ValueError(f"{kill.text!r}, which is given twice; it must be given once")
        seen.add(what)
        if kill.host is not None and kill.host >= hosts:
            raise ValueError(f"{kill.text!r}; the hosts are host0 to {name_of(hosts - 1)}")
        if kill.rank is not None and kill.rank >= ranks:
            raise ValueError(f"{kill.text!r}; the ranks are 0 to {ranks - 1}")
