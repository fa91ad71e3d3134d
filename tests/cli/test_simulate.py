"""`shardcomm simulate`: what it prints and writes, and the options that it refuses."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardcomm.cli.simulate import command
from shardcomm.simulate.stragglers import slowest_factors
from shardcomm.trace.timeline import Timeline
from support.machines import machine

LLAMA = ("--model", "llama3-8b", "--layers", "4")


def run(*args: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["simulate", *args])
    status: int = parsed.run(parsed)
    return status


def configurations(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert run(*args, "--json", "-") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["configurations"]
    return found


def test_strategies_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LLAMA, "--ranks", "16") == 0
    printed = capsys.readouterr().out
    assert "8xH100, published figures; bf16, 2,048 tokens a rank" in printed
    rows = [line.split()[:3] for line in printed.splitlines() if line.startswith("  ")][1:]
    assert rows == [
        ["full_shard", "16", "1"],
        ["shard_grad_op", "16", "1"],
        ["hybrid_shard", "16", "1"],  # one replica a host
        ["no_shard", "16", "1"],
    ]


def test_published_figures_are_called_peaks_unless_times_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "published figures are peaks: real steps take longer"
    trace = str(tmp_path / "step.json")
    assert run(*LLAMA, "--ranks", "1", "--strategy", "full_shard", "--trace", trace) == 0
    assert note in capsys.readouterr().out
    assert run(*LLAMA, "--strategy", "full_shard", "--times", trace) == 0
    assert note not in capsys.readouterr().out


def test_a_strategy_that_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LLAMA, "--ranks", "8") == 0  # one host
    assert "  hybrid_shard: give --replicas\n" in capsys.readouterr().out
    assert run(*LLAMA, "--ranks", "8", "--replicas", "2") == 0
    assert "give --replicas" not in capsys.readouterr().out


def test_the_figures_are_those_of_the_planner_and_make_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = configurations(capsys, *LLAMA, "--strategy", "full_shard", "--ranks", "8")
    assert found["compute_s"] + found["exposed_s"] == pytest.approx(found["step_s"])
    assert found["host_bytes_moved"] == found["gathered_bytes"] + found["reduced_bytes"]
    assert found["tokens_per_s_per_rank"] == pytest.approx(2048 / found["step_s"])
    assert found["machine"]["name"] == "8xH100"


def test_gathers_in_a_block_format_send_about_half_of_bfloat16s_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (*LLAMA, "--strategy", "full_shard", "--ranks", "64")
    (wide,) = configurations(capsys, *options)
    (coded,) = configurations(capsys, *options, "--gather-format", "mxfp8")
    assert coded["gathered_bytes"] / wide["gathered_bytes"] == pytest.approx(33 / 64, rel=0.01)
    assert coded["reduced_bytes"] == pytest.approx(wide["reduced_bytes"], rel=0.001)
    assert coded["peak_bytes"] > wide["peak_bytes"]  # by the wire's buffers


def test_csv_has_a_line_for_each_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LLAMA, "--csv", "-") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["strategy"] for row in rows] == ["full_shard", "shard_grad_op", "no_shard"]
    assert all(float(row["step_s"]) > 0 for row in rows)


def test_the_step_is_written_as_a_trace(tmp_path: Path) -> None:
    path, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    given = ("--strategy", "full_shard", "--trace", str(path), "--plot", str(picture))
    assert run(*LLAMA, *given) == 0
    timeline = Timeline.load(path)
    assert timeline.steps() == ["step 0"]
    assert {span.row for span in timeline.ranks[0].spans} >= {"compute", "gather", "reduce"}
    assert picture.stat().st_size > 0


def test_a_sweep_finds_the_fastest_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.svg"
    given = ("--sweep", "--ranks", "32", "--memory", "20GB", "--plot", str(picture))
    found = configurations(capsys, *LLAMA, *given)
    assert {each["ranks"] for each in found} == {8, 16, 32}
    assert {each["prefetch"] for each in found} == {0, 1, 2}
    assert len(found) == (3 + 4 + 4) * 3  # hybrid_shard from two hosts on
    fitting = [each for each in found if each["peak_bytes"] <= 20e9 and each["ranks"] == 32]
    best = max(fitting, key=lambda each: each["tokens_per_s_per_rank"])
    assert picture.stat().st_size > 0
    assert run(*LLAMA, *given) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"{best['strategy']} over 32 ranks, prefetch {best['prefetch']}" in line


def test_a_sweep_ends_at_the_ranks_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no doubling of a host comes to them."""
    found = configurations(capsys, *LLAMA, "--sweep", "--ranks", "48")
    assert {each["ranks"] for each in found} == {8, 16, 32, 48}


@pytest.mark.parametrize("option", ["--strategy=no_shard", "--prefetch=1", "--backward-prefetch=0"])
def test_what_a_sweep_varies_is_not_given(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(*LLAMA, "--sweep", option)
    name = option.split("=", maxsplit=1)[0]
    assert f"--sweep and {name} exclude each other: it simulates" in capsys.readouterr().err


def test_backward_may_be_prefetched_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*LLAMA, "--strategy", "full_shard", "--prefetch", "0")
    (never,) = configurations(capsys, *given)
    (backward,) = configurations(capsys, *given, "--backward-prefetch", "1")
    (both,) = configurations(capsys, *LLAMA, "--strategy", "full_shard")
    assert never["exposed_s"] > backward["exposed_s"] > both["exposed_s"]
    assert never["peak_bytes"] < backward["peak_bytes"] == both["peak_bytes"]


def test_what_fits_nowhere_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LLAMA, "--memory", "1GB") == 0
    assert "none fits into 1.00 GB; the smallest takes" in capsys.readouterr().out


def test_stragglers_make_steps_longer_with_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*LLAMA, "--strategy", "no_shard", "--stragglers", "0.05")
    (few,) = configurations(capsys, *given, "--ranks", "8")
    (many,) = configurations(capsys, *given, "--ranks", "64")
    assert few["compute_s"] < many["compute_s"]
    assert few["step_s"] < few["p95_s"]


def test_p95_is_what_19_of_20_steps_last_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of a rank alone is its computation, times its factor."""
    given = (*LLAMA, "--ranks", "1", "--strategy", "no_shard", "--dtype", "fp32")
    (even,) = configurations(capsys, *given)
    (found,) = configurations(capsys, *given, "--stragglers", "0.5", "--steps", "20", "--seed", "3")
    drawn = sorted(slowest_factors(0.5, 1, 20, 3))
    assert found["p95_s"] / even["step_s"] == pytest.approx(drawn[18])
    assert drawn[18] < 0.9 * drawn[19]


def test_recomputation_takes_a_forward_more(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--params", "1e9", "--ranks", "1", "--strategy", "no_shard", "--dtype", "fp32")
    (plain,) = configurations(capsys, *given)
    (again,) = configurations(capsys, *given, "--recompute")
    forward_s = 2 * 1e9 * 2048 / 794.5e12
    assert again["step_s"] - plain["step_s"] == pytest.approx(forward_s)


@pytest.mark.parametrize("model", [("--model", "gpt", "--width", "64"), ("--params", "7e9")])
def test_times_are_taken_from_a_trace(
    model: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 7e9 parameters in blocks the model itself has none, and computes for no time at all."""
    path = tmp_path / "trace.json"
    small = (*model, "--layers", "2", "--strategy", "no_shard", "--ranks", "1")
    (before,) = configurations(capsys, *small, "--trace", str(path))
    # A simulated trace is one, too; its packs are not a unit's time, and come again.
    (after,) = configurations(capsys, *small, "--times", str(path))
    assert after["step_s"] == pytest.approx(before["step_s"], rel=0.2)


def test_times_of_another_step_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    context = ("--context", "64", "--layers", "2", "--strategy", "no_shard", "--ranks", "1")
    gpt = ("--model", "gpt", *context)
    configurations(capsys, *gpt, "--trace", str(path))
    wide = "the trace is of another model: its '(root)' has 147,968 parameters and the model's 295,936"  # fmt: skip
    many = "the trace is of steps of 64 tokens a rank; --batch and --context make 448"
    for options, message in ((("--width", "512"), wide), (("--batch", "7"), many)):
        with pytest.raises(SystemExit) as ended:
            run(*gpt, *options, "--times", str(path))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    # An older file does not say what its step was.
    document = json.loads(path.read_text())
    del document["otherData"]["step"]
    path.write_text(json.dumps(document))
    run(*gpt, "--batch", "7", "--times", str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--machine", "9xH100"],
            "9xH100: no such file, and none of the machines 8xH100, 8xH200, which come along",
        ),
        (["--replicas", "3", "--strategy", "hybrid_shard"], "replicas is 3; for 'hybrid_shard' it"),
        (["--strategy", "hybrid_shard"], "which needs replicas: a number that divides the 8 ranks"),
        (["--ranks", "12", "--strategy", "full_shard"], "ranks is 12; on several hosts it must be"),
        (["--sweep", "--strategy", "no_shard"], "--sweep and --strategy exclude each other"),
        (["--trace", "x.json"], "--trace shows one step; add --strategy"),
        (["--plot", "x.png"], "--plot shows one step; add --strategy"),
        (["--sweep", "--trace", "x.json"], "--trace is of one step, and --sweep simulates many"),
        (["--stragglers", "2"], "argument --stragglers: '2'; it must be a number from 0 to 1"),
        (["--steps", "5"], "--steps is for --stragglers SIGMA, which is not given"),
        (["--seed", "0"], "--seed is for --stragglers SIGMA, which is not given"),
        (["--machine", ""], "argument --machine: ''; it must not be empty"),
        (["--times", ""], "argument --times: ''; it must not be empty"),
        (["--memory", "much"], "'much'; it must be a size with its unit"),
        (["--json", "-", "--csv", "-"], "--json and --csv are both -"),
        (["--json", "/nowhere/x"], "--json is '/nowhere/x'; it must be a file that can be written"),
        (["--batch", "0"], "'0'; it must be a whole number from 1"),
        (["--times", "none.json"], "none.json: No such file or directory"),
        (["--width", "64"], "--width is for --model gpt"),
        (
            ["--strategy", "full_shard", "--replicas", "2"],
            "replicas is 2; it is for 'hybrid_shard'",
        ),
        (
            ["--strategy", "no_shard", "--reshard-after-forward", "2"],
            "strategy is 'no_shard', which keeps full parameters",
        ),
        (["--strategy", "no_shard", "--trace", "-"], "--trace is '-'; it must be a file"),
        (["--json", "both.txt", "--csv", "both.txt"], "--json and --csv are both both.txt"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*LLAMA, *options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpt_that_cannot_be_trained_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--model", "gpt", "--width", "193")
    said = "--width is 193; it must be a multiple of its 3 heads"
    assert said in capsys.readouterr().err


def test_sums_cross_between_hosts_in_a_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    machine(transport="hosts", ranks_per_host=2, cores=2).save(path)
    options = ("--model", "gpt", "--dtype", "fp32", "--machine", str(path), "--ranks", "4")
    options += ("--strategy", "full_shard")
    (wide,) = configurations(capsys, *options)
    (half,) = configurations(capsys, *options, "--reduce-format", "bf16")
    (coded,) = configurations(capsys, *options, "--reduce-format", "mxint8")
    # A rank sends three of four parts in memory, and one sum to the other host.
    crosses = wide["reduced_bytes"] / 3
    saved = [wide["network_bytes_moved"] - each["network_bytes_moved"] for each in (half, coded)]
    assert saved == pytest.approx([crosses / 2, crosses * (1 - 33 / 128)], rel=0.01)
    assert half["reduced_bytes"] == wide["reduced_bytes"]


def test_a_reduce_format_needs_a_strategy_without_replicas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options in ((), ("--strategy", "no_shard"), ("--strategy", "hybrid_shard")):
        with pytest.raises(SystemExit):
            run(*LLAMA, "--reduce-format", "bf16", *options)
        message = "--reduce-format is 'bf16'; it needs --strategy full_shard or shard_grad_op"
        assert message in capsys.readouterr().err


def test_a_block_format_needs_the_shapes_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of --params have one dim, which no format would code: the figures would be those without."""
    with pytest.raises(SystemExit):
        run("--params", "7e9", "--gather-format", "mxfp8")
    assert "--gather-format is 'mxfp8'; it needs --model" in capsys.readouterr().err


def test_nothing_fits_into_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LLAMA, "--memory", "0GB") == 0
    assert "none fits into 0 B" in capsys.readouterr().out


def test_a_name_that_the_terminal_has_no_letters_for_is_printed_all_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "made.json"
    machine(name="f\u00fcnf").save(path)
    done = subprocess.run(
        [sys.executable, "-m", "shardcomm", "simulate", "--model", "gpt", "--machine", str(path)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(r"f\xfcnf, published figures")


def test_more_ranks_than_a_host_of_shm_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.json"
    machine(transport="shm").save(path)
    with pytest.raises(SystemExit):
        run(*LLAMA, "--machine", str(path), "--ranks", "16", "--strategy", "full_shard")
    assert "ranks is 16; machine 'made' is one host, of 8 ranks at most" in capsys.readouterr().err


def test_a_machine_of_several_cpu_hosts_is_swept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts.json"
    machine(transport="hosts", ranks_per_host=2, cores=2 / 3).save(path)
    assert run("--model", "gpt2", "--machine", str(path), "--ranks", "8", "--sweep") == 0
    printed = capsys.readouterr().out
    assert "memory/step  network/step" in printed
    assert {line.split()[1] for line in printed.splitlines() if "_shard " in line} == {
        "2",
        "4",
        "8",
    }
