"""`engine.gathered()`, and units unsharded by hand: full parameters outside of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardcomm import Communicator, Engine, Mesh, MixedPrecision, fully_shard
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values

Body = Callable[[nn.Module, Engine, nn.Module], Any]


def with_sharded(body: Body, make: Callable[[], nn.Module] = Chain, **options: Any) -> list[Any]:
    """What `body` gives on each of two ranks, for a sharded model, its engine and its plain twin."""

    def rank(comm: Communicator) -> Any:
        model, plain = twins(make)
        return body(model, fully_shard(model, comm, **options), plain)

    return run_threads(rank, 2)


def assert_full(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, nn.Parameter), name
        assert not hasattr(p, "to_local"), name
        assert torch.equal(p, q), name


def assert_rows(model: nn.Module, plain: nn.Module) -> None:
    """The model shows rows, of these values."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert hasattr(p, "to_local"), name
        assert torch.equal(p.full_tensor(), q.detach()), name


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


def interrupted(engine: Engine, model: nn.Module) -> None:
    with engine.gathered():
        pass


@pytest.mark.parametrize("call", [interrupted, lambda engine, model: model.state_dict()])
def test_in_a_forward_it_is_refused(call: Callable[[Engine, nn.Module], Any]) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        model.between = lambda i, x: (call(engine, model), x)[1]
        with pytest.raises(RuntimeError, match="before or after the model"):
            model(values(3, WIDTH))
        model.between = plain.between
        assert torch.equal(model(values(3, WIDTH)), plain(values(3, WIDTH)))

    with_sharded(body)


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


# Units unsharded by hand.


class Tied(nn.Module):
    """An embedding whose weight is the head's, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.embed.weight)


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])
UNITS: Any = [nn.Embedding, nn.Linear]


def assert_same_rows(engine: Engine, model: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[name], value)


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("resharded", ["by the backward", "by hand", "before the backward"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_weight_that_is_unsharded_by_hand_trains_as_without_sharding(
    resharded: str, strategy: str
) -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        unit = engine.unit(model.embed)
        sgd = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
        for _ in range(3):
            unit.unshard()
            unit.unshard()
            assert_full(model.embed, plain.embed)  # type: ignore[arg-type]
            loss = model(IDS).square().sum()
            if resharded == "before the backward":
                unit.reshard()
            loss.backward()
            if resharded == "by hand":
                unit.reshard()
            plain(IDS).square().sum().backward()
            assert model.embed.weight is engine.units[1].params[0].shard
            assert_same_gradients_by_name(model, plain)
            for optimizer in sgd:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_rows(engine, model, plain)

    with_sharded(body, Tied, units=UNITS, strategy=strategy)


def assert_same_gradients_by_name(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if p.grad is not None:
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(full, q.grad, msg=name)


def alone(model: Any) -> torch.Tensor:
    """No unit's forward runs."""
    return F.linear(values(2, WIDTH), model.embed.weight).square().sum()


def last(model: Any) -> torch.Tensor:
    """The weight's gradient comes before any unit's backward."""
    x = model.blocks[0](values(2, WIDTH).requires_grad_())
    return F.linear(x, model.embed.weight).square().sum()


def first(model: Any) -> torch.Tensor:
    """The unit's own backward, and its reduce, come before."""
    x = F.linear(values(2, WIDTH), model.blocks[1].weight)
    return (model.blocks[1](model.blocks[0](x)) + model.blocks[1].bias).square().sum()


@pytest.mark.parametrize("use", [alone, last, first])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_weights_gradient_may_come_at_any_time(
    use: Callable[[Any], torch.Tensor], strategy: str, sync: bool
) -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        for turn in range(2):
            for unit in engine.units:
                unit.unshard()
            with torch.enable_grad() if sync or turn else engine.no_sync():
                use(model).backward()
            use(plain).backward()
        assert_same_gradients_by_name(model, plain)

    with_sharded(body, Tied, units=UNITS, strategy=strategy)


@pytest.mark.covers("gathered and unshard")
def test_of_ranks_in_two_dimensions_a_gradient_is_the_mean_of_all() -> None:
    def rank(mesh: Mesh) -> None:
        model, plain = twins(Tied)
        engine = fully_shard(model, mesh, strategy="hybrid_shard", units=UNITS)
        engine.unit(model.embed).unshard()  # type: ignore[arg-type]
        ((mesh.rank + 1) * model(IDS).sum()).backward()
        (2.5 * plain(IDS).sum()).backward()  # the mean of 1 to 4
        assert_same_gradients_by_name(model, plain)

    run_mesh(rank, 2, 2)


@pytest.mark.covers("gathered and unshard")
def test_a_weight_is_unsharded_in_the_forward_that_needs_it() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        unit = engine.unit(model.embed)

        def forward(ids: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(model.blocks[1](torch.tanh(model.blocks[0](model.embed(ids)))))
            unit.unshard()
            y = F.linear(x, model.embed.weight)
            unit.reshard()
            return y

        model.forward = forward
        for _ in range(2):
            for each in (model, plain):
                each(IDS).square().sum().backward()
        assert_same_gradients_by_name(model, plain)

    with_sharded(body, Tied, units=UNITS)


def test_an_unsharded_root_steps_as_any() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        engine.unit(model).unshard()
        for _ in range(2):
            for each in (model, plain):
                each(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    with_sharded(body)


def test_what_is_unsharded_is_in_the_dtype_to_compute_in() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        unit = engine.unit(model.embed)
        unit.unshard()
        assert torch.equal(model.embed.weight, plain.embed.weight.bfloat16())  # type: ignore[union-attr,operator]
        out = model(IDS)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, plain.bfloat16()(IDS))
        unit.reshard()
        assert model.embed.weight.dtype == torch.float32

    with_sharded(
        body, Tied, units=UNITS, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )


@pytest.mark.covers("gathered and unshard")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_weight_that_is_unsharded_by_hand_evaluates_as_without_sharding(strategy: str) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        unit = engine.unit(model.embed)
        with torch.no_grad():
            for factor in (1, 3):
                for each in (model, plain):
                    for p in each.parameters():
                        p.mul_(factor)
                unit.unshard()
                x = values(2, WIDTH)
                assert torch.equal(F.linear(x, model.embed.weight), F.linear(x, plain.embed.weight))
                for _ in range(2):
                    assert torch.equal(model(IDS), plain(IDS))
                unit.reshard()
                unit.reshard()

    with_sharded(body, Tied, units=UNITS, strategy=strategy)


def test_a_change_of_what_is_unsharded_is_refused() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        gathered = partial(interrupted, engine, model)
        for call in (engine.unit(model).reshard, model.state_dict, gathered):
            engine.unit(model).unshard()
            for p in (model.stem.weight, model.stem.bias):
                p.data.add_(1.0)
            with pytest.raises(RuntimeError, match=r"was changed.*write=True"):
                call()
            assert_rows(model, plain)

    with_sharded(body)


def test_to_unshard_what_is_gathered_is_refused() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        block = engine.unit(model.blocks[0])
        with engine.gathered(model.blocks[0]):
            with pytest.raises(RuntimeError, match=r"unshard of unit 'blocks\.0' inside of engine"):
                block.unshard()
            assert_full(model.blocks[0], plain.blocks[0])  # type: ignore[index]
            engine.unit(model).unshard()  # another
        block.unshard()
        assert_full(model.blocks[0], plain.blocks[0])  # type: ignore[index]
        engine.release()
        assert_rows(model, plain)

    with_sharded(body)


def test_a_state_dict_ends_an_unshard() -> None:
    def body(model: Any, engine: Engine, plain: nn.Module) -> None:
        engine.unit(model).unshard()
        with engine.gathered():
            assert_full(model, plain)
        assert_rows(model, plain)
        engine.unit(model).unshard()
        state = model.state_dict()
        assert all(hasattr(value, "rectangles") for value in state.values())
        assert_rows(model, plain)

    with_sharded(body)


def test_unshard_is_a_context() -> None:
    def body(comm: Communicator) -> None:
        model, twin = twins(Chain)
        engine = fully_shard(model, comm, units=[Block])
        unit = engine.units[1]
        name = unit.params[0].name
        with unit.unshard():
            assert torch.equal(model.get_parameter(name), twin.get_parameter(name))
        assert model.get_parameter(name) is unit.params[0].shard

    run_threads(body, 2)
