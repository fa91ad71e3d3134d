"""What README, docs and docstrings show is run as it stands: `python` blocks on two ranks, or on as many as the page
says, and commands of `shardcomm`. `py` blocks, which need more than a program, compile; of other commands, the files
and targets that they name are there."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardcomm
from shardcomm.cli.parser import make_parser
from shardcomm.cluster import refusal
from support import commands
from support.shown_examples import run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def commands_of(page: Path) -> list[str]:
    """The lines of its ```sh blocks, without their comments."""
    text = "".join(blocks(page, "sh")).replace("\\\n", "")
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def named(page: Path, index: object = "") -> str:
    return f"{page.relative_to(ROOT)}-{index}".rstrip("-")


SOURCES = sorted((ROOT / "shardcomm").rglob("*.py"))
EXAMPLES = [
    pytest.param(page, example, id=named(page, number))
    for page in [*PAGES, *SOURCES]
    for number, example in enumerate(blocks(page, "python"), 1)
]
FRAGMENTS = [
    pytest.param(page, fragment, id=named(page, number))
    for page in [*PAGES, *SOURCES, ROOT / "shardcomm/_C.pyi"]
    for number, fragment in enumerate(blocks(page, "py"), 1)
]
COMMANDS = {command: page for page in PAGES for command in commands_of(page)}
OURS = [command for command in COMMANDS if command.startswith("shardcomm ")]


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
def test_a_python_example_runs(page: Path, example: str, tmp_path: Path) -> None:
    for needed in ("jax", "lightning", "accelerate"):
        if re.search(rf"shardcomm\.(interop\.)?{needed}\b", example) and not find_spec(needed):
            pytest.skip(f"needs: pip install {needed}")
    said = re.search(r"^<!-- ranks: (\d+) -->$", page.read_text(), re.MULTILINE)
    ranks = int(said.group(1)) if said else 2
    shardcomm.launch(run, ranks, (page.name, example, tmp_path), timeout_s=60)


@pytest.mark.parametrize(("page", "fragment"), FRAGMENTS)
def test_a_fragment_compiles(page: Path, fragment: str) -> None:
    compile(fragment, page.name, "exec")


def test_there_are_examples_and_commands() -> None:
    assert len(EXAMPLES) > 20
    assert len(FRAGMENTS) > 10
    assert len(OURS) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if set(commands_of(page)) & set(OURS)], ids=named
)
def test_the_commands_of_shardcomm_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, in one folder: one may read what another has written."""
    # For commands that run another of shardcomm's.
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    for command in commands_of(page):
        if command not in OURS or COMMANDS[command] != page:
            continue  # another page runs it
        if command.startswith("shardcomm cluster ") and (why_not := refusal()):
            pytest.skip(why_not)
        ran = commands.command(*shlex.split(command)[1:], cwd=tmp_path)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in OURS])
def test_what_another_command_names_is_there(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        rules = re.findall(r"^(\S+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(targets) <= set(rules)
    if "shardcomm" in words[1:] and words[words.index("shardcomm") - 1] == "-m":
        make_parser().parse_args(words[words.index("shardcomm") + 1 :])
    for word in words:
        path = word.partition("::")[0]
        if re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|sh)", path):
            assert (ROOT / path).exists(), path


def shown_output(page: Path) -> list[tuple[str, str]]:
    """Of each ```text block right behind a ```sh block with a plan: the command, and what the block shows of it."""
    behind = r"```sh\nshardcomm (plan .*)\n```\n\n```text\n((?:.*\n)*?)```"
    return re.findall(behind, page.read_text())


@pytest.mark.parametrize(
    ("command", "shown"), [each for page in PAGES for each in shown_output(page)]
)
def test_a_plan_that_is_shown_is_what_the_command_prints(command: str, shown: str) -> None:
    printed = commands.command(*shlex.split(command))
    assert shown.strip() in printed.stdout, printed.stderr


def test_a_plan_is_shown() -> None:
    assert any(map(shown_output, PAGES))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"^::: shardcomm\.(\w+)", pages, re.MULTILINE))
    assert set(shardcomm.__all__) - documented == set()


def test_the_cases_page_names_tests_that_exist() -> None:
    """Those of the right column; the left one's are PyTorch's."""
    lines = (ROOT / "docs/fsdp2_cases.md").read_text().splitlines()
    ours = [line.split("|")[2] for line in lines if line.startswith("| ")]
    shown = set(re.findall(r"`(test_\w+)`", " ".join(ours)))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(shown) > 50
    assert shown - set(re.findall(r"def (test_\w+)", sources)) == set()
