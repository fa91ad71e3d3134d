"""Parameters of which each rank has the whole: gradients from outside of their unit's forward are averaged, too."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.nn.init import orthogonal_

from shardcomm import Communicator, Engine, MixedPrecision, fully_shard
from support.generator import seeded
from support.thread_ranks import run_threads

RANKS = 2
WIDTH = 8
IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])


class Model(nn.Module):
    """An embedding whose weight the model's own forward uses again, when it is `tied`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.tied = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.block(self.embed(ids)))
        return F.linear(x, self.embed.weight) if self.tied else x


def run(body: Callable[[Model, Engine, Model], None], ranks: int = RANKS, **options: Any) -> None:
    """Calls `body` on each rank with a model of `no_shard`, its engine, and its plain twin."""
    with seeded(0):
        plain = Model()
    nets = [copy.deepcopy(plain) for _ in range(2 * ranks)]

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank], nets[2 * comm.rank + 1]
        options_ = {"strategy": "no_shard", **options}
        engine = fully_shard(model, comm, units=[nn.Linear, nn.Embedding], **options_)
        body(model, engine, twin)

    run_threads(rank, ranks)


def tied_in_the_loss(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return F.linear(model(ids), model.embed.weight).square().mean()


def tied_in_the_models_forward(model: Model, ids: torch.Tensor) -> torch.Tensor:
    model.tied = True
    return model(ids).square().mean()


def penalized(model: Model, ids: torch.Tensor) -> torch.Tensor:
    decay = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    return model(ids).square().mean() + 0.01 * decay


def of_a_unit_without_forward(model: Model, ids: torch.Tensor) -> torch.Tensor:
    x = F.embedding(ids, model.embed.weight)
    return model.block(x).square().mean()  # type: ignore[no-any-return]


def touched(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """As programs for DDP do. The gradient of a sum is one number, expanded."""
    return model(ids).square().mean() + sum(p.sum() for p in model.parameters())


LOSSES = [
    tied_in_the_loss,
    tied_in_the_models_forward,
    penalized,
    of_a_unit_without_forward,
    touched,
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_all_ranks_batches(
    loss: Callable[[Model, torch.Tensor], torch.Tensor], ranks: int
) -> None:
    """Over two backwards, of which the second adds; then after `zero_grad`, and with parts frozen and thawed."""
    batches = torch.tensor([[0, 1, 2], [3, 4, 0], [2, 2, 4]])[:ranks]

    def body(model: Model, engine: Engine, twin: Model) -> None:
        def both(*, accumulate: bool) -> None:
            with engine.no_sync() if accumulate else contextlib.nullcontext():
                loss(model, batches[engine.mesh.rank].unsqueeze(0)).backward()
            loss(twin, batches).backward()

        def check() -> None:
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)

        for _ in range(2):
            both(accumulate=False)
            check()
        for each in (model, twin):
            each.zero_grad()
        both(accumulate=True)
        both(accumulate=False)
        check()
        for train in (False, True):
            for each in (model, twin):
                each.zero_grad()
                each.embed.weight.requires_grad_(train)
            both(accumulate=False)
            check()

    run(body, ranks)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_that_autograd_hands_to_several_are_copied(accumulate: bool) -> None:
    """Of `a + b` both get the same tensor, and of `backward([a], [g])` the caller's own."""
    with seeded(0):
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    nets = [copy.deepcopy(plain) for _ in range(2 * RANKS)]
    x = torch.ones(2, WIDTH)

    def loss(net: nn.Sequential) -> torch.Tensor:
        loss = net(x).square().mean()  # first, so that its gradients come last
        return loss + ((net[0].bias + net[2].bias) * torch.arange(WIDTH)).sum()  # type: ignore[no-any-return]

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank], nets[2 * comm.rank + 1]
        engine = fully_shard(model, comm, units=nn.Linear, strategy="no_shard")
        for last in (False, True) if accumulate else (True,):
            with contextlib.nullcontext() if last else engine.no_sync():
                loss(model).backward()
            loss(twin).backward()
        given = torch.ones(WIDTH)
        for each in (model, twin):
            torch.autograd.backward([each[0].bias + 0, each(x).square().mean()], [given, None])
            assert torch.equal(given, torch.ones(WIDTH))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    run_threads(rank, RANKS)


@pytest.mark.parametrize("loss", [tied_in_the_loss, penalized])
def test_in_mixed_precision(loss: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
    """The gradient from outside is rounded as that of the forward is."""

    def body(model: Model, engine: Engine, twin: Model) -> None:
        for each in (model, twin):
            loss(each, IDS).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-3)

    run(body, mixed_precision=MixedPrecision(torch.bfloat16, output_dtype=torch.float32))


def test_a_parameter_that_was_frozen_at_first() -> None:
    batches = torch.tensor([[0, 1, 2], [3, 4, 0]])
    with seeded(0):
        plain = Model()
    plain.embed.weight.requires_grad_(False)
    nets = [copy.deepcopy(plain) for _ in range(2 * RANKS)]

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank], nets[2 * comm.rank + 1]
        fully_shard(model, comm, units=[nn.Linear, nn.Embedding], strategy="no_shard")
        for train in (False, True):
            for each, ids in ((model, batches[comm.rank : comm.rank + 1]), (twin, batches)):
                each.zero_grad()
                each.embed.weight.requires_grad_(train)
                tied_in_the_loss(each, ids).backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)

    run_threads(rank, RANKS)


def test_optimizers_in_hooks_say_what_to_call_instead() -> None:
    """A hook would be called with the gradient of this rank alone."""

    def body(model: Model, engine: Engine, twin: Model) -> None:
        model.embed.weight.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(RuntimeError, match=r"'embed.weight' from outside .* unshard\(\)"):
            tied_in_the_loss(model, IDS).backward()
        with engine.unit(model.embed).unshard():
            loss = tied_in_the_loss(model, IDS)
        loss.backward()
        tied_in_the_loss(twin, IDS).backward()
        torch.testing.assert_close(model.embed.weight.grad, twin.embed.weight.grad)

    run(body)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_the_owner_alone_does_not_train_outside_of_the_forward(strategy: str) -> None:
    """Of other ranks' batches it would have no gradient; ranks without the parameter are refused before."""

    def body(model: Model, engine: Engine, twin: Model) -> None:
        says = (
            r"'embed.weight' from outside .* the one rank that has|'embed.weight': outside of the"
        )
        with pytest.raises(RuntimeError, match=says):
            F.linear(torch.ones(WIDTH), model.embed.weight).sum().backward()
        with torch.no_grad():
            model.embed.weight.mul_(2)

    run(body, strategy=strategy, granularity="tensor")


def test_autograd_grad_says_what_to_call_instead() -> None:
    def body(model: Model, engine: Engine, twin: Model) -> None:
        loss = tied_in_the_loss(model, IDS)
        with pytest.raises(RuntimeError, match=r"autograd\.grad with .*'embed\.weight'.* \.grad"):
            torch.autograd.grad(loss, [model.embed.weight])
        x = torch.ones(2, WIDTH, requires_grad=True)
        for inputs in (model.block.weight, [x, *model.block.parameters()]):
            with pytest.raises(
                RuntimeError, match=r"autograd\.grad with .*'block\.weight'.* \.grad"
            ):
                grad(model.block(x).sum(), inputs, allow_unused=True)  # type: ignore[arg-type]
        spare = torch.ones(1, requires_grad=True)
        assert torch.autograd.grad(model.block(x).sum(), [x, spare], allow_unused=True)[1] is None

    run(body)


def test_after_close_gradients_are_this_ranks() -> None:
    def body(model: Model, engine: Engine, twin: Model) -> None:
        engine.close()
        for each in (model, twin):
            loss = F.embedding(IDS, each.embed.weight).sum() * (engine.mesh.rank + 1)
            loss.backward()
        assert torch.equal(model.embed.weight.grad, twin.embed.weight.grad)  # type: ignore[arg-type]

    run(body)


@pytest.mark.parametrize(
    "init",
    [
        nn.Linear.reset_parameters,
        lambda block: nn.init.normal_(block.weight),
        lambda block: nn.init.trunc_normal_(block.weight),
        lambda block: nn.init.sparse_(block.weight, 0.5),
        lambda block: orthogonal_(block.weight),
        lambda block: orthogonal_(block.weight.data),
        lambda block: block.weight.data.normal_(),
        lambda block: block.weight.detach().normal_(),
        lambda block: block.weight.requires_grad_(False).uniform_(-1, 1),
    ],
)
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_ranks_do_not_draw_random_values_each_for_itself(
    ranks: int, init: Callable[[nn.Linear], Any]
) -> None:
    def body(model: Model, engine: Engine, twin: Model) -> None:
        if ranks == 1:
            init(model.block)
            assert not torch.equal(model.block.weight, twin.block.weight)
            return
        with pytest.raises(RuntimeError, match=r"_ of 'block\.weight', which every rank has: each"):
            init(model.block)
        assert torch.equal(model.block.weight, twin.block.weight)
        init(copy.deepcopy(model.block))  # a plain module
        for of in (model.block.weight.data, model.block.weight.detach()):
            assert type(of) is torch.Tensor
            assert torch.equal(of.new_empty(2).fill_(1), torch.ones(2))
            copied = io.BytesIO()
            torch.save(of, copied)
            copied.seek(0)
            for each in (copy.deepcopy(of), torch.load(copied), nn.Parameter(of)):
                assert torch.equal(each, of)
            assert not torch.equal(copy.deepcopy(of).normal_(), of)

    run(body, ranks)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "full_shard"), (2, "no_shard")])
def test_a_whole_parameter_answers_what_rows_are_asked(ranks: int, strategy: str) -> None:
    """So that a program for several ranks runs on one."""

    def body(model: Model, engine: Engine, twin: Model) -> None:
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            rows = ours.to_local()  # type: ignore[operator]
            full = ours.full_tensor()  # type: ignore[operator]
            for values in (rows, full):
                assert not values.requires_grad
                assert torch.equal(values, theirs)
            full.zero_()  # a tensor of its own
            rows.add_(1)  # in the parameter's memory
            assert torch.equal(ours, theirs + 1)

    run(body, ranks, strategy=strategy)
