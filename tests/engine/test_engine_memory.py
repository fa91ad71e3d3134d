"""What the engine holds, and when it lets go of it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcomm import Communicator, fully_shard
from shardcomm.parameter.plain import grad_of, plain
from support.nets import STEPS, assert_same, batch, loss_of, make, optimizer_of, reference
from support.thread_ranks import run_threads


def test_gradients_memory_is_given_back_between_steps() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            loss = loss_of(model, batch(comm.rank, step))
            assert engine.footprint().gradient_bytes == 0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    expected = reference(make(), 2)
    for state in run_threads(body, 2):
        assert_same(state, expected, bitwise=True)


def test_gradients_that_somebody_has_are_not_given_back() -> None:
    comm = Communicator.local_group(1)[0]
    model = make()
    fully_shard(model, comm)
    loss_of(model, batch(0, 0)).backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    loss_of(model, batch(0, 1))
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(before) == len(after) > 0
    assert all(map(torch.equal, before, after))


@pytest.mark.covers("memory as planned")
def test_each_rank_holds_its_share_and_padding_only() -> None:
    def body(comm: Communicator) -> tuple[int, ...]:
        model = make(layers=3, width=32)
        engine = fully_shard(model, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        footprint = engine.footprint()
        with plain():  # outside of an optimizer's step they tell the whole's size
            rows = sum(p.nbytes for p in model.parameters())
            assert sum(grad_of(p).nbytes for p in model.parameters()) == rows
        assert footprint.gradient_bytes == footprint.parameter_bytes
        return (
            rows,
            footprint.parameter_bytes,
            footprint.padding_bytes,
            footprint.total_parameter_bytes,
        )

    whole = sum(p.nbytes for p in make(layers=3, width=32).parameters())
    results = run_threads(body, 4)
    assert sum(rows for rows, _, _, _ in results) == whole
    for _, held, padding, total in results:
        assert total == whole
        assert 4 * held == total + padding


def test_full_parameters_are_let_go_of_once_they_are_sharded() -> None:
    model = make()
    whole = [weakref.ref(param) for param in model.parameters()]
    engine = fully_shard(model, Communicator.local_group(1)[0])
    gc.collect()
    assert not any(param() for param in whole)
    engine.close()


class _Operations(TorchDispatchMode):
    """Counts what is dispatched: every allocation and every view is an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_makes_gradients_and_no_other_memory_or_views_of_its_own(
    ranks: int, adds: bool
) -> None:
    """Only of shards, and where it does not add to the step before: one allocation a unit, and a view a parameter."""

    def operations_of_third_step(
        model: nn.Module, tokens: torch.Tensor, adds: bool
    ) -> Counter[str]:
        for _ in range(2):
            loss_of(model, tokens).backward()
            if not adds:
                model.zero_grad()
        with _Operations() as operations:
            loss_of(model, tokens).backward()
        return operations.counts

    plain = operations_of_third_step(make(), batch(0, 0), adds=False)

    def body(comm: Communicator) -> Counter[str]:
        model = make()
        fully_shard(model, comm)
        return operations_of_third_step(model, batch(comm.rank, 0), adds)

    for ours in run_threads(body, ranks):
        extra = ours - plain
        units, params = 1 + len(make().blocks), len(list(make().parameters()))
        expected = {"empty_like": units, "as_strided": params}
        # The mark shows each unit's input, an activation, as an alias of itself.
        assert extra.pop("detach", 0) <= len(make().blocks)
        assert extra == ({} if adds or ranks == 1 else expected), extra
