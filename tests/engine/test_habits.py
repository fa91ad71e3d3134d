"""What people do around a forward: they interrupt it, catch what it raises, call it from inside, convert, drop."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcomm
from shardcomm import Communicator, Engine, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, local, twins, values


def trained_alike(
    make: Callable[[], nn.Module],
    between: Callable[[nn.Module, Callable[[], None]], None],
    **options: Any,
) -> None:
    """Trains a sharded model and its plain twin for two steps, and calls `between` with each of them in between."""

    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        engine = fully_shard(model, comm, **options)
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

            def step(net: nn.Module = net, optimizer: Any = optimizer) -> None:
                net(values(4, WIDTH)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            between(net, step)
            step()
        full = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(full[name], value)
        engine.close()

    run_threads(body, 2)


class Failure(Exception):
    pass


def fail_once(net: nn.Module, error: type[BaseException]) -> None:
    """An `error` in the second block's forward, with gradients of a backward before it."""
    net(values(4, WIDTH, seed=2)).sum().backward()
    hook = net.blocks[1].linear.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        net(values(4, WIDTH, seed=3))
    hook.remove()


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_after_a_forward_that_was_interrupted_the_model_shows_rows(
    error: type[BaseException], strategy: str
) -> None:
    def between(net: nn.Module, _step: object) -> None:
        rows = list(net.parameters())
        fail_once(net, error)
        assert all(map(operator.is_, net.parameters(), rows))
        net.zero_grad()  # of the rows; else the next backward would add to their gradients

    trained_alike(Chain, between, strategy=strategy)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
def test_a_unit_called_alone_after_an_interruption_has_the_values_of_now(
    error: type[BaseException],
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        fully_shard(model, comm)
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            fail_once(net, error)
            optimizer.step()
        with torch.no_grad():
            for block, twin in zip(model.blocks, plain.blocks, strict=True):
                torch.testing.assert_close(block(values(2, WIDTH)), twin(values(2, WIDTH)))

    run_threads(body, 2)


class Greedy(nn.Module):
    """Raises where it is given more than two rows, as if memory ran out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError
        return y


class Retrying(Chain):
    def __init__(self) -> None:
        super().__init__(Greedy, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            try:
                x = block(x)
            except torch.OutOfMemoryError:
                x = torch.cat([block(half) for half in x.split(2)])
        return x


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_model_may_catch_what_its_blocks_raise_and_call_them_again(strategy: str) -> None:
    trained_alike(Retrying, lambda _net, step: step(), strategy=strategy)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, depth - 1) if depth else x


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("root", [False, True], ids=["unit", "model"])
def test_a_module_may_call_itself(root: bool) -> None:
    make: Callable[[], nn.Module] = Recursive if root else lambda: Chain(Recursive, 3)
    trained_alike(make, lambda _net, step: step())


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.tanh(self.a(x))))


class Recomputed(Chain):
    def __init__(self) -> None:
        super().__init__(TwoLayers, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.covers("exceptions", "activation checkpointing")
def test_after_a_recomputation_that_raised_the_model_shows_rows() -> None:
    def between(net: nn.Module, _step: object) -> None:
        net(values(4, WIDTH, seed=2)).sum().backward()
        loss = net(values(4, WIDTH, seed=3)).sum()
        module = net.blocks[1].a
        hook = module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Failure()))
        with pytest.raises(Failure):
            loss.backward()
        hook.remove()
        net.zero_grad()

    trained_alike(Recomputed, between, units=nn.Linear)


def test_conversions_that_change_nothing_may_come_between_forward_and_backward() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        other, _ = twins(Chain)
        engine = fully_shard(model, comm)
        fully_shard(other, comm)
        for net in (model, plain):
            loss = net(values(4, WIDTH)).square().sum()
            net.float()
            net.to("cpu")
            net.requires_grad_()
            for each in (other, net):
                for param in each.parameters():
                    param.requires_grad_(True)
            other.float()
            loss.backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("first", ["backward", "no grad"])
def test_several_forwards_in_one_autocast(first: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            # The cache of casts keeps, of a plain model as well, casts that were made without gradients.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=net is model):
                with torch.set_grad_enabled(first == "backward"):
                    loss = net(values(4, WIDTH)).float().square().sum()
                if first == "backward":
                    loss.backward()
                net(values(4, WIDTH, seed=2)).float().square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 1)


@pytest.mark.parametrize("granularity", ["row", "element", "tensor"])
@pytest.mark.parametrize(
    "init", [nn.init.normal_, nn.init.uniform_, nn.init.orthogonal_, nn.init.kaiming_uniform_]
)
def test_rows_are_not_initialised_by_themselves(
    init: Callable[[torch.Tensor], object], granularity: Any
) -> None:
    """Ranks whose generators have one seed would draw the same for other rows."""

    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        fully_shard(model, comm, granularity=granularity)
        # Of no rows, `orthogonal_` itself divides by their number.
        has_rows = local(model[0].weight).numel() > 0
        with pytest.raises(RuntimeError if has_rows else (RuntimeError, ZeroDivisionError)) as said:
            init(model[0].weight)
        assert not has_rows or "gathered" in str(said.value)

    run_threads(body, 2)


def test_parameters_of_one_memory_are_refused() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[1].weight.data = model[0].weight.data
        with pytest.raises(ValueError, match=r"'0.weight' and parameter '1.weight' have the same"):
            fully_shard(model, comm)
        fully_shard(model, comm, ignored_params=[model[1].weight])

    run_threads(body, 2)


class View(nn.Module):
    """A layer, and a view of its weight beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind == "parameter":
            self.beside = nn.Parameter(self.linear.weight.t())
        else:
            self.register_buffer("beside", self.linear.weight.data[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.beside


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_view_of_a_parameter_is_refused(kind: str, strategy: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=rf"{kind} 'beside' .*have the same"):
            fully_shard(View(kind), comm, strategy=strategy)

    run_threads(body, 2)


class OneStorage(nn.Module):
    """Parameters and buffers in two storages, apart from each other: one after the other, and column by column."""

    def __init__(self) -> None:
        super().__init__()
        flat, columns = torch.randn(2 * WIDTH * WIDTH), torch.randn(WIDTH, 2 * WIDTH)
        self.a = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        self.b = nn.Parameter(flat[WIDTH * WIDTH :].view(WIDTH, WIDTH))
        self.c, self.d = map(nn.Parameter, columns.split(WIDTH, dim=1))
        self.register_buffer("mask", torch.ones(WIDTH))
        self.register_buffer("rest", self.mask[WIDTH // 2 :])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.a @ self.b @ self.c @ self.d) * self.mask


def test_parameters_apart_in_one_storage_are_trained() -> None:
    trained_alike(OneStorage, lambda _net, step: step())


def test_a_scripted_module_is_refused() -> None:
    (comm,) = Communicator.local_group(1)
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), torch.jit.script(nn.Tanh()))
    with pytest.raises(ValueError, match=r"'0' is compiled by TorchScript.*before torch.jit.scrip"):
        fully_shard(model, comm)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("before", [False, True])
def test_parameters_frozen_or_thawed_between_forward_and_backward(
    before: bool, strategy: str
) -> None:
    """Autograd leaves no gradient in a leaf that is frozen by then, and none in one that forward took for frozen."""

    def between(net: nn.Module, step: Callable[[], None]) -> None:
        net.blocks[1].requires_grad_(not before)
        net.stem.weight.requires_grad_(not before)
        loss = net(values(4, WIDTH)).square().sum()
        net.blocks[1].requires_grad_(before)
        net.stem.weight.requires_grad_(before)
        loss.backward()
        without = {name for name, param in net.named_parameters() if param.grad is None}
        assert without == {"stem.weight", "blocks.1.linear.weight", "blocks.1.linear.bias"}
        net.requires_grad_()

    trained_alike(Chain, between, strategy=strategy)


def test_a_block_that_is_inserted_later_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model = Chain()
        fully_shard(model, comm)
        model.blocks.insert(0, nn.Linear(WIDTH, WIDTH))
        with pytest.raises(RuntimeError, match="a Linear is put into a model after fully_shard"):
            model(values(2, WIDTH))

    run_threads(body, 2)


def dropped(comm: Communicator, use: Callable[[nn.Module, Engine], object]) -> list[Any]:
    """Weak references to a model that was used and not closed, and to its engine."""
    model = Chain()
    engine = fully_shard(model, comm)
    optimizer = shardcomm.AdamW(model.parameters())
    use(model, engine)
    optimizer.step()
    return [weakref.ref(model), weakref.ref(engine)]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, _: model(values(2, WIDTH)).sum().backward(),
        lambda model, _: model(values(2, WIDTH).requires_grad_()).sum().backward(),
        lambda _, engine: engine.full_state_dict(),
        lambda model, engine: engine.unit(model.blocks[0]).unshard(),
    ],
    ids=["training", "inputs with gradients", "state dict", "unshard"],
)
def test_a_model_that_is_dropped_is_freed(use: Callable[[nn.Module, Engine], object]) -> None:
    def body(comm: Communicator) -> None:
        references = dropped(comm, use)
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    run_threads(body, 1)


def test_what_is_no_list_of_modules_is_told_in_a_line() -> None:
    (comm,) = Communicator.local_group(1)
    with pytest.raises(TypeError, match=r"units is a Linear; it must be") as told:
        fully_shard(Chain(), comm, units=nn.Linear(2, 2))  # type: ignore[arg-type]
    assert "\n" not in str(told.value)
    with pytest.raises(TypeError, match=r"comm is a NoneType; it must be a shardcomm.Communicator"):
        fully_shard(Chain(), None)  # type: ignore[arg-type]
