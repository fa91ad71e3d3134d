"""Runs tests of one module with one backend, each in processes of its own, which are forked from this one.

Importing torch and its tests takes longer than most tests, so it is done once, here. bench/torch_tests.py writes a
`Request` to standard input, as JSON, and reads an `Outcome` for each test from standard output, each a line of JSON.

A test's process leads a session, all of which ends with the test. What the test writes goes to a folder of its own. Who
ends the command, in whichever way, ends all of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardcomm.process.parent import signal_at_its_end
from torch_own.presented import Presentation

_GRACE_S = 15.0
"""How long a test gets past its deadline to say by itself where it hangs, as torch's tests do."""
_LOG_CHARACTERS = 6000


@dataclass(frozen=True)
class Request:
    """Which tests to run, and how."""

    backend: str
    module: str
    """A path below `path`, without its suffix."""
    path: str
    presentation: Presentation
    deadline_s: float
    only: list[str]
    """Regular expressions for the whole names of the tests to run; empty: all."""


@dataclass(frozen=True)
class Outcome:
    """What became of a test."""

    test: str
    verdict: str
    """passed, skipped, failed or hung"""
    seconds: float
    world_size: int
    chosen_as: str
    gpus: bool
    says: str = ""
    """Why it was skipped, or what was raised."""
    log: str = ""
    """Of one that failed or hung: the end of what it wrote."""


def main() -> None:
    """Runs the tests of the request."""
    signal_at_its_end(signal.SIGKILL)
    fields = json.load(sys.stdin)
    request = Request(**{**fields, "presentation": Presentation(**fields["presentation"])})
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no outcome
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(request.deadline_s))
    request.presentation.show(request.backend)
    try:
        tests = [test for test in _tests(_load(request)) if _wanted(test, request)]
    except (Exception, SystemExit, unittest.SkipTest) as error:
        print(
            f"{request.module}: cannot be imported: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        tests = []
    # A process that is forked would otherwise copy each page of all of it when it collects its garbage.
    gc.collect()
    gc.freeze()
    for test in tests:
        print(json.dumps(asdict(_run(test, request))), file=outcomes, flush=True)
    outcomes.flush()
    os._exit(0)  # what was loaded is frozen, and some of it would complain


def _load(request: Request) -> unittest.TestSuite:
    file = Path(request.path, request.module)
    # Torch's tests import their neighbours, by their own names or from torch's folder "test" on.
    sys.path[:0] = [
        str(folder) for folder in (file.parent, Path(request.path), Path(request.path).parent)
    ]
    module = importlib.import_module(file.name)
    vars(module).pop("load_tests", None)  # torch's refuses modules that are not the running script
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def _tests(suite: Any) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _tests(each)
        else:
            yield each


def _wanted(test: unittest.TestCase, request: Request) -> bool:
    from torch.testing._internal.common_distributed import MultiThreadedTestCase

    if isinstance(test, MultiThreadedTestCase):  # whose backend is their own
        return False
    name = _name(test)
    return not request.only or any(re.search(pattern, name) for pattern in request.only)


def _name(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def _run(test: unittest.TestCase, request: Request) -> Outcome:
    folder = tempfile.mkdtemp()
    recv, send = Pipe(duplex=False)
    begun = time.monotonic()
    process = os.fork()
    if process == 0:
        try:
            _run_forked(test, folder, send)
        finally:
            os._exit(1)
    send.close()
    try:
        verdict, text = recv.recv() if recv.poll(request.deadline_s + _GRACE_S) else ("hung", "")
    except EOFError:
        verdict, text = "failed", "the process of the test died"
    seconds = time.monotonic() - begun
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    recv.close()
    log = Path(folder, "log")
    written = log.read_text(errors="replace") if log.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    if "terminated or timed out after" in text:
        verdict = "hung"
    told = verdict in ("failed", "hung")
    return Outcome(
        _name(test),
        verdict,
        round(seconds, 2),
        request.presentation.world_size,
        request.presentation.chosen_as,
        request.presentation.gpus,
        raised(text) if told else text,
        f"{text}\n{written}"[-_LOG_CHARACTERS:] if told else "",
    )


def _run_forked(test: unittest.TestCase, folder: str, send: Connection) -> None:
    os.setsid()
    signal_at_its_end(signal.SIGKILL)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = unittest.TestResult()
        unittest.TestSuite([test]).run(result)
        send.send(_verdict(result))
    except BaseException:
        send.send(("failed", traceback.format_exc()))


def _verdict(result: unittest.TestResult) -> tuple[str, str]:
    for _, text in (*result.errors, *result.failures):
        return "failed", text
    if result.unexpectedSuccesses:
        return "failed", "the test was expected to fail"
    for _, reason in result.skipped:
        return "skipped", reason
    return "passed", ""


def raised(text: str) -> str:
    """What a traceback says was raised, on a line; of the first rank's, where several raised."""
    first = re.split(r"\nProcess \d+ exited with error code", "\n" + text)[:2][-1]
    lines = [
        line for line in first.partition("\nTo execute this test")[0].splitlines() if line.strip()
    ]
    ends = [
        i
        for i in range(1, len(lines))
        if lines[i - 1].startswith("  ") and not lines[i].startswith((" ", "Traceback"))
    ]
    said = lines[ends[-1] :] if ends else lines[-1:]
    return " ".join(line.strip() for line in said[:4])[:400]


if __name__ == "__main__":
    main()
