"""What cuobjdump says of the extension as it was built."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shardcomm import _C

EXTENSION = Path(_C.__file__)


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def dumped(*what: str) -> str:
    """What cuobjdump, which Triton brings, says of the extension; skips the test where there is nothing to say."""
    triton = pytest.importorskip(
        "triton", reason="Triton, which brings cuobjdump, is not installed"
    )
    if shutil.which("c++filt") is None:
        pytest.skip("there is no c++filt here")
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not _C.cuda_status().built:
        pytest.skip("shardcomm was built without CUDA")
    return output_of(dump, *what, EXTENSION)


def names_of(mangled: list[str]) -> dict[str, str]:
    names = {}
    for symbol, name in zip(mangled, output_of("c++filt", *mangled).splitlines(), strict=True):
        short = name.replace("shardcomm::", "").replace("(anonymous namespace)::", "")
        short = short.removeprefix("void ").split("(")[0]
        names[symbol] = short.replace("> >", ">>").replace("> >", ">>")
    return names
