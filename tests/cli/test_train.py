"""`shardcomm train` as its users meet it: through the command line.

One run starts it as they do; what its result holds and what it refuses are asked for in the test's own process.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardcomm import launch
from shardcomm.__main__ import main
from shardcomm.cli.train import command
from shardcomm.cli.train.job import Result, TrainOptions, train
from shardcomm.cli.train.report import table
from shardcomm.cli.train.text import Corpus, read_text
from shardcomm.comm import nccl
from shardcomm.trace.timeline import Timeline
from support.commands import torchrun
from support.sessions import members, ranks_of, wait_for_end
from support.train_runs import DEADLINE_S, SMALL, parsed, quiet_train, refusal, run


@pytest.fixture
def starting_run(text_file: str) -> Iterator[subprocess.Popen[str]]:
    """A training that would last for hours, just begun; nothing of it may be left afterwards."""
    hears = ["env", "--default-signal=HUP"]  # where the tests run under nohup
    command = [*hears, sys.executable, "-m", "shardcomm", "train", *SMALL, "--steps", "1000000"]
    temp_dir = tempfile.TemporaryDirectory()  # short: a socket's path has at most 107 characters
    process = subprocess.Popen(
        [*command, "--text", text_file],
        env={**os.environ, "TMPDIR": temp_dir.name},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all of it can be found, and ended
    )
    with temp_dir:
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=10)
            assert wait_for_end(process.pid), "processes are left"
        # multiprocessing's; torch keeps its cache of compiled code here, too
        assert list(Path(temp_dir.name).glob("pymp-*")) == []


@pytest.fixture
def long_run(starting_run: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The same, some steps into it."""
    shown = ""
    while "exposed" not in shown:  # the progress bar
        assert starting_run.stderr is not None
        char = starting_run.stderr.read(1)
        assert char, shown
        shown += char
    return starting_run


def is_fork_server(pid: int) -> bool:
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_loss_falls_and_the_report_is_complete(text_file: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--steps", "40", "--lr", "0.01", "--text", text_file, "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "shardcomm", "train", *SMALL, *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert len(result["losses"]) == 40
    assert result["losses"][-1] < 0.7 * result["losses"][0]
    share = result["total_parameter_bytes"] / 2
    assert result["parameter_bytes"] == share + result["padding_bytes"] / 2
    assert result["gradient_bytes"] == result["parameter_bytes"]
    assert abs(result["optimizer_bytes"] / (2 * share) - 1) < 0.05
    assert result["sample"].startswith("def ")
    for word in ("loss", "tokens/s", "parameters / rank", "exposed communication", "sample:"):
        assert word in done.stdout


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"strategy": "no_shard"}])
def test_same_seed_gives_the_same_losses(options: dict[str, str], text_file: str) -> None:
    losses = run(text_file, seed=3, **options).losses
    assert run(text_file, seed=3, **options).losses == losses
    assert run(text_file, seed=4, **options).losses != losses


@pytest.mark.covers("training parity")
def test_strategies_agree_and_each_is_held_against_what_it_shares_out(text_file: str) -> None:
    sharded = run(text_file)
    assert run(text_file, strategy="shard_grad_op").losses == sharded.losses
    offloaded = run(text_file, strategy="shard_grad_op", cpu_offload=True)
    assert offloaded.losses == sharded.losses
    assert "2 (shm, cpu, offloaded)\n" in table(offloaded)
    assert "2 (shm, cpu)\n" in table(sharded)
    replicated = run(text_file, strategy="no_shard")
    torch.testing.assert_close(sharded.losses, replicated.losses, rtol=1e-5, atol=1e-5)
    hybrid = run(text_file, strategy="hybrid_shard", replicas=2)
    assert hybrid.losses == replicated.losses
    total = f"{sharded.total_parameter_bytes / 2**20:.2f} MiB"
    half = f"{sharded.total_parameter_bytes / 2**21:.2f} MiB"
    assert f"total / ranks = {half}\n" in table(sharded)
    for whole in (replicated, hybrid):
        assert f"parameters / rank       {total}, total = {total}\n" in table(whole)
    of_four = dataclasses.replace(sharded, ranks=4)  # in two replicas
    assert f"total / 2 of them = {half}\n" in table(of_four)


@pytest.mark.usefixtures("warm_python")
def test_torchrun_gives_the_ranks(text_file: str) -> None:
    ranks = ["--nproc-per-node", "3", "--standalone", "-m", "shardcomm", "train"]
    done = torchrun(*ranks, *SMALL, "--text", text_file, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 3


@pytest.mark.covers("failed ranks", transports=["shm"])
def test_killed_rank_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    os.kill(ranks_of(long_run)[0], signal.SIGKILL)
    _, err = long_run.communicate(timeout=20)
    assert long_run.returncode == 1
    message = err.split("shardcomm train: ")[-1]
    assert "was killed by SIGKILL" in message
    assert "Traceback" not in message


def test_the_process_that_launched_ranks_prints_its_stacks_and_goes_on(
    long_run: subprocess.Popen[str],
) -> None:
    long_run.send_signal(signal.SIGUSR1)
    assert long_run.stderr is not None
    shown = ""
    while "in no group of several ranks" not in shown:
        line = long_run.stderr.readline()
        assert line, shown
        shown += line
    assert "in launch" in shown
    os.kill(ranks_of(long_run)[0], 0)


def test_ctrl_c_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    os.killpg(long_run.pid, signal.SIGINT)  # as a terminal does it
    _, err = long_run.communicate(timeout=20)
    assert long_run.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129)],  # of a batch system, and of a closed terminal
)
def test_a_signal_to_all_of_it_ends_the_run(
    number: signal.Signals, status: int, long_run: subprocess.Popen[str]
) -> None:
    os.killpg(long_run.pid, number)
    _, err = long_run.communicate(timeout=20)
    assert long_run.returncode == status
    assert "shardcomm: terminated" in err
    assert "Traceback" not in err


def test_nohup_keeps_a_command_from_sighup(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(sys, "argv", ["shardcomm", "plan", "--params", "7e9", "--ranks", "8"])
        assert main() == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_run_that_diverges_is_reported(text_file: str) -> None:
    shown = table(run(text_file, steps=3, lr=1e9))
    assert "nan" in shown
    assert "the loss is not a finite number" in shown


def test_a_report_that_cannot_be_written_is_one_sentence(
    text_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "train", quiet_train)
    arguments = parsed(*SMALL, "--steps", "1", "--text", text_file, "--json", "/dev/full")
    assert arguments.run(arguments) == 1
    out, err = capsys.readouterr()
    assert "tokens/s" in out
    assert err.endswith("shardcomm train: --json /dev/full: No space left on device\n")


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train_with_a_full_stderr(options: TrainOptions) -> tuple[Result, Timeline | None]:
    with redirect_stderr(FullDisk()):
        return train(options)


def test_a_progress_bar_that_cannot_be_shown_does_not_end_a_training(text_file: str) -> None:
    options = command.options_of(parsed(*SMALL, "--text", text_file))
    result, _ = launch(train_with_a_full_stderr, 2, (options,), timeout_s=DEADLINE_S)[0]
    assert len(result.losses) == options.steps


def test_ctrl_c_while_the_ranks_start_ends_the_run(starting_run: subprocess.Popen[str]) -> None:
    while not any(is_fork_server(pid) for pid in members(starting_run.pid)):
        assert starting_run.poll() is None
        time.sleep(0.005)  # else the search takes a core from the start
    os.killpg(starting_run.pid, signal.SIGINT)
    _, err = starting_run.communicate(timeout=20)
    assert starting_run.returncode == 130
    assert err.strip() == "shardcomm: interrupted"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_launcher_takes_the_ranks_along(
    how: signal.Signals, long_run: subprocess.Popen[str]
) -> None:
    long_run.send_signal(how)
    long_run.communicate(timeout=20)
    assert wait_for_end(long_run.pid)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "0"], "--ranks: '0'; it must be a whole number from 1 to 1024"),
        (["--ranks", "100000"], "--ranks: '100000'; it must be a whole number from 1 to 1024"),
        (["--seed", str(2**63)], "it must be a whole number from 0 to"),
        (["--deadline", "inf"], "--deadline: 'inf'; it must be a number above 0, at most"),
        (["--text", ""], "--text is ''; there is no such file or folder"),
        (["--steps", "x"], "--steps: 'x'; it must be a whole number"),
        (["--lr", "-1"], "--lr: '-1'; it must be a number above 0"),
        (["--strategy", "zero9"], "--strategy: invalid choice: 'zero9'"),
        (["--strategy", "hybrid_shard"], "--strategy is hybrid_shard, which needs --replicas N"),
        (
            ["--ranks", "3", "--strategy", "hybrid_shard", "--replicas", "2"],
            "--replicas is 2, which does not divide the 3 ranks",
        ),
        (["--text", "/nowhere"], "--text is '/nowhere'; there is no such file or folder"),
        (["--text", os.devnull], "there is neither a file nor a folder"),
        (
            ["--json", "/nowhere/x.json"],
            "--json is '/nowhere/x.json'; it must be a file that can be",
        ),
        (["--json", "/"], "--json is '/'; it must be a file that can be written"),
        (["--width", "193"], "--width is 193; it must be a multiple of its 3 heads"),
    ],
)
def test_bad_options_are_named(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *args)


def test_text_shorter_than_the_context_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("short")
    said = refusal(capsys, "--text", str(file), "--context", "64")
    assert "the text has 5 bytes; with --context 64 it must have at least 66" in said


@pytest.mark.slow
def test_default_text_is_the_standard_library() -> None:
    text = read_text(None)
    assert b"import" in text
    assert len(text) > 1 << 20
    assert text == read_text(None)


def test_text_of_a_folder_is_that_of_all_its_files_but_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", "a/tests/c.py", ".git/object", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"[{name}]")
    assert read_text(str(tmp_path)) == b"[a/tests/c.py][b.txt]"


def test_batches_depend_on_seed_step_and_rank_only() -> None:
    corpus = Corpus(bytes(range(256)) * 8, context=16)
    inputs, targets = corpus.batch(1, 2, 3, 4)
    again, _ = corpus.batch(1, 2, 3, 4)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(inputs, corpus.batch(*other, 4)[0])


@pytest.mark.parametrize(
    ("options", "gpus", "has_nccl", "ranks"),
    [([], 8, True, 8), ([], 1, True, 1), ([], 0, True, 2), ([], 8, False, 2),
     (["--device", "cpu"], 8, True, 2), (["--ranks", "3"], 8, True, 3)],
)  # fmt: skip
def test_a_rank_for_each_gpu_is_started(
    options: list[str],
    gpus: int,
    has_nccl: bool,
    ranks: int,
    text_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    def launched(_train: object, ranks: int, _options: object) -> None:
        started.append(ranks)
        raise command.CommError("no rank is started here")

    monkeypatch.setattr(command, "launch", launched)
    monkeypatch.setattr(command, "cuda_status", lambda: SimpleNamespace(devices=gpus))
    monkeypatch.setattr(nccl, "status", lambda: SimpleNamespace(available=has_nccl))
    arguments = parsed("--text", text_file, *options)
    assert arguments.run(arguments) == 1
    assert started == [ranks]
