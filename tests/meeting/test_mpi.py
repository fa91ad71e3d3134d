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
    """Stands for a communicator of mpi4py whose other rank never comes."""

    class Request:
        def __init__(self, *buffers: Any) -> None:
            self.buffers = buffers  # mpi4py's requests hold them, too

        def Test(self) -> bool:
            return False

    def __init__(self) -> None:
        self.receives: weakref.ref[np.ndarray[Any, Any]] | None = None

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Is_inter(self) -> bool:
        return False

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
