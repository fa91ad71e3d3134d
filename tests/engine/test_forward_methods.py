"""`engine.register_forward_method`: what uses a unit's parameters by another name than `forward`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, Engine, MixedPrecision, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, assert_same_gradients, twins

TOKENS = 7
STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Another use of the block's weight, and of its forward."""
        return F.linear(self(x), self.linear.weight)


class Stack(nn.Module):
    """No unit: its blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """Shaped as T5: an embedding that encoder, decoder and head share, and a `generate` that calls the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(TOKENS, WIDTH)
        self.encoder, self.decoder = Stack(), Stack()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.shared.weight

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(self.shared(ids))
        return encoded

    def forward(
        self, ids: torch.Tensor, out: torch.Tensor, encoded: torch.Tensor | None = None
    ) -> torch.Tensor:
        encoded = self.encode(ids) if encoded is None else encoded
        x = self.shared(out) + encoded.mean(1, keepdim=True)
        logits: torch.Tensor = self.head(self.decoder(x))
        return logits

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        encoded = self.encode(ids)
        out = ids[:, :1]
        for _ in range(length):
            out = torch.cat([out, self(ids, out, encoded)[:, -1:].argmax(-1)], 1)
        return out

    def stream(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.shared(ids)


IDS = torch.tensor([[5, 1, 2], [3, 4, 6]])
Body = Callable[[Any, Engine, Any], Any]


def with_sharded(body: Body, **options: Any) -> None:
    def rank(comm: Communicator) -> None:
        model, plain = twins(EncoderDecoder)
        engine = fully_shard(model, comm, **options)
        for name in ("encode", "generate", "stream"):
            engine.register_forward_method(model, name)
        body(model, engine, plain)

    run_threads(rank, 2)


@pytest.mark.covers("forward methods")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generating_between_steps_is_as_without_sharding(strategy: str) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for _ in range(3):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                each(IDS, IDS).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(model.generate(IDS, length=6), plain.generate(IDS, length=6))
            with torch.no_grad():
                torch.testing.assert_close(model(IDS, IDS), plain(IDS, IDS))
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(engine.full_state_dict()[name], value)

    with_sharded(body, strategy=strategy)


@pytest.mark.covers("forward methods")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_a_methods_output_trains_as_without_sharding(strategy: str) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for step in range(4):
            for each in (model, plain):
                loss = each.encode(IDS).square().mean()
                if step > 1:  # after another use of the model, in one backward
                    loss = loss + each(IDS, IDS).mean() + each.encode(IDS - step % 2).mean()
                loss.backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) is (q.grad is None)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(engine.full_state_dict()[name], value)

    with_sharded(body, strategy=strategy)


@pytest.mark.covers("forward methods")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_method_of_an_inner_unit(strategy: str, recompute: bool) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        for block in (*model.encoder.blocks, *model.decoder.blocks):
            engine.register_forward_method(block, "gate")
        for each in (model, plain):
            x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
            for block in (*each.encoder.blocks, *each.decoder.blocks):
                x = checkpoint(block.gate, x, use_reentrant=False) if recompute else block.gate(x)
            x.square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None)
        assert_same_gradients(engine, model, plain)

    with_sharded(body, strategy=strategy)


@pytest.mark.covers("forward methods", "mixed precision")
def test_inputs_and_outputs_are_cast_as_a_forwards() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)

    def body(model: Any, engine: Engine, plain: Any) -> None:
        plain.bfloat16()
        assert torch.equal(model.encode(IDS), plain.encode(IDS).float())
        assert torch.equal(model.generate(IDS, 3), plain.generate(IDS, 3))
        x = torch.ones(2, 3, WIDTH)
        seen = []
        model.decoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        model(IDS, IDS, encoded=x)
        assert seen == [torch.bfloat16]

    with_sharded(body, mixed_precision=precision)


@pytest.mark.covers("forward methods", "exceptions")
def test_an_exception_in_a_method_leaves_nothing_behind() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        for _ in range(2):
            with pytest.raises(IndexError):
                model.encode(IDS + 100)
            assert torch.equal(model.generate(IDS, 3), plain.generate(IDS, 3))
            assert torch.equal(model(IDS, IDS), plain(IDS, IDS))

    with_sharded(body)


def test_inside_of_gathered() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        with engine.gathered():
            assert torch.equal(model.generate(IDS, 3), plain.generate(IDS, 3))
            with pytest.raises(RuntimeError, match="a forward with gradients"):
                model.encode(IDS)
            moved = engine.traffic.gathered_bytes
            assert torch.equal(model.generate(IDS, 3), plain.generate(IDS, 3))
            assert engine.traffic.gathered_bytes == moved

    with_sharded(body)


def test_generating_gathers_the_roots_parameters_once() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        root = engine.units[0].full.gather_bytes
        before = engine.traffic.gathered_bytes
        model.generate(IDS, 3)
        block = engine.units[1].full.gather_bytes
        assert engine.traffic.gathered_bytes - before == root + (2 + 3 * 2) * block

    with_sharded(body, prefetch=0, slots=1)


def test_what_goes_on_after_the_call_is_refused() -> None:
    """On a rank that has not all of the parameter, by which training ends on all."""
    said: list[str] = []

    def body(model: Any, engine: Engine, plain: Any) -> None:
        try:
            next(model.stream(IDS))
        except RuntimeError as error:
            said.append(str(error))

    with_sharded(body)
    assert any("outside of the forward" in each for each in said)


def test_copies_are_refused() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        with pytest.raises(RuntimeError, match="before fully_shard"):
            copy.deepcopy(model).encode(IDS)

    with_sharded(body, strategy="no_shard")


def test_after_close_the_method_is_the_modules_own() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        engine.register_forward_method(model, "encode")
        assert torch.equal(model.encode(IDS), plain.encode(IDS))
        engine.close()
        assert "encode" not in vars(model)

    with_sharded(body)


def test_wrong_arguments_are_named() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        for module, name, says in [
            (model.encoder, "forward", r"part of unit '\(root\)'"),
            (model.encoder.blocks[0].linear, "reset_parameters", r"unit 'encoder\.blocks\.0'"),
            (plain, "encode", "none of the model's modules"),
            (model, "sing", "has no method 'sing'; give the name of a method that computes with"),
            (model, "shared", None),
            (model, "training", "has no method 'training'"),
            (model, 3, "has no method 3"),
            (model, "forward", "call the module"),
        ]:
            if says is not None:
                with pytest.raises(ValueError, match=says):
                    engine.register_forward_method(module, name)

    with_sharded(body)
