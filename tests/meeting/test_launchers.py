"""Ranks as torchrun, Open MPI, MPICH and Slurm start them. The launchers themselves are run where they are installed.

Elsewhere processes get the environment that the launchers give, as their sources say (`shardcomm.meeting.launchers`
names them) and as they were seen to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardcomm import CommError, Communicator
from shardcomm.comm import nccl, own_device, rendezvous
from shardcomm.comm.own_device import own_gpu
from shardcomm.meeting.announcement import announce, ask
from shardcomm.meeting.launchers import Launched, launched, meeting_point
from support.interpreters import run_each

DEADLINE_S = 120
PREFIXES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI", "MPI_", "SLURM_"),
)

PROGRAM = """
import torch
from shardcomm import Communicator
with Communicator.from_env(deadline_s=60, transport="shm", device="cpu") as comm:
    total = torch.tensor([10.0 ** comm.rank])
    comm.all_reduce(total)
    with Communicator.from_env(deadline_s=60, transport="shm", device="cpu") as again:
        again.barrier()
    # In one write: the ranks share their output.
    print(f"{comm.rank} of {comm.size}: {total.item():.0f}\\n", end="", flush=True)
"""


def torchrun(rank: int, size: int, agents: int = 1) -> dict[str, str]:
    here = size // agents
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % here),
        "LOCAL_WORLD_SIZE": str(here), "GROUP_WORLD_SIZE": str(agents), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }  # fmt: skip


def open_mpi(
    rank: int, size: int, here: int | None = None, job: str = "15138817"
) -> dict[str, str]:
    here = here or size
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % here), "OMPI_COMM_WORLD_LOCAL_SIZE": str(here),
        "PMIX_RANK": str(rank), "PMIX_NAMESPACE": job,
    }  # fmt: skip


def hydra(rank: int, size: int, here: int | None = None) -> dict[str, str]:
    here = here or size
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank % here), "MPI_LOCALNRANKS": str(here),
    }  # fmt: skip


def batch_script(tasks: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "8", "SLURM_NTASKS": str(tasks), "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
    }  # fmt: skip


def srun(
    rank: int,
    size: int,
    *,
    node: int = 0,
    local: int | None = None,
    tasks: str = "",
    step: str = "0",
) -> dict[str, str]:
    return batch_script(size) | {
        "SLURM_STEP_ID": step, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank if local is None else local), "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks or str(size), "SLURM_STEP_NODELIST": "n[01-02,07]",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, *environments: dict[str, str]) -> None:
    for environment in environments:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environments", "local", "name"),
    [
        ([torchrun(3, 4)], (3, 4), "torchrun"),
        ([torchrun(3, 4, agents=2)], (1, 2), "torchrun"),
        ([open_mpi(3, 4)], (3, 4), "Open MPI's mpirun"),
        ([open_mpi(3, 4, 2)], (1, 2), "Open MPI's mpirun"),
        ([hydra(3, 4)], (3, 4), "MPICH's mpiexec"),
        ([srun(3, 4)], (3, 4), "Slurm's srun"),
        ([srun(3, 4, node=1, local=0, tasks="3,1")], (0, 1), "Slurm's srun"),
        ([srun(3, 4, node=1, local=1, tasks="2(x2)")], (1, 2), "Slurm's srun"),
        # What starts what, and which of them started the ranks.
        ([batch_script(4), open_mpi(3, 4)], (3, 4), "Open MPI's mpirun"),
        ([batch_script(4), torchrun(3, 4)], (3, 4), "torchrun"),
        ([srun(0, 1), hydra(3, 4)], (3, 4), "MPICH's mpiexec"),
        ([srun(1, 2, node=1, local=0, tasks="1(x2)"), open_mpi(3, 4, 2)], (1, 2), "Open MPI's mpirun"),
        ([srun(1, 2, node=1, local=0, tasks="1(x2)"), torchrun(3, 4, agents=2)], (1, 2), "torchrun"),
        ([open_mpi(1, 2, 1), torchrun(3, 4, agents=2)], (1, 2), "torchrun"),
        # srun --mpi=pmi2 speaks of the same ranks in MPI's words.
        ([srun(3, 4), {"PMI_RANK": "3", "PMI_SIZE": "4"}], (3, 4), "Slurm's srun"),
        # A script that sets RANK and WORLD_SIZE by those of its launcher.
        ([srun(3, 4, node=1, local=1, tasks="2(x2)"), {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n01",
          "MASTER_PORT": "29500"}], (1, 2), "torchrun"),
    ],
)  # fmt: skip
def test_rank_and_size_are_those_of_the_nearest_launcher(
    monkeypatch: pytest.MonkeyPatch,
    environments: list[dict[str, str]],
    local: tuple[int, int],
    name: str,
) -> None:
    given(monkeypatch, *environments)
    own = launched()
    assert (own.rank, own.size, own.launcher) == (3, 4, name)
    assert (own.local_rank, own.local_size) == local


@pytest.mark.parametrize(
    ("environments", "said"),
    [
        ([open_mpi(0, 2), torchrun(0, 2)], "torchrun gives this process rank 0 of 2, inside of one of the 2 that Open "
         "MPI's mpirun started, each of which would make a group of its own"),
        ([srun(0, 4), open_mpi(0, 2)], "Open MPI's mpirun gives .* 0 of 2, inside of one of the 4 that Slurm's srun"),
        ([srun(0, 4), torchrun(0, 2)], "torchrun gives .* 0 of 2, inside of one of the 4 that Slurm's srun started"),
        ([open_mpi(1, 4), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}],
         "torchrun gives .* 0 of 1, inside of one of the 4"),
        ([{"PMIX_RANK": "0"}], "PMIX_RANK is set, by a launcher that shardcomm does not know; set RANK, WORLD_SIZE, "),
        ([{"PMI_RANK": "0", "PMI_SIZE": "2"}], "PMI_RANK is set, by a launcher that shardcomm does not know"),
        ([{"OMPI_COMM_WORLD_SIZE": "2"}], "OMPI_COMM_WORLD_SIZE is set, as by Open MPI's mpirun, and "
         "OMPI_COMM_WORLD_RANK not set; unset OMPI_COMM_WORLD_SIZE, or set RANK"),
        # mpiexec -pmi-port
        ([{"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_ID": "0"}], "PMI_RANK, PMI_SIZE not set"),
        ([open_mpi(2, 2)], "OMPI_COMM_WORLD_RANK is '2'; it must be a whole number from 0 to 1"),
        ([open_mpi(0, 2) | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}], "LOCAL_RANK is '2'; .* from 0 to 1"),
        ([srun(0, 2) | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}], r"TASKS_PER_NODE is '2\(x'; Slurm writes it as"),
        ([srun(0, 2, node=1)], "SLURM_NODEID is '1'; it must be a whole number from 0 to 0"),
        ([batch_script(2)], r"allocation is for 2 tasks \(SLURM_NTASKS\), and srun did not start this process"),
        ([open_mpi(0, 2, 1)], "mpirun started 2 ranks on several hosts and does not say where rank 0 is; set MASTER_"),
        ([hydra(0, 2, 1), {"MASTER_ADDR": "h"}], "MPICH's mpiexec gives its run no name .* set MASTER_PORT"),
    ],
)  # fmt: skip
def test_what_would_be_several_groups_is_refused(
    monkeypatch: pytest.MonkeyPatch, environments: list[dict[str, str]], said: str
) -> None:
    given(monkeypatch, *environments)
    with pytest.raises(ValueError, match=said):
        Communicator.from_env(deadline_s=1.0)


@pytest.mark.parametrize(
    "environment", [{}, open_mpi(0, 1), hydra(0, 1), srun(0, 1), batch_script(1)]
)
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    given(monkeypatch, environment)
    with Communicator.from_env() as comm:
        assert comm.size == 1


def test_the_meeting_point_is_what_the_user_or_slurm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one, on_two = Launched("", 0, 2, 0, 2, "8.0"), Launched("", 0, 2, 0, 1, "8.0", None, "n01")
    assert meeting_point(on_one) is None
    host, port = meeting_point(on_two) or ("", 0)
    assert host == "n01"
    assert 1024 <= port < 32768  # what Linux gives to whoever connects begins there
    other_step = Launched("", 0, 2, 0, 1, "8.1", None, "n01")
    assert meeting_point(other_step) not in (None, (host, port))
    monkeypatch.setenv("MASTER_PORT", "4711")
    assert meeting_point(on_one) == ("127.0.0.1", 4711)
    assert meeting_point(on_two) == ("n01", 4711)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    assert meeting_point(on_one) == ("elsewhere", 4711)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[01-03,07]", "n01"), ("n[7,9]", "n7"), ("a,b[1-2]", "a"), ("a[1-2],b3", "a1"),
     ("r1-n[099-101],x", "r1-n099"), ("r[1-2]n[3-4]", "r1n3"), ("", "")],
)  # fmt: skip
def test_the_first_of_slurms_hosts(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    given(monkeypatch, srun(0, 2) | {"SLURM_STEP_NODELIST": nodes})
    assert launched().first_host == first
    if shutil.which("scontrol") is None or not nodes:
        return
    command = ["scontrol", "show", "hostnames", nodes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode == 0:  # not every version knows two ranges
        assert done.stdout.split()[0] == first


@pytest.mark.parametrize(("gpus", "gpu"), [(4, 3), (2, 1), (1, 0)])
def test_the_gpu_is_that_of_the_rank_on_its_host(
    monkeypatch: pytest.MonkeyPatch, gpus: int, gpu: int
) -> None:
    """Of 1: srun --gpus-per-task=1 shows each task its own alone."""
    given(monkeypatch, srun(3, 4))
    assert own_gpu(launched(), gpus) == torch.device("cuda", gpu)


@pytest.mark.parametrize(
    ("gpus", "nccl_is_there", "device", "says"),
    [
        (4, True, "cuda:0", ""),
        (1, True, "cpu", "this host has 4 of them, and sees 1 GPU .*give device='cuda'"),
        (4, False, "cpu", "there is no NCCL"),
        (0, True, "cpu", ""),
    ],
)
def test_that_gpus_are_left_alone_is_said_once_a_host(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nccl_is_there: bool, device: str, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    status = SimpleNamespace(available=nccl_is_there, reason="there is no NCCL")
    monkeypatch.setattr(nccl, "status", lambda: status)
    monkeypatch.setattr(own_device, "core_device", lambda operation, given: torch.device(given))
    for rank in range(4):
        own = Launched("", rank, 4, rank, 4)
        said = (
            pytest.warns(RuntimeWarning, match=f"^connect: the ranks work on CPUs, since {says}")
            if says and rank == 0
            else warnings.catch_warnings(action="error")
        )
        with said:
            found = own_device.checked_device("connect", own, "auto", None, "default", "fast")
        assert found == torch.device("cpu" if device == "cpu" else f"cuda:{rank}")
        with warnings.catch_warnings(action="error"):
            named = own_device.checked_device("connect", own, "auto", "cpu", "default", "fast")
        assert named == torch.device("cpu")


def test_the_gpu_is_the_current_device_when_the_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, {})
    gpu, done = torch.device("cuda", 1), list[object]()
    monkeypatch.setattr(rendezvous, "checked_device", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(
        Communicator, "local_group", lambda size, **given: done.append(size) or [None]
    )
    Communicator.from_env()
    assert done == [gpu, 1]


# Whole runs.


def run(command: list[str], environment: dict[str, str] | None = None) -> list[str]:
    """The sorted lines of standard output."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(PREFIXES)}
    done = subprocess.run(
        command, env=clean | (environment or {}), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


# Forks a process for each environment, which runs the program in it.
LAUNCHER = """
import json, os, sys
environments = json.loads(os.environ["ENVIRONMENTS"])
ranks = []
for environment in environments:
    rank = os.fork()
    if rank == 0:
        os.environ.clear()
        os.environ.update(environment)
        exec(PROGRAM)
        sys.exit()
    ranks.append(rank)
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def launch_each(*jobs: list[dict[str, str]], program: str = PROGRAM) -> list[list[str]]:
    """The sorted lines of each job, which are all run at once.

    Of a job, one process starts another with each of the environments, as a launcher does, and waits for them.
    """
    clean = {n: v for n, v in os.environ.items() if not n.startswith(PREFIXES)}
    ended = run_each(
        f"PROGRAM = {program!r}\n{LAUNCHER}",
        [{"ENVIRONMENTS": json.dumps([clean | each for each in job])} for job in jobs],
    )
    for launcher in ended:
        assert launcher.returncode == 0, launcher.stdout + launcher.stderr
    return [sorted(launcher.stdout.splitlines()) for launcher in ended]


OF_TWO = ["0 of 2: 11", "1 of 2: 11"]


def test_ranks_of_two_of_slurms_nodes_meet_on_the_first() -> None:
    of_node = [(0, 0), (0, 1), (1, 0)]
    environments = [
        srun(rank, 3, node=node, local=local, tasks="2,1") | {"SLURM_STEP_NODELIST": "localhost,x"}
        for rank, (node, local) in enumerate(of_node)
    ]
    assert launch_each(environments) == [[f"{rank} of 3: 111" for rank in range(3)]]


# No rank 1 asks before both ranks 0 have announced a port, or failed to. Runs of the same name would otherwise meet
# one after the other, as if nothing were wrong.
BOTH_ANNOUNCED = """
import os
from pathlib import Path
from shardcomm.meeting import store
from support.gates import until
folder, announce, ask = Path(os.environ["FOLDER"]), store.announce, store.ask
def announces(*run):
    try:
        announce(*run)
    finally:
        (folder / str(os.getpid())).touch()
def asks(*run):
    until(lambda: len(os.listdir(folder)) == 2, "both ranks 0 have announced")
    return ask(*run)
store.announce, store.ask = announces, asks
"""


@pytest.mark.parametrize("of", [lambda r, j: open_mpi(r, 2, job=j), lambda r, _: hydra(r, 2)])
def test_two_runs_on_one_host_do_not_meet(of: object, tmp_path: Path) -> None:
    assert callable(of)
    folder = {"FOLDER": str(tmp_path)}
    jobs = [[of(rank, job) | folder for rank in range(2)] for job in ("1", "2")]
    assert launch_each(*jobs, program=BOTH_ANNOUNCED + PROGRAM) == [OF_TWO, OF_TWO]


def test_launch_inside_of_a_launcher_starts_ranks_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from shardcomm import Communicator, launch
from shardcomm.meeting.launchers import launched

def launched_inside():
    with Communicator.from_env(deadline_s=60) as comm:
        comm.barrier()
        return launched().launcher, comm.size

if __name__ == "__main__":
    print(launch(launched_inside, 2))
""")
    done = run([sys.executable, str(program)], open_mpi(1, 4) | srun(1, 4))
    assert done == ["[('torchrun', 2), ('torchrun', 2)]"]


def test_a_port_is_announced_to_the_other_ranks_alone() -> None:
    run_name = f"test {os.getpid()}"
    announce(run_name, 4711, 2)
    with pytest.raises(CommError, match="rank 0 of another program meets its ranks under the same"):
        announce(run_name, 4712, 2)
    assert [ask(run_name, 30.0) for _ in range(2)] == [4711, 4711]
    announce(run_name, 4713, 1)  # the next program of the same run
    assert ask(run_name, 30.0) == 4713
    with pytest.raises(CommError, match="rank 0 did not announce its port"):
        ask(run_name, 0.1)


def test_a_rank_without_a_rank_0_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, open_mpi(1, 2, job=f"of nobody {os.getpid()}"))
    with pytest.raises(
        CommError,
        match=r"rank 1 of 2: no rendezvous: rank 0 keeps the store at a port of this host",
    ):
        Communicator.from_env(deadline_s=0.3)


def test_rank_0_at_the_name_of_no_host_ends_with_its_error() -> None:
    program = "import shardcomm; shardcomm.Communicator.from_env(deadline_s=0.5)"
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "nobody.invalid"}
    [ended] = run_each(program, [first | {"MASTER_PORT": port}])
    assert ended.returncode == 1
    assert re.search(r"which was not reached within 0.5 s: .*\bname\b.*\n\Z", ended.stderr, re.I)
    assert "frame #" not in ended.stderr  # of torch's own attempts


def test_a_program_that_meets_nobody_ends_with_its_error() -> None:
    program = "import shardcomm; shardcomm.Communicator.from_env(deadline_s=0.5)"
    alone = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = {"MASTER_PORT": str(listening.getsockname()[1])}  # on which nobody listens any more
    for ended in run_each(program, [alone | port] * 4):
        assert ended.returncode == 1
        assert ended.stderr.endswith("which was not reached within 0.5 s: Connection refused\n")
        assert "frame #" not in ended.stderr  # of torch's own attempts


def installed(*names: str) -> str:
    """The first of the programs that is there; skips without one."""
    for name in names:
        if (program := shutil.which(name)) is not None:
            return program
    pytest.skip(f"no {' or '.join(names)} here")


def mpirun_of_open_mpi() -> str:
    program = installed("mpirun.openmpi", "mpirun")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if "OpenRTE" not in version.stdout and "Open MPI" not in version.stdout:
        pytest.skip("mpirun is not Open MPI's")
    return program


def test_open_mpi_itself() -> None:
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    assert run([mpirun_of_open_mpi(), *options, sys.executable, "-c", PROGRAM]) == OF_TWO


def test_mpich_itself(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mpiexec = installed("mpiexec.hydra")
    assert run([mpiexec, "-n", "2", sys.executable, str(program)]) == OF_TWO
    # The ranks' parents are shells here; and the second program of a run meets like the first.
    twice = f"{sys.executable} {program} && {sys.executable} {program}"
    assert run([mpiexec, "-n", "2", "sh", "-c", twice]) == sorted(OF_TWO * 2)


def slurm() -> str:
    program = installed("srun")
    info = ["sinfo", "--noheader", "--states=idle,mixed", "-o", "%D"]
    done = subprocess.run(info, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode != 0 or not done.stdout.strip():
        pytest.skip(f"no node of Slurm's is free here: {done.stderr.strip()}")
    return program


def test_slurm_itself(tmp_path: Path) -> None:
    srun_options = [slurm(), "-N", "1", "-n", "2"]
    assert run([*srun_options, sys.executable, "-c", PROGRAM]) == OF_TWO
    assert run([*srun_options, "--mpi=pmi2", sys.executable, "-c", PROGRAM]) == OF_TWO
    script, out = tmp_path / "batch.sh", tmp_path / "out"
    script.write_text(
        f"#!/bin/sh\ncat >{tmp_path}/program.py <<'EOF'\n{PROGRAM}\nEOF\n"
        f"{sys.executable} {tmp_path}/program.py\nsrun {sys.executable} {tmp_path}/program.py\n"
    )
    run(["sbatch", "--wait", "-N", "1", "-n", "2", "-o", str(out), str(script)])
    text = out.read_text()
    assert re.search("ValueError: Slurm's allocation is for 2 tasks", text), text
    assert sorted(line for line in text.splitlines() if " of 2: " in line) == OF_TWO
