"""Parameters of any dtype, against plain autograd."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import run_threads
from torch import nn
from twins import WIDTH, Chain, assert_same_gradients, twins, values

from shardcomm import Communicator, MixedPrecision, fully_shard


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
