"""Parameters sharded on any dim, or owned whole by one rank, against the plain model."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from shardcomm import AdamW, Communicator, Mesh, MixedPrecision, fully_shard
from shardcomm.unit.groups import ShardDimOf
from support.nets import TiedEnds, assert_same, batch, loss_of, reference, sgd_of
from support.thread_ranks import run_mesh, run_threads
from support.twins import local, twins

STEPS = 3


class Conv(nn.Module):
    """A 4-D weight, matrices (one of them frozen), vectors and a scalar, on the last dim of x of size 6."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.mix = nn.Linear(15, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.frozen(x).unflatten(-1, (2, 3)).movedim(-2, 1)
        return x + self.scale * torch.tanh(self.mix(self.conv(image).movedim(1, -2).flatten(-2)))


class Mixed(TiedEnds):
    def __init__(self) -> None:
        super().__init__(6, (Conv() for _ in range(3)))


def second(name: str, param: nn.Parameter) -> int:
    """The second dim of what has one."""
    return 1 if param.dim() > 1 else 0


DIMS: dict[str, ShardDimOf] = {"0": 0, "second": second, "last": -1, "auto": "auto"}


@pytest.mark.covers("shard_dim")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dim", DIMS.values(), ids=DIMS)
def test_any_dim_trains_as_the_plain_model(dim: ShardDimOf, ranks: int) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model, _ = twins(Mixed)
        engine = fully_shard(model, comm, shard_dim=dim)
        optimizer = sgd_of(model)
        for step in range(STEPS):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    expected = reference(twins(Mixed)[1], ranks, STEPS, optimizer_of=sgd_of)  # type: ignore[arg-type]
    for state in run_threads(body, ranks):
        assert_same(state, expected, bitwise=False)


@pytest.mark.parametrize("dim", DIMS.values(), ids=DIMS)
def test_a_rank_holds_a_slice_in_the_parameters_own_order_of_dims(dim: ShardDimOf) -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        model, _ = twins(Mixed)
        fully_shard(model, comm, shard_dim=dim)
        loss_of(model, batch(comm.rank, 0)).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                assert local(param.grad).stride() == local(param).stride(), name
        return [local(param).clone() for param in model.parameters()]

    held = run_threads(body, 3)
    for (name, whole), *parts in zip(twins(Mixed)[1].named_parameters(), *held, strict=True):
        differ = (d for d in range(whole.dim()) if any(p.shape[d] != whole.shape[d] for p in parts))
        along = next(differ, 0)
        if whole.dim():
            assert torch.equal(torch.cat(parts, along), whole), name
        if dim != "auto":
            wanted = dim(name, whole) if callable(dim) else dim
            assert along == wanted % max(whole.dim(), 1), name


def test_auto_finds_rows_of_one_size() -> None:
    """Up and down projections have rows of 32 elements in common, on different dims."""

    def body(comm: Communicator) -> dict[ShardDimOf, int]:
        padding = {}
        for dim in (0, -1, "auto"):
            model = nn.Sequential(nn.Linear(32, 112, bias=False), nn.Linear(112, 32, bias=False))
            padding[dim] = fully_shard(model, comm, shard_dim=dim).footprint().padding_bytes
        return padding

    padding = run_threads(body, 3)[0]
    # 224 rows of 32 over 3 ranks: one row is left over, of 4 bytes an element.
    assert padding["auto"] == 32 * 4 < min(padding[0], padding[-1])


@pytest.mark.covers("shard_dim", "gradient accumulation", "gradient clipping")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_mesh_accumulates_and_clips_on_the_last_dim(rows: int) -> None:
    def body(mesh: Mesh) -> tuple[float, dict[str, torch.Tensor]]:
        model, _ = twins(Mixed)
        engine = fully_shard(model, mesh, strategy="hybrid_shard", shard_dim=-1)
        with engine.no_sync():
            loss_of(model, batch(mesh.rank, 0)).backward()
        loss_of(model, batch(mesh.rank, 1)).backward()
        norm = float(engine.clip_grad_norm_(0.1))
        sgd_of(model).step()
        return norm, engine.full_state_dict()

    plain = twins(Mixed)[1]
    ranks = 2 * rows
    sum(loss_of(plain, batch(r, m)) / ranks for r in range(ranks) for m in range(2)).backward()
    wanted_norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    sgd_of(plain).step()
    for norm, state in run_mesh(body, rows, 2):
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
        assert_same(state, plain, bitwise=False)


@pytest.mark.covers("shard_dim", "mixed precision")
def test_bf16_gathers_and_reduces_the_same_numbers_on_the_last_dim() -> None:
    """The kernels that compute may round differently; the wire may not."""
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    weight = torch.randn(6, 15, generator=torch.Generator().manual_seed(3))

    def body(comm: Communicator) -> torch.Tensor:
        model = nn.Linear(15, 6, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)
        engine = fully_shard(model, comm, shard_dim=-1, mixed_precision=half)
        (2.0**comm.rank * model(torch.eye(15))).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        assert torch.equal(local(grad), torch.full_like(local(grad), (1 + 2) / 2))
        with torch.no_grad():
            assert torch.equal(model(torch.eye(15)).T, weight.bfloat16())
        return engine.full_state_dict()["weight"]

    assert all(torch.equal(kept, weight) for kept in run_threads(body, 2))


@pytest.mark.covers("shard_dim", "optimizers", "optimizer state")
@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamW])
def test_adamw_goes_through_slices_and_state_alike(make: type[torch.optim.AdamW]) -> None:
    plain = twins(Mixed)[1]
    models = [copy.deepcopy(plain) for _ in range(2)]
    reference(plain, 2, STEPS, optimizer_of=lambda m: make(m.parameters(), lr=0.01))  # type: ignore[arg-type]

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = models[comm.rank]
        engine = fully_shard(model, comm, shard_dim=-1)
        optimizer = make(model.parameters(), lr=0.01)
        for step in range(STEPS):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.covers("owners")
def test_the_owner_of_a_tensor_holds_it_its_gradient_and_its_state_and_others_nothing() -> None:
    ranks = 3

    def body(comm: Communicator) -> tuple[dict[str, tuple[int, ...]], int, int]:
        model, _ = twins(Mixed)
        engine = fully_shard(model, comm, granularity="tensor")
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        numels = {}
        for name, param in model.named_parameters():
            state = optimizer.state[param]
            grad = torch.zeros(0) if param.grad is None else param.grad
            moments = [state[key].numel() if state else 0 for key in ("exp_avg", "exp_avg_sq")]
            numels[name] = (local(param).numel(), local(grad).numel(), *moments)
        footprint = engine.footprint()
        return numels, footprint.parameter_bytes, footprint.padding_bytes

    held = run_threads(body, ranks)
    whole_bytes = 0
    owners: Counter[int] = Counter()
    for name, param in twins(Mixed)[1].named_parameters():
        trained = param.numel() if param.requires_grad else 0
        of_owner = (param.numel(), trained, trained, trained)
        of_ranks = [numels[name] for numels, _, _ in held]
        assert sorted(of_ranks) == [*[(0, 0, 0, 0)] * (ranks - 1), of_owner], name
        owners[of_ranks.index(of_owner)] += 1
        whole_bytes += param.nbytes
    assert len(owners) == ranks
    (padding_bytes,) = {padding for _, _, padding in held}
    assert sum(nbytes for _, nbytes, _ in held) == whole_bytes + padding_bytes


def test_a_dim_that_a_parameter_lacks_is_named() -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match=r"'bias': shard_dim is 1; accepted for shape \(3,\): -1 "):
        fully_shard(nn.Linear(2, 3), comm, shard_dim=1)
