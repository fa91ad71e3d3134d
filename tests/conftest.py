"""Fixtures and options of all tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from support.forking import start_servers_by_forks
from support.shared_names import shared_names

# Before torch is loaded. Ranks that are threads would each have a pool of them, which spin for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA compiles each program of a test for longer than the program runs.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# An engine makes thousands of objects. A collection of garbage at each 700 took a seventh of the tests' time.
gc.set_threshold(50_000)
# A test that runs its own file as a program finds `support` there, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A shell's background process ignores Ctrl-C, and so would each process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["shardcomm.pytest"]  # the fixture `cluster`

# An example may take its time on a busy machine.
settings.register_profile("suite", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=5)
settings.load_profile("suite")
# For compute-sanitizer, under which each example takes long: only those that a test names with @example.
settings.register_profile("examples", phases=[Phase.explicit], database=None)
# For `make fuzz`: as long as one wants.
settings.register_profile("fuzz", max_examples=20_000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="of tests on random inputs")
    parser.addoption(
        "--fast",
        action="store_true",
        help="of each test the first case, and none that starts processes",
    )
    parser.addoption(
        "--every-point", action="store_true", help="end processes at every point, not at some"
    )
    parser.addoption(
        "--programs", type=int, default=90, help="how many random programs a test of such runs"
    )
    parser.addoption(
        "--blocks", type=int, default=2000, help="how many hard blocks each format encodes"
    )
    parser.addoption(
        "--not-skipped", metavar="REGEX", help="fail what is skipped for such a reason"
    )
    parser.addoption(
        "--coverage-table",
        type=Path,
        metavar="FILE",
        help="write there which features the collected tests cover: docs/coverage.md",
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    from support.case_ids import case_id  # which loads torch

    return case_id(val)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fast:
        settings.load_profile("fast")
    if config.option.seed is None:
        from_starter = getattr(config, "workerinput", {}).get("seed")
        config.option.seed = random.randrange(1 << 32) if from_starter is None else from_starter


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's: a worker gets the seed that stands in the header."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.coverage_table is not None:
        from support import coverage

        coverage.write(session.items, session.config.option.coverage_table)
    if session.config.option.collectonly:
        return
    # What is loaded by now stays. Else each collection of garbage goes through all of torch's objects.
    gc.collect()
    gc.freeze()
    modules = {item.module for item in session.items if hasattr(item, "module")}
    # Ranks are forked from a server that has loaded what they need.
    wanted = {name for module in modules for name in getattr(module, "PRELOADED", [])}
    multiprocessing.set_forkserver_preload([*sorted(wanted), "support.fork_server"])
    start_servers_by_forks()
    # It takes longer than many a test: begun at once, but only for tests that need it.
    starters = {"launch", "launched", "get_context", "processes", "command", "commands", "refusal"}
    if any(not starters.isdisjoint(vars(module)) for module in modules):
        forkserver.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return _failed_if_not_to_be_skipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _failed_if_not_to_be_skipped((yield), collector.config)


def _failed_if_not_to_be_skipped(report: Any, config: pytest.Config) -> Any:
    pattern = config.option.not_skipped
    if pattern is None or not report.skipped or hasattr(report, "wasxfail"):
        return report
    _, _, reason = report.longrepr
    if re.search(pattern, reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}: --not-skipped={pattern} forbids that"
    return report


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of random inputs; printed in the header."""
    given: int = request.config.option.seed
    return given


@pytest.fixture
def every_point(request: pytest.FixtureRequest) -> bool:
    """Whether tests that end a process at some points do so at every one."""
    return bool(request.config.getoption("--every-point"))


@pytest.fixture
def program_count(request: pytest.FixtureRequest) -> int:
    """How many random programs a test runs."""
    return int(request.config.getoption("--programs"))


@pytest.fixture
def hard_block_count(request: pytest.FixtureRequest) -> int:
    """How many hard blocks a test encodes in each format."""
    return int(request.config.getoption("--blocks"))


@pytest.fixture
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """Other processes, such as other tests, have names of their own there: theirs go away."""
    from support.gates import until  # which loads torch

    before = shared_names()
    yield
    new = shared_names() - before
    until(lambda: new.isdisjoint(shared_names()), f"these are gone: {sorted(new)}")


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process starts as Python's interpreter has torch and shardcomm loaded."""
    from support import warm_python

    monkeypatch.setattr(sys, "executable", warm_python.executable())


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    """A text to train on."""
    file = tmp_path / "text.txt"
    file.write_bytes(b"".join(b"line %d of a text to train on\n" % i for i in range(500)))
    return str(file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.fast:
        from support import fast

        items[:], left_out = fast.select(items)
        config.hook.pytest_deselected(items=left_out)
    # A long one that begins last would run alone.
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))
