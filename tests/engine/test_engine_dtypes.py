"""Parameters of any dtype, against plain autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardcomm import Communicator, MixedPrecision, fully_shard
from support.nets import STEPS, Net, assert_same, batch, loss_of, make, optimizer_of, train
from support.rank_sums import combined
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, twins, values


class Quantised(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        weight = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 5
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x @ (self.weight.real if self.weight.is_complex() else self.weight).to(x.dtype)


@pytest.mark.covers("frozen and tied parameters", "mixed precision")
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


@pytest.mark.covers("mixed precision")
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_float64_trains_as_it_is(ranks: int, cpu_offload: bool) -> None:
    """Scaled, added, and looked at for NaN, too: what a copy does in float32 only."""

    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain().double())
        engine = fully_shard(model, comm, on_nonfinite="raise", cpu_offload=cpu_offload)
        engine.set_gradient_divide_factor(ranks / 2)
        for seed in (1, 2):
            x = values(3, WIDTH, seed=seed).double()
            model(x).square().sum().backward()
            (2 * plain(x).square().sum()).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


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


def bf16_reference(ranks: int) -> Net:
    """Computes with a bf16 copy of fp32 parameters; averages bf16 gradients in fp32."""
    model = make()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        each_ranks: list[list[torch.Tensor]] = []
        for rank in range(ranks):
            half = copy.deepcopy(model)
            for param in half.parameters():
                param.data = param.data.to(torch.bfloat16)
            loss_of(half, batch(rank, step)).backward()
            each_ranks.append([p.grad.float() for p in half.parameters() if p.grad is not None])
        for param, *of_ranks in zip(model.parameters(), *each_ranks, strict=True):
            param.grad = combined(of_ranks) * (1.0 / ranks)
        optimizer.step()
    return model


@pytest.mark.covers("mixed precision")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_bf16_parameters_with_fp32_shards(ranks: int, reduce_dtype: torch.dtype | None) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        seen: list[torch.dtype] = []
        model.blocks[0].register_forward_hook(lambda m, a, out: seen.append(m.up.weight.dtype))
        state = train(comm, model, mixed_precision=precision)
        assert set(seen) == {torch.bfloat16}
        return state

    expected = bf16_reference(ranks)
    for state in run_threads(body, ranks):
        assert_same(state, expected, bitwise=True)


@pytest.mark.covers("mixed precision")
def test_one_unit_may_hold_several_dtypes() -> None:
    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))

    def run(model: nn.Sequential) -> None:
        hidden = model[0](torch.ones(2, 4))
        model[1](hidden.to(torch.bfloat16)).float().sum().backward()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()

        def forward(self) -> torch.Tensor:
            return self.net[1](self.net[0](torch.ones(2, 4)).to(torch.bfloat16)).float().sum()

    plain = Whole()
    plain().backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = Whole()
        model.load_state_dict(plain.state_dict())
        engine = fully_shard(model, comm)
        model().backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                assert param.grad.dtype == param.dtype
                param.copy_(param.grad)
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, grad in grads.items():
            assert torch.equal(state[name], grad), name
