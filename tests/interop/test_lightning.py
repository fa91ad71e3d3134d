"""Lightning's Fabric and Trainer over the engine: what they compute, save and refuse, compared with their DDP.

All that ranks do is done in one launch for each number of ranks.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcomm import launch
from support import interpreters
from support.lightning_fabric import (
    fabric_of,
    only_some,
    other_ways,
    refused_by_fabric,
    train,
    without_state,
)
from support.lightning_ranks import OURS
from support.lightning_saves import failed, half_removed, killed, written_later
from support.lightning_trainer import ended_by_rank_1, fit, refused_by_trainer

STEPS = 3  # before a checkpoint, and after it
PRELOADED = [
    "lightning.fabric",
    "lightning.pytorch",
]  # by the fork server, in whose ranks it would take seconds

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs: pip install lightning"
)


def consolidated(folder: Path) -> None:
    """Lightning's own command makes of a folder the file that it would have been."""
    from lightning.fabric.utilities.consolidate_checkpoint import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    made = _format_checkpoint(_load_distributed_checkpoint(folder / "sharded.ckpt"))
    file = torch.load(folder / "full.ckpt", weights_only=False)
    assert made.keys() == file.keys()
    assert made["state_dict"].keys() == file["state_dict"].keys()
    for name, weight in file["state_dict"].items():
        torch.testing.assert_close(made["state_dict"][name], weight)


def at_two_ranks(folder: Path) -> dict[Any, Any]:
    fabric: dict[Any, Any] = {}
    trainer: dict[Any, Any] = {}
    for which in (OURS, "DDP"):
        for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"):
            fabric[which, precision] = train(fabric_of(which, precision), 2 * STEPS)
        fabric[which, "by value"] = train(fabric_of(which), STEPS, value=0.01)
        trainer[which] = fit(folder, which)
        trainer[which, "manual"] = fit(folder, which, manual=True)
    shapes = {"granularity": "tensor", "strategy": "shard_grad_op"}
    fabric["tensors"] = train(fabric_of(OURS, **shapes), 2 * STEPS)
    fabric["hybrid"] = train(fabric_of(OURS, strategy="hybrid_shard", replicas=2), 2 * STEPS)
    trainer["late"] = fit(folder, OURS, late=True)
    for kind in ("full", "sharded"):
        train(fabric_of(OURS, state_dict_type=kind), STEPS, save=folder / kind)
        fit(folder, OURS, epochs=1, save=folder / f"{kind}.ckpt", state_dict_type=kind)
    if torch.distributed.get_rank() == 0:
        consolidated(folder)
    train(fabric_of(OURS, **shapes), STEPS, save=folder / "of tensors")
    train(fabric_of("DDP"), STEPS, save=folder / "of DDP")
    fabric["DDP resumes"] = train(fabric_of("DDP"), STEPS, load=folder / "full")
    trainer["DDP resumes"] = fit(folder, "DDP", resume=folder / "full.ckpt")
    others = other_ways()
    only_some(folder)
    without_state(folder)
    refused_by_fabric(folder)
    refused_by_trainer(folder)
    return {"fabric": fabric, "trainer": trainer, "others": others}


def resumed(folder: Path) -> dict[Any, Any]:
    files = ("full", "sharded", "of tensors", "of DDP")
    return {
        "fabric": [train(fabric_of(OURS), STEPS, load=folder / name) for name in files],
        "trainer": [
            fit(folder, OURS, resume=folder / f"{kind}.ckpt", state_dict_type=kind)
            for kind in ("full", "sharded")
        ],
    }


def close(to: Any, rel: float = 2e-6) -> Any:
    return pytest.approx(to, rel=rel, abs=1e-7)


def all_close(runs: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert runs[name] == close(value), name


@needs_lightning
@pytest.mark.slow
def test_losses_are_those_of_ddp_and_checkpoints_go_on_with_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    ran, _ = launch(at_two_ranks, 2, (tmp_path,), timeout_s=180)
    fabric, trainer = ran["fabric"], ran["trainer"]
    whole = fabric["DDP", "32-true"]
    for precision, rel in (("32-true", 2e-6), ("64-true", 1e-12)):
        for ours, ddp in zip(fabric[OURS, precision], fabric["DDP", precision], strict=True):
            assert ours == close(ddp, rel)
    for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
        for ours, ddp in zip(fabric[OURS, precision], fabric["DDP", precision], strict=True):
            assert ours == close(ddp, 2e-2)
    for name in ("tensors", "hybrid"):
        assert [*map(close, whole)] == fabric[name]
    assert [*map(close, fabric["DDP", "by value"])] == fabric[OURS, "by value"]
    assert [*map(close, whole[STEPS:])] == fabric["DDP resumes"]

    all_close(trainer[OURS], trainer["DDP"])
    all_close(trainer["late"], trainer["DDP"])
    all_close(trainer[OURS, "manual"], trainer["DDP", "manual"])
    then = {**trainer["DDP"], "training": trainer["DDP"]["training"][4:]}
    all_close(trainer["DDP resumes"], then)

    others = ran["others"]
    assert others["apart"] == close(others["expected"])
    assert others["stepped"] < others["apart"]
    assert others["score by Fabric"] == close(others["score"])

    for ranks in (1, 2, 4):
        again = launch(resumed, ranks, (tmp_path,), timeout_s=180)[0]
        for losses in again["fabric"]:
            assert [*map(close, whole[STEPS:])] == losses, ranks
        for run in again["trainer"]:
            all_close(run, then)


REPLACED = pytest.mark.parametrize(
    ("before", "after"),
    [("sharded", "sharded"), ("sharded", "full"), ("full", "sharded"), ("full", "full")],
)


@needs_lightning
@pytest.mark.slow
@REPLACED
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it_or_its_own(
    before: str, after: str, tmp_path: Path
) -> None:
    [(left, log)] = launch(killed, 1, (tmp_path, before, after), timeout_s=120)
    assert left == sorted(left)
    assert {*left} == {1, 2}

    path = tmp_path / "work/last.ckpt"
    if (before, after) == ("full", "full"):  # by one operation
        set_aside = named = next(
            n for n, (operation, _) in enumerate(log) if operation == "replace"
        )
    else:
        set_aside = log.index(("rename", str(path)))
        named = next(n for n in range(set_aside + 1, len(log)) if log[n][0] == "rename")
    partial = log[named][1]
    for written in [partial, f"{partial}/meta.pt"] if after == "sharded" else [partial]:
        assert ("fsync", written) in log[:set_aside]
    assert log[named + 1 : named + 3] == [(each, str(path.parent)) for each in ("open", "fsync")]


@needs_lightning
@pytest.mark.slow
@REPLACED
def test_an_error_of_rank_0_in_a_save_is_told_to_all_ranks(
    before: str, after: str, tmp_path: Path
) -> None:
    of_0, of_1 = launch(failed, 2, (tmp_path, before, after), timeout_s=120)
    assert [said for said, _ in of_0] == [said for said, _ in of_1]
    assert of_0[0] == ("", 2)
    for said, left in of_0:
        assert left == 2 if not said else left in (1, 2)
        assert not said or said.startswith(
            f"the checkpoint {tmp_path / 'work/last.ckpt'} was not saved: rank 0: "
        )
        assert not said or "No space left" in said
    assert sum(left == 1 for _, left in of_0) > 3


@needs_lightning
@pytest.mark.slow
def test_one_rank_says_whether_a_file_replaces_a_folder(tmp_path: Path) -> None:
    launch(half_removed, 2, (tmp_path,), timeout_s=60)


@needs_lightning
@pytest.mark.slow
def test_a_folder_is_not_removed_for_a_file_that_is_written_later(tmp_path: Path) -> None:
    launch(written_later, 2, (tmp_path,), timeout_s=60)


@needs_lightning
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_exception_of_one_rank_leaves_a_run_whose_callback_saves_then(
    kind: str, tmp_path: Path
) -> None:
    rank_0, rank_1 = launch(ended_by_rank_1, 2, (tmp_path, kind), timeout_s=60)
    assert rank_0[0].startswith("CommError")
    assert rank_1[:2] == ("KeyError('of rank 1')", "ValueError('before it')")
    for _, _, (said,) in (rank_0, rank_1):
        assert "the ranks could not save together: " in said


def test_shardcomm_imports_without_lightning() -> None:
    """And the package for Lightning, or for accelerate, says what is missing."""
    program = (
        "import importlib, sys\n"
        "sys.modules.update(lightning=None, accelerate=None, transformers=None)\n"
        "import shardcomm\n"
        "for name in ('lightning', 'accelerate'):\n"
        "    try:\n"
        "        importlib.import_module(f'shardcomm.interop.{name}')\n"
        "    except ImportError as error:\n"
        "        print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    for name, said in zip(("lightning", "accelerate"), ran.stdout.splitlines(), strict=True):
        assert f"needs the package {name}: pip install {name}" in said


def test_shardcomm_does_not_import_the_frameworks() -> None:
    ran = interpreters.run(
        "import sys, shardcomm\n"
        "print([m for m in ('lightning', 'accelerate', 'transformers') if m in sys.modules])"
    )
    assert ran.stdout.strip() == "[]", ran.stderr
