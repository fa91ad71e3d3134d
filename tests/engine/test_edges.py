"""What torch's tools do to a sharded model: it works as without sharding, or raises a sentence that says what to do."""

from __future__ import annotations

import copy
import gc
import io
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

import shardcomm
from shardcomm import Communicator, Engine, Mesh, fully_shard, launch
from support.generator import seeded
from support.thread_ranks import run_mesh, run_threads
from support.twins import Chain, local, twins, values

RANKS = 2
WIDTH = 8


class Tied(nn.Module):
    """An embedding that is a unit of its own, and whose weight the model's forward may read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor, *, tied: bool = False) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.embed.weight) if tied else x


def model_of(seed: int = 0) -> Tied:
    with seeded(seed):
        return Tied()


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])


def with_sharded(
    body: Callable[[Tied, Engine, Tied], Any], ranks: int = RANKS, **options: Any
) -> list[Any]:
    """What `body` gives on each rank, for a sharded model, its engine and its plain twin, both after a backward."""
    plain = model_of()
    nets = [copy.deepcopy(plain) for _ in range(2 * ranks)]

    def rank(comm: Communicator) -> Any:
        model, twin = nets[2 * comm.rank], nets[2 * comm.rank + 1]
        engine = fully_shard(model, comm, units=[nn.Linear, nn.Embedding], **options)
        for each in (model, twin):
            each(IDS).square().sum().backward()
        return body(model, engine, twin)

    return run_threads(rank, ranks)


# Norms and clipping.


@pytest.mark.covers("gradient clipping")
@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("foreach", [None, False])
def test_total_norm_and_clipping_are_global(
    kind: float, granularity: str, foreach: bool | None
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin)]
        ours, theirs = (nn.utils.get_total_norm(g, kind, foreach=foreach) for g in grads)
        torch.testing.assert_close(ours, theirs)
        if kind <= 0:
            return
        ours, theirs = (
            nn.utils.clip_grad_norm_(m.parameters(), 0.1, kind, foreach=foreach)
            for m in (model, twin)
        )
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]

    with_sharded(body, granularity=granularity)


@pytest.mark.covers("gradient clipping", "ignored parameters")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("foreach", [None, False])
def test_norms_with_plain_gradients_among_them_are_the_same_on_every_rank(
    kind: float, replicas: int, foreach: bool | None
) -> None:
    """Nobody averages gradients of `ignored_params`, and a rank may have none: the mean of their powers counts."""
    shards, ranks = 2, 2 * replicas
    nets = [model_of() for _ in range(2 * ranks)]

    def body(mesh: Mesh) -> torch.Tensor:
        model, twin = nets[2 * mesh.rank], nets[2 * mesh.rank + 1]
        ignored = [*model.blocks[1].parameters()]
        fully_shard(
            model,
            mesh if replicas > 1 else mesh.shard,
            strategy="hybrid_shard" if replicas > 1 else "full_shard",
            units=[nn.Linear, nn.Embedding],
            ignored_params=ignored,
        )
        grads = []
        for each in (model, twin):
            each(IDS).square().sum().backward()
            weight, bias = each.blocks[1].parameters()
            weight.grad *= 1 + mesh.rank
            if mesh.rank == ranks - 1:
                bias.grad = None
            grads.append([p.grad for p in each.parameters() if p.grad is not None])
        theirs = nn.utils.get_total_norm(grads[1][:3], kind)  # of what is sharded
        own = nn.utils.get_total_norm(grads[1][3:], kind)
        row, plain = torch.empty(shards), torch.empty(ranks)
        mesh.shard.all_gather(row, own.view(1))
        mesh.replicate.all_gather(plain, row)
        if math.isinf(kind):
            expected = max(theirs, plain.max()) if kind > 0 else min(theirs, plain.min())
        elif kind == 0:
            expected = theirs + plain.mean()
        else:
            expected = (theirs**kind + (plain**kind).mean()) ** (1 / kind)
        ours = nn.utils.get_total_norm(grads[0], kind, foreach=foreach)
        torch.testing.assert_close(ours, expected)
        if kind <= 0:
            return ours
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind, foreach=foreach)
        for mine, whole in zip(grads[0], grads[1], strict=True):
            full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            torch.testing.assert_close(full, whole * (0.1 / (expected + 1e-6)).clamp(max=1.0))
        return ours

    norms = run_mesh(body, replicas, shards)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_a_norm_is_what_it_was_where_plain_gradients_are_the_same_on_every_rank() -> None:
    def body(comm: Communicator) -> None:
        model, owned = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 3)
        model.extra = owned
        fully_shard(model, comm, ignored_params=owned.parameters())
        for number, param in enumerate(owned.parameters()):
            param.grad = torch.linspace(0.1, 3 + number, param.numel()).view_as(param)
        model.weight.grad = torch.zeros_like(model.weight)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norms = [torch.linalg.vector_norm(p.grad).double() for p in owned.parameters()]  # type: ignore[arg-type]
        assert torch.equal(norm, torch.stack(norms).norm().float())

    run_threads(body, 3)


@pytest.mark.covers("gradient clipping", "optimizers")
def test_clipping_inside_an_optimizers_closure_is_global() -> None:
    """As Lightning does."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        norms = []
        for each in (model, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

            def closure(each: nn.Module = each) -> torch.Tensor:
                each.zero_grad()
                loss: torch.Tensor = each(IDS).square().sum()
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        torch.testing.assert_close(norms[0], norms[1])
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


def test_a_closure_that_only_clips_sees_guarded_rows() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        norms = []
        for each in (model, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

            def closure(each: nn.Module = each) -> torch.Tensor:
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
                return norms[-1]

            optimizer.step(closure)  # type: ignore[arg-type]
        torch.testing.assert_close(norms[0], norms[1])

    with_sharded(body)


def test_a_norm_of_a_single_parameter_and_clipping_by_value() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            with torch.no_grad():
                torch.testing.assert_close(p.norm() + 0, q.norm())
                torch.testing.assert_close(float(torch.linalg.vector_norm(p)), float(q.norm()))
            assert p.grad is not None
            assert q.grad is not None
            for kind in (1.0, math.inf, -math.inf):
                ours = torch.linalg.vector_norm(p.grad, kind) + 0
                torch.testing.assert_close(ours, torch.linalg.vector_norm(q.grad, kind))
        for each in (model, twin):
            nn.utils.clip_grad_value_(each.parameters(), 0.01)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]

    with_sharded(body)


def test_rows_scaled_by_a_norm_are_rows() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with torch.no_grad():
            ours, theirs = (
                [
                    each.embed.weight.grad / each.embed.weight.grad.norm(),
                    each.embed.weight.norm() * each.embed.weight,
                    *torch._foreach_div(
                        [p.grad for p in each.parameters()], each.embed.weight.norm()
                    ),
                    *torch._foreach_mul(list(each.parameters()), 2.0),
                ]
                for each in (model, twin)
            )
        for mine, whole in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.full_tensor(), whole)
            torch.testing.assert_close(mine.norm() + 0, whole.norm())

    with_sharded(body)


@pytest.mark.parametrize("inference", [False, True])
def test_a_norm_is_changed_in_place(inference: bool) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with torch.inference_mode(inference):
            ours, theirs = (changed_norms(each) for each in (model, twin))
        torch.testing.assert_close(ours, theirs)

    with_sharded(body)


def changed_norms(model: Tied) -> list[torch.Tensor]:
    weight, *_ = grads = [p.grad for p in model.parameters() if p.grad is not None]
    clamped, copied, added, written, half = (weight.norm() for _ in range(5))
    clamped.clamp_(max=0.25)
    copied.copy_(torch.tensor(3.0))
    added += 1
    written.data.mul_(2)
    norms = [grad.norm() for grad in grads]
    torch._foreach_reciprocal_(norms)
    together = torch.stack([clamped, copied, added, written, *norms, half])
    low = half.to(torch.bfloat16)
    half.mul_(0.5)
    seen = [weight.norm(), *(grad.norm() for grad in grads)]
    values = [float(each) for each in seen]  # completed, and partial in what follows
    again = torch.stack(seen)
    total = again.norm()
    again[0] = 0
    each = [clamped, copied, added, written, together, low.float(), half, half.data, again]
    return [
        *(tensor + 0 for tensor in each),
        together.norm(),
        total,
        again.norm(),
        torch.tensor(values),
        *norms,
    ]


def test_a_norm_that_all_ranks_have_read_is_read_on_one() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        norm, expected = model.embed.weight.grad.norm(), twin.embed.weight.grad.norm()  # type: ignore[union-attr]
        assert norm > 0
        if engine.mesh.rank == 0:
            for same in (norm, norm.to(torch.float64), torch.stack([norm, norm])[1]):
                assert float(same) == pytest.approx(float(expected))
        ours, theirs = (nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, twin))
        torch.testing.assert_close(ours, theirs)

    with_sharded(body)


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda model, engine: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, engine: float(model.blocks[0].weight.grad.norm()),
        lambda model, engine: float(model.embed.weight.data.norm()),
        lambda model, engine: engine.mesh.shard.all_reduce(torch.zeros(1, dtype=torch.float64)),
    ],
)
def test_a_norm_that_one_rank_reads_alone_is_a_mismatch(
    meanwhile: Callable[[Tied, Engine], object],
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        def alone(model: Tied, engine: Engine) -> None:
            float(model.embed.weight.grad.norm())  # type: ignore[union-attr]

        with pytest.raises(shardcomm.CommError, match="different collectives") as caught:
            (meanwhile if engine.mesh.rank else alone)(model, engine)
        if engine.mesh.rank == 0:
            assert "of 'embed.weight' (tag" in str(caught.value)
            assert "which every rank must read" in str(caught.value)

    with_sharded(body)


def test_equality_is_of_the_whole_tensors() -> None:
    """A difference that one rank has is seen by all; Lightning's BaseFinetuning looks for parameters so."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = model.embed.weight
        same = weight.detach().clone()
        assert torch.equal(weight, weight)
        assert weight.equal(same)
        with torch.no_grad():
            if engine.mesh.shard.rank == 0:
                local(same)[0, 0] += 1
        assert not torch.equal(weight, same)
        others = [p for p in model.parameters() if p is not weight]
        assert others
        assert not any(torch.equal(weight, other) for other in others)

    with_sharded(body)


# Compute with rows.


@pytest.mark.parametrize(
    "use",
    [
        lambda m: F.linear(torch.ones(1, WIDTH), m.embed.weight),
        lambda m: m(IDS, tied=True),
        lambda m: m.embed.weight[0],
        lambda m: m.embed.weight.T,
        lambda m: m.embed.weight.sum(0),
        lambda m: m.embed.weight.sum().backward(),
        lambda m: m.embed.weight.argmax(),
        lambda m: m.embed.weight.data @ torch.ones(WIDTH),
        lambda m: m.embed.weight.add(torch.ones(5, WIDTH)),
        lambda m: m.embed.weight.data.add_(torch.ones(5, WIDTH)),
        lambda m: m.embed.weight.numpy(force=True),
        lambda m: nn.init.xavier_uniform_(m.embed.weight),
        lambda m: m.embed.weight.grad.mean(dim=-1),
        lambda m: torch._foreach_max([m.embed.weight.data]),
        lambda m: torch.equal(m.embed.weight, torch.ones(5, WIDTH)),
        lambda m: torch._foreach_add([m.embed.weight.data], [torch.zeros(8, 1, 1)]),
        lambda m: parameters_to_vector(m.parameters()),
        lambda m: vector_to_parameters(torch.zeros(5 * WIDTH), [m.embed.weight]),
        lambda m: m.embed.weight.norm().backward(),
        lambda m: bool(m.embed.weight),
        lambda m: m.embed.weight.narrow(0, 0, 1),
    ],
)
def test_what_would_be_wrong_of_rows_alone_is_refused(use: Callable[[Tied], Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"of '.*': outside of the forward of unit '.*'"):
            use(model)

    with_sharded(body)


@pytest.mark.parametrize("shape", [(), (1,), (1, WIDTH)])
@pytest.mark.parametrize(
    "average",
    [
        lambda mean, p: mean.lerp_(p, 0.1),
        lambda mean, p: mean.data.mul_(0.9).add_(p.data, alpha=0.1),
        lambda mean, p: torch._foreach_lerp_([mean], [p.detach()], 0.1),
        lambda mean, p: mean.copy_(p),
    ],
)
def test_an_average_made_before_is_refused_on_ranks_without_rows(
    average: Callable[[torch.Tensor, nn.Parameter], Any], shape: tuple[int, ...]
) -> None:
    """Where torch broadcasts, or says something of shapes."""

    def body(comm: Communicator) -> bool:
        model = nn.Module()
        model.scale = nn.Parameter(torch.ones(shape))
        model.forward = lambda x: x * model.scale  # type: ignore[assignment]
        mean = torch.zeros(shape)
        fully_shard(model, comm)
        with torch.no_grad():
            model.scale.add_(torch.ones(()))  # a number
            if not local(model.scale).numel():
                with pytest.raises(RuntimeError, match=r"of 'scale': outside of the forward"):
                    average(mean, model.scale)
                return False
            average(mean, model.scale)
        assert mean.gt(0).all()
        return True

    assert sorted(run_threads(body, RANKS)) == [False, True]


def test_a_whole_parameter_is_gathered_in_a_forward_that_gathers_ahead() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(layers=6))
        fully_shard(model, comm, prefetch=3)

        def between(i: int, x: torch.Tensor) -> torch.Tensor:
            last: Any = model.blocks[-1]
            assert torch.equal(last.linear.weight.full_tensor(), plain.blocks[-1].linear.weight)
            return x

        model.between = between
        for _ in range(20):
            model(values(3, WIDTH)).sum().backward()

    run_threads(body, RANKS)


@pytest.mark.parametrize("index", [0, -1, 5, slice(0, 1), (slice(None), 0), [0, 1]])
@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.data, lambda p: p.grad])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_index_is_refused_on_ranks_with_rows_and_without(
    rows: int, of: Callable[[nn.Parameter], Any], index: Any
) -> None:
    """Of 2 rows a rank has one, which would be all that it takes; of one, a rank has none."""

    def body(comm: Communicator) -> None:
        model = nn.Linear(64, rows, bias=False)
        fully_shard(model, comm)
        model(values(3, 64)).sum().backward()
        assert len(local(model.weight)) == 1 or rows == 1
        if len(local(model.weight)) == rows:
            return
        with torch.no_grad():
            for use in (
                lambda: of(model.weight)[index],
                lambda: of(model.weight).__setitem__(index, 0.0),
            ):
                with pytest.raises(RuntimeError, match=r"item__ of 'weight': outside of the forw"):
                    use()
            for everything in (..., slice(None), (slice(None), ...)):
                of(model.weight)[everything] = 2.0
                assert local(of(model.weight)).eq(2.0).all()

    run_threads(body, RANKS)


def test_elementwise_arithmetic_is_that_of_the_whole() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            average = [p.detach().clone() for p in each.parameters()]
            with torch.no_grad():
                for p, mean in zip(each.parameters(), average, strict=True):
                    p.mul_(2).sub_(p.grad, alpha=0.5)
                    mean.lerp_(p, 0.25)
                torch._foreach_copy_(list(each.parameters()), average)
                p.data = torch.zeros_like(p)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body)


# What is replaced, converted, moved or added.


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: setattr(m.embed.weight, "data", torch.zeros(5, WIDTH)),
        lambda m: setattr(m.embed, "weight", nn.Parameter(torch.zeros(5, WIDTH))),
        lambda m: setattr(m.blocks[0], "weight", m.blocks[1].weight),
        lambda m: setattr(m, "head", nn.Linear(WIDTH, 2)),
        lambda m: m.blocks.append(nn.Linear(WIDTH, WIDTH)),
        lambda m: (m.blocks.insert(0, nn.Linear(WIDTH, WIDTH)), m.blocks.pop(-1)),
        lambda m: (setattr(m, "blocks", m.blocks[:1]), m.blocks.insert(0, nn.Linear(WIDTH, WIDTH))),
        lambda m: (setattr(m, "new", nn.ParameterList()), m.new.append(torch.ones(1))),
        lambda m: (setattr(m, "new", nn.ModuleDict()), m.new.update({"q": nn.Linear(2, 2)})),
        lambda m: (
            m.blocks.insert(0, nn.Sequential()),
            m(IDS),
            m.blocks[0].append(nn.Linear(2, 2)),
        ),
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda m: parametrize.register_parametrization(m.embed, "weight", nn.Identity()),
        lambda m: torch.func.functional_call(m, {"embed.weight": torch.zeros(5, WIDTH)}, (IDS,)),
    ],
)
def test_what_would_not_be_trained_is_refused(change: Callable[[Tied], Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"(after|before)\s+fully_shard"):
            (change(model), model(IDS))

    with_sharded(body)


def test_what_changes_nothing_is_let_through() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        model.float().cpu().to(torch.float32).requires_grad_(True).train()
        model.act = nn.GELU()  # type: ignore[assignment]
        model.embed.weight = model.embed.weight
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body)


def test_modules_without_parameters_are_put_in_and_taken_out() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            each.blocks.insert(1, nn.ReLU())
            each(IDS)
            del each.blocks[0]
        for _ in range(2):
            assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_an_optimizer_warns_of_parameters_beside_the_sharded_ones(strategy: str) -> None:
    """Each rank would train its own head."""

    def optimized(model: nn.Sequential, ranks: int) -> list[str]:
        nets = [copy.deepcopy(model) for _ in range(ranks)]

        def rank(comm: Communicator) -> None:
            whole: Any = nets[comm.rank]
            ignored = whole[0].blocks[0].parameters()
            fully_shard(
                whole[0], comm, ignored_params=ignored, strategy=strategy, units=[nn.Embedding]
            )
            optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
            for _ in range(2):
                whole(IDS).sum().backward()
                optimizer.step()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_threads(rank, ranks)
        return [str(each.message) for each in caught if "SGD.step" in str(each.message)]

    beside = optimized(nn.Sequential(model_of(), nn.Linear(WIDTH, 3)), RANKS)
    assert len(beside) == RANKS
    assert all("has 2 that no engine has, the first of shape (3, 8)" in each for each in beside)
    assert not optimized(nn.Sequential(model_of()), RANKS)
    frozen = nn.Sequential(model_of(), nn.Linear(WIDTH, 3).requires_grad_(False))
    assert not optimized(frozen, RANKS)
    assert not optimized(nn.Sequential(model_of(), nn.Linear(WIDTH, 3)), 1)


def test_values_put_in_a_parameters_place_are_trained() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            for p in each.parameters():
                p.data = torch.full_like(p, 0.5)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each.zero_grad()
            each(IDS).square().sum().backward()
            optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("take", [lambda p: p.data, lambda p: p.detach()])
def test_values_are_swapped_for_averages_and_back(
    take: Callable[[nn.Parameter], torch.Tensor], strategy: str
) -> None:
    """As a widespread average of weights does it, by reference."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        outputs = []
        for each in (model, twin):
            params = list(each.parameters())
            averages = [p.data.clone().mul_(0.5) for p in params]
            held = [take(p) for p in params]
            for p, average in zip(params, averages, strict=True):
                p.data = average
            outputs.append([each(IDS)])
            for p, before in zip(params, held, strict=True):
                p.data = before
            for p in params:
                p.data = p.data  # changes nothing
            outputs[-1].append(each(IDS))
            for p, average in zip(params, averages, strict=True):  # the other common way
                before = p.data
                p.data = average
                p.data = before.mul_(0.25)
            outputs[-1].append(each(IDS))
        ours, theirs = outputs
        torch.testing.assert_close(ours, theirs)

    with_sharded(body, strategy=strategy)


def test_an_alias_shows_what_is_written_in_place() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for p in model.parameters():
            alias, values = p.data, torch.full_like(p, 0.5)
            p.data.mul_(0)
            assert not local(alias).any()
            shape = local(values).shape
            p.data = values.t() if shape[0] == shape[-1] > 1 else values
            assert not local(alias).any()
            p.data.mul_(2)
            assert not local(alias).any()
            assert bool((local(p) == 1).all())

    with_sharded(body)


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
def test_the_root_mean_square_is_of_the_whole(granularity: str) -> None:
    """As transformers' Adafactor takes it: the norm by the number of elements, which Lightning counts as well."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.numel() == torch.numel(p) == p.data.nelement() == q.numel()
            for ours, theirs in [(p.data, q.data), (p.grad, q.grad)]:
                assert ours is not None
                assert theirs is not None
                rms = ours.norm(2) / ours.numel() ** 0.5
                torch.testing.assert_close(rms + 0, theirs.norm(2) / theirs.numel() ** 0.5)

    with_sharded(body, granularity=granularity)


def test_a_gradient_that_is_set_has_the_rows_shape() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = model.embed.weight
        with pytest.raises(RuntimeError, match=r"'embed.weight' was given .* \(5, 8\); accepted"):
            weight.grad = torch.ones(5, WIDTH)
        weight.grad = torch.ones_like(weight)
        assert torch.equal(weight.grad.full_tensor(), torch.ones(5, WIDTH))

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_and_their_weights_stay_in_place(
    kind: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For cuDNN they would move their weights to memory of their own, in each forward."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers.flatten_parameters()
            return self.head(self.layers(x)[0])  # type: ignore[no-any-return]

    def move(layers: Any) -> None:
        for p in layers.parameters():
            p.data = p.data.clone()

    with seeded(0):
        plain, x = Recurrent(), torch.randn(2, 3, WIDTH)
    nets = [copy.deepcopy(plain) for _ in range(2 * RANKS)]
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank : 2 * comm.rank + 2]
        engine = fully_shard(model, comm, units=[kind, nn.Linear], strategy=strategy)
        for each in (model, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                each(x).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(engine.full_state_dict(), dict(twin.state_dict()))

    run_threads(rank, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to("meta")]
)
def test_conversions_are_refused(change: Callable[[Tied], Any], strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"after\s+fully_shard"):
            (change(model), model(IDS))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize(
    "put",
    [
        lambda m: [setattr(p, "data", torch.full_like(p, 0.5)) for p in m.parameters()],
        lambda m: vector_to_parameters(torch.linspace(-1, 1, 184), m.parameters()),
        lambda m: [p.fill_(0.5) for p in m.to_empty(device="cpu").parameters()],
        lambda m: m.load_state_dict(model_of(seed=1).state_dict(), assign=True),
    ],
)
def test_values_put_in_the_place_of_whole_parameters_are_trained(
    put: Callable[[Tied], Any],
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            each.zero_grad()
            with torch.no_grad():
                put(each)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(IDS).square().sum().backward()
            optimizer.step()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    with_sharded(body, strategy="no_shard")


def test_a_copy_of_whole_parameters_is_a_plain_model() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        copied = copy.deepcopy(model)
        copied.load_state_dict(model_of(seed=1).state_dict())
        assert torch.equal(copied.half().blocks[0].weight, model_of(seed=1).blocks[0].weight.half())  # type: ignore[arg-type,operator]
        assert torch.equal(model(IDS), twin(IDS))
        saved = io.BytesIO()
        torch.save(model.embed.weight, saved)
        saved.seek(0)
        assert type(torch.load(saved)) is nn.Parameter

    with_sharded(body, strategy="no_shard")


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_model_is_not_pickled(strategy: str, closed: bool) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        if closed:
            engine.close()
        with pytest.raises(
            RuntimeError, match=r"cannot be pickled.* Save .* torch.distributed.checkpoint"
        ):
            torch.save(nn.Sequential(model), io.BytesIO())

    with_sharded(body, strategy=strategy)


def test_fully_shard_is_called_once() -> None:
    def body(comm: Communicator) -> None:
        model = model_of()
        fully_shard(model.embed, comm)
        with pytest.raises(ValueError, match=r"once, with the whole model, .* units="):
            fully_shard(model, comm)

    run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_copies_are_refused(strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"before (fully_shard|it is sharded)"):
            copy.deepcopy(model)(IDS)

    with_sharded(body, strategy=strategy)


def test_values_put_in_a_gradients_place_are_stepped_with() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            for p in each.parameters():
                assert p.grad is not None
                p.grad.data = torch.full_like(p.grad, 2.0)
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}, {"strategy": "no_shard"}])
def test_nobody_gives_parameters_other_memory(options: dict[str, Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = model.embed.weight
        for call in (model.share_memory, lambda: weight.set_(torch.zeros_like(weight))):  # type: ignore[call-overload]
            with torch.no_grad(), pytest.raises(RuntimeError, match="memory belongs to the engine"):
                call()

    with_sharded(body, **options)


def test_a_copy_of_a_whole_parameter_may_have_any_memory() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = copy.copy(model.embed.weight)
        assert weight.share_memory_().is_shared()
        weight.detach().set_(torch.zeros(1))  # type: ignore[call-overload]

    with_sharded(body, strategy="no_shard")


def test_old_loops_that_detach_gradients_zero_them() -> None:
    """As optimizers of torch 1.0 did it, and tutorials still do."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            for p in each.parameters():
                assert p.grad is not None
                p.grad.detach_()
                p.grad.zero_()
            each(IDS).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, q.grad)

    with_sharded(body)


def test_a_tensor_is_converted_to_be_like_rows() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        p = model.embed.weight
        ids = torch.arange(3)
        for like in (ids.type_as(p), ids.to(p), ids.to(p.data)):
            assert type(like) is torch.Tensor
            torch.testing.assert_close(like, ids.float())
        half = p.data.to(torch.bfloat16)
        torch.testing.assert_close(half.full_tensor(), twin.embed.weight.bfloat16())  # type: ignore[attr-defined]

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_parameter_that_forward_has_from_a_list_says_so_in_backward(strategy: str) -> None:
    class Listed(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.tied = [self.embed.weight]

        def forward(self, ids: torch.Tensor, *, tied: bool = False) -> torch.Tensor:
            return F.linear(super().forward(ids), self.tied[0])

    nets = [Listed() for _ in range(RANKS)]

    def rank(comm: Communicator) -> None:
        model = nets[comm.rank]
        fully_shard(model, comm, units=[nn.Linear, nn.Embedding], strategy=strategy)
        with pytest.raises(
            RuntimeError, match=r"a gradient came to parameter 'embed\.weight' as it"
        ):
            model(IDS).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"a gradient came to parameter 'embed\.weight' as it"
        ):
            torch.autograd.grad(model(IDS).sum(), model.tied)

    run_threads(rank, RANKS)


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"strategy": "no_shard"}])
def test_a_gradient_that_is_kept_stays_when_the_next_comes(options: dict[str, Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        kept = []
        for each in (model, twin):
            loss = each(IDS).square().sum()
            each.zero_grad()
            loss.backward(retain_graph=True)
            kept.append([p.grad for p in each.parameters()])
            each.zero_grad()
            (3 * loss).backward()
            kept.append([p.grad for p in each.parameters()])
        for ours, theirs in zip(kept[0] + kept[1], kept[2] + kept[3], strict=True):
            grad = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            torch.testing.assert_close(grad, theirs)

    with_sharded(body, **options)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_shallow_copy_is_refused_when_it_is_called(strategy: str) -> None:
    """It would call the original, with the original's attributes."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        copied = copy.copy(model)
        with pytest.raises(RuntimeError, match=r"a copy of unit '\(root\)'"):
            copied(IDS)
        model(IDS)
        engine.close()
        assert "__getstate__" not in vars(model)

    with_sharded(body, strategy=strategy)


def test_a_backward_of_a_graph_from_before_says_so() -> None:
    nets = [model_of() for _ in range(RANKS)]

    def rank(comm: Communicator) -> None:
        loss = nets[comm.rank](IDS).sum()
        fully_shard(nets[comm.rank], comm, units=nn.Linear)
        with pytest.raises(RuntimeError, match=r"a gradient came to parameter .* as it was before"):
            loss.backward()

    run_threads(rank, RANKS)


def test_sparse_gradients_are_dense_once_they_are_reduced() -> None:
    nets = [nn.Embedding(5, WIDTH, sparse=True) for _ in range(RANKS)]

    def rank(comm: Communicator) -> None:
        model = nets[comm.rank]
        fully_shard(model, comm)
        model(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
            torch.optim.SparseAdam(model.parameters()).step()

    run_threads(rank, RANKS)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_step_that_would_pass_over_gradients_of_no_sync_is_refused(
    strategy: str, kind: type[torch.optim.Optimizer]
) -> None:
    """Whether a `.grad` of before is shown or not."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        optimizer: Any = kind(model.parameters())
        for set_to_none in (False, True):
            optimizer.zero_grad(set_to_none=set_to_none)
            with engine.no_sync():
                model(IDS).square().sum().backward()
                with pytest.raises(
                    RuntimeError, match=r"'embed.weight' are not reduced over .*no_sync"
                ):
                    optimizer.step()
            model(IDS).square().sum().backward()
            optimizer.step()
            optimizer.step()

    with_sharded(body, strategy=strategy)


def test_a_step_before_the_all_reduce_of_replicas_is_refused() -> None:
    nets = [model_of() for _ in range(4)]

    def rank(mesh: Mesh) -> None:
        model = nets[mesh.rank]
        engine = fully_shard(model, mesh, units=nn.Linear, strategy="hybrid_shard")
        optimizer = torch.optim.SGD(model.parameters())
        for requires in (False, True):
            engine.set_requires_all_reduce(requires)
            model(IDS).square().sum().backward()
            if not requires:
                with pytest.raises(RuntimeError, match="not reduced over the ranks yet"):
                    optimizer.step()
        optimizer.step()

    run_mesh(rank, 2, 2)


def test_an_optimizer_made_before_is_refused_at_its_first_step() -> None:
    nets = [model_of() for _ in range(RANKS)]

    def rank(comm: Communicator) -> None:
        model = nets[comm.rank]
        optimizer = torch.optim.AdamW(model.parameters())
        fully_shard(model, comm)
        model(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="after fully_shard"):
            optimizer.step()

    run_threads(rank, RANKS)


def test_an_optimizer_that_has_stepped_before_is_refused_at_its_next_step() -> None:
    nets = [model_of() for _ in range(2 * RANKS)]

    def rank(comm: Communicator) -> None:
        fully_shard(nets[2 * comm.rank], comm)  # from here on steps are looked at
        model = nets[2 * comm.rank + 1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fully_shard(model, comm)
        model(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="after fully_shard"):
            optimizer.step()

    run_threads(rank, RANKS)


def test_an_optimizer_of_parameters_on_the_meta_device_is_refused_at_its_first_step() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH, device="meta")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model, comm)
        model(torch.ones(2, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match=r"SGD\.step: .* 'weight' as it was before"):
            optimizer.step()

    run_threads(body, RANKS)


def sgd_by_hand(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "use",
    [
        lambda params: nn.utils.clip_grad_norm_(params, 1.0),
        sgd_by_hand,
        lambda params: torch.optim.SGD(params, lr=0.1).zero_grad(),
    ],
)
def test_a_list_of_parameters_that_was_taken_before_has_no_gradients(
    use: Callable[[list[nn.Parameter]], object], strategy: str
) -> None:
    """Without gradients nothing would be clipped or trained, silently."""

    def body(comm: Communicator) -> None:
        model = model_of()
        params, other = list(model.parameters()), nn.Linear(WIDTH, 3)
        before = model.embed.weight.sum()
        model.embed.bias = other.bias
        fully_shard(model, comm, strategy=strategy)
        model(IDS).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"\.grad was read of parameter .* after fully_shard"
        ):
            use(params)
        with pytest.raises(RuntimeError, match=r"a gradient came to parameter .* as it was before"):
            before.backward()
        copied = copy.deepcopy(params)
        assert {type(each) for each in copied} == {nn.Parameter}
        copied[0].sum().backward()
        assert copied[0].grad is not None
        gone = weakref.ref(params[0])
        del params, before
        gc.collect()
        assert gone() is None
        fully_shard(other, comm)  # with a parameter that this model has, too
        other(torch.ones(2, WIDTH)).sum().backward()

    run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("shown_by", ["gathered", "unshard"])
def test_an_optimizer_made_of_full_parameters_is_refused_at_its_first_step(
    shown_by: str, strategy: str
) -> None:
    """It would step on copies, and leave the model as it is."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        if shown_by == "gathered":
            with engine.gathered():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            engine.unit(model.embed).unshard()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.unit(model.embed).reshard()
        model(IDS).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"SGD\.step: .* full parameter 'embed\.weight'"):
            optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_gradient_hook_is_refused(strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
            model.embed.weight.register_hook(lambda grad: grad)

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_that_are_returned_are_refused(allow_unused: bool) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        loss = model(IDS).square().sum()
        with pytest.raises(RuntimeError, match=r"loss\.backward\(\)"):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
        model.zero_grad()
        loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]

    with_sharded(body)


@pytest.mark.covers("optimizers")
def test_an_optimizer_in_backward_sees_the_reduced_gradients() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in each.parameters()}

            def step(p: torch.Tensor, optimizers: Any = optimizers) -> None:
                optimizers[p].step()
                p.grad = None

            for p in each.parameters():
                p.grad = None
                p.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
            for _ in range(2):
                each(IDS).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is None
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


@pytest.mark.covers("gradient clipping")
def test_a_hook_takes_norms_of_whole_gradients_while_others_are_reduced() -> None:
    def body(mesh: Mesh) -> None:
        model, plain = twins(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]))
        fully_shard(model, mesh, units=nn.Linear, strategy="hybrid_shard")
        norms: dict[nn.Parameter, float] = {}
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(
                lambda p: norms.update({p: float(p.grad.norm())})
            )
        for _ in range(10):
            for net in (model, plain):
                net.zero_grad()
                net(values(3, 256)).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert norms[p] == pytest.approx(float(q.grad.norm()), rel=1e-5)

    run_mesh(body, 2, 2)


def zeroed(model: Tied) -> None:
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None for p in model.parameters())
    model(IDS).square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.zero_()
    model(IDS).square().sum().backward()


def thawed(model: Tied) -> None:
    for on in (False, True):
        model.zero_grad()
        loss = model(IDS).square().sum()
        model.embed.requires_grad_(on)
        loss.backward()
        model(IDS).square().sum().backward()


def hooked(model: Tied) -> None:
    model.zero_grad()
    model.blocks[1].register_full_backward_hook(lambda module, grads, _: (2 * grads[0],))
    model.blocks[0].register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],))
    model(IDS).square().sum().backward()


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("loop", [zeroed, thawed, hooked])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_gradients_are_those_without_sharding(loop: Callable[[Tied], None], strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        loop(model)
        loop(twin)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for optimizer in optimizers:
            optimizer.step()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    with_sharded(body, strategy=strategy)


def test_a_whole_parameter_beside_one_that_another_rank_has_is_refused() -> None:
    """The rank that owns the weight of a LayerNorm, and not its bias."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(x)
            return out

    def body(comm: Communicator) -> None:
        model = Norms()
        fully_shard(model, comm, granularity="tensor")
        with pytest.raises(RuntimeError, match=r"'norm\.(weight|bias)': outside of the forward of"):
            model.norm(torch.ones(2, WIDTH))

    run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_a_gradients_data_that_was_replaced_is_added_to(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        fully_shard(model, comm, strategy=strategy)
        x = torch.ones(1, WIDTH)
        for _ in range(2):
            model(x).sum().backward()
            assert model.weight.grad is not None
            model.weight.grad.data = torch.full_like(model.weight.grad.data, 5.0)
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert local(model.weight.grad).eq(6.0).all()
        model.zero_grad()
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert local(model.weight.grad).eq(1.0).all()

    run_threads(body, RANKS)


# State dicts.


def test_a_models_state_dict_is_that_of_its_engine() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        of_model, of_engine = model.state_dict(), engine.state_dict()
        assert of_model.keys() == of_engine.keys() == twin.state_dict().keys()
        for name, value in of_model.items():
            assert value.shape == twin.state_dict()[name].shape
            assert repr(value) == repr(of_engine[name])
        inner = model.blocks[0].state_dict(prefix="inner.")
        assert inner["inner.weight"].shape == (WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint"):
            torch.save(of_model, io.BytesIO())

    with_sharded(body)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("assign", [False, True])
def test_full_tensors_load_into_a_model(assign: bool) -> None:
    other = model_of(seed=1)

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        model(IDS)
        model.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(model(IDS), other(IDS))
        twin.load_state_dict(engine.full_state_dict())
        model.load_state_dict(model.state_dict(), assign=assign)
        model.blocks[0].load_state_dict(other.blocks[0].state_dict(), assign=assign)
        assert torch.equal(model(IDS), twin(IDS))
        with pytest.raises(RuntimeError, match=r"embed\.weight has shape \(4, 8\)"):
            model.load_state_dict({"embed.weight": torch.zeros(4, WIDTH)}, strict=False)

    with_sharded(body)


def saved_as_torch_does(folder: str) -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group() as comm:
        model = model_of()
        fully_shard(model, comm, units=[nn.Linear, nn.Embedding])
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/own")
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/torch")
        other = model_of(seed=1)
        engine = fully_shard(other, comm, units=[nn.Embedding])
        state = other.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{folder}/own")
        other.load_state_dict(state)
        full = engine.full_state_dict()
        assert all(torch.equal(full[n], v) for n, v in model_of().state_dict().items())
        again = get_model_state_dict(model)
        dcp.load({"model": again}, checkpoint_id=f"{folder}/torch")
        set_model_state_dict(model, again)
        given = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with pytest.raises(NotImplementedError, match="full_state_dict"):
            given["embed.weight"].sum()
    dist.destroy_process_group()


@pytest.mark.covers("checkpoints")
def test_torchs_checkpoint_tools_save_and_load_a_models_state_dict(tmp_path: Path) -> None:
    launch(saved_as_torch_does, RANKS, (str(tmp_path),), timeout_s=60)
    for name in ("own", "torch"):
        plain = model_of(seed=1)
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert all(torch.equal(state["model"][n], v) for n, v in model_of().state_dict().items())


@pytest.mark.covers("loss scaling, NaN and Inf")
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("bad", range(RANKS))
def test_torchs_scaler_skips_a_step_on_all_ranks_if_one_has_an_inf(
    bad: int, granularity: str
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> tuple[bool, bool, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = engine.full_state_dict()
        model.zero_grad()
        scaler.scale(model(IDS).square().sum()).backward()
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        held = [grad for grad in grads if grad.numel()]
        if engine.mesh.rank == bad and held:
            held[0].view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        skipped = all(torch.equal(before[n], v) for n, v in engine.full_state_dict().items())
        return bool(held), skipped, scaler.get_scale()

    seen = with_sharded(body, granularity=granularity)
    had_inf = seen[bad][0]
    assert [each[1:] for each in seen] == [(had_inf, 2.0 if had_inf else 4.0)] * RANKS


class Lamb(torch.optim.Optimizer):
    """Its core: a step whose length is the parameter's norm over that of the update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad + 0.01 * p
                    trust = p.norm() / (update.norm() + 1e-6)
                    p.sub_(group["lr"] * trust * update)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_an_optimizer_that_takes_norms_takes_those_of_whole_parameters(granularity: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            Lamb(each.parameters()).step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body, granularity=granularity)


class FailsOnce(torch.optim.SGD):
    """Its first step raises when the first parameter is updated, and the others are not."""

    failed = False

    def _init_group(self, group: Any, *lists: Any) -> bool:
        if group is self.param_groups[1] and not self.failed:
            self.failed = True
            raise ZeroDivisionError
        return super()._init_group(group, *lists)  # type: ignore[no-any-return, misc]


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("then", ["step", "closure", "zero_grad", "save", "forward"])
def test_training_goes_on_after_a_step_that_raised(then: str, granularity: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        norms = []
        for each in (model, twin):
            first, *others = each.parameters()
            groups: Any = [{"params": [first]}, {"params": others}]
            optimizer = FailsOnce(groups, lr=0.1, momentum=0.9)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()

            def clip(each: nn.Module = each) -> torch.Tensor:
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
                return norms[-1]

            if then == "step":
                optimizer.step()
                clip()
            elif then == "closure":
                optimizer.step(clip)  # type: ignore[arg-type]
            elif then == "zero_grad":
                optimizer.zero_grad()
            elif then == "save":
                saved = engine.full_state_dict() if each is model else each.state_dict()
                each.load_state_dict(saved)
            for _ in range(2):
                each(IDS).square().sum().backward()
                clip()
                optimizer.step()
        half = len(norms) // 2
        torch.testing.assert_close(norms[:half], norms[half:])
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body, granularity=granularity)


def test_a_parameter_that_another_engine_has_taken_over_is_trained_by_this_one() -> None:
    def body(comm: Communicator) -> None:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        for model in (first, second):
            fully_shard(model, comm)
        before = second.weight.full_tensor()  # type: ignore[operator]
        second(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(second.parameters(), lr=0.5).step()
        torch.testing.assert_close(second.weight.full_tensor(), before - 0.5)  # type: ignore[operator]

    run_threads(body, RANKS)


class Clamped(torch.optim.AdamW):
    """Does something of its own around AdamW's step, element by element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.1, 0.1)


class Orthogonal(torch.optim.SGD):
    """Takes the nearest orthogonal matrix of each gradient, as Muon does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                    p.grad.copy_(u @ v)
        super().step(closure)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_of_its_own_around_torchs_is_as_without_sharding(options: dict[str, bool]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            optimizer = Clamped(each.parameters(), lr=0.1, **options)  # type: ignore[arg-type]
            for _ in range(2):
                each(IDS).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


def test_a_step_of_its_own_on_matrices_is_refused_on_rows() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        model(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="this rank has only its rows"):
            Orthogonal(model.parameters(), lr=0.1).step()

    with_sharded(body)


def test_rows_are_plain_in_a_step_and_guarded_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[type] = []

    def failing(params: list[torch.Tensor], *rest: Any, **kwargs: Any) -> None:
        seen.extend(map(type, params))
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", failing)

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(ZeroDivisionError):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        model(IDS).sum().backward()
        norm = nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        twin(IDS).sum().backward()
        torch.testing.assert_close(
            norm,
            nn.utils.get_total_norm(p.grad for p in twin.parameters() if p.grad is not None),
        )

    with_sharded(body)
    assert set(seen) == {nn.Parameter}


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize(
    "average",
    [
        lambda comm, p: comm.all_reduce(p.grad, "avg"),
        lambda comm, p: comm.all_reduce(p),
        lambda comm, p: comm.broadcast(p.data),
        lambda comm, p: shardcomm.reduce_scatter_tensor(p.grad, torch.ones(16), group=comm),
        lambda comm, p: dist.all_reduce(p.grad),
        lambda comm, p: dist.broadcast(p.data, 0),
        lambda comm, p: dist.all_gather([p.data, p.data], p.grad),
    ],
)
def test_rows_are_not_mixed_with_other_ranks_rows(
    average: Callable[[Communicator, Any], Any], granularity: str
) -> None:
    """With another name for each collective that averages gradients, or starts alike, by hand."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        grads = [each.grad.full_tensor() for each in model.parameters()]  # type: ignore[union-attr]
        for param in model.parameters():  # also where this rank has all of its rows, or none
            with pytest.raises(RuntimeError, match=r"leave the call out, take full_tensor\(\)"):
                average(engine.mesh.shard, param)
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert torch.equal(param.grad.full_tensor(), grad)  # type: ignore[union-attr]
            rows = param.to_local()  # type: ignore[attr-defined]
            counts = torch.tensor([float(rows.numel())])
            engine.mesh.shard.all_reduce(counts)  # plain tensors are
            assert counts == grad.numel()

    with_sharded(body, granularity=granularity)


@pytest.mark.parametrize("outer", [lambda model: model, nn.Sequential])
def test_ddp_of_a_sharded_model_is_refused(outer: Callable[[Any], Any]) -> None:
    model = model_of()
    fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="averages gradients already: call the model itself"):
            nn.parallel.DistributedDataParallel(outer(model))
    finally:
        dist.destroy_process_group()


def with_a_hook(model: nn.Linear) -> None:
    model.weight.register_hook(lambda grad: grad * 0)  # type: ignore[no-untyped-call]


def with_an_optimizer_in_backward(model: nn.Linear) -> None:
    model.weight.register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[no-untyped-call]


def with_a_gradient(model: nn.Linear) -> None:
    model(torch.ones(WIDTH)).sum().backward()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    ("before", "what"),
    [
        (with_a_hook, "hooks"),
        (with_an_optimizer_in_backward, "hooks"),
        (with_a_gradient, "a gradient"),
    ],
)
def test_what_hangs_on_parameters_before_is_refused(
    before: Callable[[nn.Linear], None], what: str, strategy: str
) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        before(model)
        with pytest.raises(ValueError, match=f"parameter 'weight' has {what} already"):
            fully_shard(model, comm, strategy=strategy)

    run_threads(body, RANKS)


TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "torch.jit.trace": lambda module, x: torch.jit.trace(module, (x,)),  # type: ignore[no-untyped-call]
    "make_fx": lambda module, x: make_fx(module)(x),
}


@pytest.mark.parametrize("by", TRACERS)
def test_a_trace_is_made_inside_of_gathered(by: str) -> None:
    model = model_of().requires_grad_(False)
    engine = fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear)
    for module, x in ((model, IDS), (model.blocks[0], torch.ones(2, WIDTH))):
        with pytest.raises(RuntimeError, match=rf"{by} of .* trace inside of engine.gathered\(\)"):
            TRACERS[by](module, x)
    with engine.gathered(), torch.no_grad():
        traced = TRACERS[by](model, IDS)
    assert torch.equal(traced(IDS), model(IDS))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_parameters_are_not_swapped(strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for param in model.parameters():
            other = nn.Parameter(torch.zeros(local(param).shape))
            for pair in ((param, other), (other, param)):
                with pytest.raises(RuntimeError, match="the engine; call it before fully_shard"):
                    torch.utils.swap_tensors(*pair)  # type: ignore[no-untyped-call]
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_quantised_modules_know_that_they_are_not_the_engines(inplace: bool) -> None:
    model = model_of()
    fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear, strategy="no_shard")
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=inplace)
    with pytest.raises(RuntimeError, match=r"load its full_state_dict\(\) into another one"):
        quantised(IDS)
