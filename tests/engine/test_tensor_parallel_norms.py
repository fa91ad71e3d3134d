"""Tensor parallel inside, sharding outside: norms, clipping and what overflows, over both meshes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardcomm import fully_shard, launch
from support.tensor_parallel_nets import (
    MAX_NORM,
    attention_net,
    batch,
    columns_and_rows,
    sequence,
    twins,
)
from support.tensor_parallel_ranks import DEADLINE_S, backward, mesh_of, process_group, sharded


def take_norms() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        part = mesh["dp"].get_local_rank()
        for plan in (columns_and_rows, sequence):
            for how in ({}, {"granularity": "tensor"}, {"strategy": "no_shard"}):
                net, engine = sharded(mesh, plan=plan, **how)
                _, plain = twins(attention_net)
                backward(net, part, 2)
                backward(plain)
                for order in (0.0, 0.5, 1, 2, 3, math.inf, -math.inf):
                    for foreach in (True, False):
                        got, expected = (
                            torch.nn.utils.get_total_norm(
                                [p.grad for p in each.parameters()], order, foreach=foreach
                            )
                            for each in (net, plain)
                        )
                        close(got, expected, f"{plan.__name__} {how} order {order}")
                for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
                    with torch.no_grad():
                        close(p.norm(), q.norm(), name)
                    close(p.grad.norm(1), q.grad.norm(1), name)
                    for mine, whole in ((p, q), (p.grad, q.grad)):
                        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
                        torch.testing.assert_close(full.detach(), whole.detach())
                close(
                    engine.clip_grad_norm_(MAX_NORM),
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM),
                    "clip",
                )
                engine.close()


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got).detach(),
        expected.detach(),
        rtol=1e-4,
        atol=1e-6,
        msg=lambda said: f"{what}: {said}",
    )


@pytest.mark.covers("tensor parallel", "gradient clipping")
def test_norms_are_of_the_whole_and_count_what_is_replicated_once() -> None:
    launch(take_norms, 4, timeout_s=DEADLINE_S)


def take_norms_with_ignored_parameters() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        (net, plain) = twins(attention_net)
        sequence(net, mesh["tp"])
        ignored = [net.head.weight, net.scale]  # a DTensor, and a plain one
        fully_shard(net, mesh["dp"], ignored_params=ignored)
        backward(net)
        backward(plain)
        for foreach in (True, False):
            for order in (2, 3, math.inf):
                norms = [
                    torch.nn.utils.get_total_norm(
                        [p.grad for p in each.parameters()], order, foreach=foreach
                    )
                    for each in (net, plain)
                ]
                close(*norms, f"order {order}")
        net.scale.grad *= 1 + dist.get_rank()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        expected = sum(
            p.grad.norm() ** 2 for name, p in plain.named_parameters() if name != "scale"
        )
        own = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(own, net.scale.grad.norm() * norm / MAX_NORM)  # before they were clipped
        close(norm, (expected + torch.stack(own).square().mean()).sqrt(), "of all ranks")


@pytest.mark.covers("tensor parallel", "gradient clipping", "ignored parameters")
def test_norms_with_ignored_parameters_are_the_same_on_all_ranks() -> None:
    launch(take_norms_with_ignored_parameters, 4, timeout_s=DEADLINE_S)


def overflow() -> None:
    with process_group():
        mesh = mesh_of(2, 2)
        last = dist.get_rank() == 3
        net, engine = sharded(mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = engine.full_state_dict()
        scaler.scale(net(batch(0)[0]).sum()).backward()
        if last:
            net.layers[0].mlp.up.weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(torch.equal(v, before[k]) for k, v in engine.full_state_dict().items())
        engine.close()

        net, engine = sharded(mesh, units=[nn.Linear], on_nonfinite="skip")
        if mesh["tp"].get_local_rank() == 1:
            net.layers[1].mlp.up.register_forward_hook(lambda m, args, out: Overflowing.apply(out))
        backward(net)
        assert "layers.1.mlp.up" in engine.nonfinite
        assert "layers.1.mlp.down" not in engine.nonfinite
        assert all(p.grad is None for p in net.parameters())
        engine.close()


class Overflowing(torch.autograd.Function):
    """Its gradient is Inf."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, math.inf)


@pytest.mark.covers("tensor parallel", "loss scaling, NaN and Inf")
def test_what_overflows_in_one_part_is_left_out_on_all_ranks() -> None:
    launch(overflow, 4, timeout_s=DEADLINE_S)
