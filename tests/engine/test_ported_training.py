"""What PyTorch states of FSDP2's training, but for what the other ported files state; see docs/fsdp2_cases.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, ShardedParameter, fully_shard
from support.parity import MLP, STRATEGIES, assert_same_params, numbers, tokens, train_alike
from support.thread_ranks import run_threads
from support.transformer import VOCABULARY, Transformer
from support.twins import twins, values

# Inputs.


class ParameterOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> torch.Tensor:
        return self.weight @ self.weight


class Paramless(nn.Module):
    def forward(self, x: torch.Tensor, ys: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x + sum(ys)


def test_a_forward_without_inputs_trains() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(ParameterOnly)
        train_alike(comm, fully_shard(model, comm), model, plain, lambda rank, index: ())

    run_threads(body, 2)


def test_a_model_without_parameters_computes() -> None:
    def body(comm: Communicator) -> None:
        fully_shard(model := Paramless(), comm)
        x = values(3)
        assert torch.equal(model(x, (x, x)), 3 * x)

    run_threads(body, 2)


# What parameters are between the parts of a step.


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_parameters_are_rows_of_the_same_values_before_and_after_each_part_of_a_step(
    strategy: str, nested: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(MLP(3), MLP(3)))
        units = [model[0].up, model[0].down] if nested else []  # type: ignore[index]
        fully_shard(model, comm, units=units, strategy=strategy)

        def check() -> None:
            assert all(isinstance(param, ShardedParameter) for param in model.parameters())
            assert_same_params(model, plain)

        check()
        with torch.no_grad():
            model(values(2, 3))
        check()
        loss = model(values(2, 3)).sum()
        check()
        loss.backward()
        check()

    run_threads(body, 4)


# Parameters that are left out.


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ignored = nn.Linear(8, 8), nn.Linear(8, 8)
        self.subtrahend = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.ignored(x)) - self.subtrahend
        return out


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.addend = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.addend
        return out


@pytest.mark.covers("ignored parameters")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_are_ignored_are_averaged_by_their_owner(strategy: str) -> None:
    """As DDP around FSDP2 does; here by a hook of the caller's."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Outer)
        ignored = list(model.inner.ignored.parameters())  # type: ignore[union-attr]
        units: Any = [model.inner]
        engine = fully_shard(model, comm, units=units, ignored_params=ignored, strategy=strategy)
        for param in ignored:
            assert type(param) is nn.Parameter
            param.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad, "avg"))
        train_alike(comm, engine, model, plain, numbers(4, 8))

    run_threads(body, 2)


# Other methods than forward.


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel_size=4, stride=4)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.patches(images).flatten(2).transpose(1, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images).sum(1)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = Vision(), nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.projector(self.vision.features(images))
        return out


@pytest.mark.covers("forward methods")
def test_a_units_other_method_is_registered() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Projected)
        engine = fully_shard(model, comm, units=[Vision, nn.Linear])
        engine.register_forward_method(model.vision, "features")  # type: ignore[arg-type]
        train_alike(comm, engine, model, plain, numbers(2, 3, 8, 8))

    run_threads(body, 2)


# What is gathered and reduced, and when.


@pytest.mark.parametrize(
    ("strategy", "gathers_in_backward"),
    [("full_shard", True), ("shard_grad_op", False), ("no_shard", False)],
)
def test_bytes_of_a_step(strategy: str, gathers_in_backward: bool) -> None:
    """A gather a unit in forward, one in backward for those that were released, and a reduce a unit."""

    def body(comm: Communicator) -> None:
        model, _ = twins(Transformer)
        engine = fully_shard(model, comm, strategy=strategy, granularity="element")
        traffic = engine.traffic
        model(*tokens(VOCABULARY, 2, 6)(0, 0)).sum().backward()  # learns the order
        model.zero_grad()
        start = (traffic.gathered_bytes, traffic.reduced_bytes)
        loss = model(*tokens(VOCABULARY, 2, 6)(0, 0)).sum()
        forward = traffic.gathered_bytes - start[0]
        loss.backward()
        backward = traffic.gathered_bytes - start[0] - forward
        reduced = traffic.reduced_bytes - start[1]
        assert reduced > 0
        if strategy == "no_shard":
            assert forward == backward == 0
        else:
            assert forward > 0
            assert (backward > 0) == gathers_in_backward
            assert backward < forward  # the root, and the last unit, are kept

    run_threads(body, 2)


def test_a_unit_without_parameters_may_be_unsharded() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        engine = fully_shard(model, comm, units=nn.Linear)
        for unit in engine.units:  # the root has none
            unit.unshard()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        for unit in engine.units:
            unit.reshard()
        train_alike(comm, engine, model, plain, numbers(2, 4))

    run_threads(body, 2)
