"""The README's Python examples run as they stand, on two ranks; its plan and its tables are what commands print."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardcomm import launch

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(example: str, folder: Path) -> None:
    os.chdir(folder)  # for what it writes
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs(index: int, tmp_path: Path) -> None:
    launch(run, 2, (EXAMPLES[index], tmp_path), timeout_s=60)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def test_the_plan_shown_is_the_plan_printed() -> None:
    command, shown = re.findall(
        r"```\n\$ shardcomm (plan .*)\n((?:.*\n)*?)```", README.read_text()
    )[0]
    arguments = [sys.executable, "-m", "shardcomm", *command.split()]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == shown.strip()


def check_tables(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "bench/report.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_tables_are_those_of_the_saved_results() -> None:
    checked = check_tables(README.parent)
    assert checked.returncode == 0, checked.stderr


def test_a_table_that_is_not_its_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "bench/results").mkdir(parents=True)
    shutil.copy(README.parent / "bench/report.py", tmp_path / "bench")
    for day, seconds in (("01", "7 s"), ("03", "9 s"), ("02", "8 s")):
        result = {
            "date": f"2026-01-{day}T00:00:00+00:00",
            "command": "python bench/one.py --json x.json",
            "machine": {"cpu": "a processor", "cores": 2},
            "versions": {"torch": "2.13.0"},
            "title": "One.",
            "table": [["what", "time"], ["all", seconds]],
            "bounds": [],
        }
        (tmp_path / f"bench/results/{day}.json").write_text(json.dumps(result))
    (tmp_path / "bench/results/README.md").touch()
    readme = tmp_path / "README.md"
    for block in ("one", "other"):
        with readme.open("a") as file:
            file.write(f"Before.\n\n<!-- bench: {block} -->\n<!-- end -->\n\nAfter.\n")

    checked = check_tables(tmp_path)
    assert checked.returncode == 1
    assert "README.md: one\n" in checked.stderr

    subprocess.run([sys.executable, tmp_path / "bench/report.py"], check=True, timeout=60)
    assert check_tables(tmp_path).returncode == 0
    assert "| all | 9 s |" in readme.read_text()
    assert readme.read_text().count("After.") == 2

    readme.write_text(readme.read_text().replace("9 s", "1 s"))
    assert check_tables(tmp_path).returncode == 1

    readme.write_text(readme.read_text().replace("<!-- end -->", "", 1))
    assert "no `<!-- end -->`" in check_tables(tmp_path).stderr


def test_the_cases_page_names_tests_that_exist() -> None:
    """Those of the right column; the left one's are PyTorch's."""
    root = Path(__file__).parents[2]
    lines = (root / "docs/fsdp2_cases.md").read_text().splitlines()
    ours = [line.split("|")[2] for line in lines if line.startswith("| ")]
    named = set(re.findall(r"`(test_\w+)`", " ".join(ours)))
    sources = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    assert len(named) > 50
    assert named - set(re.findall(r"def (test_\w+)", sources)) == set()
