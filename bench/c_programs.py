"""The C programs of this folder: ours, and those of Open MPI that they are measured beside."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import shardcomm

Samples = dict[str, list[float]]  # seconds of each round, by what was measured


def ours(folder: str, name: str) -> str:
    """Compiles NAME.c into `folder`, with the C library."""
    library = shardcomm.get_library_dir()
    options = [f"-I{shardcomm.get_include()}", f"-L{library}", f"-Wl,-rpath,{library}"]
    return _compiled(folder, name, shutil.which("cc") or "cc", *options, "-lshardcomm")


def openmpi(folder: str, name: str) -> str | None:
    """Compiles NAME.c into `folder`. None, and a line that says so, where Open MPI is not installed."""
    mpicc = shutil.which("mpicc")
    if mpicc and shutil.which("mpirun"):
        return _compiled(folder, name, mpicc)
    print("Open MPI is left out: mpicc and mpirun not found (Debian: openmpi-bin libopenmpi-dev)")
    return None


def under_mpirun(ranks: int, program: str) -> list[object]:
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks, program]


def samples_of(*command: object, timeout_s: float = 600) -> Samples:
    """What the program prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    samples: Samples = json.loads(done.stdout)
    return samples


def _compiled(folder: str, name: str, compiler: str, *options: str) -> str:
    program = str(Path(folder) / name)
    source = str(Path(__file__).with_name(f"{name}.c"))
    subprocess.run([compiler, "-O3", "-march=native", "-o", program, source, *options], check=True)
    return program
