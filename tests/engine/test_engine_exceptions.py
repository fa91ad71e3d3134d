"""What an exception in forward or backward leaves behind: nothing that the next step, or a state dict, would see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcomm import Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, twins, values


class Failure(Exception):
    pass


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise Failure


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("no_sync", [False, True])
def test_exception_in_backward_leaves_nothing_to_the_next_step(ranks: int, no_sync: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        model.between = lambda i, x: _FailInBackward.apply(x) if i == 1 else x
        with engine.no_sync() if no_sync else torch.enable_grad(), pytest.raises(Failure):
            model(values(3, WIDTH)).sum().backward()
        model.between = lambda i, x: x
        model.zero_grad()
        for net in (model, plain):
            net(values(3, WIDTH, seed=2)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layers", [2, 4])  # with a slot each, and shared ones
def test_exception_in_backward_leaves_nothing_to_the_next_one(ranks: int, layers: int) -> None:
    """Of a graph that was there before: no forward comes between."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(layers=layers))
        engine = fully_shard(model, comm)
        model.between = lambda i, x: _FailInBackward.apply(x) if i == 1 else x
        failing = model(values(3, WIDTH)).sum()
        model.between = lambda i, x: x
        loss = model(values(3, WIDTH, seed=2)).sum()
        with pytest.raises(Failure):
            failing.backward()
        loss.backward()
        plain(values(3, WIDTH, seed=2)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


def failing_forward(model: nn.Module, *, at: int) -> None:
    """Of a unit: its parameters are shown in full when it raises."""

    def fail(*_: object) -> None:
        raise Failure

    hook = model.blocks[at].linear.register_forward_hook(fail)
    with pytest.raises(Failure):
        model(values(3, WIDTH))
    hook.remove()


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("ranks", [1, 2])
def test_exception_in_forward_does_not_reach_the_state_dict(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        failing_forward(model, at=2)
        state = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        with torch.no_grad():
            model(values(3, WIDTH))  # takes the slots
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name

        failing_forward(model, at=1)
        doubled = {name: 2 * value for name, value in plain.state_dict().items()}
        engine.load_state_dict(doubled)
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, doubled[name]), name

        failing_forward(model, at=1)
        for unit in engine.units:
            for param in unit.params:
                assert all(m._parameters[a] is param.shard for m, a in param.owned.places)
        engine.close()
        assert sum(p.numel() for u in engine.units for p in u.module.parameters(recurse=False)) <= (
            sum(p.numel() for p in plain.parameters())
        )
        for unit in engine.units:
            for param in unit.params:
                assert all(m._parameters[a] is param.shard for m, a in param.owned.places)

    run_threads(body, ranks)


@pytest.mark.covers("exceptions")
def test_exception_in_forward_keeps_gradients_of_no_sync() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        with engine.no_sync():
            model(values(3, WIDTH)).sum().backward()
        failing_forward(model, at=2)
        model(values(3, WIDTH, seed=2)).sum().backward()
        for seed in (1, 2):
            plain(values(3, WIDTH, seed=seed)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_exception_in_a_hook_at_the_end_of_backward_leaves_nothing_to_the_next_step(
    strategy: str,
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        # All are shown when backward has ended, those of the stem first.
        engine = fully_shard(model, comm, strategy=strategy, on_nonfinite="raise")

        def fail(param: nn.Parameter) -> None:
            raise Failure

        hook = model.stem.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(Failure):
            model(values(3, WIDTH)).sum().backward()
        hook.remove()
        model.zero_grad()
        for net in (model, plain):
            net(values(3, WIDTH, seed=2)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.covers("exceptions")
def test_zero_grad_after_an_exception_in_backward_drops_the_gradients_there_were() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        model(values(3, WIDTH)).sum().backward()
        model.between = lambda i, x: _FailInBackward.apply(x) if i == 2 else x
        with pytest.raises(Failure):
            model(values(3, WIDTH)).sum().backward()
        model.between = lambda i, x: x
        model.zero_grad()
        for net in (model, plain):
            net(values(3, WIDTH, seed=2)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class _Notes(nn.Module):
    """Changes its weight, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.linear.weight.add_(1)


class _NotesFailures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes = _Notes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise Failure
        except Failure:
            self.notes(x)
        return x


def test_a_unit_that_returns_nothing_while_an_exception_is_handled_has_not_failed() -> None:
    """What a forward that fails returns is None, too, to the hooks."""

    def body(comm: Communicator) -> None:
        model = _NotesFailures()
        fully_shard(model, comm, units=_Notes)
        with pytest.raises(RuntimeError, match=r"'notes.linear.weight' was changed in the forward"):
            model(values(3, WIDTH))

    run_threads(body, 2)
