"""Tables of README and docs are those of the saved results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def check_tables(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "bench/report.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_tables_are_those_of_the_saved_results() -> None:
    checked = check_tables(ROOT)
    assert checked.returncode == 0, checked.stderr


def test_no_page_shows_an_empty_table() -> None:
    empty = re.compile(r"^<!-- bench: .* -->\n\s*<!-- end -->$", re.MULTILINE)
    found = {page.name: empty.findall(page.read_text()) for page in PAGES}
    assert not {name: blocks for name, blocks in found.items() if blocks}


def test_a_table_that_is_not_its_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "bench/results").mkdir(parents=True)
    shutil.copy(ROOT / "bench/report.py", tmp_path / "bench")
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
    (tmp_path / "docs").mkdir()
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
