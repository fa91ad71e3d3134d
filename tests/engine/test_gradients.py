"""Gradients around their reduce: loss scaling, divide factors, NaN and Inf. And the casts around a model."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, GradScaler, Mesh, MixedPrecision, fully_shard
from support.nets import assert_same, batch, loss_of, make, sgd_of
from support.thread_ranks import run_mesh, run_threads
from support.twins import local

HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)


@pytest.mark.covers("loss scaling, NaN and Inf")
def test_loss_scaling_by_a_power_of_2_changes_nothing() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = sgd_of(model)
        scaler = GradScaler(engine, init_scale=2.0**10)
        for step in range(3):
            scaler.scale(loss_of(model, batch(comm.rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return engine.full_state_dict()

    plain = make()
    optimizer = sgd_of(plain)
    for step in range(3):
        sum(loss_of(plain, batch(rank, step)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for state in run_threads(body, 2):
        assert_same(state, plain, bitwise=False)


@pytest.mark.covers("loss scaling, NaN and Inf")
@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("width", [4, 32])  # the smaller one is on rank 0 alone
def test_scaler_skips_a_step_on_all_ranks_if_one_has_an_inf(
    width: int, unscale_first: bool
) -> None:
    def body(comm: Communicator) -> tuple[bool, float]:
        model = nn.Linear(width, width, bias=False)
        engine = fully_shard(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = GradScaler(engine, init_scale=4.0)
        before = local(model.weight).clone()
        scaler.scale(model(torch.ones(1, width)).sum()).backward()
        if comm.rank == 0:  # the rows of one rank only
            assert model.weight.grad is not None
            local(model.weight.grad)[0, 0] = float("inf")
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return torch.equal(local(model.weight), before), scaler.get_scale()

    assert run_threads(body, 3) == [(True, 2.0)] * 3


@pytest.mark.covers("loss scaling, NaN and Inf")
def test_an_inf_on_another_device_of_one_rank_skips_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where some units are offloaded, torch looks at the gradients of each device by themselves."""
    of_torch = torch.amp.GradScaler._unscale_grads_
    ranks = threading.local()

    def of_two_devices(scaler: GradScaler, *args: Any) -> dict[torch.device, torch.Tensor]:
        another = torch.full((), float(ranks.rank == 1))
        return {**of_torch(scaler, *args), torch.device("cpu", 1): another}

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", of_two_devices)

    def body(comm: Communicator) -> tuple[bool, float]:
        ranks.rank = comm.rank
        model = make()
        engine = fully_shard(model, comm)
        optimizer = sgd_of(model)
        scaler = GradScaler(engine, init_scale=4.0)
        param = next(model.parameters())
        before = local(param).clone()
        scaler.scale(loss_of(model, batch(comm.rank, 0))).backward()
        scaler.step(optimizer)
        scaler.update()
        return torch.equal(local(param), before), scaler.get_scale()

    assert run_threads(body, 2) == [(True, 2.0)] * 2


@pytest.mark.covers("loss scaling, NaN and Inf", "mixed precision")
def test_overflow_of_float16_is_found_and_the_scale_backs_off() -> None:
    def body(mesh: Mesh) -> list[float]:
        model = make()
        engine = fully_shard(model, mesh, strategy="hybrid_shard", mixed_precision=HALF)
        optimizer = sgd_of(model)
        scaler = GradScaler(engine, init_scale=2.0**30)
        scales = []
        for step in range(30):
            scaler.scale(loss_of(model, batch(mesh.rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert all(value.isfinite().all() for value in engine.full_state_dict().values())
        return scales

    first, *others = run_mesh(body, 2, 2)
    assert first[0] == 2.0**29
    assert first[-1] < first[0]
    assert first[-1] == first[-2]  # steps are taken again
    assert all(scales == first for scales in others)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_sums_are_divided_by_the_factor(strategy: str, reduce_dtype: torch.dtype) -> None:
    def body(mesh: Mesh) -> torch.Tensor:
        ranks = mesh if strategy == "hybrid_shard" else mesh.shard
        model = nn.Linear(4, 4, bias=False)
        precision = MixedPrecision(reduce_dtype=reduce_dtype)
        engine = fully_shard(model, ranks, strategy=strategy, mixed_precision=precision)
        engine.set_gradient_divide_factor(2 * ranks.size)
        for _ in range(2):  # the second is added
            model(torch.ones(1, 4) * (1 + ranks.rank)).sum().backward()
        assert model.weight.grad is not None
        return local(model.weight.grad)

    rows = 2 if strategy == "hybrid_shard" else 1
    ranks = 2 * rows
    mean = sum(range(1, ranks + 1)) / ranks
    for grad in run_mesh(body, rows, 2):
        assert grad.eq(2 * mean / 2).all()


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), "2"])
def test_factors_that_divide_nothing_are_refused(factor: object) -> None:
    engine = fully_shard(nn.Linear(2, 2), Communicator.local_group(1)[0])
    with pytest.raises(ValueError, match=r"factor is .*; it must be a number above 0"):
        engine.set_gradient_divide_factor(factor)  # type: ignore[arg-type]


def test_a_factor_that_changes_each_step_makes_nothing_anew() -> None:
    model = nn.Linear(2, 2, bias=False)
    engine = fully_shard(model, Communicator.local_group(1)[0])
    (bucket, _) = engine.units[0].buckets[0]
    packs: list[object] = []
    for factor in range(1, 30):
        engine.set_gradient_divide_factor(factor)
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.eq(torch.tensor(1.0) / factor).all()
        packs.append(list(bucket.reduction._full._packs.values()))
        assert packs[-1] == packs[0]
        model.zero_grad()


def poison(model: nn.Module, unit: int, value: float) -> None:
    """The next gradient of a block's weight has `value` in one place."""

    def put(grad: torch.Tensor) -> torch.Tensor:
        on_gradient.remove()
        return grad.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value))

    def watch(block: nn.Module, args: tuple[torch.Tensor]) -> None:
        nonlocal on_gradient
        on_forward.remove()
        on_gradient = block.up.weight.register_hook(put)

    on_forward = model.blocks[unit].register_forward_pre_hook(watch)
    on_gradient = on_forward


@pytest.mark.covers("loss scaling, NaN and Inf")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_raise_on_all_ranks_and_name_unit_and_parameter(value: float) -> None:
    def body(mesh: Mesh) -> None:
        model = make()
        engine = fully_shard(model, mesh, strategy="hybrid_shard", on_nonfinite="raise")
        loss_of(model, batch(mesh.rank, 0)).backward()
        assert engine.nonfinite == ()
        if mesh.rank == 3:
            poison(model, 2, value)
        with pytest.raises(
            FloatingPointError,
            match=r"gradients of 'blocks\.2' are NaN or Inf .*, those of 'blocks\.2\.up\.weight'; no",
        ):
            loss_of(model, batch(mesh.rank, 1)).backward()
        assert engine.nonfinite == ("blocks.2",)
        assert all(param.grad is None for param in model.parameters())

    run_mesh(body, 2, 2)


def test_of_many_nonfinite_gradients_some_are_named() -> None:
    def body(comm: Communicator) -> str:
        model = make()
        fully_shard(model, comm, on_nonfinite="raise")
        with pytest.raises(FloatingPointError) as caught:
            (loss_of(model, batch(comm.rank, 0)) * (math.nan if comm.rank else 1.0)).backward()
        return str(caught.value)

    many = len(list(make().parameters()))
    for message in run_threads(body, 2):
        assert f"'blocks.3.down.weight' and {many - 8} others; no parameter has a .grad" in message


@pytest.mark.covers("loss scaling, NaN and Inf", "gradient accumulation")
@pytest.mark.parametrize("ranks", [1, 2])
def test_nonfinite_gradients_are_skipped_with_those_they_were_added_to(ranks: int) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm, on_nonfinite="skip")
        optimizer = sgd_of(model)
        for step in range(4):
            if step == 2:
                poison(model, 0, float("nan"))
            loss_of(model, batch(comm.rank, step)).backward()
            assert engine.nonfinite == (("blocks.0",) if step == 2 else ())
            if step == 1:
                continue  # the next is added
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    plain = make()
    optimizer = sgd_of(plain)
    for step in (0, 3):
        sum(loss_of(plain, batch(rank, step)) / ranks for rank in range(ranks)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for state in run_threads(body, ranks):
        assert_same(state, plain, bitwise=False)


def test_large_gradients_are_no_inf() -> None:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, Communicator.local_group(1)[0], on_nonfinite="raise")
    (model(torch.ones(1, 4)) * 3e38).sum().backward()  # their sum overflows
    assert model.weight.grad is not None
    assert model.weight.grad.eq(3e38).all()


def test_on_nonfinite_that_is_no_such_thing_is_named() -> None:
    with pytest.raises(ValueError, match="on_nonfinite is 'warn'; accepted: 'raise', 'skip', None"):
        fully_shard(make(), Communicator.local_group(1)[0], on_nonfinite="warn")  # type: ignore[arg-type]


class Seen(nn.Module):
    """Keeps the dtype of its latest input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtype = x.dtype
        return torch.nn.functional.linear(x.to(self.linear.weight.dtype), self.linear.weight)


def test_outputs_of_the_model_are_cast_and_not_those_of_its_units() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    first, second = Seen(), Seen()
    model = nn.Sequential(first, second)
    fully_shard(model, Communicator.local_group(1)[0], units=Seen, mixed_precision=precision)
    x = torch.ones(2, 4, requires_grad=True)
    out = model(x)
    assert out.dtype == torch.float32
    assert first.dtype == second.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None for p in (first.linear.weight, second.linear.weight))


def test_inputs_are_cast_unless_told_otherwise() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = Seen()
    fully_shard(model, Communicator.local_group(1)[0], units=[], mixed_precision=precision)
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.int8, "output_dtype is torch.int8; accepted: torch.float32, torch.bfloat16"),
        ("bfloat16", "output_dtype is 'bfloat16'; accepted: torch.float32, torch.bfloat16"),
    ],
)
def test_output_dtype_that_cannot_be_is_named(dtype: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MixedPrecision(output_dtype=dtype)


def test_what_passes_between_units_keeps_its_dtype() -> None:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False
    )
    first, second = Seen(), Seen()
    model = nn.Sequential(first, second)
    fully_shard(model, Communicator.local_group(1)[0], units=Seen, mixed_precision=precision)
    assert model(torch.ones(2, 4)).dtype == torch.float32
    assert second.dtype == torch.bfloat16
