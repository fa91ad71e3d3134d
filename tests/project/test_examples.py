"""The examples that have no test file of their own run as they stand, on two ranks."""

from __future__ import annotations

import importlib.util
import logging
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from shardcomm import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
PRELOADED = ["lightning.fabric", "lightning.pytorch", "accelerate"]


def run(name: str, *args: object) -> Any:
    tqdm.set_lock(threading.RLock())  # transformers shows bars; the default lock is a semaphore
    return runpy.run_path(str(EXAMPLES / name))["main"](*args)


def test_train_gpt_learns_and_its_ranks_agree() -> None:
    first, second = launch(run, 2, ("train_gpt.py", 10), timeout_s=120)
    assert first == second
    assert first[-1] < 4.5  # from log(256) = 5.5


def test_handwritten_fsdp_trains_alike_by_hand_and_on_buckets() -> None:
    for losses in launch(run, 2, ("handwritten_fsdp.py",), timeout_s=120):
        assert losses["on Bucket"] == pytest.approx(losses["by hand"], rel=1e-4)


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs: pip install {package}")


def both_of_lightning(folder: Path) -> tuple[list[float], list[float]]:
    """In one launch, since importing lightning takes seconds."""
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel("ERROR")
    return run("lightning_fabric.py", str(folder)), run("lightning_trainer.py", str(folder))


@needs("lightning")
@pytest.mark.slow
def test_the_examples_for_lightning_learn_and_resume(tmp_path: Path) -> None:
    first, second = launch(both_of_lightning, 2, (tmp_path,), timeout_s=180)
    assert first == second
    fabric, trainer = first
    assert len(fabric) == 40
    assert fabric[-1] < fabric[19] < fabric[0]
    assert trainer[1] <= trainer[0] < 0.9  # from 1 + 1


@needs("accelerate")
@pytest.mark.slow
def test_accelerate_engine_learns(tmp_path: Path) -> None:
    first, second = launch(run, 2, ("accelerate_engine.py", str(tmp_path)), timeout_s=180)
    assert first == second
    assert first[-1] < 0.7 * first[0]
    assert (tmp_path / "sharded").is_dir()


def both_of_transformers(folder: Path) -> tuple[list[float], list[float]]:
    return (
        run("accelerate_trainer.py", "ddp"),
        run("accelerate_trainer.py", "engine", str(folder)),
    )


@needs("accelerate")
@needs("transformers")
@pytest.mark.slow
def test_accelerate_trainer_learns_alike_with_both_and_saves_whole_models(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for ddp, engine in launch(both_of_transformers, 2, (tmp_path,), timeout_s=180):
        assert engine == pytest.approx(ddp, rel=1e-3)
        assert engine[-1] < 0.7 * engine[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.lm_head.weight.shape == (256, 64)


@needs("transformers")
def test_finetune_hf_learns_and_saves_a_whole_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first, second = launch(run, 2, ("finetune_hf.py", str(tmp_path)), timeout_s=180)
    assert first == second
    assert first[-1] < first[0] / 2
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.lm_head.weight.shape == (256, 64)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs: pip install jax")
def test_jax_fsdp_trains_as_the_unsharded_model() -> None:
    for losses, apart in launch(run, 2, ("jax_fsdp.py",), timeout_s=120):
        sharded, unsharded = zip(*losses, strict=True)
        assert sharded == pytest.approx(unsharded, rel=1e-5)
        assert sharded[-1] < sharded[0] - 0.15
        assert apart < 1e-5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_fit_on_a_page(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
