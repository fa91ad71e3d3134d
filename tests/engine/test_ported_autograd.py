"""What PyTorch states of FSDP2 under autograd, stated of `fully_shard`; see docs/fsdp2_cases.md."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, fully_shard
from support.parity import MLP, STRATEGIES, assert_same_grads, loss_of, numbers, train_alike
from support.thread_ranks import run_threads
from support.twins import twins, values


class TwoOutputs(nn.Module):
    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(6, 6), nn.Linear(6, 6), both

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.relu(self.first(x))
        return first, torch.relu(self.second(x if self.both else first))


@pytest.mark.parametrize("units", [[], ["first"], ["first", "second"]])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_output_or_a_module_that_the_loss_does_not_use(strategy: str, units: list[str]) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: TwoOutputs(both=True))
        of: Any = [getattr(model, name) for name in units]
        engine = fully_shard(model, comm, units=of, strategy=strategy)
        for loss in (lambda out: (out[0] * out[1]).sum(), lambda out: out[0].sum()):
            train_alike(comm, engine, model, plain, numbers(2, 6), steps=2, loss=loss)

    run_threads(body, 3)


def test_backwards_of_one_output_after_the_other() -> None:
    """A forward's two branches, each with a backward of its own, over a trunk that both use."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), TwoOutputs(both=True))

    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        engine = fully_shard(model, comm, units=nn.Linear)
        for net in (model, plain):
            first, second = net(values(4, 6))
            with engine.no_sync():
                second.square().sum().backward(retain_graph=True)
            first.square().sum().backward()
        assert_same_grads(model, plain)

    run_threads(body, 2)


Pair = namedtuple("Pair", "x y")


class InContainer(nn.Module):
    """Takes and gives a container of a tensor."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.mlp, self.wrap, self.take = MLP(6), wrap, take

    def forward(self, inputs: Any) -> Any:
        return self.wrap(self.mlp(self.take(inputs)))


@pytest.mark.parametrize(
    ("wrap", "take"),
    [
        (lambda x: [x], lambda inputs: inputs[0]),
        (lambda x: Pair(x, torch.ones_like(x)), lambda inputs: inputs.x),
        (lambda x: (x,), lambda inputs: inputs[0]),
        (lambda x: {"x": x}, lambda inputs: inputs["x"]),
    ],
    ids=["list", "namedtuple", "tuple", "dict"],
)
def test_activations_in_containers(wrap: Callable[[Any], Any], take: Callable[[Any], Any]) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(*(InContainer(wrap, take) for _ in range(3))))
        engine = fully_shard(model, comm, units=InContainer)
        loss: Callable[[Any], torch.Tensor] = lambda out: loss_of(take(out))  # noqa: E731
        inputs = numbers(2, 6)
        train_alike(comm, engine, model, plain, lambda r, i: (wrap(*inputs(r, i)),), loss=loss)

    run_threads(body, 2)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(1, 1), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.used(x))


def test_a_module_in_a_unit_that_no_forward_uses_has_no_gradient() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(WithUnused(), WithUnused(), nn.Linear(6, 6)))
        engine = fully_shard(model, comm, units=WithUnused)
        train_alike(comm, engine, model, plain, numbers(2, 6))

    run_threads(body, 2)
