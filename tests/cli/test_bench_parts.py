"""The parts of `shardcomm bench` that need no ranks: sizes, options, timing, inputs, the comparison."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardcomm import Communicator
from shardcomm.cli.bench import command, timing, transports
from shardcomm.cli.bench.case import Collectives
from shardcomm.cli.bench.files import write_csv
from shardcomm.cli.bench.measure import measure
from shardcomm.cli.bench.operations import OPERATIONS
from shardcomm.cli.bench.options import BenchOptions, Sizes, size_bytes
from shardcomm.cli.bench.results import Figure, Results, Row, Section
from shardcomm.cli.bench.transports import ThreadRanks
from shardcomm.cli.exact_values import values
from shardcomm.comm.operands import RED_OPS
from support.thread_ranks import run_threads


def status(*args: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["bench", *args])
    found: int = parsed.run(parsed)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1000", 1000), ("64K", 65536), ("1.5m", 1572864), ("2G", 1 << 31), ("8KB", 8192)],
)
def test_sizes_are_read_as_nccl_tests_does(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


def test_sizes_go_up_by_the_factor_or_else_by_the_step() -> None:
    assert Sizes(1 << 10, 1 << 20, 1, 4).all() == [1 << n for n in range(10, 21, 2)]
    assert list(Sizes(100, 350, 100, 1).all()) == [100, 200, 300]
    assert list(Sizes(5, 5, 1 << 20, 1).all()) == [5]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--op", "all_gather,alltoall"], "there is no operation 'alltoall'; accepted"),
        (
            ["--transport", "tcp"],
            "there is no transport 'tcp'; accepted, separated by commas: shm,",
        ),
        (["-b", "2M", "-e", "1M"], "-b is 2097152 bytes and -e is 1048576 bytes; the first"),
        (["-b", "0", "-e", "1M", "-f", "2"], "-b is 0 and -f is 2; a factor needs"),
        (["-b", "x"], "-b: 'x'; it must be a number of bytes"),
        (["-b", "-1"], "-b"),
        (["-e", "2000000G"], "at most 1 PiB"),
        (["-i", "0"], "-i: '0'; it must be at least 1 byte"),
        (["-f", "0"], "-f: '0'; it must be a whole number from 1 to"),
        (["-n", "0"], "-n: '0'; it must be a whole number from 1 to"),
        (["-a", "4"], "-a: '4'; it must be a whole number from 0 to 3"),
        (["-d", "fp3"], "-d: invalid choice: 'fp3'"),
        (["-o", "prod"], "-o: invalid choice: 'prod'"),
        (["-T", "0"], "-T: '0'; it must be a number above 0"),
        (["--ranks", "0"], "--ranks: '0'; it must be a whole number from 1 to 1024"),
        (["-b", "512G", "-e", "512G"], "2 ranks need about 9216.0 GiB for a size of 524288 MiB"),
        (["-e", "1K"], "-b is 33554432 bytes (the default) and -e is 1024 bytes; the first"),
        (["-b", "3", "-e", "3"], "go up to 3 bytes; all_gather of 2 ranks needs at least 32"),
        (["-b", "1", "-e", "1K", "-f", "1"], "go up to 1 bytes; all_gather of 2 ranks needs"),
        (
            ["--op", "all_reduce", "-d", "double", "-b", "0", "-e", "7", "-i", "1"],
            "go up to 7 bytes; all_reduce of 2 ranks needs at least 8",
        ),
        (["--op", "gather", "-d", "int32"], "-d is int32; gather takes float, half and"),
        (["--shapes", "gpt9"], "nor a JSON file: No such file or directory"),
        (["--shapes", "gpt2"], "--shapes is for --op gather, reduce, pack, unpack, none of"),
        (["--op", "broadcast", "-o", "max"], "-o is for --op reduce_scatter, all_reduce, none"),
        (["--json", "/nowhere/x"], "--json is '/nowhere/x'; it must be a file that can be written"),
        (["--json", "-", "--csv", "-"], "--json and --csv are both -"),
        (["--fit", "-"], "--fit is '-'; it must be a file that can be written"),
        (["--fit", "here.json", "--ranks", "4"], "--ranks is not for --fit"),
        (["--fit", "here.json", "-d", "half"], "-d is not for --fit"),
        (["--fit", "here.json", "--compare", "a", "b"], "--fit is not for --compare"),
        (
            ["--compare", "a", "b", "--json", "x"],
            "--json is not for --compare, which does without it",
        ),
        (["--tolerance", "0.2"], "--tolerance is for --compare A B, which is not given"),
        (["--plot", "x.bmp3"], "--plot: 'x.bmp3'; it must end in"),
        (["--compare", "/nowhere/a", "/nowhere/b"], "--compare: /nowhere/a: No such file"),
    ],
)
def test_bad_options_are_named(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        status(*args)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_graphs_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        status("-G", "1")
    assert "-G is 1, but a CUDA graph needs a GPU" in capsys.readouterr().err


def test_thread_ranks_on_a_gpu_take_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: one is played."""
    played = SimpleNamespace(available=True, reason="")
    monkeypatch.setattr(transports._C, "cuda_status", lambda: played)

    def refused(control: Communicator) -> None:
        with pytest.raises(transports.Unusable, match="which a CUDA graph of one rank cannot hold"):
            transports.open_transport("local:cuda", control, options(graph_launches=1))

    run_threads(refused, 2)


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        status("--plot", str(tmp_path / "x.png"))
    assert "pip install 'shardcomm[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{}", '{"w": [0]}', '{"w": []}', '{"w": 3}', "no"])
def test_a_file_of_shapes_that_is_none_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        status("--op", "gather", "--shapes", str(file))
    assert str(file) in capsys.readouterr().err


def options(**changed: object) -> BenchOptions:
    return replace(
        BenchOptions(
            operations=("all_gather",),
            transports=("local",),
            sizes=Sizes(64, 64, 1, 1),
            layers=(),
            dtype="float",
            redop="sum",
            iterations=4,
            warmups=2,
            aggregate=3,
            checks=1,
            average=1,
            cpu_time=False,
            graph_launches=0,
            communication_memory=False,
            statistics=False,
            deadline_s=60.0,
            ranks=3,
            to_stderr=True,
        ),
        **changed,  # type: ignore[arg-type]
    )


def test_warm_ups_iterations_and_aggregates_are_run_as_often_as_asked() -> None:
    calls = []
    (comm,) = Communicator.local_group(1)
    with comm:
        found = timing.timing(lambda: calls.append(1), comm, comm.device, options(), 0.0)
    assert len(calls) == 2 + 4 * 3
    assert found.spread is not None
    assert found.spread.min_s <= found.time_s <= found.spread.max_s


@pytest.mark.parametrize(("average", "expected"), list(enumerate([1.0, 7 / 3, 1.0, 4.0])))
def test_the_time_printed_is_of_the_ranks_asked_for(
    average: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks take 1, 2 and 4 seconds; half a second is the loop's own."""
    monkeypatch.setattr(timing, "loop", lambda rank, device, options: [2.0**rank, 2.0**rank + 1.0])

    class Rank(int):
        def __call__(self) -> None:
            pass

    def time(comm: Communicator) -> timing.Timing:
        return timing.timing(Rank(comm.rank), comm, comm.device, options(average=average), 0.5)

    for found in run_threads(time, 3):
        # 0.5 more for the mean of two iterations, and 0.5 less.
        assert found.time_s == pytest.approx(expected)
        assert found.spread is not None
        assert found.spread.max_s - found.spread.min_s == pytest.approx(1.0)


def test_loops_own_time_is_taken_off_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it goes on beside what is timed. No GPU is needed: the loop is played."""
    monkeypatch.setattr(timing, "loop", lambda run, device, options: [2.0])
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    (comm,) = Communicator.local_group(1)
    with comm:
        for device, expected in (("cpu", 1.5), ("cuda", 2.0)):
            found = timing.timing(lambda: None, comm, torch.device(device), options(), 0.5)
            assert found.time_s == pytest.approx(expected)


def test_a_graph_is_captured_before_ranks_meet_and_only_its_launches_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nccl-tests does. No GPU is needed: capture, clock and meeting are played."""
    happened: list[str] = []

    def graph(run: object, options: BenchOptions) -> Callable[[], None]:
        happened.append("capture")
        return partial(happened.append, "launch")

    def clock() -> float:
        happened.append("clock")
        return 12.0 * happened.count("launch")

    monkeypatch.setattr(timing, "_graph", graph)
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    (comm,) = Communicator.local_group(1)
    monkeypatch.setattr(comm, "barrier", partial(happened.append, "meet"))
    with comm:
        asked = options(graph_launches=2)
        found = timing.timing(lambda: None, comm, torch.device("cuda"), asked, 0.0)
    assert happened == ["capture", "meet", "clock", "launch", "launch", "clock"]
    assert found.time_s == pytest.approx(1.0)  # 4 iterations of 3 operations in a launch


@pytest.mark.parametrize("dtype", ["half", "bfloat16", "int32", "uint8", "double", "int64"])
def test_every_type_and_reduction_is_right(dtype: str) -> None:
    """What a row expects is right, since the collectives are: tests of theirs compare them with PyTorch."""

    def rows(comm: Communicator) -> list[Row | None]:
        return [
            measure(
                OPERATIONS[name], 640, options(dtype=dtype, redop=op, checks=2), 0.0, comm, comm
            )
            for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
            for op in RED_OPS
        ]

    for row in chain.from_iterable(run_threads(rows, 3)):
        assert row is not None
        assert [figure.wrong for figure in row.figures()] == [0, 0]


@pytest.mark.slow
def test_other_processes_wait_for_threads_that_take_longer_than_the_timeout() -> None:
    """Two threads play the processes; the ranks of `local` are threads of the first."""
    deadline_s = 2.0

    def process(control: Communicator) -> int | None:
        with closing(
            ThreadRanks("local", control, control.device, options(deadline_s=deadline_s))
        ) as ranks:
            return ranks.run(takes_long)

    def takes_long(on: Collectives, control: Communicator) -> int:
        Event().wait(1.5 * deadline_s)
        return on.rank

    controls = Communicator.local_group(2, deadline_s=deadline_s)
    with ThreadPoolExecutor(2) as processes:
        assert list(processes.map(process, controls, timeout=60)) == [0, None]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int64]
)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_and_means_of_inputs_are_exact(dtype: torch.dtype, ranks: int, seed: int) -> None:
    inputs = [values(500, dtype, r, seed % 1000, terms=ranks, divisor=ranks) for r in range(ranks)]
    exact = np.sum([tensor.double().numpy() for tensor in inputs], axis=0)
    summed = inputs[0].clone()
    for tensor in inputs[1:]:
        summed += tensor  # rounded, or wrapped, each time
    assert np.array_equal(summed.double().numpy(), exact)
    assert np.array_equal(exact / ranks, exact // ranks)
    assert len(inputs[0].unique()) > 1
    assert not torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0], values(500, dtype, 0, seed % 1000 + 1))


def result(time_s: float, spread: bool = True) -> dict[str, Any]:
    found = {"p10_s": time_s * 0.9, "p90_s": time_s * 1.1}
    figure = {"time_s": time_s, "spread": found if spread else None}
    row = {"layer": None, "size_bytes": 1024, "out_of_place": figure, "in_place": None}
    section = {"operation": "all_gather", "transport": "shm", "device": "cpu", "dtype": "float"}
    return {"ranks": 2, "sections": [{**section, "redop": "none", "root": -1, "rows": [row]}]}


@pytest.mark.parametrize(
    ("after", "tolerance", "expected"),
    [(1.05e-5, "0.1", 0), (1.3e-5, "0.1", 1), (1.3e-5, "0.5", 0), (0.5e-5, "0.1", 0)],
)
def test_compare_fails_on_what_became_slower_past_the_tolerance(
    after: float, tolerance: str, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(result(1e-5)))
    b.write_text(json.dumps(result(after)))
    assert status("--compare", str(a), str(b), "--tolerance", tolerance) == expected
    shown = capsys.readouterr().out
    low, high = after * 0.9 / 1.1e-5, after * 1.1 / 0.9e-5
    assert f"{after / 1e-5:.3f}  ({low:.2f} - {high:.2f})" in shown
    assert ("SLOWER" in shown) == bool(expected)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ('{"something": "else"}', "is not a result of shardcomm bench --json"),
        ("[]", "is not a result of shardcomm bench --json"),
        ('{"ranks": 2, "sections": [{}]}', "is not a result of shardcomm bench --json"),
        ("{", "it is not JSON"),
        ('{"ranks": 2, "sections": []}', "the two files have no figure in common"),
        (json.dumps(result(1e-5) | {"ranks": 4}), "A is of 2 ranks and B of 4"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(
    other: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(result(1e-5)))
    b.write_text(other)
    with pytest.raises(SystemExit) as ended:
        status("--compare", str(a), str(b))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_csv_has_the_same_columns_whether_or_not_single_iterations_were_timed(
    tmp_path: Path,
) -> None:
    """As with `--transport nccl,shm`, where only the CPU's have spreads."""
    spread = timing.Spread(*range(1, 8))

    def section(device: str, spread: timing.Spread | None) -> Section:
        row = Row(None, 64, 8, 1e9, Figure(1e-6, 6.4e7, 3.2e7, 0, spread), None)
        return Section("all_gather", device, device, "float", "none", -1, [row])

    found = Results(2, 0.0, None, [section("cuda", None), section("cpu", spread)])
    write_csv(str(tmp_path / "csv"), found)
    with (tmp_path / "csv").open() as file:
        without, with_spread = csv.DictReader(file)
    assert (without["time_s"], without["p99_s"]) == ("1e-06", "")
    assert (with_spread["time_s"], with_spread["p99_s"]) == ("1e-06", "5")
