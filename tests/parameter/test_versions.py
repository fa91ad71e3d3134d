"""Values that autograd takes for others: torch's loops with a sharded model raise where they do without sharding.

A loop runs on a sharded model and on its plain twin. Where it raises on the twin it raises on every rank, and the next
step is right; where it does not, the gradients are the twin's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcomm
from shardcomm import Communicator, ExponentialMovingAverage, Mesh, fully_shard
from shardcomm.parameter.shard_tensor import ShardTensor
from support.clipping import Clipping
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values

CHANGED = "modified by an inplace operation"
SHARDED = ["full_shard", "shard_grad_op"]
STRATEGIES = [*SHARDED, "no_shard"]
MORE = {
    **{strategy: {"strategy": strategy} for strategy in STRATEGIES},
    "whole_tensors": {"granularity": "tensor"},
    "elements": {"granularity": "element"},
    "offloaded": {"cpu_offload": True},
    "own_slots": {"slots": 5},
}
Loop = Callable[[Any], None]


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    loss: torch.Tensor = model(values(3, WIDTH, seed=seed)).square().sum()
    return loss


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params), lr=0.1)


def halve(params: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)


# What torch refuses.


def step_between_backwards(model: nn.Module) -> None:
    optimizer = sgd(model.parameters())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def step_between_backwards_by_foreach(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def loss_kept_over_a_step(model: nn.Module) -> None:
    optimizer = sgd(model.parameters())
    kept, loss = loss_of(model), loss_of(model, seed=2)
    loss.backward()
    optimizer.step()
    kept.backward()


def loss_kept_over_a_step_and_a_forward(model: nn.Module) -> None:
    optimizer = sgd(model.parameters())
    kept = loss_of(model)
    loss_of(model, seed=2).backward()
    optimizer.step()
    (kept + loss_of(model, seed=3)).backward()


def load_between_backwards(model: nn.Module) -> None:
    other, _ = twins(Chain)
    halve(other.parameters())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    model.load_state_dict(other.state_dict())
    loss.backward()


def change_between_backwards(model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    halve(model.parameters())
    loss.backward()


def change_before_a_backward(model: nn.Module) -> None:
    loss = loss_of(model)
    halve(model.parameters())
    loss.backward()


def step_of_one_unit_between_backwards(model: Chain) -> None:
    optimizer = sgd(model.blocks[1].parameters())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


REFUSED = [
    step_between_backwards,
    step_between_backwards_by_foreach,
    loss_kept_over_a_step,
    loss_kept_over_a_step_and_a_forward,
    load_between_backwards,
    change_between_backwards,
    change_before_a_backward,
    step_of_one_unit_between_backwards,
]


def assert_refused(
    loop: Loop, comm: Communicator | Mesh, options: dict[str, Any], *, by_torch: bool = True
) -> None:
    model, plain = twins(Chain)
    if by_torch:
        with pytest.raises(RuntimeError, match=CHANGED):
            loop(copy.deepcopy(plain))
    engine = fully_shard(model, comm, **options)
    with pytest.raises(RuntimeError, match=CHANGED):
        loop(model)
    # Training goes on.
    model.zero_grad()
    plain.load_state_dict(engine.full_state_dict())
    for net in (model, plain):
        loss_of(net).backward()
    assert_same_gradients(engine, model, plain)


@pytest.mark.covers("changed parameters")
@pytest.mark.parametrize("options", MORE)
@pytest.mark.parametrize("loop", REFUSED)
def test_a_backward_of_changed_parameters_raises_on_every_rank(loop: Loop, options: str) -> None:
    # Of six ranks, half have no rows of a block.
    run_threads(lambda comm: assert_refused(loop, comm, MORE[options]), 6)


@pytest.mark.covers("changed parameters")
@pytest.mark.parametrize("loop", REFUSED)
def test_a_backward_of_changed_parameters_raises_on_every_replica(loop: Loop) -> None:
    run_mesh(lambda mesh: assert_refused(loop, mesh, {"strategy": "hybrid_shard"}), 2, 2)


def fused_step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def own_adamw(model: nn.Module) -> None:
    optimizer = shardcomm.AdamW(model.parameters(), lr=0.1)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def own_step(model: nn.Module) -> None:
    optimizer = Clipping(list(model.parameters()), lr=0.1)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


@pytest.mark.parametrize("options", [*SHARDED, "whole_tensors"])
@pytest.mark.parametrize("loop", [fused_step, own_adamw, own_step])
def test_steps_of_which_torch_says_nothing_count(loop: Loop, options: str) -> None:
    run_threads(lambda comm: assert_refused(loop, comm, MORE[options], by_torch=False), 6)


@pytest.mark.covers("changed parameters")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writing_full_parameters_between_backwards_raises(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm, strategy=strategy)
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        with engine.gathered(write=True):
            halve(model.parameters())
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()

    run_threads(body, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_inside_of_an_average_raises_and_after_it_is_right(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm, strategy=strategy)
        average = ExponentialMovingAverage(engine)
        for net in (model, plain):
            halve(net.parameters())
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        with average.applied(), pytest.raises(RuntimeError, match=CHANGED):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        loss_of(plain).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_load_by_the_engine_between_backwards_raises(in_place: bool, strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, other = twins(Chain)
        engine = fully_shard(model, comm, strategy=strategy)
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        state = other.state_dict()
        if in_place:  # as torch.distributed.checkpoint does
            state = engine.state_dict()
            with torch.no_grad():
                for part in (part for value in state.values() for part in _parts(value)):
                    part.mul_(0.5)
        engine.load_state_dict(state)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()

    run_threads(body, 6)


def _parts(value: torch.Tensor) -> Iterable[torch.Tensor]:
    return value.parts if isinstance(value, ShardTensor) else [value]


# What torch allows.


def two_backwards(model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def accumulation(model: nn.Module) -> None:
    losses = [loss_of(model, seed) for seed in range(3)]
    losses[1].backward()
    (losses[2] + losses[0]).backward()


def evaluation_between(model: nn.Module) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        loss_of(model, seed=2)
    model.state_dict()
    loss.backward()


def step_of_nothing_that_backward_needs(model: Chain) -> None:
    """A backward needs the weights of none of the layers whose inputs have no gradient."""
    optimizer = sgd(model.stem.parameters())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def step_of_biases(model: Chain) -> None:
    """No backward needs a bias; they are in one unit with the weights."""
    optimizer = sgd(p for name, p in model.named_parameters() if name.endswith("bias"))
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def frozen_units(model: Chain) -> None:
    model.blocks[2].requires_grad_(False)
    kept = loss_of(model)
    kept.backward(retain_graph=True)
    optimizer = sgd(model.blocks[2].parameters())
    optimizer.step()
    kept.backward()


def checkpointed(model: Chain) -> None:
    for block in model.blocks:
        plainly = block.forward
        block.forward = lambda x, f=plainly: checkpoint(f, x, use_reentrant=False)
    optimizer = sgd(model.parameters())
    for seed in range(2):
        two = [loss_of(model, seed), loss_of(model, seed + 2)]
        sum(two).backward()  # type: ignore[union-attr]
        optimizer.step()


def step_between_checkpointed_backwards(model: Chain) -> None:
    """What is computed again is computed with the parameters of now, in all layers."""
    for i, block in enumerate(model.blocks):
        plainly: Any = block.forward
        block.forward = lambda x, f=plainly, i=i: checkpoint(f, x, use_reentrant=i % 2 == 1)
    optimizer = sgd(model.parameters())
    kept = loss_of(model)
    loss_of(model, seed=2).backward()
    optimizer.step()
    kept.backward()
    again = loss_of(model, seed=3)
    optimizer.step()
    again.backward()


def change_before_the_backward_of_a_block_alone(model: Chain) -> None:
    x = values(3, WIDTH).requires_grad_()
    loss = checkpoint(model.blocks[0], x, use_reentrant=True).square().sum()
    halve(model.parameters())
    loss.backward()


def optimizer_in_backward(model: nn.Module) -> None:
    optimizers = {param: sgd([param]) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        loss_of(model, seed).backward()


ALLOWED = [
    two_backwards,
    accumulation,
    evaluation_between,
    step_of_nothing_that_backward_needs,
    step_of_biases,
    frozen_units,
    checkpointed,
    step_between_checkpointed_backwards,
    change_before_the_backward_of_a_block_alone,
    optimizer_in_backward,
]


@pytest.mark.covers("changed parameters")
@pytest.mark.parametrize("options", MORE)
@pytest.mark.parametrize("loop", ALLOWED)
def test_what_changes_nothing_that_a_backward_needs_is_allowed(loop: Loop, options: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm, **MORE[options])  # type: ignore[arg-type]
        loop(plain)
        loop(model)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 3)


class Gan(nn.Module):
    """Two nets with an optimizer each, whose graphs outlive the other's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judged = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, judge: bool) -> torch.Tensor:
        return self.judged(x) if judge else self.made(x)


@pytest.mark.parametrize("in_units", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_of_one_net_leaves_graphs_of_the_other(strategy: str, in_units: bool) -> None:
    def train(model: Gan) -> None:
        optimizers = sgd(model.made.parameters()), sgd(model.judged.parameters())
        for seed in range(3):
            made = model(values(3, WIDTH, seed=seed), judge=False)
            model(made.detach(), judge=True).square().sum().backward()
            optimizers[1].step()
            model.zero_grad()
            model(made, judge=True).square().sum().backward()
            optimizers[0].step()

    def body(comm: Communicator) -> None:
        model, plain = twins(Gan)
        units = [model.made, model.judged] if in_units else []
        engine = fully_shard(model, comm, strategy=strategy, units=units)
        train(plain)  # type: ignore[arg-type]
        train(model)  # type: ignore[arg-type]
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_model_made_for_inference_computes(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        with torch.inference_mode():
            model, plain = twins(Chain)
            fully_shard(model, comm, strategy=strategy)
            for seed in range(2):
                torch.testing.assert_close(loss_of(model, seed), loss_of(plain, seed))

    run_threads(body, 2)


# A loss that a unit keeps, whose weights its output needs, too.


class WithPenalty(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.penalty = self.linear.weight.square().sum()
        return output


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("block", range(4))
def test_a_kept_loss_of_weights_that_the_output_needs_is_never_wrong(
    block: int, strategy: str
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(WithPenalty))
        engine = fully_shard(model, comm, strategy=strategy)

        def backward(net: Any) -> None:
            (loss_of(net) + net.blocks[block].penalty).backward()

        if strategy == "full_shard" and block < 2:  # the slots of the last two are theirs yet
            with pytest.raises(RuntimeError, match=CHANGED):
                backward(model)
            model.zero_grad()
            for net in (model, plain):
                loss_of(net).backward()
        else:
            for net in (model, plain):
                backward(net)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Skipping(nn.Sequential):
    """A chain in which each call names the blocks that it goes through."""

    def forward(self, x: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:  # type: ignore[override]
        for block in blocks:
            x = self[block](x)
        return x


@pytest.mark.parametrize("strategy", SHARDED)
def test_units_of_one_rank_that_convert_are_called_in_any_order(strategy: str) -> None:
    """Their gathers are done at once; nobody waits for one."""
    plain = Skipping(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = copy.deepcopy(plain)
    comm = Communicator.local_group(1)[0]
    half = shardcomm.MixedPrecision(param_dtype=torch.bfloat16)
    fully_shard(model, comm, units=nn.Linear, strategy=strategy, mixed_precision=half)
    twin = copy.deepcopy(plain).to(torch.bfloat16)
    x = values(3, WIDTH)
    for blocks in ((0, 1, 2, 3), (0, 2, 3), (3, 1), (1, 1, 0)):
        model.zero_grad()
        twin.zero_grad()
        model(x, blocks).square().sum().backward()
        twin(x.to(torch.bfloat16), blocks).square().sum().backward()
        for block in blocks:
            ours, theirs = model[block].weight.grad, twin[block].weight.grad
            torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=0)  # type: ignore[union-attr,operator]


class OnlyWhereThereAreRows(torch.optim.Optimizer):
    """As many an optimizer passes over parameters without elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() and param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)


def test_a_step_of_some_ranks_rows_is_known_to_all() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))
        fully_shard(model, comm, units=nn.Linear)
        optimizer = OnlyWhereThereAreRows(model.parameters())
        kept = loss_of(model)
        loss_of(model, seed=2).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            kept.backward()

    run_threads(body, 2)


def in_a_list(params: list[nn.Parameter]) -> None:
    torch._foreach_mul_(params, -2.0)


def by_data(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data.mul_(-2.0)


@pytest.mark.parametrize("granularity", ["row", "element", "tensor"])
@pytest.mark.parametrize("change", [in_a_list, by_data])
def test_rows_that_change_before_a_backward_are_noticed(
    change: Callable[[list[nn.Parameter]], None], granularity: Any
) -> None:
    """By `.data` without sharding too, backward then is of the new values; here of some units' old ones."""

    def body(comm: Communicator) -> None:
        model = Chain()
        fully_shard(model, comm, units=[Block], granularity=granularity)
        loss = loss_of(model)
        with torch.no_grad():
            change(list(model.parameters()))
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()
        model.zero_grad()
        loss = loss_of(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            param.grad.mul_(2.0)  # not the parameter
            torch._foreach_mul_([param.grad], 2.0)
        loss.backward()

    run_threads(body, 2)
