"""`nn.TransformerEncoder` in evaluation with padding: torch's fast path leaves zeros, with sharded layers too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import Communicator, MixedPrecision, fully_shard
from shardcomm.parameter.sharded_parameter import ShardedParameter
from support.parity import STRATEGIES
from support.thread_ranks import run_threads
from support.twins import WIDTH, twins, values

PADDED = torch.tensor([[False, False, False], [False, True, True]])
X = values(2, 3, WIDTH)


def encoder(*, norm: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH) if norm else None)


def output_of(net: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    out: torch.Tensor = net(x, src_key_padding_mask=PADDED)
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    **{strategy: {"strategy": strategy} for strategy in STRATEGIES},
    "by class": {"units": nn.TransformerEncoderLayer},
    "whole tensors": {"granularity": "tensor"},
    "offloaded": {"cpu_offload": True},
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_encoder_evaluates_as_without_sharding(options: str, norm: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: encoder(norm=norm))
        fully_shard(model, comm, **OPTIONS[options])
        for _ in range(2):
            for net in (model, plain):
                net.train()
                output_of(net).square().sum().backward()
                net.eval()
            with torch.no_grad():
                expected = output_of(plain)
                torch.testing.assert_close(output_of(model), expected)
            assert norm or not expected[PADDED].any()  # it is the fast path
            torch.testing.assert_close(output_of(model), output_of(plain))  # and this is not

    run_threads(body, 2)


def test_an_encoder_in_bfloat16_evaluates_as_without_sharding() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(encoder)
        half = MixedPrecision(param_dtype=torch.bfloat16)
        fully_shard(model, comm, mixed_precision=half)
        model.eval()
        plain.to(torch.bfloat16).eval()
        with torch.no_grad():
            ours, theirs = output_of(model), output_of(plain, X.to(torch.bfloat16))
        torch.testing.assert_close(ours, theirs)

    run_threads(body, 2)


def test_its_parameters_are_guarded_after_an_error_and_in_a_copy() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(encoder)
        engine = fully_shard(model, comm)
        model.eval()
        with torch.no_grad():
            with pytest.raises((RuntimeError, AssertionError)):
                output_of(model, X[:, :, :4])
            assert all(type(p) is ShardedParameter for p in model.parameters())
            with pytest.raises(AssertionError, match="only bool and floating types"):
                model(X, src_key_padding_mask=PADDED.long())
            assert all(type(p) is ShardedParameter for p in model.parameters())
            output_of(model)
            assert all(type(p) is ShardedParameter for p in model.parameters())
            with engine.gathered():
                copied = copy.deepcopy(model)
                torch.testing.assert_close(output_of(model), output_of(plain.eval()))
        assert all(type(p) is ShardedParameter for p in model.parameters())
        assert copied is not model

    run_threads(body, 2)
