"""Reductions of a sharded tensor to one value are those of the whole, on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcomm
from shardcomm import Communicator, Engine, Mesh, fully_shard
from support.generator import seeded
from support.thread_ranks import run_mesh, run_threads
from support.twins import local

RANKS = 3


class Net(nn.Module):
    """Seven rows for three ranks; the bias and the number have fewer ranks than that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.scale
        return out


def with_sharded(body: Callable[[Net, Engine, Net], None], **options: Any) -> None:
    """Calls `body` on each rank with a sharded model, its engine and a plain twin, both after a backward."""
    with seeded():
        plain = Net()
    nets = [copy.deepcopy(plain) for _ in range(2 * RANKS)]

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank : 2 * comm.rank + 2]
        engine = fully_shard(model, comm, units=nn.Linear, **options)
        for each in (model, twin):
            each(torch.linspace(-1, 1, 10).view(2, 5)).sum().backward()
        body(model, engine, twin)

    run_threads(rank, RANKS)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "sum in double": lambda t: torch.sum(t, dtype=torch.float64),
    "mean": torch.mean,
    "std": lambda t: t.std(),
    "std, biased": lambda t: t.std(False),
    "var": lambda t: torch.var(t, correction=0),
    "max": torch.max,
    "amax": lambda t: t.amax(),
    "min": lambda t: t.min(),
    "amin": torch.amin,
    "abs max": lambda t: t.abs().max(),
    "is NaN": lambda t: torch.isnan(t).any(),
    "is finite": lambda t: t.isfinite().all(),
    "none is zero": torch.all,
    "any": lambda t: t.any(),
    "zeros": lambda t: (t == 0).sum(),
    "how many": torch.count_nonzero,
    "share": lambda t: (t.abs() < 0.2).float().mean(),
    "close": lambda t: torch.allclose(t, t.clone()),
    "not close": lambda t: torch.allclose(t, t + 1),
    "as a number": lambda t: float(t.mean()),
    "all together": lambda t: torch.stack([t.mean(), t.std(), t.norm()]),
}


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_reduction_is_of_the_whole(reduce: Callable[[Any], Any], granularity: str) -> None:
    def body(model: Net, engine: Engine, twin: Net) -> None:
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            with torch.no_grad():
                for ours, theirs in [(p, q), (p.data, q.data), (p.grad, q.grad)]:
                    value, expected = reduce(ours), reduce(theirs)
                    assert isinstance(value, type(expected))
                    torch.testing.assert_close(value + 0, expected + 0, equal_nan=True)

    with_sharded(body, granularity=granularity)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("holder", range(RANKS))
def test_what_one_rank_has_is_seen_by_all(holder: int, bad: float) -> None:
    def body(model: Net, engine: Engine, twin: Net) -> None:
        weight = model.linear.weight
        with torch.no_grad():
            if engine.mesh.rank == holder and local(weight).numel():
                local(weight)[0, 0] = bad
            whole = weight.full_tensor()  # type: ignore[operator]
            for reduce in (torch.max, torch.min, torch.sum, torch.mean):
                torch.testing.assert_close(reduce(weight), reduce(whole), equal_nan=True)
            assert torch.isnan(weight).any() == torch.isnan(whole).any()
            assert weight.isfinite().all() == whole.isfinite().all()

    with_sharded(body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_reduction_has_the_dtype_that_torch_gives_it(dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> None:
        with seeded():
            model = Net().to(dtype)
        twin = copy.deepcopy(model)
        fully_shard(model, comm)
        for p, q in zip(model.linear.parameters(), twin.linear.parameters(), strict=True):
            for reduce in (torch.sum, torch.mean, torch.max, torch.std):
                torch.testing.assert_close(reduce(p.detach()), reduce(q.detach()))

    run_threads(body, RANKS)


def test_replicas_count_once() -> None:
    with seeded():
        plain = Net()
    nets = [copy.deepcopy(plain) for _ in range(4)]

    def body(mesh: Mesh) -> None:
        model = nets[mesh.rank]
        fully_shard(model, mesh, strategy="hybrid_shard")
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.detach().sum(), q.detach().sum())

    run_mesh(body, 2, 2)


def test_a_value_is_read_with_gradients_enabled_and_not_trained_with() -> None:
    def body(model: Net, engine: Engine, twin: Net) -> None:
        weight = model.linear.weight
        mean = weight.mean()
        assert mean.item() == pytest.approx(twin.linear.weight.mean().item())
        loss = model(torch.ones(1, 5)).sum() + 0.1 * mean
        with pytest.raises(RuntimeError, match=r"mean to differentiate of 'linear\.weight'"):
            loss.backward()

    with_sharded(body)


def test_a_value_that_one_rank_asks_for_alone_is_a_mismatch() -> None:
    def body(model: Net, engine: Engine, twin: Net) -> None:
        weight = model.linear.weight.detach()
        with pytest.raises(shardcomm.CommError, match="different collectives") as caught:
            (weight.max if engine.mesh.rank else weight.mean)()
        if engine.mesh.rank == 0:
            assert "mean of 'linear.weight' (tag" in str(caught.value)

    with_sharded(body)
