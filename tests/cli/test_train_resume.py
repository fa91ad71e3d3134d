"""`shardcomm train --checkpoint`: a run that was interrupted ends as if it had not been."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from shardcomm import Checkpoints, Communicator, RankError, fully_shard
from shardcomm.checkpoint.folders import complete_steps
from shardcomm.cli.train import progress
from shardcomm.cli.train.report import table
from shardcomm.meeting.store import env_store
from support.gates import until
from support.train_runs import SMALL, refusal, run

STEPS = 20


def test_a_resumed_run_equals_one_that_was_not_interrupted(text_file: str, tmp_path: Path) -> None:
    undisturbed = run(text_file, steps=9).losses
    saving = {"checkpoint": str(tmp_path), "save_every": 2}
    assert run(text_file, steps=5, **saving).losses == undisturbed[:5]
    assert complete_steps(tmp_path) == [4, 5]
    assert run(text_file, steps=9, **saving).losses == undisturbed
    done = run(text_file, steps=9, **saving)
    assert done.losses == undisturbed
    shown = table(done)
    assert "not measured: no step was left to do" in shown
    for of_steps in ("tokens/s", "gradients / rank", "communicated / step"):
        assert of_steps not in shown
    # Other ranks go on too, with other batches.
    resharded = run(text_file, steps=10, ranks=3, strategy="shard_grad_op", **saving)
    assert resharded.losses[:9] == undisturbed


@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata", "progress.json"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    text_file: str, tmp_path: Path, file: str
) -> None:
    undisturbed = run(text_file, steps=6).losses
    saving = {"checkpoint": str(tmp_path), "save_every": 2}
    run(text_file, steps=4, **saving)
    damaged = tmp_path / "step-00000004" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    before = progress.Progress.latest(tmp_path)
    assert before is not None
    assert before.losses == undisturbed[: 2 if file == progress.FILE else 4]
    assert run(text_file, steps=6, **saving).losses == undisturbed
    assert complete_steps(tmp_path) == [4, 6]  # 4 anew
    assert (tmp_path / "step-00000004.damaged").exists()


def test_what_no_run_can_go_on_from_is_named(
    text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, file, damaged = tmp_path / "saved", tmp_path / "file", tmp_path / "damaged"
    run(text_file, ranks=1, steps=2, checkpoint=str(saved))
    file.touch()
    (damaged / "step-00000007").mkdir(parents=True)
    there_is = f"--checkpoint is '{saved}', where there is a checkpoint of step 2"
    other = ["--text", text_file, *SMALL]
    for args, message in [
        (["--resume"], "--resume needs the folder of the checkpoints: --checkpoint DIR"),
        (["--save-every", "5"], "--save-every needs the folder of the checkpoints: --checkpoint"),
        (["--save-every", "0"], "--save-every: '0'; it must be a whole number from 1"),
        (
            ["--checkpoint", ""],
            "--checkpoint is '': '': a folder's name is not empty; the current folder",
        ),
        (["--checkpoint", str(file)], f"'{file}': '{file}' is a file; it must be a folder"),
        (["--checkpoint", "/proc/x"], "'/proc/x': /proc/x: no such folder can be made: No such"),
        (
            ["--checkpoint", str(damaged), "--resume"],
            f"no checkpoint there can be gone on from: {damaged}/step-00000007/manifest.json: No such",
        ),
        (["--checkpoint", str(saved)], f"{there_is}; add --resume to go on from it, or name ano"),
        (
            ["--checkpoint", str(saved), "--resume", *other, "--width", "64", "--lr", "0.1"],
            f"{there_is} of another run: --width is 64, the checkpoint's is 32; --lr is 0.1, the c",
        ),
        (
            ["--checkpoint", str(saved), "--resume", *other, "--steps", "1"],
            f"{there_is}; --steps is 1; it must be at least as many",
        ),
    ]:
        assert message in refusal(capsys, *args)


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(text_file: str, tmp_path: Path) -> None:
    (tmp_path / "writer.json").mkdir()
    with pytest.raises(RankError) as caught:
        run(text_file, checkpoint=str(tmp_path), save_every=2)
    for rank, line in enumerate(str(caught.value).splitlines()):
        assert re.fullmatch(
            rf"rank {rank} raised CheckpointError: the checkpoint of step 2 was not saved: "
            rf"rank 0: {tmp_path}/writer\.json\.\w{{8}}: Is a directory",
            line,
        )
    assert rank == 1


def test_the_losses_of_a_run_that_diverged_are_json(text_file: str, tmp_path: Path) -> None:
    saving = {"checkpoint": str(tmp_path), "lr": 1e9}
    losses = run(text_file, steps=3, **saving).losses
    assert math.isnan(losses[-1])
    text = (tmp_path / "step-00000003/progress.json").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    saved = json.loads(text, parse_constant=refuse)["losses"]
    assert saved == [loss if math.isfinite(loss) else None for loss in losses]
    resumed = run(text_file, steps=4, **saving).losses
    assert [math.isnan(loss) for loss in resumed] == [each is None for each in saved] + [True]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    comm = Communicator.local_group(1)[0]
    model = torch.nn.Linear(2, 2)
    engine = fully_shard(model, comm)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, comm)
    with torch.random.fork_rng():
        assert progress.load(checkpoints, engine, optimizer) is None
        saved = progress.Progress(1, [0.25, 0.5], {"seed": 0})
        progress.save(checkpoints, saved, engine, optimizer)
        checkpoints.wait()
        numbers = torch.rand(4)
        assert progress.load(checkpoints, engine, optimizer) == saved
        assert torch.equal(torch.rand(4), numbers)


def test_ranks_started_again_do_not_read_what_those_before_them_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    before, _, _ = env_store(timedelta(seconds=10))
    before.set("address", "of a rank that is dead")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    now, _, _ = env_store(timedelta(seconds=10))
    assert before.check(["address"])
    assert not now.check(["address"])


# A rank says that it is there.
RANK = """
import os, sys
from pathlib import Path
from shardcomm.__main__ import main
Path(sys.argv.pop(1), str(os.getpid())).touch()
sys.exit(main())
"""


@contextmanager
def torchrun(ranks: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`shardcomm train` on two ranks, all started again once when one fails; none of it is left afterwards.

    Each has a file in `ranks`, whose name is its pid.
    """
    ranks.mkdir()
    script = ranks.with_suffix(".py")
    script.write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         "--max-restarts", "1", "--monitor-interval", "0.1", str(script), str(ranks), "train",
         *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        for rank in ranks.iterdir():
            with suppress(ProcessLookupError):
                os.kill(int(rank.name), signal.SIGKILL)
        process.communicate(timeout=10)


def newest(directory: Path) -> int:
    return (complete_steps(directory) or [0])[-1] if directory.exists() else 0


@pytest.mark.usefixtures("warm_python")
def test_torchrun_restarts_a_run_of_which_a_rank_is_killed(
    text_file: str,
    tmp_path: Path,
    seed: int,
) -> None:
    choose = random.Random(seed)
    undisturbed = run(text_file, steps=STEPS).losses
    out, saved, ranks = tmp_path / "killed.json", tmp_path / "saved", tmp_path / "ranks"
    options = [*SMALL, "--steps", str(STEPS), "--text", text_file, "--json", str(out)]
    options += ["--checkpoint", str(saved), "--save-every", "2", "--resume"]
    step = choose.randrange(STEPS // 2)
    with torchrun(ranks, *options) as process:

        def there() -> list[Path]:
            assert process.poll() is None, process.communicate()
            return sorted(ranks.iterdir()) if newest(saved) >= step else []

        victim = choose.choice(until(there, f"a rank at step {step}"))
        os.kill(int(victim.name), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(list(ranks.iterdir())) > 2  # two of them were started again
    assert json.loads(out.read_text())["losses"] == undisturbed, seed
