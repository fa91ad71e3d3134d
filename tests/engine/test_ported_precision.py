"""What PyTorch states of FSDP2's mixed precision, stated of `fully_shard`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, MixedPrecision, Policy, fully_shard, launch
from support.parity import MLP, STRATEGIES, assert_same_params, numbers, three, train_alike, whole
from support.thread_ranks import run_threads
from support.twins import twins, values

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


# Mixed precision against a copy of the model that computes in it, and an optimizer in float32.


def largest(name: str, param: nn.Parameter) -> int:
    return param.shape.index(max(param.shape))


@pytest.mark.covers("mixed precision")
@pytest.mark.parametrize("dim", [0, largest])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "micro"),
    [
        (BF16, None, 1),
        (F16, None, 1),
        (F16, BF16, 1),
        (BF16, F32, 1),
        (BF16, F32, 4),
        (F32, BF16, 1),
        (F32, BF16, 4),
        (None, F16, 4),
    ],
)
def test_compute_and_reduce_dtypes(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    micro: int,
    strategy: str,
    dim: Any,
) -> None:
    """Two ranks: the mean of two gradients is exact but for the roundings that are asked for."""
    computed = param_dtype or F32
    wire = reduce_dtype or computed
    steps = 3

    def body(comm: Communicator) -> None:
        model, plain = twins(three)
        precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        engine = fully_shard(
            model, comm, units=MLP, strategy=strategy, mixed_precision=precision, shard_dim=dim
        )
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
        batch = numbers(4, 16)
        for step in range(steps):
            for index in range(step * micro, (step + 1) * micro):
                loss = model(*batch(comm.rank, index)).sum()
                assert loss.dtype == computed
                if index == (step + 1) * micro - 1:
                    loss.backward()
                else:
                    with engine.no_sync():
                        loss.backward()
            mean_of_ranks(plain, batch, range(step * micro, (step + 1) * micro), computed, wire)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None
                assert ours.grad.dtype == ours.dtype == F32
                tolerance = 2 * torch.finfo(wire).eps
                torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=tolerance, atol=1e-6)
                theirs.grad = whole(ours.grad).clone()  # roundings do not add up over steps
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, plain)

    run_threads(body, 2)


def mean_of_ranks(
    plain: nn.Module,
    batch: Callable[[int, int], tuple[torch.Tensor]],
    indices: range,
    computed: torch.dtype,
    wire: torch.dtype,
) -> None:
    """Leaves the mean of two ranks' gradients, computed in one dtype and sent in another, in `plain`."""
    sums = [torch.zeros_like(param) for param in plain.parameters()]
    for rank in range(2):
        replica = copy.deepcopy(plain).to(computed)
        of_rank = [torch.zeros_like(param) for param in plain.parameters()]
        for index in indices:
            replica.zero_grad()
            replica(batch(rank, index)[0].to(computed)).sum().backward()
            for total, param in zip(of_rank, replica.parameters(), strict=True):
                assert param.grad is not None
                total.add_(param.grad)
        for total, grad in zip(sums, of_rank, strict=True):
            total.add_(grad.to(wire))
    for param, total in zip(plain.parameters(), sums, strict=True):
        param.grad = (total / 2).to(wire).to(param.dtype)


@pytest.mark.covers("mixed precision", "gradient accumulation")
def test_no_sync_adds_up_in_the_dtype_of_the_reduce() -> None:
    """64 gradients of which each alone is lost beside the sum in bfloat16."""

    def body(comm: Communicator) -> None:
        model = nn.Linear(4, 4, bias=False)
        precision = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)
        engine = fully_shard(model, comm, mixed_precision=precision)
        for index, scale in enumerate([256.0, *[0.5] * 64]):
            loss = model(torch.full((1, 4), scale)).sum()
            if index < 64:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()
        assert model.weight.grad is not None
        assert torch.equal(whole(model.weight.grad), torch.full((4, 4), 288.0))

    run_threads(body, 2)


class WithCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.counter = nn.Parameter(torch.ones(16, dtype=torch.int64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_thawed_after_a_first_forward_is_reduced_in_the_reduce_dtype(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(WithCounter)
        precision = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)
        fully_shard(model, comm, mixed_precision=precision, strategy=strategy)
        for net in (model, plain):
            net.requires_grad_(False)
        with torch.no_grad():
            model(values(4, 16))
        for net in (model, plain):
            net.layers.requires_grad_(True)  # type: ignore[union-attr]
        # What bfloat16 has exactly, so that only a reduce in it would round: 1 on one rank, 1/512 on the other.
        model(torch.ones(1, 16) / 512**comm.rank).sum().backward()
        bias = model.layers[1].bias  # type: ignore[union-attr,index]
        weight = model.layers[0].weight  # type: ignore[union-attr,index]
        assert model.counter.grad is None
        assert bias.grad is not None
        assert weight.grad is not None
        grads = whole(weight.grad)
        assert grads.dtype == F32
        assert not torch.equal(grads, grads.to(BF16).float())

    run_threads(body, 2)


# Inputs and outputs.


@dataclass
class Two:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Nested:
    two: Two
    z: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, given: Any) -> Any:
        if isinstance(given, Nested):
            return Nested(Two(self._of(given.two.x), self._of(given.two.y)), self._of(given.z))
        return type(given)(self._of(given.x), self._of(given.y))

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        out: torch.Tensor = self.linear(x)
        return out


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (lambda x: Two(x, x.clone()), lambda c: c.x + c.y),
    "nested dataclass": (
        lambda x: Nested(Two(x, x.clone()), x.clone()),
        lambda c: c.two.x + c.two.y + c.z,
    ),
    "named tuple": (lambda x: Named(x, x.clone()), lambda c: c.x + c.y),
}


class Structures(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(2))
        self.wrap, self.take = CONTAINERS[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        container = self.wrap(x)
        for block in self.blocks:
            container = block(container)
        return self.take(container)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("dtypes", [(None, None), (BF16, BF16), (BF16, F32)])
def test_structures_of_tensors_between_units(
    kind: str, dtypes: tuple[torch.dtype | None, torch.dtype | None]
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Structures(kind))
        engine = fully_shard(model, comm, mixed_precision=MixedPrecision(*dtypes))
        if dtypes == (None, None):
            train_alike(comm, engine, model, plain, numbers(2, 8))
            return
        out = model(values(2, 8))
        assert out.dtype == BF16
        out.float().square().sum().backward()
        assert all(dtype == BF16 for block in model.blocks for dtype in block.seen)  # type: ignore[union-attr]
        replica = copy.deepcopy(plain).to(BF16)
        replica(values(2, 8).to(BF16)).float().square().sum().backward()
        for ours, theirs in zip(model.parameters(), replica.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(whole(ours.grad), theirs.grad.float(), rtol=1e-2, atol=1e-2)

    run_threads(body, 2)


class Recording(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.given: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        self.given.append((x.dtype, *(other.dtype for other in others)))
        return super().forward(x.to(self.weight.dtype))


class WithExternalInput(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recompute = Recording(), Recording(), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        external = torch.ones(2, 8)
        if self.recompute:
            return checkpoint(self.second, x, external, use_reentrant=False)  # type: ignore[no-any-return]
        out: torch.Tensor = self.second(x, external)
        return out


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cast", [True, False])
def test_inputs_that_come_from_outside_of_a_unit_are_cast_each_time(
    cast: bool, recompute: bool
) -> None:
    def body(comm: Communicator) -> None:
        model = WithExternalInput(recompute=recompute)
        precision = MixedPrecision(BF16, cast_forward_inputs=cast, output_dtype=F32)
        fully_shard(model, comm, units=Recording, mixed_precision=precision)
        out = model(values(2, 8))
        assert out.dtype == F32
        out.sum().backward()
        expected = (BF16, BF16 if cast else F32)
        assert model.second.given == [expected] * (2 if recompute else 1)
        assert model.first.given == [expected[1:]]

    run_threads(body, 2)


class OfOneGroup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x).float())
        return out


def test_a_float32_value_between_two_units_is_cast() -> None:
    def body(comm: Communicator) -> None:
        model = OfOneGroup()
        fully_shard(model, comm, units=nn.Linear, mixed_precision=MixedPrecision(BF16))
        out = model(values(2, 8))
        assert out.dtype == BF16
        out.sum().backward()
        assert all(param.grad is not None for param in model.parameters())

    run_threads(body, 2)


@pytest.mark.covers("mixed precision")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), (4, 8)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), (4, 8)),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)),
            (3, 1, 9, 9),
        ),
    ],
    ids=["LayerNorm", "BatchNorm1d", "BatchNorm2d"],
)
def test_norms_compute_in_low_precision(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(make)
        for buffer in model.buffers():  # torch's batch norms take no buffers of another dtype
            buffer.data = buffer.to(dtype) if buffer.is_floating_point() else buffer
        units: Any = list(model.children())
        fully_shard(model, comm, units=units, mixed_precision=MixedPrecision(dtype))
        out = model(values(*shape))
        assert out.dtype == dtype
        out.sum().backward()
        for param in model.parameters():
            assert param.grad is not None
            assert param.grad.dtype == F32

    run_threads(body, 2)


def test_a_batch_norm_in_float32_among_convolutions_in_half_precision() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))
        norm = MixedPrecision(param_dtype=F32, output_dtype=BF16)
        units: Any = {nn.Conv2d: None, nn.BatchNorm2d: Policy(mixed_precision=norm)}
        fully_shard(model, comm, units=units, mixed_precision=MixedPrecision(BF16))
        out = model(values(3, 1, 9, 9))
        assert out.dtype == BF16
        out.sum().backward()
        assert all(param.grad is not None for param in model.parameters())

    run_threads(body, 2)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Recording(), Recording()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize(
    ("half", "precision", "given"),
    [
        ("second", MixedPrecision(F16), (F32, F16)),
        ("second", MixedPrecision(F16, cast_forward_inputs=False), (F32, F32)),
        ("first", MixedPrecision(F16, output_dtype=F32), (F16, F32)),
    ],
)
def test_one_unit_in_half_precision(
    half: str, precision: MixedPrecision, given: tuple[torch.dtype, torch.dtype]
) -> None:
    def body(comm: Communicator) -> None:
        model = TwoParts()
        units: Any = {getattr(model, half): Policy(mixed_precision=precision)}
        fully_shard(model, comm, units=units)
        model(values(2, 8)).sum().backward()
        assert (model.first.given, model.second.given) == ([(given[0],)], [(given[1],)])
        assert all(param.grad is not None for param in model.parameters())

    run_threads(body, 2)


def jvp_before_any_other_forward() -> None:
    with Communicator.from_env() as comm:
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
        precision = MixedPrecision(BF16, reduce_dtype=F32)
        fully_shard(
            model, comm, units=nn.Linear, mixed_precision=precision, strategy="shard_grad_op"
        )
        x, tangent = values(8, seed=1).to(BF16), values(8, seed=2).to(BF16)
        out, tangent_out = torch.func.jvp(model, (x,), (tangent,))
        assert out.dtype == tangent_out.dtype == BF16
        torch.testing.assert_close(tangent_out, model(tangent).detach())  # it is linear


def test_a_jvp_before_any_other_forward() -> None:
    """A process has one level of forward mode at a time: ranks are processes here."""
    launch(jvp_before_any_other_forward, 2, timeout_s=60)
