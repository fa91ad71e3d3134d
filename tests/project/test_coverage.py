"""docs/coverage.md is what the marks of the tests, and what the tests call, amount to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardcomm import launch
from support import coverage
from support.thread_ranks import run_threads

ROOT = Path(__file__).parents[2]


def over_processes() -> None:
    launch(over_gloo, 2)


def over_gloo() -> str:
    return "c10d"


def over_threads() -> None:
    run_threads(lambda comm: {"strategy": "shard_grad_op"}, 2)


TABLE = {"wide": {"strategy": "hybrid_shard"}}


def found(item: pytest.Item, *marks: pytest.MarkDecorator) -> set[tuple[str, str]]:
    """Strategies and transports of `item`, as if it had `marks`."""
    own = list(item.own_markers)
    for mark in marks or (pytest.mark.covers("granularity"),):
        item.add_marker(mark)
    try:
        return {(each.strategy, each.transport) for each in coverage.covered([item])}
    finally:
        item.own_markers[:] = own


@pytest.mark.parametrize("options", [{"strategy": "no_shard"}])
def test_a_parameter_goes_before_what_is_written(
    request: pytest.FixtureRequest, options: dict[str, str]
) -> None:
    assert callable(over_threads)
    assert found(request.node) == {(options["strategy"], "local")}


@pytest.mark.parametrize("name", ["wide"])
def test_a_parameter_may_be_the_key_of_a_table(request: pytest.FixtureRequest, name: str) -> None:
    assert found(request.node) == {(TABLE[name]["strategy"], "local")}


@pytest.mark.parametrize("call", [over_threads])
def test_a_strategy_is_read_in_what_a_test_calls(request: pytest.FixtureRequest, call: Any) -> None:
    assert found(request.node) == {("shard_" + "grad_op", "local")}


def test_a_transport_is_read_in_what_a_process_runs(request: pytest.FixtureRequest) -> None:
    assert callable(over_processes)
    assert found(request.node) == {("full_" + "shard", "c1" + "0d")}


def test_a_mark_goes_before_all(request: pytest.FixtureRequest) -> None:
    assert callable(over_processes)
    said = pytest.mark.covers("granularity", "collectives", strategies=["x"], transports=["c10d"])
    assert found(request.node, said) == {("x", "c10d"), ("", "c10d")}


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1)])
def test_one_rank_covers_nothing(
    request: pytest.FixtureRequest, replicas: int, shards: int
) -> None:
    assert found(request.node) == set()


@pytest.mark.parametrize("features", [["granularities"], []])
def test_what_is_no_feature_is_refused(request: pytest.FixtureRequest, features: list[str]) -> None:
    with pytest.raises(pytest.UsageError, match=r"accepted: what support\.coverage lists"):
        found(request.node, pytest.mark.covers(*features))


def test_what_is_no_transport_is_refused(request: pytest.FixtureRequest) -> None:
    with pytest.raises(pytest.UsageError, match=r"covers has transports \['host'\]; accepted: "):
        found(request.node, pytest.mark.covers("collectives", transports=["hosts", "host"]))


def all_are_collected(config: pytest.Config) -> bool:
    """Whether this run began with all tests."""
    option = config.option
    failed = getattr(option, "lf", False)  # of a plugin that may be switched off
    chosen = option.keyword or option.markexpr or option.deselect or failed or option.fast
    return config.args == config.getini("testpaths") and not chosen


@pytest.mark.slow
def test_the_page_is_what_the_tests_cover(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    written = tmp_path / "coverage.md"
    if all_are_collected(request.config):
        coverage.write(request.session.items, written)
    else:
        command = ["-m", "pytest", "--collect-only", "-q", "--coverage-table", str(written)]
        subprocess.run(
            [sys.executable, *command], cwd=ROOT, check=True, capture_output=True, timeout=300
        )
    shown = (ROOT / "docs" / "coverage.md").read_text()
    anew = "python -m pytest --collect-only -q --coverage-table=docs/coverage.md"
    assert shown == written.read_text(), f"write the page anew: {anew}"


def test_every_feature_is_covered() -> None:
    rows = (ROOT / "docs" / "coverage.md").read_text().splitlines()
    for feature in (*coverage.ENGINE, *coverage.WITHOUT_ENGINE):
        assert any(row.startswith(f"| {feature} | `tests/") for row in rows), feature
