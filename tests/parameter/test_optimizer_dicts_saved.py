"""Optimizers' state dicts that torch.distributed.checkpoint saves, resumed by other numbers of processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardcomm import Communicator, fully_shard, launch
from support.optimizer_nets import (
    BY_ELEMENTS,
    GRANULARITIES,
    OPTIMIZERS,
    STEPS,
    Net,
    train,
    unsharded,
)
from support.twins import twins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ANOTHER = {"row": "tensor", "element": "row", "tensor": "element"}
SAVED = [*itertools.product(BY_ELEMENTS, GRANULARITIES), ("Adafactor", "tensor")]


def save(directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, granularity in SAVED:
        with Communicator.from_env(deadline_s=60) as comm:
            model, _ = twins(Net)
            engine = fully_shard(model, comm, granularity=granularity)
            optimizer = OPTIMIZERS[name](model)
            train(model, optimizer, range(STEPS))
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments}
            dcp.save(state, checkpoint_id=f"{directory}/{name}-{granularity}")
            engine.close()
    dist.destroy_process_group()


def ways(saved: Path) -> dict[str, Callable[[nn.Module, torch.optim.Optimizer, str], None]]:
    """To resume: each loads what was trained for STEPS into a model and its optimizer, which has not stepped."""

    def by_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=saved / name)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    def of_full(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        options = StateDictOptions(full_state_dict=True)
        weights, moments = get_state_dict(*unsharded(name.partition("-")[0], STEPS))
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options
        )

    def of_rank_0(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        weights, moments = get_state_dict(*unsharded(name.partition("-")[0], STEPS))
        if dist.get_rank() != 0:
            weights, moments = {}, {}
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, moments, options=options)

    return {"dcp": by_dcp, "full": of_full, "rank 0": of_rank_0}


def resume(directory: str) -> list[tuple[str, dict[str, torch.Tensor]]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ends = []
    for way, load in ways(Path(directory)).items():
        for name, saved_by in SAVED[: None if way == "dcp" else -1]:
            granularity = "tensor" if name == "Adafactor" else ANOTHER[saved_by]
            with Communicator.from_env(deadline_s=60) as comm:
                model = Net()
                engine = fully_shard(model, comm, granularity=granularity)
                optimizer = OPTIMIZERS[name](model)
                load(model, optimizer, f"{name}-{saved_by}")
                train(model, optimizer, range(STEPS, 2 * STEPS))
                ends.append((f"{name} {granularity} {way}", engine.full_state_dict()))
                engine.close()
    dist.destroy_process_group()
    return ends


@pytest.mark.covers("optimizer state", "checkpoints")
def test_torchs_state_dicts_are_saved_by_4_ranks_and_resumed_by_2(tmp_path: Path) -> None:
    launch(save, 4, (str(tmp_path),), timeout_s=120)
    wanted = {name: unsharded(name, 2 * STEPS)[0].state_dict() for name in OPTIMIZERS}
    for name, granularity in SAVED:
        model, optimizer = unsharded(name, 0)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments}
        dcp.load(state, checkpoint_id=tmp_path / f"{name}-{granularity}", no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        train(model, optimizer, range(STEPS, 2 * STEPS))
        torch.testing.assert_close(model.state_dict(), wanted[name])
        dcp_to_torch_save(tmp_path / f"{name}-{granularity}", tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt")
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = unsharded(name, 0)
        model.load_state_dict(whole["model"])
        set_optimizer_state_dict(model, optimizer, whole["optim"], options=options)
        train(model, optimizer, range(STEPS, 2 * STEPS))
        torch.testing.assert_close(model.state_dict(), wanted[name])
    for ends in launch(resume, 2, (str(tmp_path),), timeout_s=120):
        for what, weights in ends:
            torch.testing.assert_close(
                weights, wanted[what.partition(" ")[0]], msg=lambda m, w=what: f"{w}: {m}"
            )


def resume_by_its_own_dict(directory: str) -> list[tuple[int, bool]]:
    """After a load of `optimizer.state_dict()`, before and after a first step: how many states, and whether they are
    those that were saved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loaded = []
    with Communicator.from_env(deadline_s=60) as comm:
        model, _ = twins(Net)
        fully_shard(model, comm)
        saved = OPTIMIZERS["AdamW"](model)
        train(model, saved, range(STEPS))
        dcp.save({"optim": saved.state_dict()}, checkpoint_id=directory)
        for steps in (0, 1):
            model, _ = twins(Net)
            fully_shard(model, comm)
            optimizer = OPTIMIZERS["AdamW"](model)
            train(model, optimizer, range(steps))
            state = {"optim": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=directory)
            optimizer.load_state_dict(state["optim"])
            pairs = zip(saved.state.values(), optimizer.state.values(), strict=False)
            equal = all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in pairs)
            loaded.append((len(optimizer.state), equal))
    dist.destroy_process_group()
    return loaded


@pytest.mark.covers("optimizer state", "checkpoints")
def test_an_optimizers_own_dict_is_loaded_after_its_first_step_and_loads_nothing_before_it(
    tmp_path: Path,
) -> None:
    states = len(list(Net().parameters()))
    for loaded in launch(resume_by_its_own_dict, 2, (str(tmp_path),), timeout_s=60):
        assert loaded == [(0, True), (states, True)]
