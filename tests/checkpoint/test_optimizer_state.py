"""`engine.optimizer_state`: what it makes, loads, copies and refuses, for any optimizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardcomm import AdamW, Communicator, fully_shard
from shardcomm.parameter.shard_tensor import ShardTensor
from support.nets import batch, loss_of
from support.saved_nets import STEPS, adamw, assert_equal, load_here, make, trained
from support.thread_ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Momentum(torch.optim.Optimizer):
    """Gradients and a momentum, which it calls `mu`; without a step count."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.decay = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    mu = state.setdefault("mu", torch.zeros_like(param))
                    mu.mul_(self.decay).add_(param.grad)
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
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # binds `step` to the optimizer
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
        name, state = [*given["state"].items()][-1]
        wrong = {**given["state"], name: {**state, "exp_avg": torch.zeros(7, 3)}}
        third = adamw(model)
        for _ in range(2):
            third.step()
        kept = [{k: v.clone() for k, v in state.items()} for state in third.state.values()]
        with pytest.raises(ValueError, match=re.escape(f"exp_avg of {name} has shape (7, 3)")):
            engine.optimizer_state(third).load_state_dict({**given, "state": wrong})
        for state, before in zip(third.state.values(), kept, strict=True):
            assert_equal(state, before)

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


class Wrapping(Momentum):
    """Steps by another optimizer, as Lookahead and SAM do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"])
        self.base = base

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_an_optimizer_of_an_optimizer_makes_no_step_to_show_its_state() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(4, 4)
        engine = fully_shard(model, comm)
        optimizer = Wrapping(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 4)).sum().backward()
        before = engine.full_state_dict()
        with pytest.raises(RuntimeError, match=r"its base is an optimizer too, .* Wrapping\.base"):
            engine.optimizer_state(optimizer).state_dict()
        assert_equal(engine.full_state_dict(), before)

    run_threads(body, 2)
