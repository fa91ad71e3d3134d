"""Parameters that their own unit's forward changes, and gradients as it and a hook of backward see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, fully_shard
from support.parity import whole
from support.thread_ranks import run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values

SHARDED = ["full_shard", "shard_grad_op"]
STRATEGIES = [*SHARDED, "no_shard"]


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    loss: torch.Tensor = model(values(3, WIDTH, seed=seed)).square().sum()
    return loss


class Changing(Block):
    """Does `change` in each forward: nothing, until a test gives it something."""

    change: Callable[[nn.Linear], None] = staticmethod(lambda linear: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.linear)
        return super().forward(x)


def clamp(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.clamp_(-0.1, 0.1)


def clamp_detached(linear: nn.Linear) -> None:
    linear.weight.detach().clamp_(-0.1, 0.1)


def clamp_data(linear: nn.Linear) -> None:
    linear.weight.data.view(-1).clamp_(-0.1, 0.1)


def assign_data(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data.clamp(-0.1, 0.1)


def set_memory(linear: nn.Linear) -> None:
    """As cuDNN's flatten_parameters."""
    with torch.no_grad():
        linear.weight.set_(linear.weight.clamp(-0.1, 0.1))  # type: ignore[call-overload]


def swap_a_bias(linear: nn.Linear) -> None:
    linear.bias.data = torch.zeros_like(linear.bias)


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    "change", [clamp, clamp_detached, clamp_data, assign_data, set_memory, swap_a_bias]
)
def test_a_parameter_that_a_forward_changes_raises_on_every_rank(
    change: Callable[[nn.Linear], None], strategy: str, in_evaluation: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Changing))
        engine = fully_shard(model, comm, strategy=strategy)
        before = engine.full_state_dict()
        model.blocks[2].change = change  # type: ignore[index, union-attr]
        with (
            pytest.raises(RuntimeError, match=r"'blocks.2.linear.*' was changed in the forward of"),
            torch.set_grad_enabled(not in_evaluation),
        ):
            loss_of(model)
        # Training goes on, with what there was before.
        del model.blocks[2].change  # type: ignore[index, union-attr]
        after = engine.full_state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        for net in (model, plain):
            loss_of(net).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("change", [clamp, clamp_data])
def test_a_forward_that_changes_a_parameter_and_raises_leaves_the_next_as_it_is(
    change: Callable[[nn.Linear], None], strategy: str
) -> None:
    def interrupted(linear: nn.Linear) -> None:
        change(linear)
        raise ValueError("interrupted")

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Changing))
        engine = fully_shard(model, comm, strategy=strategy)
        model.blocks[2].change = interrupted  # type: ignore[index, union-attr]
        with pytest.raises(ValueError, match="interrupted"):
            loss_of(model)
        del model.blocks[2].change  # type: ignore[index, union-attr]
        for net in (model, plain):
            loss_of(net).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("change", [clamp_detached, clamp_data, assign_data, swap_a_bias])
def test_a_forward_that_changes_a_whole_parameter_persists_or_raises(
    change: Callable[[nn.Linear], None],
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Changing))
        for net in (model, plain):
            for block in net.blocks:  # type: ignore[union-attr]
                block.change = change  # type: ignore[union-attr]
        engine = fully_shard(model, comm, strategy="no_shard")
        loss_of(plain).backward()
        if change not in (clamp_detached, clamp_data):
            with pytest.raises(RuntimeError, match=r"'blocks.0.linear.*' was changed in the forwa"):
                loss_of(model)
            return
        loss_of(model).backward()
        got = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(got[name], value, msg=name)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_sees_the_gradients_from_before(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Changing))
        seen: list[Any] = []
        for net in (model, plain):
            for block in net.blocks:  # type: ignore[union-attr]
                block.change = lambda linear: seen.append(linear.weight.grad)  # type: ignore[union-attr]
        fully_shard(model, comm, strategy=strategy)
        for net in (model, plain):
            loss_of(net).backward()
        assert seen == [None] * 8
        seen.clear()
        for net in (model, plain):
            loss_of(net)
        for ours, theirs in zip(seen[:4], seen[4:], strict=True):
            torch.testing.assert_close(ours.norm(), theirs.norm())
            torch.testing.assert_close(whole(ours), theirs)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_drops_gradients(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Changing))
        engine = fully_shard(model, comm, strategy=strategy)
        for net in (model, plain):
            loss_of(net).backward()
            for block in net.blocks:  # type: ignore[union-attr]
                block.change = nn.Module.zero_grad  # type: ignore[union-attr]
            loss_of(net, 1).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_a_gradient_that_is_not_reduced_yet_is_not_shown_in_backward() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        fully_shard(model, comm)
        model.blocks[2].linear.register_full_backward_hook(lambda m, *_: m.weight.grad)  # type: ignore[index, union-attr]
        with pytest.raises(RuntimeError, match=r"\.grad of 'blocks.2.linear.weight' in a backward"):
            loss_of(model).backward()

    run_threads(body, 2)
