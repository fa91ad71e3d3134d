"""The engine in the loops that people write beside plain training, each against the same loop on the plain model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, Engine, Mesh, fully_shard
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]
Loop = Callable[[nn.Module], None]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params), lr=0.1, momentum=0.5)


def assert_same_parameters(engine: Engine, plain: nn.Module) -> None:
    state = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


def train_both(make: Callable[[], nn.Module], loop: Loop, **options: object) -> None:
    """`loop` trains a sharded model and its plain twin alike."""

    def body(comm: Communicator) -> None:
        model, plain = twins(make)
        engine = fully_shard(model, comm, **options)  # type: ignore[arg-type]
        loop(model)
        loop(plain)
        assert_same_parameters(engine, plain)

    run_threads(body, 2)


# A frozen base with few trainable parameters beside it, in the same modules.


class Adapted(nn.Module):
    """A frozen matrix, and a trainable one of low rank added to it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedChain(Chain):
    """Nothing that comes before its units needs a gradient."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(Adapted)
        self.stem.requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_beside_a_frozen_base(strategy: str, recompute: bool) -> None:
    def loop(model: nn.Module) -> None:
        optimizer = sgd(param for param in model.parameters() if param.requires_grad)
        for step in range(3):
            model(values(3, WIDTH, seed=step)).square().sum().backward()
            assert all((p.grad is not None) is p.requires_grad for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    train_both(lambda: AdaptedChain(recompute), loop, strategy=strategy)


@pytest.mark.covers("frozen and tied parameters")
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_what_is_trained_has_gradients_and_is_reduced(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(AdaptedChain)
        engine = fully_shard(model, comm)
        model(values(3, WIDTH)).sum().backward()
        frozen = sum(p.nbytes for p in plain.parameters() if not p.requires_grad)
        footprint = engine.footprint()
        held = footprint.total_parameter_bytes + footprint.padding_bytes - frozen
        assert 0 < footprint.gradient_bytes <= held // comm.size
        assert engine.traffic.reduced_bytes <= held * (comm.size - 1) // comm.size

    run_threads(body, ranks)


# Two models that train against each other, or one that is used as two.


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Chain(layers=2)
        self.critic = Chain(layers=3)


def adversarial(pair: Pair, *, freeze: bool, penalty: bool = False) -> None:
    critics, generators = sgd(pair.critic.parameters()), sgd(pair.generator.parameters())
    for step in range(3):
        real, noise = values(3, WIDTH, seed=2 * step), values(3, WIDTH, seed=2 * step + 1)
        with torch.no_grad():
            fake = pair.generator(noise)
        # The critic is in use twice before its backward.
        loss = pair.critic(fake).mean() - pair.critic(real).mean()
        if penalty:
            between = (0.3 * real + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(pair.critic(between).sum(), between, create_graph=True)
            loss = loss + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        critics.step()
        pair.zero_grad()
        if freeze:
            pair.critic.requires_grad_(False)
        (-pair.critic(pair.generator(noise)).mean()).backward()
        generators.step()
        pair.zero_grad()
        pair.critic.requires_grad_(True)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_engines_train_against_each_other(strategy: str, freeze: bool) -> None:
    def body(comm: Communicator) -> None:
        pair, plain = twins(Pair)
        engines = [fully_shard(m, comm, strategy=strategy) for m in (pair.generator, pair.critic)]
        for each in (pair, plain):
            adversarial(each, freeze=freeze)
        assert_same_parameters(engines[0], plain.generator)
        assert_same_parameters(engines[1], plain.critic)

    run_threads(body, 2)


def test_two_engines_on_one_mesh() -> None:
    def body(mesh: Mesh) -> None:
        pair, plain = twins(Pair)
        models = (pair.generator, pair.critic)
        engines = [fully_shard(model, mesh, strategy="hybrid_shard") for model in models]
        for each in (pair, plain):
            adversarial(each, freeze=False)
        assert_same_parameters(engines[0], plain.generator)
        assert_same_parameters(engines[1], plain.critic)

    run_mesh(body, 2, 2)


@pytest.mark.covers("torch.func")
def test_gradient_penalty_of_a_critic() -> None:
    def body(comm: Communicator) -> None:
        pair, plain = twins(Pair)
        engines = [
            fully_shard(m, comm, strategy="shard_grad_op") for m in (pair.generator, pair.critic)
        ]
        for each in (pair, plain):
            adversarial(each, freeze=True, penalty=True)
        assert_same_parameters(engines[0], plain.generator)
        assert_same_parameters(engines[1], plain.critic)

    run_threads(body, 2)


# Gradients of inputs.


@pytest.mark.covers("torch.func")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_inputs(strategy: str, frozen: bool) -> None:
    """By backward, and by autograd.grad, which leaves no gradients to parameters."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        if frozen:
            model.requires_grad_(False)
            plain.requires_grad_(False)
        engine = fully_shard(model, comm, strategy=strategy)
        grads = []
        for net in (model, plain):
            x = values(3, WIDTH).requires_grad_()
            (asked,) = torch.autograd.grad(net(x).square().sum(), x)
            assert all(param.grad is None for param in net.parameters())
            net(x).square().sum().backward()
            grads.append((asked, x.grad))
        for got, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(got, wanted)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


# Several forwards, several backwards.


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forwards_whose_backwards_come_one_by_one(strategy: str, first: int) -> None:
    def loop(model: nn.Module) -> None:
        optimizer = sgd(model.parameters())
        for step in range(3):
            losses = [model(values(3, WIDTH, seed=2 * step + m)).square().sum() for m in range(2)]
            losses[first].backward()
            losses[1 - first].backward()
            optimizer.step()
            optimizer.zero_grad()

    train_both(Chain, loop, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_graph_that_is_kept_has_a_second_backward(strategy: str) -> None:
    def loop(model: nn.Module) -> None:
        optimizer = sgd(model.parameters())
        for step in range(2):
            loss = model(values(3, WIDTH, seed=step)).square().sum()
            loss.backward(retain_graph=True)
            (3 * loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    train_both(Chain, loop, strategy=strategy)


# Evaluation.


class Moody(Chain):
    """Computes otherwise in evaluation, and leaves early there."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.skipped = set() if self.training else {3}
        return super().forward(x)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_before_between_and_within_steps(
    strategy: str, without_gradients: Callable[[], torch.no_grad]
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Moody)
        engine = fully_shard(model, comm, strategy=strategy)

        def evaluate(net: nn.Module) -> torch.Tensor:
            net.eval()
            with without_gradients():
                out = net(values(3, WIDTH, seed=9))
            net.train()
            return out.clone()

        seen = []
        for net in (model, plain):
            optimizer = sgd(net.parameters())
            outs = [evaluate(net)]
            for step in range(3):
                loss = net(values(5, WIDTH, seed=step)).square().sum()
                if step == 1:
                    outs.append(evaluate(net))
                loss.backward()
                optimizer.step()
                outs.append(evaluate(net))
                optimizer.zero_grad()
            seen.append(outs)
        for got, wanted in zip(*seen, strict=True):
            torch.testing.assert_close(got, wanted)
        assert_same_parameters(engine, plain)

    run_threads(body, 2)


# Units that are called twice, or not at all, as a step wants it.


@pytest.mark.covers("odd forwards", "activation checkpointing")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("prefetch", "back", "slots"), [(0, 3, 1), (1, None, 2), (2, 1, None)])
def test_units_skipped_and_repeated_at_random(
    strategy: str, prefetch: int, back: int | None, slots: int | None, seed: int
) -> None:
    class Random(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for i in self.calls:
                x = self.blocks[i](x)
            return x

    def loop(model: nn.Module) -> None:
        chance = random.Random(seed)  # the same on all ranks
        optimizer = sgd(model.parameters())
        for step in range(6):
            model.calls = chance.choices(range(4), k=chance.randint(0, 6))
            model(values(3, WIDTH, seed=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    depths = {"prefetch": prefetch, "backward_prefetch": back, "slots": slots}
    train_both(Random, loop, strategy=strategy, **depths)


# Compiled blocks.


@pytest.mark.covers("torch.compile")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_blocks_train_between_evaluations(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(layers=3))
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        engine = fully_shard(model, comm, strategy=strategy)
        for net in (model, plain):
            optimizer = sgd(net.parameters())
            for step in range(3):
                net(values(3, WIDTH, seed=step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    net(values(3, WIDTH))
        assert_same_parameters(engine, plain)

    run_threads(body, 2)
