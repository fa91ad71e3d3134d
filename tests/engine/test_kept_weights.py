"""Weights that a forward has kept in a variable, and that somebody uses when other values are in their memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardcomm import Communicator, MixedPrecision, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values


class Keeping(Block):
    """Keeps its weight, as a cache of a layer would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.linear.weight]  # in a list, past nn.Module's own attributes
        return super().forward(x)


X = values(3, WIDTH)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: F.linear(X, w),
        lambda w: w.norm(),
        lambda w: w + 1,
        lambda w: w.clone(),
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.T,
        lambda w: w.mul_(0),
        lambda w: setattr(w, "data", X),
        lambda w: w.set_(X),
        copy.deepcopy,
        lambda w: torch.save(w, io.BytesIO()),
        lambda w: torch.stack([X[0], w[0]]),
    ],
)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_computing_with_a_kept_weight_is_refused(use: Callable[[Any], Any], strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(Keeping))
        engine = fully_shard(model, comm, strategy=strategy)
        for net in (model, plain):
            net(X).sum().backward()
        (kept,) = model.blocks[0].kept  # type: ignore[index, union-attr]
        with pytest.raises(
            RuntimeError, match=r"of 'blocks\.0\.linear\.weight', which was kept in"
        ):
            use(kept)
        assert kept.shape == (WIDTH, WIDTH)
        assert kept.dtype is torch.float32
        assert kept.requires_grad
        assert "blocks.0.linear.weight" in repr(kept)
        model.zero_grad()
        plain.zero_grad()
        for net in (model, plain):  # the same parameter is there in the next forward
            net(X).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("attribute", ["T", "data", "real", "__cuda_array_interface__"])
def test_the_error_names_the_attribute_of_a_kept_weight(attribute: str) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: Chain(Keeping))
        fully_shard(model, comm)
        model(X).sum().backward()
        (kept,) = model.blocks[0].kept  # type: ignore[index, union-attr]
        with pytest.raises(RuntimeError, match=rf"^{attribute} of 'blocks\.0\.linear\.weight'"):
            getattr(kept, attribute)

    run_threads(body, 2)


def test_a_kept_weight_is_refused_in_the_forward_when_its_slot_is_anothers() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: Chain(Keeping))
        fully_shard(model, comm)
        blocks: Any = model.blocks
        model.between = lambda i, x: F.linear(x, blocks[0].kept[0]) if i == 3 else x  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match=r"linear of 'blocks\.0\.linear\.weight', which was"):
            model(X)
        model.between = lambda i, x: x  # type: ignore[assignment]
        model(X).sum().backward()

    run_threads(body, 2)


@pytest.mark.parametrize("half", [False, True])
def test_a_kept_weight_of_a_rank_that_has_it_whole_is_the_weight(half: bool) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(lambda: Chain(Keeping))
        precision = MixedPrecision(param_dtype=torch.bfloat16) if half else None
        engine = fully_shard(model, comm, strategy="no_shard", mixed_precision=precision)
        model(X).sum().backward()
        (kept,) = model.blocks[0].kept  # type: ignore[index, union-attr]
        if half:  # it is a cast, in a slot
            with pytest.raises(RuntimeError, match="which was kept in a variable"):
                kept.norm()
            return
        assert torch.equal(kept, engine.full_state_dict()["blocks.0.linear.weight"])

    run_threads(body, 2)


class OwnLinear(torch.autograd.Function):
    """A linear layer whose backward, in Python, computes with the weight that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Own(nn.Module):
    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.opaque = opaque

    def forward(self, x: Any) -> Any:
        x = OwnLinear.apply(getattr(x, "inside", x), self.weight)
        return Opaque(x) if self.opaque else x


class Opaque:
    """An output that announces no backward, since nobody finds the tensor in it."""

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_backward_in_python_has_the_weight_that_it_saved(strategy: str, opaque: bool) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: nn.Sequential(*(Own(opaque and i < 3) for i in range(4))))
        engine = fully_shard(model, comm, units=Own, strategy=strategy)
        for net in (model, plain):
            loss, other = (net(X * n).square().sum() for n in (1, 2))
            if net is model and opaque and strategy == "full_shard":
                with pytest.raises((TypeError, RuntimeError), match=r"unit '\d'"):
                    loss.backward()
                return
            loss.backward(retain_graph=True)
            other.backward()
            loss.backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)
