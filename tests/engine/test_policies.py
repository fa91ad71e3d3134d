"""Units that differ from the rest: policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import CommError, Communicator, MemoryPlan, MixedPrecision, Policy, fully_shard
from support.nets import Block, Net, assert_same, batch, loss_of, make, reference, sgd_of
from support.thread_ranks import run_threads

HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IN_FLOAT32 = MixedPrecision(param_dtype=torch.float32, output_dtype=torch.bfloat16)
RANKS = 2
STEPS = 3


def in_half_but_norms(model: Net) -> Net:
    """`model` as autograd trains it without us: float32 parameters, of which all but norms compute in bfloat16."""

    def half(module: nn.Module, dtype: torch.dtype, output: torch.dtype | None) -> None:
        forward = module.forward

        def cast(x: torch.Tensor) -> torch.Tensor:
            full = dict(module.named_parameters(recurse=False))
            x = x.to(dtype) if x.is_floating_point() else x
            out: torch.Tensor = torch.func.functional_call(
                _Forward(forward), {f"module.{k}": v.to(dtype) for k, v in full.items()}, (x,)
            )
            return out if output is None else out.to(output)

        class _Forward(nn.Module):
            def __init__(self, call: Any) -> None:
                super().__init__()
                self.module = module
                self.call = call

            def forward(self, x: torch.Tensor) -> Any:
                return self.call(x)

        module.forward = cast  # type: ignore[method-assign]

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            half(module, torch.float32, torch.bfloat16)
        elif isinstance(module, nn.Linear | nn.Embedding):
            half(module, torch.bfloat16, None)
    return model


@pytest.mark.covers("units that differ", "mixed precision")
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_norms_compute_in_float32_among_blocks_in_bfloat16(cpu_offload: bool) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make(layers=2)
        dtypes: set[tuple[type, torch.dtype]] = set()
        engine = fully_shard(
            model,
            comm,
            mixed_precision=HALF,
            units={
                Block: None,
                nn.LayerNorm: Policy(mixed_precision=IN_FLOAT32, cpu_offload=cpu_offload),
            },
        )
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.Linear):
                module.register_forward_hook(
                    lambda m, args, out: dtypes.update(
                        {(type(m), m.weight.dtype), (type(m), args[0].dtype)}
                    )
                )
        optimizer = sgd_of(model)
        for step in range(STEPS):
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert dtypes == {(nn.LayerNorm, torch.float32), (nn.Linear, torch.bfloat16)}
        return engine.full_state_dict()

    expected = in_half_but_norms(make(layers=2))
    optimizer = sgd_of(expected)
    for step in range(STEPS):
        loss_of(expected, batch(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_threads(body, RANKS):
        for name, value in expected.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), msg=name, rtol=1e-5, atol=1e-6)


POLICIES: dict[str, Any] = {
    "offloaded": {Block: Policy(cpu_offload=True)},
    "prefetched": {Block: Policy(prefetch=3, backward_prefetch=0)},
    "kept": {Block: Policy(strategy="no_shard")},
    "kept after forward": {Block: Policy(strategy="shard_grad_op"), nn.Linear: None},
    "nested": {Block: Policy(prefetch=0), nn.Linear: Policy(prefetch=2, cpu_offload=True)},
}


@pytest.mark.covers("units that differ", "memory as planned")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("policies", POLICIES)
def test_training_with_policies_equals_unsharded_and_takes_what_was_planned(
    policies: str, strategy: str
) -> None:
    expected = reference(make(), RANKS, STEPS)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        given = {"units": POLICIES[policies], "strategy": strategy}
        plan = MemoryPlan.of(
            make(), RANKS, rank=comm.rank if strategy != "no_shard" else 0, **given
        )
        engine = fully_shard(model, comm, **given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
        for step in range(STEPS):
            loss_of(model, batch(comm.rank, step)).backward()
            assert engine.footprint() == plan.footprint
            optimizer.step()
            optimizer.zero_grad()
        offloaded = [u for u in engine.units if any(b.offload for b, _ in u.buckets)]
        held = sum(4 * b.shard.nbytes for u in offloaded for b, _ in u.buckets)
        padding = sum(b.layout.padding for u in offloaded for b, _ in u.buckets)
        assert held - 2 * 4 * padding <= plan.host_bytes <= held
        assert (held > 0) is (policies in ("offloaded", "nested"))
        return engine.full_state_dict()

    for state in run_threads(body, RANKS):
        assert_same(state, expected, bitwise=True)


@pytest.mark.covers("ranks that differ")
def test_ranks_must_agree_on_policies() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(
            CommError, match=r"unit 'blocks\.0' has prefetch 0 on rank 0 and 1 on rank 1"
        ):
            fully_shard(make(), comm, units={Block: Policy(prefetch=comm.rank)})

    run_threads(body, RANKS)


def test_ranks_of_a_policy_are_some_of_all() -> None:
    many = Communicator.local_group(3)

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="a policy's comm has 3 ranks and fully_shard's 2"):
            fully_shard(make(), comm, units={Block: Policy(comm=many[comm.rank])})
        with pytest.raises(TypeError, match=r"comm is a int; it must be a shardcomm\.Communicator"):
            fully_shard(make(), comm, units={Block: Policy(comm=2)})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="strategy is 'zero'; accepted: 'full_shard'"):
            fully_shard(make(), comm, units={Block: Policy(strategy="zero")})

    run_threads(body, RANKS)
