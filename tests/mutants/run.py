"""Puts mistakes into a copy of the tree, one at a time, and says which of them the tests notice.

    make mutants                                          all: about an hour
    python tests/mutants/run.py --only barrier --room comm    those with this in their names, of this room

The copy is build/mutated/tree, so that a second run builds little. First the tests must pass without any mistake. Then,
for each mutation (mutations.py), what it needs is built and its tests run; the verdict is

    noticed      a test failed, as it must
    missed       all passed
    no end       not within the time limit: a test that hangs must fail by a deadline of its own
    broken       it does not compile, or cannot be imported; that is no test
    unnoticed    not run: the entry says why no test can notice

It ends with the tally. Exit status 1 if a mutation was missed, had no end, or was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mutations import ROOT, Mutation, is_cpp, mutations, split_program

WORK = ROOT / "build" / "mutated"
TREE = WORK / "tree"
LIMIT_S = 240.0
"""Of one test of a mutation. They take seconds; those that a mistake makes hang have deadlines below this."""

_NO_TEST_RAN = (2, 4, 5)  # of pytest's exit statuses: not collected, wrongly called, not found


class Failed(Exception):
    """What a test needs is not there: a command's output, or what else says why."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation; `says`: the test that noticed, or why it was not run."""

    mutation: Mutation
    verdict: str
    seconds: float
    says: str = ""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Which mistakes do the tests notice?")
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--room", default="", help="mutations of this room (a file beside this)")
    parser.add_argument("--json", type=Path, help="writes the verdicts there")
    parser.add_argument("--list", action="store_true", help="shows the mutations, and runs nothing")
    parser.add_argument(
        "--skip-check", action="store_true", help="does not run the tests without a mistake first"
    )
    options = parser.parse_args()
    chosen = [m for m in mutations() if options.only in m.name and options.room in ("", m.room)]
    if not chosen:
        parser.error("no such mutation")
    for mutation in chosen:
        if trouble := mutation.check():
            sys.exit(f"{mutation.room}: {mutation.name!r}: {trouble}")
        if options.list:
            print(f"{mutation.room:11} {mutation.name}")
    if options.list:
        return 0

    copy_tree()
    bench = Bench()
    to_run = [m for m in chosen if m.tests]
    if not options.skip_check and to_run:
        bench.check(dict.fromkeys(test for m in to_run for test in m.tests))
    verdicts = []
    for mutation in chosen:
        verdicts.append(judge(mutation, bench))
        print(line(verdicts[-1]), flush=True)
        if options.json:  # as it grows
            options.json.write_text(
                json.dumps([asdict(each) for each in verdicts], indent=1) + "\n"
            )
    counts = Counter(each.verdict for each in verdicts)
    print(tally(verdicts))
    return int(any(counts[bad] for bad in ("missed", "no end", "broken")))


def copy_tree() -> None:
    """Brings the copy up to date; what has not changed keeps its time, so that it is not built again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, TREE / name
        if not target.is_file() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for folder in ("csrc", "shardcomm", "tests"):
        for file in (TREE / folder).rglob("*.*"):
            name = file.relative_to(TREE).as_posix()
            if file.suffix != ".so" and "__pycache__" not in name and name not in names:
                file.unlink()


def judge(mutation: Mutation, bench: Bench) -> Verdict:
    """Applies it, builds, runs its tests, and takes it back."""
    if mutation.unnoticed:
        return Verdict(mutation, "unnoticed", 0.0, mutation.unnoticed)
    begin = time.monotonic()

    def verdict(kind: str, says: str = "") -> Verdict:
        return Verdict(mutation, kind, round(time.monotonic() - begin, 1), says)

    with applied(mutation):
        try:
            for test in mutation.tests:
                bench.build([test], mutation)
                if not bench.passes([test], limit_s=LIMIT_S):
                    return verdict("noticed", test)
        except Failed as failure:
            return verdict("broken", str(failure)[-500:])
        except subprocess.TimeoutExpired:
            return verdict("no end")
    return verdict("missed")


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The copy has the mistake in here."""
    file = TREE / mutation.file
    before = file.read_text()
    file.write_text(mutation.applied(TREE))
    try:
        yield
    finally:
        file.write_text(before)


class Bench:
    """Builds and runs tests in the copy."""

    def __init__(self) -> None:
        bin = Path(sys.executable).parent
        self._environment = os.environ | {
            "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(TREE),
            "PYTHONDONTWRITEBYTECODE": "1",  # two versions of a file may be of the same second
            "XDG_CACHE_HOME": str(WORK / "cache"),  # of the backends that were compiled
        }
        self._extension_is_clean = False

    def check(self, tests: Iterable[str]) -> None:
        """Ends the program unless all pass without a mistake."""
        tests = list(tests)
        python = [test for test in tests if not is_cpp(test)]
        programs = [test for test in tests if is_cpp(test)]
        self.build(tests)
        if python and not self.passes(python, limit_s=20 * LIMIT_S, quiet=False):
            sys.exit("these tests fail without any mistake")
        for program in programs:
            if not self.passes([program], limit_s=LIMIT_S):
                sys.exit(f"{program} fails without any mistake")
        print(f"{len(tests)} tests pass without a mistake", flush=True)

    def build(self, tests: Sequence[str], mutation: Mutation | None = None) -> None:
        """What the tests need; Failed if it does not compile."""
        programs = [test for test in tests if is_cpp(test)]
        of_sanitizer: dict[str, list[str]] = {}
        for program, sanitizer in map(split_program, programs):
            of_sanitizer.setdefault(sanitizer, []).append(program)
        for sanitizer, targets in of_sanitizer.items():
            sanitize = f"-DSHARDCOMM_SANITIZE={sanitizer}"
            options = ["-DSHARDCOMM_TESTS=ON", sanitize]
            self._make(f"programs {sanitizer}".strip(), targets, *options)
        if len(programs) == len(tests):
            return
        mutated = mutation is not None and mutation.compiled
        if mutated or not self._extension_is_clean:
            self._extension_is_clean = False
            options = ("-DSHARDCOMM_PYTHON=ON", "-DCMAKE_INSTALL_LIBDIR=lib")
            self._make("extension", ["_C", "shardcomm"], *options)
            install = ["cmake", "--install", str(WORK / "extension"), "--component", "library"]
            self._run([*install, "--prefix", str(TREE / "shardcomm")])
            for built in (WORK / "extension").glob("_C*.so"):
                (TREE / "shardcomm" / built.name).unlink(missing_ok=True)
                shutil.copy(built, TREE / "shardcomm")
            self._extension_is_clean = not mutated

    def _make(self, folder: str, targets: Sequence[str], *options: str) -> None:
        where = str(WORK / folder)
        if not Path(where, "build.ninja").exists():
            options = (*options, "-DSHARDCOMM_CUDA=off", "-DCMAKE_BUILD_TYPE=Release")
            self._run(["cmake", "-G", "Ninja", "-S", str(TREE), "-B", where, *options])
        self._run(["cmake", "--build", where, "-j", str(os.cpu_count()), "--target", *targets])

    def _run(self, command: Sequence[str]) -> None:
        result = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise Failed(result.stdout + result.stderr)

    def passes(self, tests: Sequence[str], *, limit_s: float, quiet: bool = True) -> bool:
        """Runs one program, or Python tests; TimeoutExpired if they have no end."""
        if is_cpp(tests[0]):
            program, sanitizer = split_program(tests[0])
            # The thread sanitizer wants memory where no random layout puts anything.
            command = ["setarch", "-R", str(WORK / f"programs {sanitizer}".strip() / program)]
        else:
            options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
        output = subprocess.DEVNULL if quiet else None
        process = subprocess.Popen(
            command, cwd=TREE, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
        finally:
            end_session(process.pid)
        if status in _NO_TEST_RAN and not is_cpp(tests[0]):
            raise Failed(
                f"pytest ends with status {status}, and has run no test: {', '.join(tests)}"
            )
        return status == 0


def end_session(pid: int) -> None:
    """What a test left behind that hung, or was ended by a mistake: all processes of its session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            if session == pid:
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue  # it has ended


def line(verdict: Verdict) -> str:
    """One for each mutation."""
    mutation = verdict.mutation
    says = f"  ({verdict.says})" if verdict.says else ""
    return f"{verdict.verdict:9} {verdict.seconds:6.1f} s  {mutation.room}: {mutation.name}{says}"


def tally(verdicts: Sequence[Verdict]) -> str:
    """Counts, by room and of all."""

    def row(name: str, holds: Callable[[Verdict], bool]) -> str:
        of = [each for each in verdicts if holds(each)]
        noticed = sum(each.verdict == "noticed" for each in of)
        others = Counter(each.verdict for each in of if each.verdict != "noticed")
        rest = ", ".join(f"{count} {kind}" for kind, count in others.items())
        return f"{name:12} {noticed:4} of {len(of):4} noticed ({noticed / len(of):.0%}) {rest}".rstrip()

    rooms = dict.fromkeys(each.mutation.room for each in verdicts)
    rows = [row(room, lambda each, room=room: each.mutation.room == room) for room in rooms]  # type: ignore[misc]
    return "\n".join([*rows, row("all", lambda each: True)])


if __name__ == "__main__":
    sys.exit(main())
