"""What people do around a forward: they interrupt it, catch what it raises, call it from inside, convert, drop."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import shardcomm
from shardcomm import Communicator, Engine, fully_shard, launch
from support.gates import until
from support.parity import assert_same_params
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
        fail_once(net, error)
        net.zero_grad()  # of the rows; else the next backward would add to their gradients

    trained_alike(Chain, between, strategy=strategy)


class Encoder(Chain):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


@pytest.mark.covers("exceptions")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_forward_beside_one_in_another_thread_is_refused(strategy: str, method: str) -> None:
    """Else both compute with the same full parameters, which the one that ends first gives away."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Encoder)
        engine = fully_shard(model, comm, strategy=strategy)
        engine.register_forward_method(model, "encode")
        call = model if method == "forward" else model.encode

        def beside(_number: int, x: torch.Tensor) -> torch.Tensor:
            model.between = alone  # for the other thread's forward, should there be one
            with ThreadPoolExecutor(1) as other:
                for each in (model, model.encode):
                    with pytest.raises(RuntimeError, match=r"'\(root\)' while another thread runs"):
                        other.submit(each, values(4, WIDTH)).result()
            return x

        alone = model.between
        for between in (beside, alone):
            model.between = between
            model.zero_grad()
            call(values(4, WIDTH)).sum().backward()
        plain(values(4, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)
        with ThreadPoolExecutor(1) as other, torch.no_grad():  # one after the other
            given = other.submit(call, values(4, WIDTH)).result()
        assert given.isfinite().all()
        engine.close()

    run_threads(body, 2)


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_forward_that_still_gathers_is_not_joined_by_another_thread(method: str) -> None:
    refused = threading.Event()

    def body(comm: Communicator) -> None:
        model, _ = twins(Encoder)
        engine = fully_shard(model, comm)
        engine.register_forward_method(model, "encode")
        call = model if method == "forward" else model.encode
        if comm.rank == 0:
            with ThreadPoolExecutor(1) as other:
                first = other.submit(call, values(4, WIDTH))
                until(lambda: any(p.call for p in comm.pending() if p.rank == 0), "rank 0 gathers")
                for each in (model, model.encode, model.blocks[0]):
                    with pytest.raises(RuntimeError, match="while another thread runs one"):
                        each(values(4, WIDTH))
                refused.set()
                first.result()
        else:
            assert refused.wait(60)
            call(values(4, WIDTH))
        engine.close()

    run_threads(body, 2)


def test_autograds_threads_recompute_inside_of_a_forward() -> None:
    """As on a GPU, where autograd has threads of its own."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def energy(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            energy = checkpoint(self.energy, x, use_reentrant=False)
            with ThreadPoolExecutor(1) as autograds:
                (forces,) = autograds.submit(torch.autograd.grad, energy, x).result()
            return forces

    def body(comm: Communicator) -> None:
        model, plain = twins(Forces)
        engine = fully_shard(model, comm)
        engine.register_forward_method(model, "energy")
        x = values(4, WIDTH).requires_grad_()
        torch.testing.assert_close(model(x), plain(x))
        engine.close()

    run_threads(body, 2)


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


@pytest.mark.slow
def test_a_model_may_be_compiled_afterwards() -> None:
    """Each unit's forward is compiled by itself, and nothing of the engine."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        torch._dynamo.reset()
        counted = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counted)
        for _ in range(2):
            model.zero_grad()
            compiled(values(4, WIDTH)).sum().backward()
        plain(values(4, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)
        computes = {"linear", "tanh"}
        for graph in counted.graphs:
            calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
            assert {getattr(node.target, "__name__", node.target) for node in calls} <= computes

    run_threads(body, 1)


@pytest.mark.slow
def test_one_graph_of_all_units_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(
            Unsupported, match=r"block.compile\(fullgraph=True\) before fully_shard"
        ):
            compiled(values(4, WIDTH))
        engine.close()

    run_threads(body, 1)


@pytest.mark.slow
def test_a_gathered_model_is_one_graph_if_its_root_has_no_parameters_either() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        engine = fully_shard(model, comm, units=nn.Linear)
        torch._dynamo.reset()
        with engine.gathered(), torch.no_grad():
            x = values(4, WIDTH)
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), model(x))
        engine.close()

    run_threads(body, 1)


@pytest.mark.slow
def test_graphs_end_at_a_registered_method() -> None:
    """Else Dynamo traces the engine, too, and warns of what it does not know."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Encoder)
        engine = fully_shard(model, comm)
        engine.register_forward_method(model, "encode")
        torch._dynamo.reset()
        x = values(4, WIDTH)
        with warnings.catch_warnings(record=True) as warned:
            got = torch.compile(lambda x: 2 * model.encode(x), backend="eager")(x)
        assert not [str(each.message) for each in warned if "Dynamo" in str(each.message)]
        torch.testing.assert_close(got, 2 * plain(x))
        got.sum().backward()
        (2 * plain(x)).sum().backward()
        assert_same_gradients(engine, model, plain)
        engine.close()

    run_threads(body, 1)


@pytest.mark.slow
def test_blocks_that_are_compiled_to_one_graph_each_train() -> None:
    def compiled() -> Chain:
        model = Chain()
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        return model

    def body(comm: Communicator) -> None:
        torch._dynamo.reset()
        model, plain = compiled(), Chain()
        plain.load_state_dict(model.state_dict())
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(4, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)
        engine.close()

    run_threads(body, 1)


def train_by_a_compiled_function() -> None:
    with Communicator.from_env() as comm:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

            @torch.compile(backend="eager")
            def backward(x: torch.Tensor, net: nn.Module = net) -> None:
                net(x).square().sum().backward()

            for seed in range(2):
                backward(values(4, WIDTH, seed=seed))
                optimizer.step()
                optimizer.zero_grad()
        assert_same_params(model, plain)
        engine.close()


@pytest.mark.slow
def test_a_function_with_forward_and_backward_may_be_compiled() -> None:
    launch(train_by_a_compiled_function, 2, timeout_s=120)


def test_what_is_no_list_of_modules_is_told_in_a_line() -> None:
    (comm,) = Communicator.local_group(1)
    with pytest.raises(TypeError, match=r"units is a Linear; it must be") as told:
        fully_shard(Chain(), comm, units=nn.Linear(2, 2))  # type: ignore[arg-type]
    assert "\n" not in str(told.value)
    with pytest.raises(TypeError, match=r"comm is a NoneType; it must be a shardcomm.Communicator"):
        fully_shard(Chain(), None)  # type: ignore[arg-type]
