"""What ranks on hosts find in their environment, and how torchrun starts them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from shardcomm.cluster.hosts import Host
from shardcomm.cluster.kills import Kill
from shardcomm.cluster.links import DEVICE
from shardcomm.cluster.steps import variables
from shardcomm.meeting.launchers import forget
from shardcomm.meeting.store import SECRET

_LOGS = "/dev/shm/torchrun"  # torchrun makes folders for the ranks' logs, here where they end with the host
_PORT = 29500  # of the ranks' store, in a network where nobody else listens
_LAUNCHED = (SECRET, "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")


def of_host(
    hosts: Sequence[Host], host: Host, ranks_a_host: int, kills: Sequence[Kill]
) -> dict[str, str]:
    """The environment of a host's processes."""
    env = dict(os.environ)
    forget(env)
    for name in _LAUNCHED:  # by a launcher that started this process
        env.pop(name, None)
    # All hosts share this machine's cores.
    threads = max(1, (os.cpu_count() or 1) // (len(hosts) * ranks_a_host))
    defaults = {"OMP_NUM_THREADS": str(threads), "PET_LOG_DIR": _LOGS}
    own = {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE}
    return defaults | env | own | variables(kills, host.number, ranks_a_host)


def of_rank(
    hosts: Sequence[Host], host: Host, ranks_a_host: int, local_rank: int
) -> dict[str, str]:
    """What torchrun would add to it for one rank."""
    own = {
        "RANK": host.number * ranks_a_host + local_rank, "WORLD_SIZE": len(hosts) * ranks_a_host,
        "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks_a_host,
        "GROUP_RANK": host.number, "GROUP_WORLD_SIZE": len(hosts),
        "MASTER_ADDR": hosts[0].address, "MASTER_PORT": _PORT,
    }  # fmt: skip
    return {name: str(value) for name, value in own.items()}


def check_program(command: Sequence[str]) -> None:
    """ValueError unless there is the program, or the script: the hosts have this machine's files."""
    program = command[0] if command else ""
    there = os.path.isfile(program) if program.endswith(".py") else shutil.which(program)
    if not there:
        raise ValueError(
            f"{program!r}; it must be a Python script whose name ends in .py, as seen from {os.getcwd()}, or a program "
            "of the PATH"
        )


def torchrun(
    hosts: Sequence[Host], host: Host, ranks_a_host: int, command: Sequence[str]
) -> list[str]:
    """What runs a command as the ranks of one host: a Python script by its interpreter, any other program as it is."""
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(len(hosts)), "--node-rank", str(host.number), "--nproc-per-node", str(ranks_a_host),
        "--master-addr", hosts[0].address, "--master-port", str(_PORT),
        *([] if command[0].endswith(".py") else ["--no-python"]), *command,
    ]  # fmt: skip
