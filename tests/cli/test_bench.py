"""`shardcomm bench` as its users meet it: what it prints and writes, what it finds wrong, how it fails."""

from __future__ import annotations

import argparse
import csv
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from shardcomm.bucket.bucket import Bucket
from shardcomm.cli.bench import command
from shardcomm.cli.bench.driver import benchmark
from shardcomm.cli.bench.options import BenchOptions
from shardcomm.cli.bench.results import Results
from shardcomm.comm.core import CoreCommunicator
from support import commands
from support.nccl_tests_output import Table, tables
from support.sessions import ranks_of, wait_for_end

DEADLINE_S = 120.0
RANKS = 3
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
# (n - 1) / n of the bytes cross the bus in a gather or a reduce-scatter, twice that in an all-reduce.
BUS_FACTORS = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "broadcast": 1.0}
# What one rank of three cannot have a third of, what is no multiple, and scalars of the shape world.
LAYER = {"a": [7, 5], "b": [1], "c": [4, 3, 2], "d": [11]}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return commands.command("bench", *args)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def in_process(*args: str) -> int:
    """The exit status of `shardcomm bench`, run in this process, where it can be patched."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["bench", *args])
    status: int = parsed.run(parsed)
    return status


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("shapes") / "layer.json"
    file.write_text(json.dumps(LAYER))
    return str(file)


@pytest.fixture(scope="module")
def finished(
    layer_file: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of everything, on sizes that no number of ranks divides well, and its files."""
    folder = tmp_path_factory.mktemp("bench")
    transports = "shm,local,c10d:gloo,torch:gloo,nccl,torch:nccl,local:cuda"
    files = [f"--{kind}={folder / kind}" for kind in ("json", "csv")]
    done = bench(
        *("--ranks", str(RANKS), "--transport", transports, "--shapes", layer_file, *files),
        *("--op", ",".join([*COLLECTIVES, "gather", "reduce", "pack", "unpack"])),
        *("-b", "8", "-e", "9000", "-f", "10", "-n", "3", "-I", f"--plot={folder / 'plot.png'}"),
    )
    return done, folder


Finished = tuple[subprocess.CompletedProcess[str], Path]


def named(output: str) -> dict[tuple[str, str], Table]:
    """Tables by operation and transport, which a comment above each names."""
    titles = [line[2:].split(",")[0] for line in output.splitlines() if line.endswith(", cpu")]
    keys = [tuple(title.split(": ")) for title in titles]
    return dict(zip(keys, tables(output), strict=True))  # type: ignore[arg-type]


def test_all_operations_over_all_transports_are_right(finished: Finished) -> None:
    done, _ = finished
    assert done.returncode == 0, done.stderr
    found = named(done.stdout)
    transports = ["shm", "local", "c10d:gloo", "torch:gloo"]
    assert set(found) == {
        *((op, transport) for op in COLLECTIVES for transport in transports),
        *((op, transport) for op in ("gather", "reduce") for transport in transports[:3]),
        ("pack", "memory"),
        ("unpack", "memory"),
    }
    for table in found.values():
        assert (table.out_of_bounds, table.verdict) == (0, "OK")


def test_what_is_not_there_is_skipped_with_the_reason(finished: Finished) -> None:
    done, folder = finished
    assert "# Skipped gather over torch:gloo: torch.distributed has no" in done.stdout
    if not torch.cuda.is_available():
        for transport in ("nccl", "torch:nccl", "local:cuda"):
            assert f"# Skipped transport {transport}: " in done.stdout
    written = json.loads((folder / "json").read_text())["skipped"]
    assert f"# Skipped {written[0]['what']}: {written[0]['reason']}\n" in done.stdout


def test_sizes_and_counts_are_nccl_tests(finished: Finished) -> None:
    """8, 80, 800, 8000 bytes; parts of a rank are rounded down to 16 bytes, and none are left of 8 bytes."""
    found = named(finished[0].stdout)
    for op in ("all_gather", "reduce_scatter"):
        rows = found[op, "shm"].rows
        assert [(row.size, row.count) for row in rows] == [(48, 4), (768, 64), (7968, 664)]
    for op in ("all_reduce", "broadcast"):
        rows = found[op, "shm"].rows
        assert [row.size for row in rows] == [8, 80, 800, 8000]
        assert [row.count for row in rows] == [2, 20, 200, 2000]
    assert finished[0].stdout.count("# 8 B: less than 16 B a rank") == 2
    kinds = {op: (table.rows[0].redop, table.rows[0].root) for (op, _), table in found.items()}
    assert kinds == {
        "all_gather": ("none", -1),
        "reduce_scatter": ("sum", -1),
        "all_reduce": ("sum", -1),
        "broadcast": ("none", 0),
        "gather": ("none", -1),
        "reduce": ("avg", -1),
        "pack": ("none", -1),
        "unpack": ("none", -1),
    }


def test_bandwidths_are_nccl_tests(finished: Finished) -> None:
    for (op, _), table in named(finished[0].stdout).items():
        busbws = []
        for row in table.rows:
            for measured in (row.out_of_place, row.in_place):
                if measured is None:
                    assert op not in COLLECTIVES
                    continue
                busbws.append(measured.busbw)
                assert row.type == "float"
                # Both are printed with two decimals.
                rounding = 0.006 * (1 + measured.algbw / measured.time)
                assert measured.algbw == pytest.approx(row.size / measured.time / 1e3, abs=rounding)
                if op in COLLECTIVES:
                    busbw = measured.algbw * BUS_FACTORS[op]
                    assert measured.busbw == pytest.approx(busbw, abs=0.02)
        assert table.mean_busbw == pytest.approx(sum(busbws) / len(busbws), abs=0.006)


def test_files_hold_what_the_table_shows(finished: Finished) -> None:
    done, folder = finished
    report = json.loads((folder / "json").read_text())
    shown = named(done.stdout)
    with (folder / "csv").open() as file:
        lines = list(csv.DictReader(file))
    for section in report["sections"]:
        rows = shown[section["operation"], section["transport"]].rows
        assert [row["size_bytes"] for row in section["rows"]] == [row.size for row in rows]
        for written, row in zip(section["rows"], rows, strict=True):
            out = written["out_of_place"]
            assert row.out_of_place is not None
            assert out["time_s"] * 1e6 == pytest.approx(row.out_of_place.time, rel=0.001, abs=0.006)
            assert out["spread"]["min_s"] <= out["spread"]["p50_s"] <= out["spread"]["max_s"]
            assert {
                (line["time_s"], line["placement"])
                for line in lines
                if (line["operation"], line["transport"])
                == (section["operation"], section["transport"])
            } >= {(str(out["time_s"]), "out_of_place")}
        if len(rows) >= 3:
            assert section["fit"]["alpha_s"] >= 0
            assert (section["fit_in_place"] is None) == (rows[0].in_place is None)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_loop_itself_is_measured_and_taken_off(finished: Finished) -> None:
    done, folder = finished
    overhead_s = json.loads((folder / "json").read_text())["overhead_s"]
    assert overhead_s > 0
    assert f"# Harness: {overhead_s * 1e6:.3f} us an operation" in done.stdout
    assert "taken off all times" in done.stdout


def test_ratios_of_times_close_the_table(finished: Finished) -> None:
    found = named(finished[0].stdout)
    _, _, closing = finished[0].stdout.partition("# all_reduce: times as long as over shm")
    ratio = float(closing.splitlines()[2].split()[2])
    first, other = (found["all_reduce", name].rows[0].out_of_place for name in ("shm", "local"))
    assert first is not None
    assert other is not None
    assert ratio == pytest.approx(other.time / first.time, abs=0.02, rel=0.02)


def quiet_benchmark(options: BenchOptions) -> Results:
    """The ranks' stdout is that of whoever started their fork server."""
    with redirect_stdout(io.StringIO()):
        return benchmark(options)


def benchmark_with_a_wrong_element(options: BenchOptions) -> Results:
    """Every result of rank 1 comes out with its first element one too large."""

    def spoil(name: str) -> None:
        right = getattr(CoreCommunicator, name)

        def wrong(self: CoreCommunicator, *args: object, **kwargs: object) -> object:
            ended = right(self, *args, **kwargs)
            # The communicator beside the measured one carries times and counts, in 64 bits.
            buffer = args[0]
            assert isinstance(buffer, torch.Tensor)
            if self.rank == 1 and buffer.dtype == torch.float32:
                buffer.view(-1)[0] += 1
            return ended

        setattr(CoreCommunicator, name, wrong)

    gathered = Bucket.all_gather

    def wrongly_gathered(self: Bucket, *, async_op: bool = False) -> object:
        work = gathered(self, async_op=async_op)
        if self.comm.rank == 1:
            self.full[0] += 1
        return work

    for name in COLLECTIVES:
        spoil(name)
    Bucket.all_gather = wrongly_gathered  # it does not pass the communicator's methods
    return quiet_benchmark(options)


def test_a_wrong_element_is_counted_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, layer_file: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "benchmark", benchmark_with_a_wrong_element)
    file = tmp_path / "wrong.json"
    args = ["--shapes", layer_file, "-b", "64", "-e", "64", "-n", "1", "--json", str(file)]
    ops = [*COLLECTIVES, "gather", "reduce", "pack"]
    assert in_process("--op", ",".join(ops), *args) == 1
    sections = {s["operation"]: s for s in json.loads(file.read_text())["sections"]}
    assert list(sections) == ops
    for op, section in sections.items():
        (row,) = section["rows"]
        wrong = row["out_of_place"]["wrong"]
        if op == "gather":
            assert wrong in (1, 2)  # in the window that both see; rank 0 may have looked before
        else:
            assert wrong == (0 if op == "pack" else 1), op
        if op in COLLECTIVES:
            assert row["in_place"]["wrong"] == 1


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    """A run that would last for hours; nothing of it may be left afterwards."""
    command = [sys.executable, "-m", "shardcomm", "bench", "--transport", "shm,c10d:gloo"]
    process = subprocess.Popen(
        [*command, "-b", "1K", "-e", "64M", "-i", "16", "-n", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(" "):  # up to the first row
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)
        assert wait_for_end(process.pid), "processes are left"


def test_a_killed_rank_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    os.kill(ranks_of(long_run)[1], signal.SIGKILL)
    _, err = long_run.communicate(timeout=30)
    assert long_run.returncode == 1
    assert "was killed by SIGKILL" in err
    assert "Traceback" not in err


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def benchmark_onto_a_full_disk(options: BenchOptions) -> Results:
    with redirect_stdout(FullDisk()):
        return benchmark(options)


def test_a_table_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "benchmark", benchmark_onto_a_full_disk)
    assert in_process("-b", "1K", "-e", "1K") == 1
    err = capsys.readouterr().err
    assert "the table could not be written: No space left on device" in err
    assert "Traceback" not in err


SMALL = ["-b", "64", "-e", "64", "-n", "2", "--json", "-"]


@pytest.mark.usefixtures("warm_python")
def test_torchrun_gives_the_ranks() -> None:
    done = commands.torchrun(
        "--nproc-per-node", "3", "--standalone", "-m", "shardcomm", "bench", *SMALL
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 3


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_mpirun_gives_the_ranks() -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = run([*mpirun, sys.executable, "-m", "shardcomm", "bench", *SMALL])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["-I"], ["-C", "1"], ["-R", "1"]])
def test_operations_on_a_gpu_are_right(options: list[str], layer_file: str) -> None:
    ops = ["--op", ",".join([*COLLECTIVES, "gather", "reduce", "pack", "unpack"])]
    transports = ["--ranks", "1", "--transport", "local:cuda,nccl,torch:nccl"]
    done = bench(*ops, *transports, *SMALL, *options, "--shapes", layer_file)
    assert done.returncode == 0, done.stderr
    measured = {section["transport"] for section in json.loads(done.stdout)["sections"]}
    assert "local:cuda" in measured


@pytest.mark.gpu
def test_a_graph_of_operations_is_timed() -> None:
    done = bench("--ranks", "1", "--transport", "torch:nccl", *SMALL, "-G", "3")
    assert done.returncode == 0, done.stderr
