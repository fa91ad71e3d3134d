"""`shardcomm train` as its users meet it: through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardcomm.train.text import Corpus, read_text

SMALL = ["--steps", "6", "--width", "32", "--layers", "3", "--batch", "2", "--context", "16"]
DEADLINE_S = 120.0


def train(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardcomm", "train", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_bytes(b"".join(b"line %d of a text to train on\n" % i for i in range(500)))
    return str(file)


@pytest.fixture
def long_run(text_file: str) -> Iterator[subprocess.Popen[str]]:
    """A training that would last for hours, some steps into it; what is left of it is ended afterwards."""
    command = [sys.executable, "-m", "shardcomm", "train", *SMALL, "--steps", "1000000"]
    process = subprocess.Popen(
        [*command, "--text", text_file],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all of it can be found, and ended
        # Whoever runs the tests in the background has Ctrl-C ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    try:
        shown = ""
        while "exposed" not in shown:  # the progress bar: a few steps are done
            assert process.stderr is not None
            char = process.stderr.read(1)
            assert char, shown
            shown += char
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)
        assert wait_for_end(process.pid), "processes are left"


def group_members(session: int) -> list[int]:
    """Processes of a session, but zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_for_end(session: int) -> bool:
    """Whether all processes of the session end within a few seconds."""
    done = subprocess.run(
        ["timeout", "10", "sh", "-c", f"while ps -s {session} -o stat= | grep -qv Z; do :; done"],
        check=False,
    )
    return done.returncode == 0


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Its rank processes, told by the communication memory they map."""
    return [
        pid for pid in group_members(process.pid)
        if "memfd:shardcomm" in Path(f"/proc/{pid}/maps").read_text()
    ]  # fmt: skip


def test_loss_falls_and_the_report_is_complete(text_file: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = train(*SMALL, "--steps", "40", "--lr", "0.01", "--text", text_file, "--json", str(out))
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


@pytest.mark.parametrize("options", [[], ["--precision", "bf16"], ["--strategy", "no_shard"]])
def test_same_seed_gives_the_same_losses(options: list[str], text_file: str) -> None:
    def losses(seed: str) -> list[float]:
        done = train(*SMALL, *options, "--seed", seed, "--text", text_file, "--json", "-")
        assert done.returncode == 0, done.stderr
        found: list[float] = json.loads(done.stdout)["losses"]
        return found

    assert losses("3") == losses("3")
    assert losses("3") != losses("4")


def test_strategies_agree(text_file: str) -> None:
    def losses(strategy: str) -> list[float]:
        done = train(*SMALL, "--strategy", strategy, "--text", text_file, "--json", "-")
        assert done.returncode == 0, done.stderr
        found: list[float] = json.loads(done.stdout)["losses"]
        return found

    assert losses("full_shard") == losses("shard_grad_op")
    torch.testing.assert_close(losses("full_shard"), losses("no_shard"), rtol=1e-5, atol=1e-5)


def test_torchrun_gives_the_ranks(text_file: str) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--standalone",
    ]
    done = subprocess.run(
        [*torchrun, "-m", "shardcomm", "train", *SMALL, "--text", text_file, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 3


def test_killed_rank_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    os.kill(ranks_of(long_run)[0], signal.SIGKILL)
    _, err = long_run.communicate(timeout=20)
    assert long_run.returncode == 1
    message = err.split("shardcomm train: ")[-1]
    assert "was killed by SIGKILL" in message
    assert "Traceback" not in message


def test_ctrl_c_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    os.killpg(long_run.pid, signal.SIGINT)  # as a terminal does it
    _, err = long_run.communicate(timeout=20)
    assert long_run.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_killed_launcher_takes_the_ranks_along(long_run: subprocess.Popen[str]) -> None:
    long_run.kill()
    long_run.communicate(timeout=20)
    assert wait_for_end(long_run.pid)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "0"], "--ranks: '0'; it must be a whole number of at least 1"),
        (["--steps", "x"], "--steps: 'x'; it must be a whole number"),
        (["--lr", "-1"], "--lr: '-1'; it must be a number above 0"),
        (["--strategy", "zero9"], "--strategy: invalid choice: 'zero9'"),
        (["--text", "/nowhere"], "--text is '/nowhere'; there is no such file or folder"),
        (["--text", os.devnull], "there is no such file"),
        (["--width", "193"], "--width is 193; it must be a multiple of its 3 heads"),
    ],
)
def test_bad_options_are_named(args: list[str], message: str) -> None:
    done = train(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("short")
    done = train("--text", str(file), "--context", "64")
    assert done.returncode == 2
    assert "the text has 5 bytes; with --context 64 it must have at least 66" in done.stderr


def test_default_text_is_the_standard_library() -> None:
    text = read_text(None)
    assert b"import" in text
    assert len(text) > 1 << 20
    assert text == read_text(None)


def test_batches_depend_on_seed_step_and_rank_only() -> None:
    corpus = Corpus(bytes(range(256)) * 8, context=16)
    inputs, targets = corpus.batch(1, 2, 3, 4)
    again, _ = corpus.batch(1, 2, 3, 4)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(inputs, corpus.batch(*other, 4)[0])
