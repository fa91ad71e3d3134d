"""The examples that have no test file of their own run as they stand, on two ranks."""

from __future__ import annotations

import importlib.util
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from shardcomm import launch

EXAMPLES = Path(__file__).parents[2] / "examples"


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


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs: pip install transformers"
)
def test_finetune_hf_learns_and_saves_a_whole_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first, second = launch(run, 2, ("finetune_hf.py", str(tmp_path)), timeout_s=180)
    assert first == second
    assert first[-1] < first[0] / 2
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.lm_head.weight.shape == (256, 64)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_fit_on_a_page(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
