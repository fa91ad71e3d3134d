"""What models do beside the usual, against plain autograd: every rank has the same batch, so the mean is one rank's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from thread_ranks import run_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, MixedPrecision, fully_shard
from shardcomm.engine import Engine

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """A root with parameters around `layers` units; `between` is called after each of them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda i, x: x
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = self.between(i, block(x))
        return x


_generator = threading.Lock()  # thread ranks share torch's random generator


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """One to shard and its plain twin; the same on every rank."""
    with _generator, torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    return model, copy.deepcopy(model)


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def full_gradients(engine: Engine, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """By writing the gradients where the parameters are, and reading those back."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    state = engine.full_state_dict()
    return {name: None if grad is None else state[name] for name, grad in grads.items()}


def assert_same_gradients(engine: Engine, model: nn.Module, plain: nn.Module) -> None:
    got = full_gradients(engine, model)
    for name, param in plain.named_parameters():
        if param.grad is None:
            assert got[name] is None, name
        else:
            grad = got[name]
            assert grad is not None, name
            torch.testing.assert_close(grad, param.grad, msg=name)


@dataclass(frozen=True)
class Hidden:
    state: torch.Tensor
    note: str = ""


class InDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Hidden) -> Hidden:
        return Hidden(torch.tanh(self.second(torch.tanh(self.first(x.state)))), note="out")


class DataclassChain(Chain):
    def __init__(self) -> None:
        super().__init__(InDataclass)

    def forward(self, x: torch.Tensor) -> Hidden:
        hidden = Hidden(self.stem(x))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("ranks", [1, 2])
def test_dataclasses_are_opened(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(DataclassChain)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).state.square().sum().backward()
        # Each was reduced in turn, as soon as backward had left it.
        assert all(unit.pending_calls == 0 for unit in engine.units)
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


class Opaque:
    """What no pytree opens."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state


class InOpaque(Block):
    def forward(self, x: torch.Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class OpaqueChain(Chain):
    def __init__(self) -> None:
        super().__init__(InOpaque)

    def forward(self, x: torch.Tensor) -> Opaque:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).state
        return Opaque(x)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_opaque_output_raises_or_trains_but_never_loses_gradients(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(OpaqueChain)
        engine = fully_shard(model, comm, strategy=strategy)
        loss = model(values(3, WIDTH)).state.square().sum()
        if strategy == "full_shard":  # its slots are overwritten
            with pytest.raises(TypeError, match=r"unit 'blocks.3' .* returned Opaque"):
                loss.backward()
            return
        loss.backward()
        plain(values(3, WIDTH)).state.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_opaque_output_of_the_model_alone_loses_no_gradients() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(InOpaque)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).state.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Position() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = [table(len(x)) for table in self.tables]
        return sum((x * 10**i * table for i, table in enumerate(tables)), x)


def test_view_of_a_parameter_outlives_its_slot() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Positions)
        engine = fully_shard(model, comm)
        x = values(3, WIDTH)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        for net in (model, plain):
            net(x).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x += super().forward(x.clone())
        return x


class Residual(Chain):
    """The caller goes on with what a block has changed in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.sin(block(x))
        return x


@pytest.mark.parametrize("make", [Chain, Residual])
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_place_on_an_input_is_as_without_sharding(make: type[Chain], ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: make(InPlace))
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


def test_in_place_relu_as_first_module() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(
            lambda: Chain(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
        )
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_in_place_on_a_leaf_raises_as_without_sharding() -> None:
    model, plain = twins(InPlace)
    fully_shard(model, Communicator.local_group(1)[0])
    for net in (plain, model):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            net(values(3, WIDTH).requires_grad_())


class Checkpointed(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_recomputed_units_keep_no_inputs() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Checkpointed)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert not any(unit.marked for unit in engine.units)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


# Exceptions.


class Failure(Exception):
    pass


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise Failure


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


def failing_forward(model: nn.Module, *, at: int) -> None:
    """Of a unit: its parameters are shown in full when it raises."""

    def fail(*_: object) -> None:
        raise Failure

    hook = model.blocks[at].linear.register_forward_hook(fail)
    with pytest.raises(Failure):
        model(values(3, WIDTH))
    hook.remove()


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
        engine.close()
        assert sum(p.numel() for u in engine.units for p in u.module.parameters(recurse=False)) <= (
            sum(p.numel() for p in plain.parameters())
        )
        for unit in engine.units:
            for param in unit.params:
                assert all(m._parameters[a] is param.shard for m, a in param.owned.places)

    run_threads(body, ranks)


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


# Steps that deviate.


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("train", [False, True])
def test_prefetches_that_nobody_waits_for_do_not_meet_other_collectives(
    prefetch: int, train: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(lambda: nn.Linear(WIDTH, WIDTH), layers=5))
        engine = fully_shard(model, comm, prefetch=prefetch, slots=5)
        for i in range(8):
            model.skipped = set() if i % 2 else {2, 3, 4}
            if train:
                model(values(3, WIDTH)).sum().backward()
            else:
                with torch.no_grad():
                    model(values(3, WIDTH))
            assert not any(unit.gathers or unit.reduces for unit in engine.units)
            comm.barrier()
            state = engine.full_state_dict()
            assert torch.equal(state["stem.weight"], plain.stem.weight)

    run_threads(body, 2)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(sum(table(tokens) for table in self.tables))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_units_without_input_gradients_share_slots(slots: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Tables)
        engine = fully_shard(model, comm, slots=slots)
        for net in (model, plain):
            net(torch.arange(5)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_two_forwards_of_raw_inputs_with_one_backward(slots: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(*(Block() for _ in range(4))))
        engine = fully_shard(model, comm, units=Block, slots=slots)
        for _ in range(2):
            for net in (model, plain):
                distance = net(values(3, WIDTH)) - net(values(3, WIDTH, seed=2))
                distance.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def penalty(model: nn.Module) -> torch.Tensor:
    x = values(3, WIDTH).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_double_backward_equals_plain(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(Chain(), nn.Linear(WIDTH, WIDTH)))
        engine = fully_shard(model, comm, strategy=strategy, units=[*model[0].blocks, model[1]])
        for net in (model, plain):
            penalty(net).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_double_backward_with_shared_slots_says_what_to_use() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        with pytest.raises(RuntimeError, match=r"create_graph=True .* strategy='shard_grad_op'"):
            penalty(model)
        for net in (model, plain):
            net(values(3, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_unit_called_by_itself_computes_with_the_parameters_of_now() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        x = values(3, WIDTH)
        with torch.no_grad():
            for factor in (1, 2, 3):
                state = {name: factor * value for name, value in plain.state_dict().items()}
                engine.load_state_dict(state)
                scaled = copy.deepcopy(plain)
                scaled.load_state_dict(state)
                for _ in range(10):
                    assert torch.equal(model.blocks[3](x), scaled.blocks[3](x))
            assert len(engine._seen) == 0
            torch.set_grad_enabled(True)
            model(x)  # without a backward
            torch.set_grad_enabled(False)
            for net in (model, scaled):
                for param in net.parameters():
                    param.add_(1)
            assert torch.equal(model.blocks[3](x), scaled.blocks[3](x))

    run_threads(body, 2)


def test_plans_of_random_orders_are_bounded() -> None:
    model, _ = twins(lambda: Chain(layers=12))
    engine = fully_shard(model, Communicator.local_group(1)[0])
    for i in range(12):
        model.skipped = {i}
        model(values(3, WIDTH)).sum().backward()
    assert engine._program.cache_info().currsize <= 8


# What is in a model.


class Head(nn.Linear):
    """Has a parameter of its own beside the tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.empty(WIDTH))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            nn.init.constant_(self.scale, 3.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)  # has buffers only
        self.head = Head()
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens))) * self.head.scale


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_meta_parameters_and_buffers_are_materialised_once(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        with torch.device("meta"):
            model = Tied()
        engine = fully_shard(model, comm, units=[model.embed, model.head])
        assert model.embed.weight is model.head.weight
        for unit in engine.units:
            for bucket, params in unit.buckets:
                storage = bucket.shard.untyped_storage().data_ptr()
                assert all(p.shard.untyped_storage().data_ptr() == storage for p in params)
        assert model.head.scale.eq(3).all()
        assert model.norm.running_var.eq(1).all()

        plain = Tied()
        plain.load_state_dict(engine.full_state_dict())
        assert plain.embed.weight.std() > 0.7  # as nn.Embedding draws it, not nn.Linear
        for net in (model, plain):
            net(torch.arange(WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


def test_what_is_not_on_meta_keeps_its_values() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        weight = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH).float()
        model.weight = nn.Parameter(weight.clone())
        model.bias = nn.Parameter(torch.empty(WIDTH, device="meta"))
        state = fully_shard(model, comm).full_state_dict()
        assert torch.equal(state["weight"], weight)
        assert 0 < state["bias"].abs().max() < 1

    run_threads(body, 2)


class BufferOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.rope = nn.Identity()
        self.rope.register_buffer("inverse", torch.arange(2.0))


def test_meta_buffers_without_reset_parameters_are_named() -> None:
    with torch.device("meta"):
        model = BufferOnly()
    model.forward = model.linear.forward
    with pytest.raises(ValueError, match=r"Identity 'rope' has inverse on the meta device"):
        fully_shard(model, Communicator.local_group(1)[0])
    assert model.linear.weight.is_meta


def test_embedding_with_max_norm_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(ValueError, match=r"Embedding '0' has max_norm=1.0"):
        fully_shard(model, Communicator.local_group(1)[0])


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"block": Block()}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["block"](x)
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_parameters_in_containers_are_trained(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Containers)
        engine = fully_shard(model, comm, strategy=strategy)
        model(values(3, WIDTH, seed=comm.rank)).square().sum().backward()
        (sum(plain(values(3, WIDTH, seed=r)).square().sum() for r in range(2)) / 2).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Quantised(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        weight = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 5
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x @ (self.weight.real if self.weight.is_complex() else self.weight).to(x.dtype)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.bool, torch.int16, torch.int64, torch.float8_e4m3fn, torch.complex64],
)
def test_frozen_parameters_of_any_dtype_are_moved_as_they_are(
    dtype: torch.dtype, half: torch.dtype | None
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Quantised(dtype))
        engine = fully_shard(model, comm, mixed_precision=MixedPrecision(half))
        out = model(values(3, WIDTH))
        if half is None:
            assert torch.equal(out, plain(values(3, WIDTH)))
        out.sum().backward()
        weight = engine.full_state_dict()["weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.view(torch.uint8), plain.weight.view(torch.uint8))

    run_threads(body, 2)


def test_float64_trains_as_it_is() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain().double())
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH).double()).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize(
    ("dtype", "precision", "message"),
    [
        (
            torch.complex64,
            None,
            "'weight' is torch.complex64, in which gradients cannot be reduced",
        ),
        (
            torch.float64,
            MixedPrecision(torch.bfloat16),
            "'weight' is torch.float64, which mixed_pr",
        ),
        (
            torch.float64,
            MixedPrecision(None, torch.float32),
            "'weight' is torch.float64, which mix",
        ),
    ],
)
def test_dtypes_that_cannot_be_converted_are_named(
    dtype: torch.dtype, precision: MixedPrecision | None, message: str
) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.detach().to(dtype))
    with pytest.raises(ValueError, match=message):
        fully_shard(model, Communicator.local_group(1)[0], mixed_precision=precision)


# Gradients that are not there yet, or not any more.


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_buckets_hold_no_gradients_until_they_are_thawed(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        for net in (model, plain):
            net.blocks[1].requires_grad_(False)
        engine = fully_shard(model, comm)
        frozen = engine.units[2]
        assert frozen.name == "blocks.1"
        assert engine.footprint().gradient_bytes == 0
        for net in (model, plain):
            net(values(3, WIDTH)).sum().backward()
        held = [bucket for unit in engine.units if unit is not frozen for bucket, _ in unit.buckets]
        assert engine.footprint().gradient_bytes == sum(bucket.shard.nbytes for bucket in held)

        for net in (model, plain):
            net.blocks[1].requires_grad_(True)
            net(values(3, WIDTH, seed=2)).sum().backward()
        held += [bucket for bucket, _ in frozen.buckets]
        assert engine.footprint().gradient_bytes == sum(bucket.shard.nbytes for bucket in held)
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_sync_sums_a_thousand_bf16_gradients_in_float32(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        engine = fully_shard(
            model, comm, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
        )
        ones = torch.ones(1, WIDTH)
        with engine.no_sync():
            for _ in range(999):
                model(ones).sum().backward()
        model(ones).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.eq(1000).all()

    run_threads(body, ranks)


def test_zero_grad_keeps_what_no_sync_summed() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        with engine.no_sync():
            model(values(3, WIDTH)).sum().backward()
        model.zero_grad()
        model(values(3, WIDTH, seed=2)).sum().backward()
        for seed in (1, 2):
            plain(values(3, WIDTH, seed=seed)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


# State dicts.


class Normed(nn.Module):
    """Has parameters, buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.history = ["made"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))

    def get_extra_state(self) -> list[str]:
        return self.history

    def set_extra_state(self, state: list[str]) -> None:
        self.history = state


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_state_dict_is_a_copy_of_parameters_and_buffers() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Normed)
        engine = fully_shard(model, comm)
        state = engine.full_state_dict()
        model(values(4, WIDTH))
        assert not torch.equal(model.norm.running_mean, plain.norm.running_mean)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        for name, value in plain.state_dict().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[name], value), name

    run_threads(body, 1)


@pytest.mark.parametrize("make", [Normed, Nested])
def test_extra_state_passes_both_ways(make: type[nn.Module]) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        owner = model if make is Normed else model.inner
        engine = fully_shard(model, comm)
        state = engine.full_state_dict()
        assert state.keys() == plain.state_dict().keys()
        plain.load_state_dict(state)
        name = next(name for name in state if name.endswith("_extra_state"))
        assert state[name] == ["made"]
        engine.load_state_dict({**state, name: ["loaded"]})
        assert owner.history == ["loaded"]

    run_threads(body, 2)


@pytest.mark.parametrize("wrong", ["norm.running_var", "norm.bias", "linear.weight"])
@pytest.mark.parametrize("value", [torch.zeros(3), [0.0]])
def test_refused_state_dict_changes_nothing(wrong: str, value: object) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Normed)
        engine = fully_shard(model, comm)
        state = {
            name: value + 1 if isinstance(value, torch.Tensor) else ["changed"]
            for name, value in plain.state_dict().items()
        }
        state[wrong] = value
        with pytest.raises(ValueError, match=f"{wrong} (has shape|is a list)"):
            engine.load_state_dict(state)
        after = engine.full_state_dict()
        for name, expected in plain.state_dict().items():
            if isinstance(expected, torch.Tensor):
                assert torch.equal(after[name], expected), name
            else:
                assert after[name] == expected

    run_threads(body, 2)
