"""`shardcomm.connect(mpi=...)`: ranks that find each other through MPI, where mpi4py and mpirun are installed."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardcomm
from support.interpreters import run

LIMIT_S = 100


def by_mpirun(folder: Path, size: int, program: str) -> list[str]:
    """The lines that `size` ranks print, sorted. `program` has `MPI`, `np` and `shardcomm`.

    No test imports mpi4py.MPI itself: that starts MPI, whose variables the commands of later tests would inherit.
    """
    pytest.importorskip("mpi4py", reason="needs: pip install mpi4py")
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs: mpirun (Debian: openmpi-bin)")
    file = folder / "program.py"
    file.write_text(f"from mpi4py import MPI\nimport numpy as np\nimport shardcomm\n{program}")
    root = ["--allow-run-as-root", "--oversubscribe"]
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    options = root if "Open MPI" in version.stdout + version.stderr else []
    done = subprocess.run(
        [mpirun, *options, "-n", str(size), sys.executable, str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.slow
def test_ranks_of_mpirun_and_parts_of_them_meet_through_mpi(tmp_path: Path) -> None:
    """In one run, as each rank loads torch."""
    lines = by_mpirun(
        tmp_path,
        3,
        """
for transport in ("shm", "c10d"):
    with shardcomm.connect(mpi=MPI.COMM_WORLD, transport=transport, device="cpu") as comm:
        total = np.full(4, 10.0**comm.rank, dtype=np.float32)
        comm.all_reduce(total)
        print(f"{comm.transport} {comm.rank} of {comm.size}: {total[3]:.0f}\\n", end="", flush=True)

rank = MPI.COMM_WORLD.Get_rank()
part = MPI.COMM_WORLD.Split(color=rank % 2, key=-rank)
with shardcomm.connect(mpi=part, device="cpu") as comm:
    seen = np.zeros(comm.size, dtype=np.int64)
    comm.all_gather(seen, np.array([rank]))
    print(f"{rank}: {seen.tolist()}\\n", end="", flush=True)
""",
    )
    whole = [f"{transport} {rank} of 3: 111" for transport in ("c10d", "shm") for rank in range(3)]
    assert lines == ["0: [2, 0]", "1: [1]", "2: [2, 0]", *whole]


@pytest.mark.slow
def test_what_ranks_do_not_agree_on_and_who_does_not_come_is_an_error(tmp_path: Path) -> None:
    zero, one, late = by_mpirun(
        tmp_path,
        2,
        """
rank = MPI.COMM_WORLD.Get_rank()
try:
    shardcomm.connect(mpi=MPI.COMM_WORLD, transport=["shm", "c10d"][rank], device="cpu")
except ValueError as error:
    print(f"{rank}: {error}\\n", end="", flush=True)

if MPI.COMM_WORLD.Get_rank() == 0:
    try:
        shardcomm.connect(mpi=MPI.COMM_WORLD, deadline_s=0.5, device="cpu")
    except shardcomm.CommError as error:
        print(f"{error.kind}: {error}\\n", end="", flush=True)
    MPI.COMM_WORLD.send("over", 1)
else:
    MPI.COMM_WORLD.recv()
    late = np.zeros(1, dtype=np.int32)
    MPI.COMM_WORLD.Iallgather(late, np.zeros(2, dtype=np.int32)).Wait()  # so that MPI can end
""",
    )
    for rank, line in enumerate((zero, one)):
        assert line.startswith(f"{rank}: ")
        assert "the ranks gave different ones: shm, c10d" in line
    said = "not all ranks came to the rendezvous within 0.5 s: they are not in the same call of shardcomm"
    assert late == f"late: rank 0 of 2: {said}"


# `attempt` prints what a rank raises, and whether it heard of it at once.
ATTEMPTS = r"""
import socket, time
from shardcomm.comm import rendezvous

rank = MPI.COMM_WORLD.Get_rank()

def refuse(*_):
    raise LookupError("odd")

def attempt(name, **options):
    begun = time.monotonic()
    try:
        shardcomm.connect(mpi=MPI.COMM_WORLD, **({"device": "cpu", "deadline_s": 60} | options))
    except (shardcomm.CommError, ValueError, LookupError) as error:
        when = "at once" if time.monotonic() - begun < 20 else "late"
        print(f"{name}, rank {rank} {when}: {type(error).__name__}: {error}\n", end="", flush=True)

def meet():
    with shardcomm.connect(mpi=MPI.COMM_WORLD, device="cpu", deadline_s=60) as comm:
        total = np.ones(1)
        comm.all_reduce(total)
        print(f"met, rank {rank} of {total[0]:.0f}\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.covers("set-up that fails")
@pytest.mark.parametrize("victim", [0, 1])
def test_why_one_rank_gives_up_reaches_the_others_at_once_and_they_can_meet_again(
    tmp_path: Path, victim: int
) -> None:
    program = f"""
own = rank == {victim}
attempt("device", device="tpu" if own else "cpu")
meet()
attempt("deadline_s", deadline_s=-1 if own else 60)
meet()
member = rendezvous._C.ShmMember
if own:
    rendezvous._C.ShmMember = refuse
attempt("endpoint")
rendezvous._C.ShmMember = member
meet()
"""
    lines = by_mpirun(tmp_path, 3, ATTEMPTS + program)
    heard = f"CommError: rank {victim} of 3 gave up its set-up: "
    said = {
        "deadline_s": "ValueError: connect: deadline_s is -1",
        "device": "ValueError: connect: device is tpu",
        "endpoint": "LookupError: odd",
    }
    expected = [
        f"{name}, rank {rank} at once: {'' if rank == victim else heard}{why}"
        for name, why in said.items()
        for rank in range(3)
    ]
    assert len(lines) == 18
    for line, begin in zip(lines, expected, strict=False):
        assert line.startswith(begin), lines
    assert lines[9:] == [f"met, rank {rank} of 3" for rank in (0, 0, 0, 1, 1, 1, 2, 2, 2)]


@pytest.mark.slow
def test_a_rank_that_came_too_late_is_met_by_the_next_call(tmp_path: Path) -> None:
    program = """
if rank == 0:
    attempt("first", deadline_s=0.5)
    MPI.COMM_WORLD.send("over", 1)
else:
    MPI.COMM_WORLD.recv()
meet()
meet()
"""
    late, *met = by_mpirun(tmp_path, 2, ATTEMPTS + program)
    assert late.startswith("first, rank 0 at once: CommError: rank 0 of 2: not all ranks came")
    assert met == [f"met, rank {rank} of 2" for rank in (0, 0, 1, 1)]


@pytest.mark.slow
@pytest.mark.covers("set-up that fails")
def test_a_name_of_rank_0_that_others_do_not_know_is_an_error_on_all(tmp_path: Path) -> None:
    program = """
rendezvous.host_identity = lambda: f"host {rank}"
name, socket.gethostname = socket.gethostname, lambda: "nobody.invalid"
attempt("name", transport="c10d")
del rendezvous.host_identity
socket.gethostname = name
"""
    zero, one = by_mpirun(tmp_path, 2, ATTEMPTS + program)
    said = "CommError: rank 1 of 2: no rendezvous: rank 0 keeps the store at nobody.invalid:"
    assert zero.startswith(f"name, rank 0 at once: {said}"), zero
    assert one.startswith(f"name, rank 1 at once: {said}"), one
    assert "each host must reach that of rank 0 by this name" in one


def test_connect_without_mpi_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match="RANK is '3'"):
        shardcomm.connect(deadline_s=1)


@pytest.mark.parametrize("given", ["MPI.COMM_WORLD", 7, object()])
def test_what_is_no_communicator_is_refused(given: Any) -> None:
    said = re.escape(
        f"connect: mpi is a {type(given).__name__}; it must be a communicator of mpi4py"
    )
    with pytest.raises(TypeError, match=said):
        shardcomm.connect(mpi=given)


def test_one_rank_is_a_group_and_no_group_and_a_deadline_in_the_past_are_refused(
    tmp_path: Path,
) -> None:
    alone, null, negative = by_mpirun(
        tmp_path,
        1,
        """
with shardcomm.connect(mpi=MPI.COMM_SELF, deadline_s=30, device="cpu") as comm:
    comm.barrier()
    print(comm.rank, comm.size)

for mpi, deadline_s in ((MPI.COMM_NULL, 30), (MPI.COMM_SELF, -1)):
    try:
        shardcomm.connect(mpi=mpi, deadline_s=deadline_s)
    except ValueError as error:
        print("1" if mpi == MPI.COMM_NULL else "2", error)
""",
    )
    assert alone == "0 1"
    assert null.startswith("1 connect: mpi is MPI.COMM_NULL; it must be"), null
    assert negative.startswith("2 connect: deadline_s is -1"), negative


class Alone:
    """Stands for a communicator of mpi4py whose other rank comes, and does no more."""

    class Request:
        def __init__(self, *buffers: Any) -> None:
            self.buffers = buffers  # mpi4py's requests hold them, too

        def Test(self) -> bool:
            return not self.buffers

    def __init__(self) -> None:
        self.receives: weakref.ref[np.ndarray[Any, Any]] | None = None

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Is_inter(self) -> bool:
        return False

    @classmethod
    def Create_keyval(cls) -> int:
        return 0

    def Get_attr(self, key: int) -> None:
        return None

    def Set_attr(self, key: int, value: object) -> None: ...

    def Delete_attr(self, key: int) -> None: ...

    def Idup(self) -> tuple[Alone, Request]:
        return self, self.Request()

    def Iallgather(self, send: Any, receives: Any) -> Request:
        self.receives = weakref.ref(receives)
        return self.Request(send, receives)

    Iallgatherv = Iallgather


def test_what_mpi_may_write_later_stays_allocated() -> None:
    comm: Any = Alone()
    with pytest.raises(shardcomm.CommError, match="not all ranks came"):
        shardcomm.connect(mpi=comm, deadline_s=0.01, device="cpu")
    gc.collect()
    assert comm.receives() is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "state"),
    [
        ("mpi4py.rc.initialize = False\nfrom mpi4py import MPI\n", "has not been started"),
        ("from mpi4py import MPI\nMPI.Finalize()\n", "has ended"),
    ],
)
def test_mpi_must_run(program: str, state: str) -> None:
    pytest.importorskip("mpi4py", reason="needs: pip install mpi4py")
    program = f"""
import mpi4py, shardcomm
{program}
try:
    shardcomm.connect(mpi=MPI.COMM_WORLD, device="cpu")
except ValueError as error:
    print(error)
"""
    done = run(program)
    if "cannot load MPI library" in done.stderr:
        pytest.skip("mpi4py finds no MPI")
    assert done.stdout == f"connect: MPI {state}; call this between MPI.Init and MPI.Finalize\n"
