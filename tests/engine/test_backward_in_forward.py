"""A backward inside of the model's forward, or of a unit's: forces, guidance, an inner loop of training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardcomm import Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import assert_same_gradients, twins, values

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x))


class Net(nn.Module):
    """Its own parameters are used before the inner backward, and after it."""

    def __init__(self, how: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.how = how

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def guided(net: Net, x: torch.Tensor) -> torch.Tensor:
    at = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(net.run(at).sum(), at)
    return net.run(x + force)


def of_a_part(net: Net, x: torch.Tensor) -> torch.Tensor:
    at = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(net.blocks[0](at).sum(), at)
    return net.run(x + force)


def inner_loss(net: Net, x: torch.Tensor) -> torch.Tensor:
    at = x.detach().requires_grad_()
    net.run(at).square().sum().backward()
    assert at.grad is not None
    return net.run(x + at.grad)


def forces(net: Net, x: torch.Tensor) -> torch.Tensor:
    at = x.detach().requires_grad_()
    energy = net.run(at)
    (force,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
    return energy + force


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(
    "how",
    [guided, of_a_part, inner_loss, forces],
    ids=lambda function: function.__name__,
)
def test_the_forward_goes_on_after_a_backward_inside_of_it(
    how: Callable[[Net, torch.Tensor], torch.Tensor], strategy: str
) -> None:
    if how is forces and strategy == "full_shard":
        pytest.skip("full_shard refuses create_graph=True")

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Net(how))
        engine = fully_shard(model, comm, units=Block, strategy=strategy)
        for net in (model, plain):
            for _ in range(2):
                net(values(3, WIDTH)).square().sum().backward()
                assert all(unit.forward.thread is None for unit in engine.units)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.sin(self.linear(at)).sum(), at)
        return self.linear(x + force)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_units_forward_goes_on_too(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(Inner(), Inner(), Inner()))
        engine = fully_shard(model, comm, units=Inner, strategy=strategy)
        for net in (model, plain):
            for _ in range(2):
                net(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_it_goes_on_after_one_that_failed() -> None:
    def fail(_grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    def failing(net: Net, x: torch.Tensor) -> torch.Tensor:
        hooked = net.blocks[0](net.stem(x))
        hooked.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            net.blocks[1](hooked).sum().backward()
        return guided(net, x)

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Net(failing))
        engine = fully_shard(model, comm, units=Block)
        for net in (model, plain):
            out = net(values(3, WIDTH))
            net.zero_grad()
            out.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_units_that_are_called_after_a_step_inside_of_the_forward_have_its_values(
    strategy: str,
) -> None:
    def stepping(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.blocks[1](net.blocks[0](x)).square().sum().backward()
        torch.optim.SGD(net.blocks.parameters(), lr=0.1).step()
        return net.blocks[1](net.blocks[0](x))

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Net(stepping))
        fully_shard(model, comm, units=Block, strategy=strategy)
        torch.testing.assert_close(model(values(3, WIDTH)), plain(values(3, WIDTH)))

    run_threads(body, 2)


def test_a_step_of_parameters_with_which_a_forward_computes_is_refused() -> None:
    def stepping(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.run(x).square().sum().backward()
        optimizers[net].step()
        return net.run(x)

    optimizers: dict[Net, torch.optim.Optimizer] = {}

    def body(comm: Communicator) -> None:
        model = Net(stepping)
        fully_shard(model, comm, units=Block)
        optimizers[model] = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            RuntimeError, match=r"'\(root\)': inside of it its parameters were chan"
        ):
            model(values(3, WIDTH))

    run_threads(body, 2)
