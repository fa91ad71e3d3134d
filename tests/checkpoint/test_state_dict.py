"""Sharded state dicts through torch.distributed.checkpoint, against a model trained by one process, bit for bit."""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable, Iterable
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

from shardcomm import STRATEGIES, AdamW, Communicator, Engine, RowBlock, fully_shard, launch
from shardcomm.parameter.shard_tensor import ShardTensor
from support.generator import seeded
from support.nets import batch, loss_of, reference
from support.rank_sums import combined
from support.thread_ranks import run_threads
from support.twins import local

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVED_BY = 4
STEPS = 3
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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, 3, 5) / 4)
        self.shift = nn.Parameter(torch.randn(3))  # fewer rows than ranks
        self.wide = nn.Linear(5, 5, bias=False)
        self.register_buffer("scale", torch.rand(5))
        self.history = ["made"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("...c,arc->...ar", x, self.mix) + self.shift
        return x + torch.relu(self.wide(x)) * self.scale + y.mean((-2, -1)).unsqueeze(-1)

    def get_extra_state(self) -> object:
        return self.history

    def set_extra_state(self, state: object) -> None:
        self.history = list(state)  # type: ignore[call-overload]


class Tied(nn.Module):
    """With tied weights, a frozen parameter, a buffer, extra state, and shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.layers[1].wide.requires_grad_(False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(seed: int = 0) -> Tied:
    with seeded(seed):
        return Tied()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With two groups of parameters."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [p for n, p in named if "wide" not in n], "lr": 0.05},
        {"params": [p for n, p in named if "wide" in n], "lr": 0.02, "weight_decay": 0.3},
    ]
    return torch.optim.AdamW(groups, foreach=False)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """Its state has other shapes than the parameters."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.Adafactor(trainable, lr=0.05)


OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


def state_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": engine, "optim": engine.optimizer_state(optimizer)}


def trained(optimizer_of: OptimizerOf = adamw) -> tuple[Tied, torch.optim.Optimizer]:
    """What SAVED_BY ranks must arrive at."""
    optimizers = []

    def keep(model: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(optimizer_of(model))
        return optimizers[0]

    model = reference(make(), SAVED_BY, STEPS, optimizer_of=keep)  # type: ignore[arg-type]
    for layer in model.layers:
        layer.history = ["trained"]
    return model, optimizers[0]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    model, optim = get_state_dict(*trained())
    return {"model": model, "optim": optim}


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


# For a rank that wants less than a checkpoint has, DCP's planner lets the process flatten state dicts as torch 2.3 did
# for a moment. Another thread's planner would then ask for "optim.param_groups", which no checkpoint has.
_one_planner = threading.Lock()


def load_here(state: dict[str, Any], checkpoint: Path) -> None:
    """Without a process group: every rank of threads reads its own part."""
    with _one_planner:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)


def assert_equal(state: Any, wanted: Any, path: str = "") -> None:
    """All values, and for a ShardTensor those of its rectangles."""
    if isinstance(wanted, dict):
        assert state.keys() == wanted.keys(), path
        for key in wanted:
            assert_equal(state[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list) and path.endswith("groups"):
        for i, (group, wanted_group) in enumerate(zip(state, wanted, strict=True)):
            assert_equal(group, wanted_group, f"{path}.{i}")
    elif isinstance(state, ShardTensor):
        for rectangle, part in zip(state.rectangles, state.parts, strict=True):
            assert torch.equal(part, wanted[rectangle.slices]), f"{path}: {state}"
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(state, wanted), path
    else:
        assert state == wanted, path


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


class Momentum(torch.optim.Optimizer):
    """Gradients and a momentum, which it calls `mu`; without a step count."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    mu = state.setdefault("mu", torch.zeros_like(param))
                    mu.mul_(0.9).add_(param.grad)
                    param.sub_(mu, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), amsgrad=True),
    "stateless": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, t0=1),
    "ours": lambda params: AdamW(params, lr=0.1),
    "a number's name": Momentum,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_for_an_optimizers_state_changes_no_parameter(name: str) -> None:
    comm = Communicator.local_group(1)[0]
    model = make()
    with torch.no_grad():
        model.layers[0].shift.fill_(-0.0)
        model.layers[1].shift.fill_(torch.inf)
    engine = fully_shard(model, comm)
    before = engine.full_state_dict()
    optimizer = OPTIMIZERS[name](model.parameters())
    state = engine.optimizer_state(optimizer).state_dict()
    assert_equal(engine.full_state_dict(), before)
    assert torch.signbit(model.layers[0].shift).all()
    assert all(param.grad is None for param in model.parameters())
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    assert name == "stateless" or trainable <= state["state"].keys()


@pytest.mark.covers("optimizer state", "optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_where_it_was(name: str) -> None:
    def run(comm: Communicator, steps: int, state: Any = None) -> tuple[Any, dict[str, Any]]:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = OPTIMIZERS[name](model.parameters())
        saved = engine.optimizer_state(optimizer)
        first = 0
        if state is not None:
            engine.load_state_dict(state[0])
            saved.load_state_dict(state[1])
            first = STEPS - steps
        for step in range(first, first + steps):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy((engine.full_state_dict(), saved.state_dict()))

    def body(comm: Communicator) -> None:
        assert_parts_equal(run(comm, STEPS), run(comm, 1, run(comm, STEPS - 1)))

    run_threads(body, 2)


@pytest.mark.covers("optimizer state", "optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_before_the_first_step_changes_no_later_step(name: str) -> None:
    def run(comm: Communicator, *, saves: bool) -> dict[str, Any]:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = OPTIMIZERS[name](model.parameters())
        if saves:
            engine.optimizer_state(optimizer).state_dict()
        for step in range(STEPS):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    def body(comm: Communicator) -> None:
        assert_parts_equal(run(comm, saves=True), run(comm, saves=False))

    run_threads(body, 2)


@pytest.mark.covers("optimizer state", "optimizers")
def test_a_load_into_an_optimizer_without_state_is_a_copy_that_is_checked() -> None:
    def body(comm: Communicator) -> None:
        model = make()
        engine = fully_shard(model, comm)
        first, second = adamw(model), adamw(model)
        loss_of(model, batch(comm.rank, 0)).backward()
        first.step()
        given = engine.optimizer_state(first).state_dict()
        kept = [{k: v.clone() for k, v in state.items()} for state in first.state.values()]
        engine.optimizer_state(second).load_state_dict(given)
        second.step()
        for state, before in zip(first.state.values(), kept, strict=True):
            assert_equal(state, before)
        name, state = next(iter(given["state"].items()))
        wrong = {name: {**state, "exp_avg": torch.zeros(7, 3)}}
        with pytest.raises(ValueError, match=re.escape(f"exp_avg of {name} has shape (7, 3)")):
            engine.optimizer_state(adamw(model)).load_state_dict({**given, "state": wrong})

    run_threads(body, 2)


@pytest.mark.covers("optimizer state", "frozen and tied parameters")
def test_state_is_loaded_where_some_parameters_have_stepped_and_others_have_not(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = trained()
    dcp.save({"optim": get_state_dict(model, optimizer)[1]}, checkpoint_id=tmp_path)

    def body(comm: Communicator) -> None:
        model = make(seed=1)
        engine = fully_shard(model, comm)
        optimizer = adamw(model)
        last = model.layers[1].requires_grad_(False)
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        last.requires_grad_(True)
        state = {"optim": engine.optimizer_state(optimizer)}
        load_here(state, tmp_path)
        assert_equal(state["optim"].state_dict(), expected["optim"])

    run_threads(body, 2)


def test_sgds_dampened_momentum_begins_at_zeros_once_it_was_saved() -> None:
    [comm] = Communicator.local_group(1)

    def first_step(*, saves: bool) -> torch.Tensor:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        if saves:
            engine.optimizer_state(optimizer).state_dict()
        before = engine.full_state_dict()["layers.0.mix"]
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        return engine.full_state_dict()["layers.0.mix"] - before

    torch.testing.assert_close(first_step(saves=True), 0.5 * first_step(saves=False))


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


def test_no_state_is_loaded_of_what_is_frozen(expected: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save({"optim": get_state_dict(model, optimizer)[1]}, checkpoint_id=tmp_path)
    [comm] = Communicator.local_group(1)
    model = make(seed=1)
    engine = fully_shard(model, comm)
    optimizer = adamw(model)
    model.layers[1].requires_grad_(False)
    state = {"optim": engine.optimizer_state(optimizer)}
    load_here(state, tmp_path)
    model.layers[1].requires_grad_(True)
    frozen = {name for name in expected["optim"]["state"] if name.startswith("layers.1.")}
    loaded = state["optim"].state_dict()["state"]
    assert frozen
    for name, wanted in expected["optim"]["state"].items():
        assert bool(loaded[name]["exp_avg"].any()) is (
            name not in frozen and bool(wanted["exp_avg"].any())
        )


def assert_parts_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, ShardTensor):
        a, b = a.parts, b.parts
    if isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_parts_equal(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_what_an_optimizer_state_refuses(expected: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        model = make()
        engine = fully_shard(model, comm)
        with pytest.raises(ValueError, match=r"group 0 of the optimizer has a parameter of shape"):
            engine.optimizer_state(adamw(make()))
        one_group = engine.optimizer_state(torch.optim.AdamW(model.parameters()))
        with pytest.raises(
            ValueError, match=r"of 2 parameter groups with \d+ parameters, the opti"
        ):
            one_group.load_state_dict(expected["optim"])

    run_threads(body, 2)


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


@pytest.mark.parametrize("width", [1, 5])
def test_means_over_some_rows_are_no_state_to_save(width: int) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(width, 64, bias=False)
        engine = fully_shard(model, comm)
        state = engine.optimizer_state(torch.optim.Adafactor(model.parameters()))
        with pytest.raises(
            ValueError, match=r"has shape .*rows \(32, .*with granularity=\"tensor\""
        ):
            state.state_dict()

    run_threads(body, 2)
