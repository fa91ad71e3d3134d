"""`import torch` names the backend "shardcomm" by a package's entry point, and loads nothing of shardcomm."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

USES_IT = """
import sys, torch
import torch.distributed as dist
assert not any(name.startswith("shardcomm.") for name in sys.modules), "shardcomm was loaded"
store = dist.HashStore()
dist.init_process_group("shardcomm", rank=0, world_size=1, store=store)
x = torch.ones(3)
dist.all_reduce(x)
import shardcomm  # registers it once more
assert shardcomm.backend.receipts()
dist.destroy_process_group()
dist.init_process_group("shardcomm", rank=0, world_size=1, store=dist.HashStore())
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a program where a package with our entry points is installed."""
    [(name, target)] = PROJECT["project"]["entry-points"]["torch.backends"].items()
    package = tmp_path / "other-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target}\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_torch_knows_the_backend_of_a_program_that_does_not_import_shardcomm(
    installed: dict[str, str],
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", USES_IT],
        env=installed,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


def test_torch_without_autoload_does_not(installed: dict[str, str]) -> None:
    program = "import torch; print(torch.distributed.Backend.backend_list)"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "shardcomm" not in ran.stdout


def test_the_module_of_the_entry_point_is_installed() -> None:
    [target] = PROJECT["project"]["entry-points"]["torch.backends"].values()
    module = target.partition(":")[0]
    assert PROJECT["tool"]["setuptools"]["py-modules"] == [module]
    assert find_spec(module) is not None
