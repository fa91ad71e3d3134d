"""Builds the model and runs it: its small form, or with `--full` all of it. docs/protocol.md."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def configure(folder: Path, sources: Path | None = None) -> None:
    """Prepares `folder` for a model of csrc, or of other `sources`."""
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(folder), "-G", "Ninja"]
    command += ["-DCMAKE_BUILD_TYPE=Release", "-DSHARDCOMM_CUDA=off"]
    command += ["-DSHARDCOMM_TESTS=ON"]
    if sources is not None:
        command.append(f"-DSHARDCOMM_MODEL_OF={sources}")
    _do(command)


def build(folder: Path) -> Path:
    """Builds the model that `folder` is prepared for; returns the program."""
    _do(["cmake", "--build", str(folder), "--target", "model", "-j2"])
    return folder / "model"


def _do(command: list[str]) -> None:
    # The tools that the virtual environment brings, if this runs in one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{run.stdout}\n{run.stderr}")


if __name__ == "__main__":
    folder = REPOSITORY / "build" / "model"
    configure(folder)
    program = build(folder)
    sys.exit(subprocess.run([str(program), *sys.argv[1:]], check=False).returncode)
