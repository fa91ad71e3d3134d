"""Models and forwards that `fully_shard` does not compute with: each raises a sentence, or works as it advises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardcomm import Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, train_alike, twins, values

RANKS = 2


def computed_with_in_a_hook(model: Chain) -> None:
    model.register_forward_hook(lambda module, args, out: F.linear(out, module.stem.weight))
    model(values(3, WIDTH))


def computed_with_in_a_backward_pre_hook(model: Chain) -> None:
    model.register_full_backward_pre_hook(lambda module, grads: (grads[0] @ module.stem.weight,))
    model(values(3, WIDTH)).sum().backward()


def checkpointed_as_a_whole(model: Chain) -> None:
    checkpoint(model, values(3, WIDTH), use_reentrant=False).sum().backward()


def sharded_again(model: Chain) -> None:
    model.engine.close()  # type: ignore[operator, union-attr]
    fully_shard(model, Communicator.local_group(1)[0])


@pytest.mark.parametrize(
    ("use", "error", "says"),
    [
        (computed_with_in_a_hook, RuntimeError, "'stem.weight': outside of the forward of unit"),
        (
            computed_with_in_a_backward_pre_hook,
            RuntimeError,
            "'stem.weight': outside of the forward of unit",
        ),
        (checkpointed_as_a_whole, RuntimeError, r"same slot .*; call fully_shard with slots=\d+"),
        (sharded_again, ValueError, "is sharded already; call fully_shard once"),
        (nn.DataParallel, RuntimeError, "averages gradients already: call the model itself"),
    ],
)
def test_what_is_no_forward_of_units_is_refused(
    use: Callable[[Any], object], error: type[Exception], says: str
) -> None:
    nets = [twins(lambda: Chain(layers=6))[0] for _ in range(RANKS)]

    def body(comm: Communicator) -> None:
        model = nets[comm.rank]
        vars(model)["engine"] = fully_shard(model, comm)
        use(model)

    with pytest.raises(error, match=says):
        run_threads(body, RANKS)  # a rank that has all rows may get further than the other


class Transposed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize("layer", [nn.Linear, Transposed])
@pytest.mark.parametrize("granularity", ["row", "element"])
def test_a_forward_past_the_modules_call_is_refused_on_every_rank(
    granularity: str, layer: type[nn.Linear]
) -> None:
    """Also on the rank which happens to have all of the first layer, of a root that is cut in its middle."""

    def body(comm: Communicator) -> None:
        model = nn.Sequential(layer(8, 8, bias=False), layer(8, 8, bias=False))
        fully_shard(model, comm, granularity=granularity)
        assert (model[0].weight.to_local().numel() == 64) == (comm.rank == 0)
        with pytest.raises(
            RuntimeError, match=r"of '0\.weight': .*begun by module\(\.\.\.\) and not by"
        ):
            model.forward(values(3, 8))
        model(values(3, 8)).sum().backward()

    run_threads(body, RANKS)


@pytest.mark.parametrize(
    "function",
    [
        torch.median,
        torch.linalg.matrix_norm,
        torch.cumsum,
        torch.Tensor.tril_,
        torch.t,
        lambda rows, **_: rows[0],
    ],
)
def test_what_is_refused_of_rows_is_refused_where_a_rank_happens_to_have_all(
    function: Callable[..., object],
) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(6, 8, bias=False)
        fully_shard(model, comm)
        assert (len(model.weight.to_local()) == 8) == (comm.rank == 0)
        dim = {"dim": 0} if function is torch.cumsum else {}
        for rows in (model.weight.detach(), model.weight.data):
            with pytest.raises(RuntimeError, match="this rank has only its rows"):
                function(rows, **dim)
        with torch.no_grad(), pytest.raises(RuntimeError, match="this rank has only its rows"):
            function(model.weight, **dim)

    run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_an_export_is_made_inside_of_gathered(strategy: str) -> None:
    model, plain = twins(Chain)
    engine = fully_shard(model, Communicator.local_group(1)[0], strategy=strategy)
    x = values(3, WIDTH)
    with pytest.raises(RuntimeError, match=r"inside of engine\.gathered\(\)"):
        torch.export.export(model, (x,))
    with engine.gathered(), torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), plain(x))


def test_an_export_of_rows_says_where_to_make_it() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        fully_shard(model, comm)
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match=r"torch\.export .* of engine\.gathered\(\)"):
                torch.export.export(model, (values(3, WIDTH),))

    run_threads(body, RANKS)


def test_an_attention_is_a_unit_as_a_whole() -> None:
    """It computes with `out_proj.weight` itself, and calls no module."""
    nets = [twins(lambda: nn.MultiheadAttention(WIDTH, 2)) for _ in range(2 * RANKS)]
    x = values(3, 2, WIDTH)

    def refused(comm: Communicator) -> None:
        model = nets[comm.rank][0]
        fully_shard(model, comm, units=nn.Linear)
        with pytest.raises(RuntimeError, match=r"of 'out_proj\.(weight|bias)': outside of the for"):
            model(x, x, x)

    def trained(comm: Communicator) -> None:
        model, plain = nets[RANKS + comm.rank]
        engine = fully_shard(model, comm)
        for each in (model, plain):
            each(x, x, x)[0].square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(refused, RANKS)
    run_threads(trained, RANKS)


class Complex(Block):
    """Multiplies by complex numbers, which are parameters or are seen so in forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        parts = (2,) if dtype.is_floating_point else ()
        self.factor = nn.Parameter(torch.randn(WIDTH, WIDTH, *parts, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_real = self.factor.is_floating_point()
        factor = torch.view_as_complex(self.factor) if is_real else self.factor
        return super().forward((x.to(factor.dtype) @ factor).abs())


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_complex_numbers_are_trained_as_real_ones(strategy: str) -> None:
    nets = [twins(lambda: Chain(lambda: Complex(torch.float32))) for _ in range(RANKS)]

    def body(comm: Communicator) -> None:
        model, plain = nets[comm.rank]
        with pytest.raises(ValueError, match=r"'factor' is torch.complex64.*view_as_complex"):
            fully_shard(Complex(torch.complex64), comm, strategy=strategy)
        engine = fully_shard(model, comm, strategy=strategy)
        train_alike(model, plain)
        assert_same_gradients(engine, model, plain)

    run_threads(body, RANKS)
