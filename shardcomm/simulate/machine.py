"""A machine as a simulation sees it: numbers, each with where it comes from, in a JSON file.

{
 "shardcomm_machine": 1,
 "name": "8xH100",
 "origin": "published",           or "measured", by `shardcomm bench --fit`
 "transport": "nccl",             or "shm", "hosts"
 "ranks_per_host": 8, ...         the numbers; see `Machine`
 "sources": {"ranks_per_host": "...", ...}
}
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardcomm.arguments.checks import check_type
from shardcomm.files.json_file import read_json
from shardcomm.files.whole_file import written_whole

_FOLDER = Path(__file__).parent / "machines"
_ORIGINS = ("measured", "published")
_TRANSPORTS = ("shm", "hosts", "nccl")

# What each number may be; a machine with others is a slip of the pen, as of bits for bytes or ms for s.
_RANGES: Mapping[str, tuple[float, float]] = {
    "ranks_per_host": (1, 1024),
    "cores": (0, 4096),
    "flops_per_s": (1e6, 1e17),
    "unit_s": (0, 1),
    "backward": (1, 4),
    "crowding": (1, 10),
    "memory_bytes": (1e6, 1e15),
    "copy_bytes_per_s": (1e3, 1e15),
    "code_bytes_per_s": (1e3, 1e15),
    "host_latency_s": (0, 1),
    "host_bytes_per_s": (1e3, 1e15),
    "network_latency_s": (0, 10),
    "network_bytes_per_s": (0, 1e15),
    "network_burst_bytes": (0, 1e12),
    "socket_bytes_per_s": (0, 1e15),
    "turn_s": (0, 1),
    "contention": (0, 0.99),
}
_WHOLE = ("ranks_per_host", "memory_bytes")


@dataclass(frozen=True)
class Machine:
    """Hosts of equal ranks, and the links between them.

    Attributes:
        name: The machine's name.
        origin: "measured" on the machine itself, or "published" by others.
        transport: What moves bytes: "shm" (memory that the ranks of one host share), "hosts" (that, and sockets between
            hosts) or "nccl" (rings).
        ranks_per_host: The ranks that a host has at most.
        cores: The cores that a host's ranks share, for computation, copies and sockets; 0: each rank has a device of
            its own. Where hosts share a machine, as those of `shardcomm cluster` do, a host's share of its cores, which
            need not be whole: three hosts on two cores have 2/3 each.
        flops_per_s: Floating-point operations that a rank does in a second, in the matrices of a model.
        unit_s: Seconds of a unit's forward that do not grow with its operations.
        backward: How many times as long as a forward a backward takes.
        crowding: Where ranks outnumber cores, the time that a rank takes over the time that its fair share of the cores
            would give; at least 1.
        memory_bytes: A rank's memory.
        copy_bytes_per_s: Bytes that a rank reads and writes in a second when it packs gradients.
        code_bytes_per_s: The same when it encodes and decodes a block format.
        host_latency_s: Within a host: the seconds of a hop of a ring or, over shm, those that a meeting of the ranks
            takes of each rank's core.
        host_bytes_per_s: Within a host: the bytes that a rank reads and writes in a second over shm, or sends over
            its link.
        network_latency_s: The seconds of a hop of a ring from host to host or, over hosts, those that an exchange
            between them takes of each rank's core.
        network_bytes_per_s: The bytes that a host sends in a second, over all its network cards; 0: there is one host.
        network_burst_bytes: The bytes that a host's link takes at once after a pause, as one with a token bucket does,
            by which `tc` shapes links; 0 for a link without one.
        socket_bytes_per_s: Over hosts: the bytes that a core sends through sockets in a second while it receives as
            many; 0 for another transport.
        turn_s: Over hosts: the seconds in which the threads of a collective wait for their turns on a core, one after
            another, while all ranks compute without a pause; 0 where nobody has to wait. Who computes goes on until its
            slice ends, 3 to 4 ms on Linux. The time is of as many ranks a core as this machine has.
        contention: The share of its speed that computation loses while a collective runs beside it. (Where ranks
            share cores, the two share those instead.)
        sources: For each number the place that it comes from.

    Raises:
        TypeError: `sources` is no dict.
        ValueError: A number is missing, absurd or without a source; the message names it.
    """

    name: str
    origin: str
    transport: str
    ranks_per_host: int
    cores: float
    flops_per_s: float
    unit_s: float
    backward: float
    crowding: float
    memory_bytes: int
    copy_bytes_per_s: float
    code_bytes_per_s: float
    host_latency_s: float
    host_bytes_per_s: float
    network_latency_s: float
    network_bytes_per_s: float
    network_burst_bytes: float
    socket_bytes_per_s: float
    turn_s: float
    contention: float
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        check_type("Machine", "sources", self.sources, Mapping, "a dict of a text for each number")
        for field, accepted in (("origin", _ORIGINS), ("transport", _TRANSPORTS)):
            value = getattr(self, field)
            if value not in accepted:
                raise ValueError(
                    f"machine {self.name!r}: {field} is {value!r}; accepted: {', '.join(map(repr, accepted))}"
                )
        for field, (low, high) in _RANGES.items():
            value = getattr(self, field)
            kinds = (int,) if field in _WHOLE else (int, float)
            if type(value) not in kinds or not low <= value <= high:
                what = "a whole number" if field in _WHOLE else "a number"
                raise ValueError(
                    f"machine {self.name!r}: {field} is {value!r}; it must be {what} from {low:g} to {high:g}"
                )
            if not self.sources.get(field):
                raise ValueError(
                    f"machine {self.name!r}: sources has no {field!r}; each number says where it comes from"
                )

        if self.transport == "hosts":
            self._check_hosts()

    def _check_hosts(self) -> None:
        """Whether there are what the transport needs: cores, ranks that share memory, and a network."""
        for field, lacking, least in (
            ("cores", not self.cores, "more than 0"),
            ("network_bytes_per_s", not self.network_bytes_per_s, "more than 0"),
            ("socket_bytes_per_s", not self.socket_bytes_per_s, "more than 0"),
        ):
            if lacking:
                raise ValueError(
                    f"machine {self.name!r}: {field} is {getattr(self, field)!r}; with transport 'hosts' it must be "
                    f"{least}"
                )

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """Reads a machine's file, or one of those that shardcomm brings along, by its name.

        Args:
            name: A path, or the name of a machine that comes along, such as "8xH100".

        Returns:
            The machine.

        Raises:
            OSError: There is no such file; the message names the machines that come along.
            TypeError: `name` is neither a text nor a path.
            ValueError: It is no machine; the message says what is wrong with it.
        """
        accepted = "a path, or the name of a machine that comes along"
        check_type("Machine.load", "name", name, str | Path, accepted)
        path = _FOLDER / f"{name}.json" if name in shipped() else Path(name)
        if not path.exists():
            known = ", ".join(shipped())
            sentence = f"no such file, and none of the machines {known}, which come along"
            raise FileNotFoundError(errno.ENOENT, sentence, str(name))
        file = read_json(path, "a machine's file, as `shardcomm bench --fit FILE` writes it")
        file["shardcomm_machine"].whole(1, 1)
        given: dict[str, Any] = {f.name: file[f.name].raw for f in fields(cls)}
        given["name"] = file["name"].text()
        given["sources"] = {field: source.text() for field, source in file["sources"].items()}
        return cls(**given)

    def save(self, path: str | Path) -> None:
        """Writes the machine's file.

        Args:
            path: The file, which is replaced if it exists.

        Raises:
            OSError: The file cannot be written; then no part of it is left.
        """
        with written_whole(path):
            document = {"shardcomm_machine": 1, **asdict(self)}
            Path(path).write_text(json.dumps(document, indent=1) + "\n")


def shipped() -> tuple[str, ...]:
    """The names of the machines that shardcomm brings along; their figures are published ones."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))
