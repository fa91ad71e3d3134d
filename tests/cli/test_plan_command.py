"""`shardcomm plan`: what it prints and writes, and the options that it refuses."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from shardcomm.cli import plan as plan_command
from shardcomm.cli.parser import make_parser


def run(*args: str) -> int:
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["plan", *args])
    status: int = parsed.run(parsed)
    return status


def test_7e9_parameters_over_4_ranks_fit_on_40_gb_only_if_fully_sharded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """16 bytes a parameter: 112 GB in full, 28 GB as a quarter."""
    assert run("--params", "7e9", "--ranks", "4", "--dtype", "bf16", "--memory", "40GB") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert rows["no_shard:"][1] == "no,"
    assert rows["shard_grad_op:"][1] == "no,"  # a quarter, and the whole model in bf16
    assert rows["full_shard:"][1] == "yes,"
    states = {line.split()[0]: line.split()[1:7] for line in lines if " GB  " in line}
    assert states["no_shard"] == ["28.00", "GB", "28.00", "GB", "56.00", "GB"]
    assert states["full_shard"] == ["7.00", "GB", "7.00", "GB", "14.00", "GB"]


def test_what_is_offloaded_is_asked_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--params", "7e9", "--memory", "40GB", "--cpu-offload") == 0
    printed = capsys.readouterr().out
    assert "fits on 40.00 GB of a device?" in printed
    # As the README has it: 16 bytes a parameter, a quarter of them.
    answer = "full_shard: yes, 36.06 GB left for activations; 28.00 GB of its host for each rank"
    assert answer in printed


def test_hybrid_shard_is_compared_once_its_replicas_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = "hybrid_shard: give --replicas"
    assert run("--params", "1e6") == 0
    assert needed in capsys.readouterr().out
    for given in (["--replicas", "2"], ["--strategy", "full_shard"]):
        assert run("--params", "1e6", *given) == 0
        assert needed not in capsys.readouterr().out


def test_json_has_the_figures_of_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--params", "1e6", "--ranks", "6", "--replicas", "2", "--memory", "1GB", "--json", "-")
    assert run(*args) == 0
    captured = capsys.readouterr()
    plans = {plan["strategy"]: plan for plan in json.loads(captured.out)["plans"]}
    assert list(plans) == ["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"]
    assert plans["no_shard"]["state_bytes"] >= 16 * 10**6
    assert plans["hybrid_shard"]["replicas"] == 2
    assert all(plan["fits"] for plan in plans.values())
    assert "1,000,000 parameters" in captured.err


def test_secondary_shards_are_full_shards_and_a_half_of_the_bf16_parameters_at_2_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = []
    for given in ([], ["--reshard-after-forward", "2"]):
        assert run("--params", "1e9", "--dtype", "bf16", *given, "--json", "-") == 0
        plans.append(json.loads(capsys.readouterr().out)["plans"])
    *others, without = plans[0]
    *same, full_shard = plans[1]
    assert same == others
    assert full_shard["secondary_bytes"] == pytest.approx(1e9, rel=0.001)
    assert full_shard["peak_bytes"] - without["peak_bytes"] == full_shard["secondary_bytes"]
    # Of each unit three quarters for forward as before; half of it for backward, of all but the last two of 32.
    assert without["gathered_bytes"] == pytest.approx(1.5e9 * (1 + 30 / 32), rel=0.001)
    assert full_shard["gathered_bytes"] == pytest.approx(1.5e9 + 1e9 * 30 / 32, rel=0.001)


def test_one_strategy_is_shown_unit_by_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "gpt2", "--strategy", "full_shard") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt2: 124,439,808 parameters, fp32, adamw")
    assert "blocks.0 ... blocks.9" in printed


def test_gpt_has_a_position_for_each_token_of_the_context(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numels = []
    for context in ("100", "300"):
        run("--model", "gpt", "--width", "64", "--context", context, "--json", "-")
        (numel,) = {
            sum(unit["numel"] for unit in plan["units"])
            for plan in json.loads(capsys.readouterr().out)["plans"]
        }
        numels.append(numel)
    assert numels[1] - numels[0] == 200 * 64


def test_what_chakra_refuses_is_said_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("google.protobuf")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        run(
            *("--model", "gpt", "--strategy", "full_shard", "--tokens", "1"),
            *("--chakra", str(tmp_path)),
        )
    assert f"--chakra: folder is '{tmp_path}', which is not empty" in capsys.readouterr().err


def test_plot_draws_the_strategies(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "schedule.svg"
    assert run("--model", "gpt", "--layers", "3", "--plot", str(file)) == 0
    assert "full_shard" in file.read_text()


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run("--model", "gpt", "--plot", "x.png")
    assert "pip install 'shardcomm[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "one of the arguments --model --params is required"),
        (("--params", "7.5"), "'7.5'; it must be a whole number above 0"),
        (("--params", "1e99"), "'1e99'; it must be"),
        (("--params", "nan"), "'nan'; it must be"),
        (("--model", "gpt3"), "invalid choice: 'gpt3'"),
        (("--model", "gpt2", "--width", "64"), "--width is for --model gpt"),
        (("--model", "gpt2", "--context", "64"), "--context is for --model gpt"),
        (("--params", "7e9", "--memory", "40 apples"), "'40 apples'; it must be a size with its unit"),
        (("--params", "7e9", "--memory", "40"), "'40'; it must be a size with its unit, as 40GB"),
        (("--params", "7e9", "--memory", "40i"), "'40i'; it must be a size with its unit"),
        (("--params", "7e9", "--ranks", "0"), "'0'; it must be a whole number from 1"),
        (("--params", "7e9", "--ranks", "4", "--replicas", "3"), "replicas is 3; for 'hybrid_shard'"),
        (("--params", "7e9", "--strategy", "hybrid_shard"), "'hybrid_shard', which needs replicas"),
        (("--params", "7e9", "--reshard-after-forward", "3"), "a group of 3; it must be of a number"),
        (("--params", "7e9", "--strategy", "no_shard", "--reshard-after-forward", "2"),
         "strategy is 'no_shard', which keeps full parameters"),
        (("--params", "7e9", "--json", "/nowhere/x"), "--json is '/nowhere/x'"),
        (("--params", "7e9", "--plot", "x.png"), "--plot draws up to 9 units"),
        (("--params", "7e9", "--plot", "x.bmp3"), "'x.bmp3'; it must end in"),
        (("--params", "7e9", "--gather-format", "mxint8"), "--gather-format is 'mxint8'; it needs --model"),
        (("--params", "7e9", "--tokens", "5"), "--tokens is for --chakra FOLDER"),
        (("--params", "7e9", "--trace", "x.json"), "--trace is for --chakra FOLDER"),
        (("--params", "7e9", "--chakra", ""), "argument --chakra: ''; it must not be empty"),
        (("--model", "gpt", "--width", "193"), "--width is 193; it must be a multiple of its 3 heads"),
    ],
)  # fmt: skip
def test_bad_options_are_named(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*args)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["train", "bench", "doctor", "plan --model gpt2", "simulate --model gpt2"]
)
def test_what_a_command_does_not_know_is_refused_with_its_own_options(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([*line.split(), "--gpus", "8"])
    assert ended.value.code == 2
    name, said = line.split(maxsplit=1)[0], capsys.readouterr().err
    assert said.startswith(f"usage: shardcomm {name} ")
    assert f"shardcomm {name}: error: unrecognized arguments: --gpus 8" in said


@pytest.mark.parametrize("habit", ["-g 2", "--nproc-per-node 2", "--nproc_per_node=2"])
def test_what_nccl_tests_and_torchrun_call_the_ranks_is_told_as_ours(
    habit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("bench", "train"):
        with pytest.raises(SystemExit, match="2"):
            make_parser().parse_args([command, *habit.split()])
        said = capsys.readouterr().err
        assert f"unrecognized arguments: {habit}; the number of ranks is --ranks\n" in said
