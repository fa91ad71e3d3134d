"""`engine.gathered()`: full parameters outside of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardcomm import Communicator, Engine, Mesh, MixedPrecision, fully_shard
from support.gathered import assert_full, assert_rows, interrupted, with_sharded
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, twins, values

OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": "shard_grad_op"},
    {"granularity": "element", "shard_dim": -1},
    {"granularity": "tensor"},
    {"cpu_offload": True},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
]


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o), "full_shard"))
def test_inside_parameters_are_the_full_ones_and_rows_again_outside(
    options: dict[str, Any],
) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        model(values(3, WIDTH)).sum().backward()
        for _ in range(2):
            with engine.gathered():
                assert_full(model, plain)
                with torch.no_grad():
                    torch.testing.assert_close(model(values(3, WIDTH)), plain(values(3, WIDTH)))
            assert_rows(model, plain)

    with_sharded(body, **options)


@pytest.mark.covers("gathered and unshard")
def test_ranks_in_two_dimensions() -> None:
    def rank(mesh: Mesh) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        with engine.gathered(write=True), torch.no_grad():
            assert_full(model, plain)
            for each in (model, plain):
                for p in each.parameters():
                    p.mul_(2)
        assert_rows(model, plain)

    run_mesh(rank, 2, 2)


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_model_is_gathered_and_trained_after_inference_mode(strategy: str) -> None:
    """`torch.inference_mode()` around an evaluation, a merge or a look at weights, as `torch.no_grad()` would be."""

    def body(model: Any, engine: Engine, plain: Any) -> None:
        unit = engine.unit(model.blocks[0])
        with torch.inference_mode():
            with engine.gathered():
                assert_full(model, plain)
                assert torch.equal(model(values(3, WIDTH)), plain(values(3, WIDTH)))
            with engine.gathered(write=True):
                for each in (model, plain):
                    each.stem.weight.mul_(2)
            with pytest.raises(RuntimeError, match="changed, which is lost"), engine.gathered():
                model.stem.weight.mul_(2)
            unit.unshard()
        for each in (model, plain):
            each(values(3, WIDTH)).square().sum().backward()  # the unit stays in full until then
        assert_same_gradients(engine, model, plain)

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_model_made_in_inference_mode_is_gathered(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        with torch.inference_mode():
            model, plain = twins(Chain)
            engine = fully_shard(model, comm, strategy=strategy)
            with engine.gathered(write=True):
                assert_full(model, plain)
                for each in (model, plain):
                    each.stem.weight.mul_(2)
            with pytest.raises(RuntimeError, match="changed, which is lost"), engine.gathered():
                model.stem.weight.mul_(2)
            assert torch.equal(model(values(3, WIDTH)), plain(values(3, WIDTH)))

    run_threads(body, 2)


STEM = {"weight": torch.eye(WIDTH), "bias": torch.ones(WIDTH)}


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: [nn.init.eye_(block.linear.weight) for block in m.blocks],
        lambda m: m.stem.weight.data.add_(1.0),
        lambda m: setattr(m.stem.weight, "data", torch.ones(WIDTH, WIDTH)),
        lambda m: m.stem.load_state_dict(STEM),
        lambda m: [p.detach().mul_(0.5) for p in m.parameters()],
        lambda m: vector_to_parameters(2 * parameters_to_vector(m.parameters()), m.parameters()),
    ],
)
def test_what_is_written_is_kept(change: Callable[[Any], Any], strategy: str) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        model(values(3, WIDTH))  # its parameters may still be gathered
        with engine.gathered(write=True):
            change(model)
        change(plain)
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        assert torch.equal(model(values(3, WIDTH)), plain(values(3, WIDTH)))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: nn.init.zeros_(m.stem.weight),
        lambda m: [m.stem.weight.data.neg_(), m.stem.bias.data.neg_()],
        lambda m: setattr(m.stem.weight, "data", m.stem.weight + 1),
        lambda m: m.stem.load_state_dict(STEM),
    ],
)
def test_a_change_without_write_is_refused(change: Callable[[Any], Any]) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        context = engine.gathered(model.stem)  # type: ignore[arg-type]
        context.__enter__()
        change(model)
        with pytest.raises(RuntimeError, match=r"'stem\..*' was changed.*write=True"):
            context.__exit__(None, None, None)
        assert_rows(model, plain)

    with_sharded(body)


def test_a_value_that_is_no_number_is_no_change() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        with engine.gathered(write=True), torch.no_grad():
            model.stem.weight.fill_(float("nan"))  # type: ignore[operator,union-attr]
        with engine.gathered():
            pass

    with_sharded(body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.half(), "became torch.float16"),
        (lambda m: setattr(m.stem.weight, "data", torch.zeros(1)), "became"),
        (lambda m: m.stem._parameters.update(weight=nn.Parameter(torch.ones(1))), "was replaced"),
        (lambda m: setattr(m.stem, "weight", nn.Parameter(torch.ones(1))), "after fully_shard"),
    ],
)
@pytest.mark.parametrize("write", [False, True])
def test_a_parameter_that_is_replaced_or_converted_is_refused(
    change: Callable[[Any], Any], says: str, write: bool
) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        with pytest.raises(RuntimeError, match=says), engine.gathered(write=write):
            change(model)
        assert_rows(model, plain)

    with_sharded(body)


@pytest.mark.parametrize("write", [False, True])
def test_an_optimizers_step_in_it_is_refused(write: bool) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(values(3, WIDTH)).sum().backward()
        with (
            pytest.raises(RuntimeError, match=r"rows of .* were changed"),
            engine.gathered(write=write),
        ):
            optimizer.step()

    with_sharded(body)


def test_state_dicts_in_it_are_full() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        with engine.gathered(write=True):
            model.load_state_dict({n: v + 1 for n, v in plain.state_dict().items()})
            for state in (model.state_dict(), engine.state_dict(), engine.full_state_dict()):
                for name, value in plain.state_dict().items():
                    assert type(state[name]) is torch.Tensor
                    assert torch.equal(state[name], value + 1)
            engine.load_state_dict(plain.state_dict())
        assert_rows(model, plain)

    with_sharded(body)


def test_of_one_module_the_rest_of_the_model_stays_as_it_is() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        block, twin = model.blocks[1], plain.blocks[1]  # type: ignore[index]
        with engine.gathered(block):
            assert_full(block, twin)
            assert_rows(model.blocks[0], plain.blocks[0])  # type: ignore[index]
            with torch.no_grad():
                assert torch.equal(model(values(3, WIDTH)), plain(values(3, WIDTH)))
                assert torch.equal(block(values(3, WIDTH)), twin(values(3, WIDTH)))
        assert_rows(model, plain)

    with_sharded(body)


def test_with_mixed_precision_a_forward_is_of_a_model_that_is_gathered_as_a_whole() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        x = values(3, WIDTH)
        for part in (model.stem, model.blocks[0]):  # type: ignore[index]
            with torch.no_grad(), engine.gathered(part):  # type: ignore[arg-type]
                with pytest.raises(RuntimeError, match="gather the whole model"):
                    model(x)
                model.blocks[0](x)  # type: ignore[index,operator]

    with_sharded(body, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def test_gradients_in_it_are_refused() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        loss = model(values(3, WIDTH)).sum()
        with engine.gathered():
            with pytest.raises(RuntimeError, match=r"a forward with gradients .*no_grad"):
                model(values(3, WIDTH))
            with pytest.raises(RuntimeError, match=r"a backward of unit .*engine\.gathered"):
                loss.backward()
            by_hand = F.linear(values(3, WIDTH), model.stem.weight).sum()  # type: ignore[union-attr]
            with pytest.raises(RuntimeError, match=r"a gradient of 'stem.weight' .*no_grad"):
                by_hand.backward()
        assert_rows(model, plain)
        for each in (model, plain):
            each(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    with_sharded(body)


def test_a_backward_may_come_after_it() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        loss = model(values(3, WIDTH)).square().sum()
        with engine.gathered():
            assert_full(model, plain)
        loss.backward()
        plain(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    with_sharded(body)


@pytest.mark.covers("gathered and unshard", "exceptions")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("unsharded", [False, True])
def test_zero_grad_in_it_is_of_the_rows(unsharded: bool, strategy: str) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        with engine.unit(model).unshard() if unsharded else engine.gathered():
            model.zero_grad(set_to_none=False)
        assert all(bool(p.grad.eq(0).all()) for p in model.parameters() if p.grad is not None)
        with engine.unit(model).unshard() if unsharded else engine.gathered():
            model.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    with_sharded(body, strategy=strategy)


def test_an_exception_in_it_leaves_rows_as_they_were() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        def written() -> None:
            with engine.gathered(write=True):
                nn.init.zeros_(model.stem.weight)  # type: ignore[union-attr,arg-type]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            written()
        assert_rows(model, plain)

    with_sharded(body)


def test_one_inside_of_another() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        with engine.gathered(write=True):
            for write in (False, True):
                with engine.gathered(model.stem, write=write):  # type: ignore[arg-type]
                    nn.init.ones_(model.stem.weight)  # type: ignore[union-attr,arg-type]
            assert type(model.stem.weight) is nn.Parameter  # type: ignore[union-attr]
        nn.init.ones_(plain.stem.weight)  # type: ignore[union-attr,arg-type]
        assert_rows(model, plain)
        with engine.gathered(model.stem):  # type: ignore[arg-type]
            with engine.gathered():
                assert_full(model, plain)
            assert_full(model.stem, plain.stem)  # type: ignore[arg-type]
            assert_rows(model.blocks, plain.blocks)  # type: ignore[arg-type]
            with (
                pytest.raises(ValueError, match="write=True to the outer one"),
                engine.gathered(write=True),
            ):
                pass
        assert_rows(model, plain)

    with_sharded(body)


def test_frozen_in_it_is_frozen_after_it() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        with engine.gathered(model.stem):  # type: ignore[arg-type]
            model.stem.requires_grad_(False)  # type: ignore[operator]
        plain.stem.requires_grad_(False)  # type: ignore[operator]
        for each in (model, plain):
            each(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    with_sharded(body)


@pytest.mark.parametrize("call", [interrupted, lambda engine, model: model.state_dict()])
def test_in_a_forward_it_is_refused(call: Callable[[Engine, nn.Module], Any]) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        model.between = lambda i, x: (call(engine, model), x)[1]
        with pytest.raises(RuntimeError, match="before or after the model"):
            model(values(3, WIDTH))
        model.between = plain.between
        assert torch.equal(model(values(3, WIDTH)), plain(values(3, WIDTH)))

    with_sharded(body)


def test_a_forward_in_which_its_engine_was_closed_says_so() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        model.register_forward_hook(lambda *_: engine.close())
        engine = fully_shard(model, comm)
        with pytest.raises(RuntimeError, match=r"or engine\.close\(\) put this rank's rows"):
            model(values(3, WIDTH))

    run_threads(body, 2)


def test_in_a_backward_it_is_refused() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        x = values(3, WIDTH).requires_grad_()
        x.register_hook(lambda grad: interrupted(engine, model))  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="autograd runs; call it before or after a backward"):
            model(x).sum().backward()
        x = values(3, WIDTH).requires_grad_()
        x.register_hook(lambda grad: engine.units[1].unshard())  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"unshard of unit 'blocks.0': autograd runs"):
            model(x).sum().backward()
        assert_rows(model, plain)

    with_sharded(body)


@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        ("full_shard", lambda engine, model: model.state_dict()),
        ("full_shard", lambda engine, model: engine.full_state_dict()),
        ("full_shard", lambda engine, model: engine.load_state_dict(engine.state_dict())),
        ("no_shard", lambda engine, model: engine.full_state_dict()),
    ],
)
def test_state_dicts_in_a_backward_are_refused(
    strategy: str, call: Callable[[Engine, nn.Module], Any]
) -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        x = values(3, WIDTH).requires_grad_()
        x.register_hook(lambda grad: call(engine, model) and None)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match=r"a state dict.*autograd runs"):
            model(x).sum().backward()
        for each in (model, plain):
            each.zero_grad()
            each(values(3, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)

    with_sharded(body, strategy=strategy)


def test_wrong_arguments_are_named() -> None:
    def body(model: nn.Module, engine: Engine, plain: nn.Module) -> None:
        for arguments, kind, says in [
            ({"module": "stem"}, TypeError, "module is a str"),
            ({"module": plain}, ValueError, "none of the model's"),
            ({"write": "no"}, ValueError, "write is 'no'"),
        ]:
            with pytest.raises(kind, match=says), engine.gathered(**arguments):  # type: ignore[arg-type]
                pass
        with pytest.raises(ValueError, match=r"is part of unit 'blocks\.1'"):
            engine.unit(model.blocks[1].linear)  # type: ignore[index,union-attr,arg-type]
        with pytest.raises(ValueError, match="none of the model's"):
            engine.unit(plain)

    with_sharded(body)
