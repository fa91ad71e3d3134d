"""Optimizers of sharded parameters: which steps are as without sharding, and which are refused."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, Engine, Mesh, fully_shard
from support.thread_ranks import run_mesh, run_threads
from support.tied import IDS, RANKS, Tied, model_of, with_sharded
from support.twins import WIDTH, local


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


@pytest.mark.parametrize("how", ["assigned", "added"])
def test_as_many_other_parameters_are_looked_at_in_the_next_step(how: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        with engine.gathered():
            full = list(model.parameters())
        if how == "assigned":
            optimizer.param_groups[0]["params"] = full
        else:
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": full})
        model(IDS).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"SGD\.step: .* full parameter 'embed\.weight'"):
            optimizer.step()

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
