"""torch.func and torch.autograd.functional on a sharded model, each against the same on its plain twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad, functional

from shardcomm import Communicator, Engine, MixedPrecision, fully_shard, launch
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, twins, values

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]
X = values(WIDTH)


def with_sharded(body: Callable[[Any, Engine, Any], Any], **options: Any) -> None:
    def rank(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(layers=3))
        body(model, fully_shard(model, comm, **options), plain)

    run_threads(rank, 2)


def loss_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x).square().sum()


def dual(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))).tangent


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: func.grad(loss_of(m))(X),
    "grad_and_value": lambda m: func.grad_and_value(loss_of(m))(X),
    "jvp": lambda m: func.jvp(m, (X,), (X,)),
    "vjp": lambda m: func.vjp(m, X)[1](X),
    "jacrev": lambda m: func.jacrev(m)(X),
    "jacfwd": lambda m: func.jacfwd(m)(X),
    "hessian": lambda m: func.hessian(loss_of(m))(X),
    "vmap": lambda m: func.vmap(m)(values(3, WIDTH)),
    "vmap of grad": lambda m: func.vmap(func.grad(loss_of(m)))(values(3, WIDTH)),
    "of a unit": lambda m: func.jacrev(m.blocks[1])(X),  # type: ignore[index]
    "dual numbers": dual,
    "functional.jacobian": lambda m: functional.jacobian(m, X),  # type: ignore[no-untyped-call]
    "functional.vjp": lambda m: functional.vjp(loss_of(m), X),  # type: ignore[no-untyped-call]
}


FORWARD_MODE = ["jvp", "jacfwd", "hessian", "dual numbers"]
"""A process has one level of these at a time: not for ranks that are threads."""


def transformed(name: str, comm: Communicator, strategy: str) -> None:
    """Twice, and trains afterwards."""
    model, plain = twins(lambda: Chain(layers=3))
    engine = fully_shard(model, comm, strategy=strategy)
    transform = TRANSFORMS[name]
    for _ in range(2):
        torch.testing.assert_close(transform(model), transform(plain))
    for each in (model, plain):
        each(values(3, WIDTH)).square().sum().backward()
    for optimizer in [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]:
        optimizer.step()
    for n, value in plain.state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[n], value)


@pytest.mark.covers("torch.func")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in FORWARD_MODE])
def test_transforms_of_inputs_are_as_without_sharding(name: str, strategy: str) -> None:
    run_threads(lambda comm: transformed(name, comm, strategy), 2)


def forward_modes(strategy: str) -> None:
    with Communicator.from_env() as comm:
        for name in FORWARD_MODE:
            transformed(name, comm, strategy)


@pytest.mark.covers("torch.func")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_mode_is_as_without_sharding(strategy: str) -> None:
    launch(forward_modes, 2, (strategy,), timeout_s=60)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_transform_gives_can_be_trained_on(strategy: str) -> None:
    """The norm of an input's gradient as a penalty, and a model on each example by itself."""

    def body(model: Any, engine: Engine, plain: Any) -> None:
        for each in (model, plain):
            x = values(3, WIDTH)
            penalty = func.vmap(func.grad(loss_of(each)))(x).square().sum()
            (each(x).sum() + penalty + func.vmap(each)(x).square().sum()).backward()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
        for optimizer in optimizers:
            optimizer.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(engine.full_state_dict()[name], value)

    with_sharded(body, strategy=strategy)


@pytest.mark.covers("torch.func", "mixed precision")
def test_with_mixed_precision_inputs_and_outputs_are_cast() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        plain.bfloat16()
        x = values(3, WIDTH)
        with torch.no_grad():
            assert torch.equal(func.vmap(model)(x), func.vmap(plain)(x.bfloat16()).float())

    precision = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    with_sharded(body, mixed_precision=precision)


@pytest.mark.covers("torch.func", "exceptions")
def test_an_exception_in_a_transform_leaves_rows_behind() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        with pytest.raises(RuntimeError, match=r"size mismatch|shapes cannot"):
            func.grad(loss_of(model))(values(WIDTH + 1))
        assert all(hasattr(p, "to_local") for p in model.parameters())
        assert torch.equal(func.grad(loss_of(model))(X), func.grad(loss_of(plain))(X))

    with_sharded(body)


def of_parameters(
    model: nn.Module, params: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return func.functional_call(model, params, (X,)).square().sum()

    return func.grad_and_value(loss)(params)


def test_transforms_of_parameters_are_of_full_ones_inside_of_gathered() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        given = {name: param.detach() * 2 for name, param in plain.named_parameters()}
        with pytest.raises(RuntimeError, match=r"engine\.gathered\(\)"):
            of_parameters(model, given)
        with engine.gathered():
            own = {name: param.detach() for name, param in model.named_parameters()}
            for params in (own, given):
                ours, theirs = of_parameters(model, params), of_parameters(plain, params)
                torch.testing.assert_close(ours, theirs)
        assert torch.equal(model(X), plain(X))

    with_sharded(body)


def test_what_an_ended_transform_left_is_an_input_as_any() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        left: list[torch.Tensor] = []

        def loss(x: torch.Tensor) -> torch.Tensor:
            left.append(x * 2)
            return x.sum()

        outs = []
        for each in (model, plain):
            func.grad(loss)(X)
            outs.append(each(left.pop()))
            outs[-1].sum().backward()
        assert torch.equal(*outs)
        assert torch.equal(model.stem.weight.grad.full_tensor(), plain.stem.weight.grad)

    with_sharded(body)
