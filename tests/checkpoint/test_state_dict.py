"""Sharded state dicts through torch.distributed.checkpoint, against a model trained by one process, bit for bit."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.distributed.tensor import Shard

from shardcomm import STRATEGIES, Communicator, Engine, RowBlock, fully_shard, launch
from support.generator import seeded
from support.nets import batch, loss_of
from support.rank_sums import combined
from support.saved_nets import (
    SAVED_BY,
    STEPS,
    OptimizerOf,
    Tied,
    adamw,
    assert_equal,
    load_here,
    make,
    trained,
)
from support.thread_ranks import run_threads
from support.twins import local

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TRAINED: dict[str, dict[str, Any]] = {
    "rows": {},
    "elements": {"granularity": "element", "strategy": "shard_grad_op"},
    "blocks": {"granularity": RowBlock(2)},
    "tensors": {"granularity": "tensor"},
    "replicas": {"strategy": "no_shard"},
}
# On other dims kernels round differently, and replicas sum gradients in another order: what is loaded, not trained, can
# be the same bit for bit.
LOADED: dict[str, dict[str, Any]] = {
    "columns": {"shard_dim": -1},
    "column elements": {"granularity": "element", "shard_dim": -1},
}
OPTIONS = {**TRAINED, **LOADED}


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """Its state has other shapes than the parameters."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.Adafactor(trainable, lr=0.05)


def state_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": engine, "optim": engine.optimizer_state(optimizer)}


def save(directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, options in {**TRAINED, "adafactor": TRAINED["tensors"]}.items():
        with Communicator.from_env(deadline_s=60) as comm:
            model = make()
            engine = fully_shard(model, comm, **options)
            optimizer = adafactor(model) if name == "adafactor" else adamw(model)
            for step in range(STEPS):
                loss_of(model, batch(comm.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            for layer in model.layers:
                layer.history = ["trained"]
            state = state_of(engine, optimizer)
            if name != "rows":
                dcp.save(state, checkpoint_id=f"{directory}/{name}")
            else:
                saving = dcp.async_save(state, checkpoint_id=f"{directory}/{name}")
                with torch.no_grad():  # training goes on
                    for param in model.parameters():
                        param.zero_()
                        for value in optimizer.state[param].values():
                            value.zero_()
                saving.result()
            engine.close()
    for name, options in {**LOADED, "hybrid": {"strategy": "hybrid_shard"}}.items():
        mesh = init_device_mesh("cpu", (2, 2) if name == "hybrid" else (SAVED_BY,))
        engine = fully_shard(model := make(seed=1), mesh, **options)
        state = state_of(engine, adamw(model))
        dcp.load(state, checkpoint_id=f"{directory}/elements")
        dcp.save(state, checkpoint_id=f"{directory}/{name}")
        engine.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by SAVED_BY ranks for each of OPTIONS, of Adafactor, and of a mesh; that of "rows" by async_save."""
    directory = tmp_path_factory.mktemp("saved")
    launch(save, SAVED_BY, (str(directory),), timeout_s=120)
    return directory


def load_into_engine(
    comm: Communicator,
    checkpoint: Path,
    wanted: dict[str, Any],
    optimizer_of: OptimizerOf = adamw,
    **options: Any,
) -> tuple[Tied, torch.optim.Optimizer, Engine]:
    model = make(seed=1)
    engine = fully_shard(model, comm, **options)
    optimizer = optimizer_of(model)
    state = state_of(engine, optimizer)
    load_here(state, checkpoint)
    got = {key: value.state_dict() for key, value in state.items()}
    if options.get("granularity") == "tensor":  # state is its owner's
        held = {name for name, param in model.named_parameters() if local(param).numel()}
        of_held = {name: value for name, value in wanted["optim"]["state"].items() if name in held}
        assert_equal(got["optim"], {**wanted["optim"], "state": of_held}, ".optim")
        del got["optim"]
    assert_equal(got, {key: wanted[key] for key in got})
    assert_equal(engine.full_state_dict(), wanted["model"])
    return model, optimizer, engine


def plain_state(model: Tied, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def loaded_by_plain(checkpoint: Path, optimizer_of: OptimizerOf) -> dict[str, Any]:
    model = make(seed=1)
    optimizer = optimizer_of(model)
    state = plain_state(model, optimizer)
    load_here(state, checkpoint)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return plain_state(model, optimizer)


@pytest.mark.covers("checkpoints", strategies=[*STRATEGIES], transports=["shm"])
@pytest.mark.parametrize("name", [*OPTIONS, "hybrid"])
def test_a_plain_model_loads_what_ranks_saved(
    name: str, saved: Path, expected: dict[str, Any]
) -> None:
    assert_equal(loaded_by_plain(saved / name, adamw), expected)


@pytest.mark.covers("checkpoints", "optimizer state", strategies=["full_shard"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_number_of_ranks_loads_what_others_saved(
    name: str, ranks: int, saved: Path, expected: dict[str, Any]
) -> None:
    names = list(OPTIONS)
    other = names[(names.index(name) + ranks) % len(names)]
    run_threads(
        lambda comm: load_into_engine(comm, saved / name, expected, **OPTIONS[other]), ranks
    )


@pytest.mark.covers("checkpoints", "optimizer state")
def test_training_goes_on_where_it_was_saved(saved: Path, expected: dict[str, Any]) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model, optimizer, engine = load_into_engine(comm, saved / "rows", expected)
        loss_of(model, batch(comm.rank, STEPS)).backward()
        optimizer.step()
        return engine.full_state_dict()

    model, optimizer = trained()
    trainable = [param for param in model.parameters() if param.requires_grad]
    of_ranks = [
        torch.autograd.grad(loss_of(model, batch(rank, STEPS)), trainable)
        for rank in range(SAVED_BY)
    ]
    for param, *grads in zip(trainable, *of_ranks, strict=True):
        param.grad = combined(grads) / SAVED_BY
    optimizer.step()
    assert_equal(run_threads(body, SAVED_BY)[0], model.state_dict())


@pytest.mark.covers("optimizer state", "owners", strategies=["full_shard"])
def test_adafactor_goes_on_where_ranks_hold_whole_parameters(saved: Path, tmp_path: Path) -> None:
    model, optimizer = trained(adafactor)
    expected = copy.deepcopy(plain_state(model, optimizer))
    assert_equal(loaded_by_plain(saved / "adafactor", adafactor), expected)
    dcp.save(expected, checkpoint_id=tmp_path)
    go_on(model, optimizer)

    def body(comm: Communicator, checkpoint: Path) -> dict[str, torch.Tensor]:
        model, optimizer, engine = load_into_engine(
            comm, checkpoint, expected, adafactor, granularity="tensor"
        )
        go_on(model, optimizer)
        return engine.full_state_dict()

    for checkpoint, ranks in [(saved / "adafactor", 2), (tmp_path, 2), (tmp_path, 1)]:
        for state in run_threads(functools.partial(body, checkpoint=checkpoint), ranks):
            assert_equal(state, model.state_dict())


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On batches that all ranks share: of two equal gradients the mean is exact."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(0, step)).backward()
        optimizer.step()


def fsdp2(model: Tied, dim: int) -> FSDPModule:
    """Sharded on `dim` where the number of ranks divides that, as FSDP2 wants it for others than the first."""
    mesh = init_device_mesh("cpu", (ranks := dist.get_world_size(),))

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.dim() > dim and param.shape[dim] % ranks == 0 else None

    for layer in model.layers:
        fsdp2_shard(layer, mesh=mesh, shard_placement_fn=placement)
    return fsdp2_shard(model, mesh=mesh, shard_placement_fn=placement)


def through_fsdp2(saved: str, directory: str) -> list[dict[str, Any]]:
    """Loads each checkpoint and saves it again; what the loaded ones held, in full."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for name in OPTIONS:
        model = fsdp2(make(seed=1), dim=1 if name in LOADED else 0)
        optimizer = adamw(model)
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=f"{saved}/{name}")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.save(state, checkpoint_id=f"{directory}/{name}")
        found.append(full(copy.deepcopy(state)))
    dist.destroy_process_group()
    return found


def full(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


@pytest.mark.covers(
    "checkpoints",
    "optimizer state",
    strategies=["full_shard", "shard_grad_op", "no_shard"],
    transports=["local"],
)
def test_fsdp2_loads_what_ranks_saved_and_back(
    saved: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    for states in launch(through_fsdp2, 3, (str(saved), str(tmp_path)), timeout_s=120):
        for state in states:
            assert_equal(state, expected)
    for name, options in OPTIONS.items():
        run_threads(
            lambda comm: load_into_engine(comm, tmp_path / name, expected, **options),  # noqa: B023
            2,
        )


@pytest.mark.covers(
    "checkpoints", "optimizer state", strategies=["full_shard", "shard_grad_op", "no_shard"]
)
def test_ranks_load_what_a_plain_model_saved(expected: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = trained()
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path)
    for options in OPTIONS.values():
        run_threads(
            lambda comm: load_into_engine(comm, tmp_path, expected, **options),  # noqa: B023
            3,
        )


def test_full_tensors_load_too(expected: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        model = make(seed=1)
        engine = fully_shard(model, comm, granularity="element")
        optimizer = engine.optimizer_state(adamw(model))
        engine.load_state_dict(expected["model"])
        optimizer.load_state_dict(expected["optim"])
        assert_equal(engine.full_state_dict(), expected["model"])
        assert_equal(optimizer.state_dict(), expected["optim"])

    run_threads(body, 3)


def write_safetensors(directory: str, granularity: Any) -> dict[str, Any]:
    """One rank: what DCP's writer for Hugging Face gets of an engine whose parameters are not tied."""
    dist.init_process_group("gloo")
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    engine = fully_shard(model, Communicator.from_env(), granularity=granularity)
    writer = dcp.HuggingFaceStorageWriter(
        directory, save_distributed=True, enable_consolidation=True
    )
    dcp.save(engine.state_dict(), storage_writer=writer)
    dist.destroy_process_group()
    return engine.full_state_dict()


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_dcps_writer_for_hugging_face_writes_one_file(granularity: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    [expected, _] = launch(write_safetensors, 2, (str(tmp_path), granularity), timeout_s=60)
    [written] = tmp_path.glob("*.safetensors")
    assert_equal(safetensors.load_file(written), expected)


class Deep(nn.Sequential):
    """Eight layers of 4 MiB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


def grown_by_full_state() -> tuple[int, int]:
    """Names in the full state of rank 0, and by how much the memory's peak grew."""
    with Communicator.from_env(deadline_s=60) as comm:
        engine = fully_shard(Deep(), comm, units=nn.Linear)
        before = peak_bytes()
        state = engine.full_state_dict(rank=0)
        return len(state), peak_bytes() - before


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_full_state_on_one_rank_holds_one_unit_besides() -> None:
    unit = 4 << 20
    (names, first), (nothing, second) = launch(grown_by_full_state, 2, timeout_s=60)
    assert (names, nothing) == (8, 0)
    assert first < (8 + 3) * unit
    assert second < 3 * unit
