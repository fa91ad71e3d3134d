"""Which launcher started this process, and what it says in the environment: which rank it is, of how many, and where.

These are the launchers' variables; the launcher nearest to the ranks comes first. The sources named below set them, and
`srun` and `mpirun` themselves have been tried as well (Slurm 22.05, Open MPI 4.1, MPICH 4.0)::

    torchrun           RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GROUP_WORLD_SIZE
                       (torch/distributed/elastic/agent/server/local_elastic_agent.py)
    Open MPI, PRRTE    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; the job: PMIX_NAMESPACE
                       (orte/mca/schizo/ompi/schizo_ompi.c)
    MPICH, Intel MPI   PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS; the job has no name
    (Hydra)            (src/pm/hydra/proxy/pmip_cb.c)
    Slurm's srun       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE at SLURM_NODEID;
                       the job: SLURM_JOB_ID, SLURM_STEP_ID; the hosts: SLURM_STEP_NODELIST (src/common/env.c)

A batch script of Slurm's, and every process that it starts without srun, has SLURM_PROCID=0 and SLURM_NTASKS of the
whole allocation. Unlike a task of srun's it has no SLURM_STEP_ID.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

_MOST = 2**31 - 1
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ports that Linux gives to outgoing connections

_BY_HAND = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


class _Launcher(NamedTuple):
    """A launcher and the names of the variables that it sets.

    Attributes:
        name: What sentences call it.
        signs: Variables of which one is enough to recognise it.
        rank: The variable of the rank, and so on.
        job: The variables that together name the run.
        also: The variables that are needed besides rank and size.
    """

    name: str
    signs: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


_TORCHRUN = _Launcher(
    "torchrun",
    ("RANK", "WORLD_SIZE"),
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    also=("MASTER_ADDR", "MASTER_PORT"),
)
_OPEN_MPI = _Launcher(
    "Open MPI's mpirun",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE",),
)
_HYDRA = _Launcher(
    "MPICH's mpiexec",
    ("MPI_LOCALRANKID",),
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
_SLURM = _Launcher(
    "Slurm's srun",
    ("SLURM_STEP_ID",),
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_LAUNCHERS = (_TORCHRUN, _OPEN_MPI, _HYDRA, _SLURM)  # the nearest to the ranks first
# Launchers that are not served set these: their ranks are recognised by them.
_UNKNOWN = ("PMIX_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Launched:
    """This process among those that its launcher started.

    Attributes:
        launcher: The launcher's name; "" if there is none, and the process is alone.
        rank: This process's rank.
        size: How many ranks there are.
        local_rank: The rank's number among those of this host; None if the launcher does not tell.
        local_size: How many ranks this host has; None if the launcher does not tell.
        job: A name that tells the launcher's runs apart, on all hosts; "" if it has none.
        agents: How many processes of its own the launcher used to start the ranks; None if that is not known.
        first_host: The host of rank 0; "" if the launcher does not tell.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    job: str = ""
    agents: int | None = None
    first_host: str = ""

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_size == self.size

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun's variables tell the rank, and the place where the ranks meet."""
        return self.launcher == _TORCHRUN.name


def launched() -> Launched:
    """Reads the environment.

    Raises:
        ValueError: A variable is missing or wrong, or the launcher is not known here, or one launcher ran inside
            another, so that there would be several groups.
    """
    found = [_read(launcher) for launcher in _LAUNCHERS if _is_there(launcher)]
    if not found:
        if unknown := [name for name in _UNKNOWN if name in os.environ]:
            raise ValueError(
                f"{unknown[0]} is set, by a launcher that shardcomm does not know; {_BY_HAND}"
            )
        local_rank, local_size = _local(_TORCHRUN, _MOST)
        return Launched("", 0, 1, local_rank, local_size)
    own, *outer = found
    if own.local_rank is None:  # a script may have set RANK and no more, from an outer launcher's
        same = [o for o in outer if (o.rank, o.size) == (own.rank, own.size)]
        if same:
            own = replace(own, local_rank=same[0].local_rank, local_size=same[0].local_size)
    for other in outer:
        if other.size > 1 and _are_apart(own, other):
            raise ValueError(
                f"{own.launcher} gives this process rank {own.rank} of {own.size}, inside of one of the {other.size} "
                f"that {other.launcher} started, each of which would make a group of its own; let one launcher start "
                "all ranks, or have torchrun join its agents with --nnodes and --rdzv-endpoint"
            )
    return own


def _are_apart(inner: Launched, outer: Launched) -> bool:
    """Whether each process that `outer` started has started ranks of its own, which do not belong together."""
    if inner.agents is not None:
        return inner.agents != outer.size
    return inner.size < outer.size


def refuse_batch_script() -> None:
    """ValueError if Slurm's allocation is for several tasks, and srun did not start this process."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_STEP_ID" not in os.environ:
        raise ValueError(
            f"Slurm's allocation is for {tasks} tasks (SLURM_NTASKS), and srun did not start this process (it has no "
            "SLURM_STEP_ID), which would be alone; start the ranks with srun, or this one with srun --ntasks=1"
        )


def forget(environment: MutableMapping[str, str]) -> None:
    """Removes the launchers' variables about a process's rank from its environment, since it gets another rank."""
    for launcher in _LAUNCHERS:
        for name in (*launcher.signs, launcher.rank, "GROUP_WORLD_SIZE", *_UNKNOWN):
            environment.pop(name, None)


def meeting_point(own: Launched) -> tuple[str, int] | None:
    """Host and port of the store. None: all ranks are on this host, and rank 0 chooses a port of it.

    Raises:
        ValueError: Neither the launcher nor MASTER_ADDR and MASTER_PORT tell.
    """
    host = os.environ.get("MASTER_ADDR", "")
    if not host and own.on_one_host:
        if "MASTER_PORT" not in os.environ:
            return None
        host = "127.0.0.1"
    host = host or own.first_host
    if not host:
        raise ValueError(
            f"{own.launcher} started {own.size} ranks on several hosts and does not say where rank 0 is; set "
            "MASTER_ADDR to the address of its host, and MASTER_PORT to a port that is free there"
        )
    if "MASTER_PORT" in os.environ:
        return host, whole_variable("MASTER_PORT", 0, 2**16 - 1)
    if not own.job:
        raise ValueError(
            f"{own.launcher} gives its run no name to take a port by; set MASTER_PORT to a port that is free on {host}"
        )
    digest = blake2b(own.job.encode(), digest_size=8).digest()
    return host, _FIRST_PORT + int.from_bytes(digest) % _PORTS


def run_on_this_host(own: Launched) -> str:
    """A name that tells apart the runs of launchers on this host."""
    if own.job:
        return own.job
    # The process that started the ranks: the nearest above this one that was not itself given a rank.
    variable = f"{_HYDRA.rank}=".encode()
    pid = os.getppid()
    while pid > 1:
        try:
            given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        if not any(entry.startswith(variable) for entry in given):
            return f"process {pid} of {state[19]}"  # when it began, in clock ticks since boot
        pid = int(state[1])  # the parent
    raise ValueError(
        f"{own.launcher} gives its run no name, and its process cannot be found; set MASTER_ADDR and MASTER_PORT"
    )


def _first_host(nodes: str) -> str:
    """The first host of Slurm's list, as `scontrol show hostnames` would expand it: of "n[03-05,9],x" it is n03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # the pattern matches an empty text, too
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def whole_variable(name: str, first: int, last: int, *, default: int = 0) -> int:
    """The whole number that an environment variable holds; `default` if it is not set.

    Raises:
        ValueError: It is no whole number from `first` to `last`.
    """
    given = os.environ.get(name, str(default))
    if not (given.isascii() and given.isdigit() and first <= int(given) <= last):
        raise ValueError(
            f"environment variable {name} is {given!r}; it must be a whole number from {first} to {last}"
        )
    return int(given)


def _is_there(launcher: _Launcher) -> bool:
    return any(name in os.environ for name in launcher.signs)


def _read(launcher: _Launcher) -> Launched:
    needed = (launcher.rank, launcher.size, *launcher.also)
    if missing := [name for name in needed if name not in os.environ]:
        sign = next(name for name in launcher.signs if name in os.environ)
        raise ValueError(
            f"{sign} is set, as by {launcher.name}, and {', '.join(missing)} not set; unset {sign}, or {_BY_HAND}"
        )
    size = whole_variable(launcher.size, 1, _MOST)
    rank = whole_variable(launcher.rank, 0, size - 1)
    local_rank, local_size = _local(launcher, size)
    parts = [os.environ.get(name, "") for name in launcher.job]
    job = ".".join(parts) if all(parts) else ""
    agents = None
    if launcher is _TORCHRUN and "GROUP_WORLD_SIZE" in os.environ:
        agents = whole_variable("GROUP_WORLD_SIZE", 1, _MOST)
    elif launcher in (_OPEN_MPI, _HYDRA) and local_size == size:
        agents = 1  # with several hosts, Slurm may have started the other hosts' agents
    first = _first_host(os.environ.get("SLURM_STEP_NODELIST", "")) if launcher is _SLURM else ""
    return Launched(launcher.name, rank, size, local_rank, local_size, job, agents, first)


def _local(launcher: _Launcher, size: int) -> tuple[int | None, int | None]:
    local_rank = local_size = None
    if launcher.local_size in os.environ:
        local_size = (
            _tasks_of_this_node()
            if launcher is _SLURM
            else whole_variable(launcher.local_size, 1, size)
        )
    if launcher.local_rank in os.environ:
        local_rank = whole_variable(launcher.local_rank, 0, (local_size or _MOST) - 1)
    return local_rank, local_size


def _tasks_of_this_node() -> int:
    """How many tasks this node has, from a list like "4(x2),3": two nodes with 4 tasks each, and one with 3."""
    given = os.environ[_SLURM.local_size]
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", given):
        raise ValueError(
            f"environment variable {_SLURM.local_size} is {given!r}; Slurm writes it as '4(x2),3'"
        )
    tasks = []
    for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", given):
        tasks += [int(count)] * int(nodes or 1)
    return tasks[whole_variable("SLURM_NODEID", 0, len(tasks) - 1)]
