"""Steps that deviate from the order that was planned, against plain autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values


class Checkpointed(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.covers("activation checkpointing")
def test_recomputed_units_keep_no_inputs() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Checkpointed)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert not any(unit.forward.entered for unit in engine.units)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.covers("prefetch and slots")
@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("train", [False, True])
def test_prefetches_that_nobody_waits_for_do_not_meet_other_collectives(
    prefetch: int, train: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(lambda: nn.Linear(WIDTH, WIDTH), layers=5))
        engine = fully_shard(model, comm, prefetch=prefetch, slots=5)
        for i in range(8):
            model.skipped = set() if i % 2 else {2, 3, 4}
            if train:
                model(values(3, WIDTH)).sum().backward()
            else:
                with torch.no_grad():
                    model(values(3, WIDTH))
            assert not any(unit.full.gathers or unit.gradients.reduces for unit in engine.units)
            comm.barrier()
            state = engine.full_state_dict()
            assert torch.equal(state["stem.weight"], plain.stem.weight)

    run_threads(body, 2)


@pytest.mark.covers("prefetch and slots")
def test_a_unit_that_no_prefetch_has_brought_is_gathered_before_those_ahead() -> None:
    """The planned step has gathered unit 2, of blocks.1, ahead at blocks.0, which this one leaves out."""

    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm, prefetch=1)
        with torch.no_grad():
            model(values(3, WIDTH))
            model.skipped = {0}
            with engine.trace() as trace:
                model(values(3, WIDTH))
        gathers = [span.name for span in trace.spans() if span.row == "gather"]
        assert gathers[1:] == [f"blocks.{i}" for i in (0, 1, 2, 3)]

    run_threads(body, 2)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(sum(table(tokens) for table in self.tables))


@pytest.mark.covers("prefetch and slots")
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_units_without_input_gradients_share_slots(slots: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Tables)
        engine = fully_shard(model, comm, slots=slots)
        for net in (model, plain):
            net(torch.arange(5)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_two_forwards_of_raw_inputs_with_one_backward(slots: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(*(Block() for _ in range(4))))
        engine = fully_shard(model, comm, units=Block, slots=slots)
        for _ in range(2):
            for net in (model, plain):
                distance = net(values(3, WIDTH)) - net(values(3, WIDTH, seed=2))
                distance.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def penalty(model: nn.Module) -> torch.Tensor:
    x = values(3, WIDTH).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


@pytest.mark.covers("torch.func")
@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_double_backward_equals_plain(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(Chain(), nn.Linear(WIDTH, WIDTH)))
        engine = fully_shard(model, comm, strategy=strategy, units=[*model[0].blocks, model[1]])
        for net in (model, plain):
            penalty(net).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_double_backward_with_shared_slots_says_what_to_use() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        with pytest.raises(RuntimeError, match=r"create_graph=True .* strategy='shard_grad_op'"):
            penalty(model)
        for net in (model, plain):
            net(values(3, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.covers("odd forwards")
def test_unit_called_by_itself_computes_with_the_parameters_of_now() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        x = values(3, WIDTH)
        with torch.no_grad():
            for factor in (1, 2, 3):
                state = {name: factor * value for name, value in plain.state_dict().items()}
                engine.load_state_dict(state)
                scaled = copy.deepcopy(plain)
                scaled.load_state_dict(state)
                for _ in range(10):
                    assert torch.equal(model.blocks[3](x), scaled.blocks[3](x))
            assert len(engine._step._seen) == 0
            torch.set_grad_enabled(True)
            model(x)  # without a backward
            torch.set_grad_enabled(False)
            for net in (model, scaled):
                for param in net.parameters():
                    param.add_(1)
            assert torch.equal(model.blocks[3](x), scaled.blocks[3](x))

    run_threads(body, 2)


def test_plans_of_random_orders_are_bounded() -> None:
    model, _ = twins(lambda: Chain(layers=12))
    engine = fully_shard(model, Communicator.local_group(1)[0])
    for i in range(12):
        model.skipped = {i}
        model(values(3, WIDTH)).sum().backward()
    assert engine._step._program.cache_info().currsize <= 8
