"""Norms of sharded tensors, and clipping by them: those of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardcomm
from shardcomm import Communicator, Engine, Mesh, fully_shard
from support.thread_ranks import run_mesh, run_threads
from support.tied import IDS, Tied, model_of, with_sharded
from support.twins import WIDTH, twins, values


@pytest.mark.covers("gradient clipping")
@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, math.inf, -math.inf, 0.0, -1.0])
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


@pytest.mark.covers("gradient clipping")
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float64, 1e25), (torch.float32, 1e18), (torch.bfloat16, 1.0)],
)
def test_the_engines_norm_neither_overflows_nor_rounds_early(
    dtype: torch.dtype, scale: float, granularity: str
) -> None:
    """At 1e25, squares are too large for float32; at 1e18, their sum is. A norm in bfloat16 would have three digits."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).to(dtype))
        engine = fully_shard(model, comm, units=nn.Linear, granularity=granularity)
        for net in (model, plain):
            (net(values(4, 64).to(dtype)).square().sum() * scale).backward()
        grads = [p.grad.double() for p in plain.parameters() if p.grad is not None]
        expected = torch.cat([g.flatten() / scale for g in grads]).norm() * scale
        norm = engine.clip_grad_norm_(1.0)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
        for p, grad in zip(model.parameters(), grads, strict=True):
            clipped = p.grad.full_tensor().double()  # type: ignore[union-attr, operator]
            close = torch.finfo(dtype).eps * 2
            torch.testing.assert_close(clipped, grad / expected, rtol=close, atol=1e-12)

    run_threads(body, 2)


@pytest.mark.parametrize("kind", [-1.0, -2.5])
@pytest.mark.parametrize("rows", [1, 4])
def test_norms_of_negative_order_of_what_has_a_zero_are_zero(kind: float, rows: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Linear(WIDTH, rows, bias=False))
        with torch.no_grad():
            for each in (model, plain):
                each.weight[0, 3] = 0
        fully_shard(model, comm)
        ours, theirs = (nn.utils.get_total_norm([m.weight], kind) for m in (model, plain))
        torch.testing.assert_close(ours, theirs)

    run_threads(body, 2)


@pytest.mark.parametrize("kind", [-1.0, math.inf])
def test_what_has_no_elements_has_no_such_norm(kind: float) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(3, 0)
        engine = fully_shard(model, comm)
        with pytest.raises(RuntimeError, match="on an empty tensor"):
            float(torch.linalg.vector_norm(model.weight.detach(), kind))
        engine.close()

    run_threads(body, 2)


@pytest.mark.covers("gradient clipping", "ignored parameters")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, math.inf, -math.inf, 0.0, -1.0])
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
