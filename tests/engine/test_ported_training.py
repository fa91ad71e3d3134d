"""What PyTorch states of FSDP2's training, stated of `fully_shard`; docs/fsdp2_cases.md tells which test is which."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, Engine, Mesh, ShardedParameter, fully_shard
from support.parity import (
    MLP,
    STRATEGIES,
    MLPs,
    assert_same_grads,
    assert_same_params,
    loss_of,
    numbers,
    tokens,
    train_alike,
    whole,
)
from support.thread_ranks import run_mesh, run_threads
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


# Parity with data parallel.


@pytest.mark.covers("shard_dim", "training parity")
@pytest.mark.parametrize("dim", [0, "largest", "auto"])
@pytest.mark.parametrize("shapes", [((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8))])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_one_unit_on_any_dim(
    ranks: int, shapes: tuple[tuple[int, int], ...], dim: Literal[0, "largest", "auto"]
) -> None:
    def largest(name: str, param: nn.Parameter) -> int:
        return param.shape.index(max(param.shape))

    def body(comm: Communicator) -> None:
        model, plain = twins(
            lambda: nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1]))
        )
        shard_dim = largest if dim == "largest" else dim
        engine = fully_shard(model, comm, shard_dim=shard_dim)
        train_alike(comm, engine, model, plain, numbers(4, shapes[0][0]))
        if ranks == 1:
            assert engine.traffic.gathered_bytes == engine.traffic.reduced_bytes == 0

    run_threads(body, ranks)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of k has no gradient but noise
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(width), "b": nn.LayerNorm(width)})
        self.attention = Attention(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms["a"](x))
        return x + self.mlp(self.norms["b"](x))


VOCABULARY = 13


class Transformer(nn.Module):
    """`recompute`: by which of torch's ways its blocks are."""

    def __init__(self, recompute: str = "", layers: int = 3, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(TransformerBlock(8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight
        for i, layer in enumerate(self.layers):
            if recompute == "wrapper":
                self.layers[i] = checkpoint_wrapper(layer)
            elif recompute == "composable":
                composable_checkpoint(layer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            again = self.recompute == "utils"
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@pytest.mark.covers("prefetch and slots", "training parity")
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("prefetch", [(0, 0), (1, 1), (2, 2), (2, 0)])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_several_units_with_any_prefetch(
    strategy: str, prefetch: tuple[int, int], cpu_offload: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Transformer)
        engine = fully_shard(
            model,
            comm,
            strategy=strategy,
            prefetch=prefetch[0],
            backward_prefetch=prefetch[1],
            cpu_offload=cpu_offload,
        )
        train_alike(comm, engine, model, plain, tokens(VOCABULARY, 3, 6))

    run_threads(body, 2)


def kinds_of_units(model: Any, kind: str) -> list[nn.Module]:
    layers = list(model.layers)
    inner = [getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers]
    return {
        "blocks": layers,
        "blocks and ends": [*layers, model.embed, model.norm, model.head],
        "nested": [*layers, *(layer.attention for layer in inner), *(b.mlp for b in inner)],
    }[kind]


@pytest.mark.covers("activation checkpointing")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["blocks", "blocks and ends", "nested"])
@pytest.mark.parametrize("recompute", ["composable", "utils", "wrapper"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_activation_checkpointing(strategy: str, recompute: str, kind: str, tied: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Transformer(recompute, tied=tied))
        engine = fully_shard(model, comm, units=kinds_of_units(model, kind), strategy=strategy)
        train_alike(comm, engine, model, plain, tokens(VOCABULARY, 3, 6))

    run_threads(body, 2)


def test_a_unit_trains_by_itself_after_the_model() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: MLPs(6))
        engine = fully_shard(model, comm, units=MLP)
        train_alike(comm, engine, model, plain, numbers(8, 6), steps=1)
        train_alike(comm, engine, model[1], plain[1], numbers(8, 6), steps=2)  # type: ignore[index]
        train_alike(comm, engine, model, plain, numbers(8, 6), steps=1)

    run_threads(body, 2)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x) + torch.tanh(self.inner(x)))
        return out


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_a_forward_uses_twice(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(UsedTwice)
        engine = fully_shard(model, comm, units=[model.inner], strategy=strategy)  # type: ignore[list-item]
        train_alike(comm, engine, model, plain, numbers(32, 4))

    run_threads(body, 2)


# A head that is called by itself, chunk by chunk, after a forward without it.


class ChunkedHead(nn.Module):
    def __init__(self, *, recompute: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if recompute:
            composable_checkpoint(self.body)

    def forward(self, ids: torch.Tensor, *, with_head: bool = True) -> torch.Tensor:
        x: torch.Tensor = self.norm(self.body(self.embed(ids)))
        return self.head(x) if with_head else x

    def chunked(self, ids: torch.Tensor, scale: float = 1.0) -> None:
        """Backward of the model's mean square, in which at most one chunk of the head's output exists."""
        hidden = self(ids, with_head=False)
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(3, dim=1)]
        for chunk in chunks:
            (scale * self.head(chunk).square().sum()).backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks], dim=1))  # type: ignore[misc]


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_head_called_by_itself_in_chunks(strategy: str, recompute: bool, micro: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: ChunkedHead(recompute=recompute))
        parts: Any = [model.embed, model.body, model.norm, model.head]
        engine = fully_shard(model, comm, units=parts, strategy=strategy)
        batch = tokens(VOCABULARY, 2, 6)
        optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (model, plain)]
        for step in range(2):
            for index in range(step * micro, (step + 1) * micro):
                if index == (step + 1) * micro - 1:
                    model.chunked(*batch(comm.rank, index))  # type: ignore[operator]
                else:
                    with engine.no_sync():
                        model.chunked(*batch(comm.rank, index))  # type: ignore[operator]
                for rank in range(comm.size):
                    plain.chunked(*batch(rank, index), scale=1 / comm.size)  # type: ignore[operator]
            assert_same_grads(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, plain)

    run_threads(body, 2)


def test_a_head_whose_weight_is_the_roots_says_what_to_do_when_called_by_itself() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: ChunkedHead(tied=True))
        fully_shard(model, comm, units=[nn.Embedding, nn.Linear])
        with pytest.raises(
            RuntimeError, match=r"'embed\.weight': outside of the forward of unit '\(root\)'"
        ):
            model.chunked(*tokens(VOCABULARY, 2, 6)(0, 0))  # type: ignore[operator]

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_without_the_head_before_one_backward(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(ChunkedHead)
        parts: Any = [model.norm, model.head]
        fully_shard(model, comm, units=parts, strategy=strategy)
        batch = tokens(VOCABULARY, 2, 6)
        for net in (model, plain):
            first, second = (net(*batch(0, i), with_head=False) for i in range(2))
            (first.square().sum() + second.sum()).backward()
        assert model.head.weight.grad is None  # type: ignore[union-attr]
        assert_same_grads(model, plain)

    run_threads(body, 2)


class Raiser(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed:
            raise ArithmeticError("armed")
        out: torch.Tensor = self.inner(x)
        return out


@pytest.mark.covers("exceptions")
def test_the_step_after_a_forward_that_raised_is_right() -> None:
    def make() -> nn.Module:
        model = ChunkedHead()
        model.body = Raiser(model.body)  # type: ignore[assignment]
        return model

    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        parts: Any = [model.norm, model.head]
        engine = fully_shard(model, comm, units=parts)
        model.body.armed = True  # type: ignore[union-attr]
        with pytest.raises(ArithmeticError):
            model(*tokens(VOCABULARY, 2, 6)(0, 0))
        model.body.armed = False  # type: ignore[union-attr]
        train_alike(comm, engine, model, plain, tokens(VOCABULARY, 2, 6))

    run_threads(body, 2)


@pytest.mark.covers("activation checkpointing", "odd forwards")
@pytest.mark.parametrize("recompute", ["composable", "utils"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_two_forwards_of_nested_units_that_are_recomputed(
    strategy: str, recompute: str
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Transformer(recompute))
        fully_shard(model, comm, units=kinds_of_units(model, "nested"), strategy=strategy)
        batch = tokens(VOCABULARY, 2, 6)
        for net in (model, plain):
            chosen, rejected = (net(*batch(0, i)).sum() for i in range(2))
            (chosen - rejected).square().backward()
        assert_same_grads(model, plain)

    run_threads(body, 2)


# Shared parameters.


class TiedEnds(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(ids))
        return out


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_ends_of_a_number_of_rows_that_does_not_divide(strategy: str, apart: bool) -> None:
    """Also where either end is a unit: the weight belongs to the unit around both."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: TiedEnds(4 * comm.size + 1))
        units = [nn.Embedding, nn.Linear] if apart else []
        engine = fully_shard(model, comm, units=units, strategy=strategy)
        batch = tokens(4 * comm.size + 1, 2, 6)
        train_alike(comm, engine, model, plain, batch)

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


# Gradients that are accumulated.


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_over_micro_batches(strategy: str, cpu_offload: bool, no_sync: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: MLPs(6))
        engine = fully_shard(model, comm, units=MLP, strategy=strategy, cpu_offload=cpu_offload)
        batch = numbers(2, 6)
        before = engine.traffic.reduced_bytes
        train_alike(comm, engine, model, plain, batch, micro=3, no_sync=no_sync, steps=1)
        once = engine.traffic.reduced_bytes - before
        before = engine.traffic.reduced_bytes
        train_alike(comm, engine, model, plain, batch, steps=1)
        each = engine.traffic.reduced_bytes - before
        assert once == (each if no_sync else 3 * each)

    run_threads(body, 4)


@pytest.mark.covers("training parity", "activation checkpointing")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("width", [3, 16, 17])
def test_replicas_of_shards(width: int, no_sync: bool, cpu_offload: bool, recompute: bool) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.LayerNorm(width, bias=False), MLP(width, 3), MLP(width))
        if recompute:
            for module in model:
                composable_checkpoint(module)
        return model

    def body(mesh: Mesh) -> None:
        model, plain = twins(make)
        engine = fully_shard(
            model, mesh, units=MLP, strategy="hybrid_shard", cpu_offload=cpu_offload
        )
        batch = numbers(8, width)
        train_alike(mesh, engine, model, plain, batch, steps=2, micro=2, no_sync=no_sync)

    run_mesh(body, 2, 2)


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("unshard", [False, True])
def test_micro_batches_of_a_pipeline_stage(unshard: bool) -> None:
    """Gathered ahead by hand, and reduced once, at the last micro-batch."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Transformer)
        engine = fully_shard(model, comm, strategy="shard_grad_op")

        begun = set()

        def inputs(rank: int, index: int) -> tuple[torch.Tensor]:
            if unshard and index % 3 == 0 and index not in begun:
                begun.add(index)
                for unit in engine.units:
                    unit.unshard()
            return tokens(VOCABULARY, 2, 6)(rank, index)

        train_alike(comm, engine, model, plain, inputs, steps=2, micro=3, no_sync=True)

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


# Autograd.


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


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_divide_factor(ranks: int, factor: float) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(8, 4, bias=False)
        engine: Engine = fully_shard(model, comm)
        engine.set_gradient_divide_factor(factor)
        model(torch.ones(3, 8)).sum().backward()
        assert model.weight.grad is not None
        assert torch.equal(whole(model.weight.grad), torch.full((4, 8), 3 * ranks / factor))

    run_threads(body, ranks)
