"""Torch's own tests of torch.distributed: those that pass with Gloo, and of these those that pass with shardcomm.

    python bench/torch_tests.py                                   what torch's wheel has
    python bench/torch_tests.py --pytorch DIR                     and a source tree of torch
    python bench/torch_tests.py --only send_recv --verbose        some, and what those that fail have written
    python bench/torch_tests.py --against FILE                    with Gloo's verdicts from an earlier run's --json FILE

Torch's wheel has `DistributedTest`. The files of a source tree that are run stand in torch_own/modules.py. Nothing is
downloaded, and nothing of torch's is copied here. What is done so that a backend of another name is asked what Gloo is
asked stands in torch_own/presented.py, and is printed.

Each test has a deadline, and processes of its own. It passes, is skipped, fails or hangs. A row is of all tests of one
folder. What passes with Gloo and not with shardcomm is listed first, with what was raised; the bound is that there is
no such test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from harness import Bound, Report, arguments
from torch_own.modules import EXCEPTIONS, Module, modules
from torch_own.nursery import Outcome, Request
from torch_own.presented import LIBERTIES

BENCH = Path(__file__).parent
REFERENCE = "gloo"

Figures = dict[str, dict[str, str]]
"""Of each test that some backend does not skip, by backend: "passed", or the verdict and what was raised."""


def main() -> None:
    """The command."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--backend", default="shardcomm", help="a name for init_process_group")
    parser.add_argument("--only", metavar="REGEX", help="runs tests whose names have it")
    parser.add_argument(
        "--modules", default="", metavar="REGEX", help="of modules whose names have it"
    )
    parser.add_argument("--pytorch", type=Path, metavar="DIR", help="a source tree of torch")
    parser.add_argument("--against", type=Path, metavar="FILE", help="does not run Gloo again")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="of a test")
    parser.add_argument(
        "--verbose", action="store_true", help="shows what a failing test has written"
    )
    args = parser.parse_args()

    figures: Figures = {}
    for module in modules(args.pytorch):
        if not re.search(args.modules, module.name):
            continue
        if args.against is None:
            note(figures, module, REFERENCE, args)
        else:
            for name, verdicts in json.loads(args.against.read_text())["figures"].items():
                of_module, test = name.split(": ")
                if of_module == module.name and re.search(args.only or "", test):
                    figures[name] = {REFERENCE: verdicts.get(REFERENCE, "skipped")}
        note(figures, module, args.backend, args)
    tally(figures, args.backend).finish(args)


def note(figures: Figures, module: Module, backend: str, args: argparse.Namespace) -> None:
    """Runs the tests of a module, and adds the verdicts to `figures`."""
    for outcome in run(module, backend, [args.only] if args.only else [], args.deadline_s):
        told = f"{outcome.verdict}: {outcome.says}" if outcome.says else outcome.verdict
        if outcome.verdict != "skipped" or f"{module.name}: {outcome.test}" in figures:
            figures.setdefault(f"{module.name}: {outcome.test}", {})[backend] = told
        shown = "" if outcome.verdict == "skipped" else outcome.says
        print(
            f"{backend:9} {outcome.verdict:7} {outcome.seconds:6.1f} s  {outcome.test} {shown}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
        if args.verbose and outcome.log:
            print(outcome.log, file=sys.stderr, flush=True)


def tally(figures: Figures, backend: str) -> Report:
    """A row a folder, and a last one of all."""
    for name, verdicts in sorted(figures.items()):
        if lost(verdicts, backend):
            reason = excepted(name)
            why = f"torch's own: {reason}" if reason else verdicts.get(backend, "skipped")
            print(f"{name}\n    {why}", file=sys.stderr)
    print(f"\nLiberties: {'; '.join(LIBERTIES)}.\n", file=sys.stderr)
    report = Report(
        [
            "tests of",
            "pass with gloo",
            f"of these with {backend}",
            "only torch's own can",
            "fail or hang with both",
        ]
    )
    report.figures.update(figures)
    folders = Counter(_folder(name) for name in figures)
    for folder in (*folders, *(["all"] if len(folders) > 1 else [])):
        of_it = {
            name: verdicts for name, verdicts in figures.items() if folder in ("all", _folder(name))
        }
        passed = {name: v for name, v in of_it.items() if v.get(REFERENCE) == "passed"}
        gone = [name for name, verdicts in passed.items() if lost(verdicts, backend)]
        torchs = [name for name in gone if excepted(name)]
        neither = [n for n, v in of_it.items() if n not in passed and v.get(backend) != "passed"]
        report.row(folder, len(passed), len(passed) - len(gone), len(torchs), len(neither))
        report.bounds.append(Bound(f"{folder}: lost", len(gone) - len(torchs), at_most=0))
    return report


def lost(verdicts: dict[str, str], backend: str) -> bool:
    """Whether the test passes with the reference alone."""
    return verdicts.get(REFERENCE) == "passed" and verdicts.get(backend, "skipped") != "passed"


def excepted(name: str) -> str:
    """Why no backend but torch's own can pass the test; empty if one can."""
    return next((reason for test, reason in EXCEPTIONS.items() if re.search(test, name)), "")


def _folder(name: str) -> str:
    module = name.partition(":")[0]
    if "/" not in module:
        return "the wheel: DistributedTest" if module == "distributed_case" else "test/distributed"
    return f"test/distributed/{module.partition('/')[0]}"


def run(module: Module, backend: str, only: list[str], deadline_s: float) -> Iterator[Outcome]:
    """Of each test the last outcome: one that is skipped is presented again where that answers the reason."""
    skipped: dict[str, Outcome] = {}
    for presentation in module.presentations:
        if presentation.answers:
            only = [
                f"^{re.escape(name)}$"
                for name, outcome in skipped.items()
                if re.search(presentation.answers, outcome.says)
            ]
            if not only:
                continue
        for outcome in _nursery(
            Request(backend, module.name, str(module.path), presentation, deadline_s, only)
        ):
            if outcome.verdict == "skipped":
                skipped[outcome.test] = outcome
            else:
                skipped.pop(outcome.test, None)
                yield outcome
    yield from skipped.values()


def _nursery(request: Request) -> Iterator[Outcome]:
    with subprocess.Popen(
        [sys.executable, "-m", "torch_own.nursery"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")]),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        json.dump(asdict(request), process.stdin)
        process.stdin.close()
        for line in process.stdout:
            yield Outcome(**json.loads(line))
    if process.returncode != 0:
        raise RuntimeError(
            f"{request.module} with {request.backend}: the nursery ended with {process.returncode}"
        )


if __name__ == "__main__":
    main()
