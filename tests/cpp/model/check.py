"""Builds the model and runs it: its small form, or with `--full` all of it. docs/protocol.md."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def build(folder: Path, sources: Path | None = None) -> Path:
    """Builds the model, of `sources` instead of csrc, in `folder`; returns the program."""
    quiet = {"check": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # The tools that the virtual environment brings, if this runs in one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    configure = ["cmake", "-S", str(REPOSITORY), "-B", str(folder), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DSHARDCOMM_CUDA=off"]
    configure += ["-DSHARDCOMM_PYTHON=OFF", "-DSHARDCOMM_TESTS=ON"]
    if sources is not None:
        configure.append(f"-DSHARDCOMM_MODEL_OF={sources}")
    compile_it = ["cmake", "--build", str(folder), "--target", "model", "-j2"]
    for command in (configure, compile_it):
        try:
            subprocess.run(command, env=environment, **quiet)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{' '.join(command)}:\n{error.stdout}") from error
    return folder / "model"


if __name__ == "__main__":
    program = build(REPOSITORY / "build" / "model")
    sys.exit(subprocess.run([str(program), *sys.argv[1:]], check=False).returncode)
