"""Sizes that a sharded tensor tells: the whole's, and its rows' in an optimizer's step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, Engine, fully_shard
from support.generator import seeded
from support.thread_ranks import run_threads
from support.twins import local

RANKS = 2
GRANULARITIES = ("element", "row", "tensor")


class Scaled(nn.Module):
    """Seven rows, which two ranks have unevenly, and a number, which one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.scale
        return out


def with_sharded(body: Callable[[Scaled, Engine, Scaled], None], **options: Any) -> None:
    """Calls `body` on each rank with a sharded model, its engine and a plain twin, both after a backward."""
    with seeded():
        plain = Scaled()
    nets = [copy.deepcopy(plain) for _ in range(2 * RANKS)]

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank : 2 * comm.rank + 2]
        engine = fully_shard(model, comm, units=nn.Linear, **options)
        for each in (model, twin):
            each(torch.ones(2, 5)).sum().backward()
        body(model, engine, twin)

    run_threads(rank, RANKS)


def sizes(tensor: Any) -> list[Any]:
    return [
        tensor.shape,
        tensor.size(),
        tensor.stride(),
        tensor.ndim,
        tensor.dim(),
        tensor.ndimension(),
        tensor.nbytes,
        tensor.numel(),
        math.prod(tensor.shape),
        *((tensor.size(-1), tensor.stride(0), len(tensor)) if tensor.shape else ()),
    ]


@pytest.mark.parametrize("shard_dim", [0, "auto"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_outside_of_a_step_sizes_are_the_wholes(granularity: str, shard_dim: Any) -> None:
    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        rows = 0
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            rows += local(p).shape.numel()
            with torch.no_grad():
                for ours, theirs in [(p, q), (p.data, q.data), (p.grad, q.grad), (p * 2, q * 2)]:
                    assert sizes(ours) == sizes(theirs)
                assert sizes(p.data.double()) == sizes(q.data.double())
        assert rows < 5 * 7 + 7 + 1

    with_sharded(body, granularity=granularity, shard_dim=shard_dim)


def test_a_new_tensor_of_a_size_is_a_plain_one_on_every_rank() -> None:
    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        for p in model.parameters():  # one of a single row is on one rank as a whole
            for new in (p.new_zeros(p.shape), p.grad.new_ones(p.shape), p.data.new_full((2,), 3.0)):
                assert type(new) is torch.Tensor
            assert p.new_zeros(p.shape).shape == p.shape

    with_sharded(body)


def test_entries_whose_shapes_fit_are_loaded() -> None:
    other = Scaled()

    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        own = dict(model.named_parameters())
        fits = {name: v for name, v in other.state_dict().items() if v.shape == own[name].shape}
        model.load_state_dict(fits, strict=False)
        torch.testing.assert_close(engine.full_state_dict(), dict(other.state_dict()))

    with_sharded(body)


class Momentum(torch.optim.Optimizer):
    """Makes its state by the parameters' shapes, and goes element by element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def _state_of(self, p: nn.Parameter) -> Any:
        if "m" not in self.state[p]:
            assert p.grad is not None
            self.state[p]["m"] = torch.zeros(p.shape)
            self.state[p]["v"] = p.grad.new_zeros(p.grad.size())
        return self.state[p]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                state = self._state_of(p)
                state["m"].mul_(0.9).add_(p.grad)
                state["v"].add_(p.grad * p.grad)
                p.addcdiv_(state["m"], state["v"].sqrt() + 1, value=-0.1)


class MomentumFromTheStart(Momentum):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for p in (p for group in self.param_groups for p in group["params"]):
            self._state_of(p)


class AroundAdam(torch.optim.Adam):
    """A step of its own around one of torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            p.mul_(torch.full(p.shape, 0.5))
        super().step(closure)


class Inside(Momentum):
    """Another optimizer steps inside of its step."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params)
        self.inner = Momentum(params)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        super().step(closure)


@pytest.mark.covers("optimizers")
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", [Momentum, AroundAdam, Inside, torch.optim.Adagrad])
@pytest.mark.filterwarnings("ignore:.*step is given the parameters that this rank owns")
def test_a_step_makes_its_state_by_shapes(kind: Any, granularity: str) -> None:
    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        whole = [p.shape for p in twin.parameters()]
        seen: list[list[torch.Size]] = []
        for each in (model, twin):
            optimizer = kind(list(each.parameters()))

            def look(*args: Any, each: nn.Module = each) -> None:
                seen.append([p.shape for p in each.parameters()])

            optimizer.register_step_pre_hook(look)
            optimizer.register_step_post_hook(look)
            for _ in range(2):
                optimizer.step()
                look()
        assert seen == [whole] * len(seen)
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    with_sharded(body, granularity=granularity)


def test_a_closure_is_told_the_wholes_sizes_and_the_step_after_it_the_rows() -> None:
    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        for each in (model, twin):

            def closure(each: nn.Module = each) -> float:
                assert [tuple(p.shape) for p in each.parameters()] == [(), (7, 5), (7,)]
                return 0.0

            Momentum(each.parameters()).step(closure)
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    with_sharded(body)


def test_after_a_step_that_raised_a_forward_brings_the_wholes_sizes_back() -> None:
    class Fails(Momentum):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError

    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        with pytest.raises(ZeroDivisionError):
            Fails(model.parameters()).step()
        model(torch.ones(2, 5))
        assert [p.shape for p in model.parameters()] == [p.shape for p in twin.parameters()]

    with_sharded(body)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: torch.zeros(p.shape).lerp_(p, 0.1),
        lambda p: torch.empty(p.shape).copy_(p),
        lambda p: p.add_(torch.randn(p.shape)),
        lambda p: p.data.copy_(torch.zeros(p.size())),
        lambda p: torch.zeros(p.shape).__setitem__(..., p),
        lambda p: setattr(p, "data", torch.zeros(p.shape)),
        lambda p: setattr(p, "grad", torch.zeros(p.shape)),
        lambda p: setattr(p.grad, "data", torch.zeros(p.shape)),
        lambda p: p.new_zeros(p.shape) + p,
        lambda p: MomentumFromTheStart([p]).step(),
    ],
)
def test_rows_do_not_meet_a_tensor_made_by_the_wholes_shape(
    use: Callable[[Any], object],
) -> None:
    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        for p in model.parameters():
            if p is model.scale or local(p).numel() == p.numel():
                continue  # a number may meet any rows, and the whole may be here
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"rows|outside of the forward"):
                use(p)

    with_sharded(body)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_what_computes_with_rows_is_not_compiled(granularity: str) -> None:
    """It sees nothing of what a step's hooks make of them: a number that one rank has came out wrong."""

    def body(model: Scaled, engine: Engine, twin: Scaled) -> None:
        step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False).step
        for compiled in (step, lambda: model.linear.weight.detach() * 2):
            with pytest.raises(RuntimeError, match="compile the model or its blocks, and call"):
                torch.compile(compiled, backend="eager")()

    with_sharded(body, granularity=granularity)
