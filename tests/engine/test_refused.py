"""What torch's tools may not do to a sharded model: it raises a sentence that says what to do instead."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

import shardcomm
from shardcomm import Communicator, Engine, fully_shard
from support.thread_ranks import run_threads
from support.tied import IDS, RANKS, Tied, model_of, with_sharded
from support.twins import WIDTH, local, values


@pytest.mark.parametrize(
    "use",
    [
        lambda m: F.linear(torch.ones(1, WIDTH), m.embed.weight),
        lambda m: m(IDS, tied=True),
        lambda m: m.embed.weight[0],
        lambda m: m.embed.weight.T,
        lambda m: m.embed.weight.sum(0),
        lambda m: m.embed.weight.sum().backward(),
        lambda m: m.embed.weight.argmax(),
        lambda m: m.embed.weight.data @ torch.ones(WIDTH),
        lambda m: m.embed.weight.add(torch.ones(5, WIDTH)),
        lambda m: m.embed.weight.data.add_(torch.ones(5, WIDTH)),
        lambda m: m.embed.weight.numpy(force=True),
        lambda m: nn.init.xavier_uniform_(m.embed.weight),
        lambda m: m.embed.weight.grad.mean(dim=-1),
        lambda m: torch._foreach_max([m.embed.weight.data]),
        lambda m: torch.equal(m.embed.weight, torch.ones(5, WIDTH)),
        lambda m: torch._foreach_add([m.embed.weight.data], [torch.zeros(8, 1, 1)]),
        lambda m: parameters_to_vector(m.parameters()),
        lambda m: vector_to_parameters(torch.zeros(5 * WIDTH), [m.embed.weight]),
        lambda m: m.embed.weight.norm().backward(),
        lambda m: bool(m.embed.weight),
        lambda m: m.embed.weight.narrow(0, 0, 1),
        lambda m: {p.data_ptr(): p.numel() for p in m.parameters()},  # counts tied ones once
        lambda m: sum(p.untyped_storage().nbytes() for p in m.parameters()),
    ],
)
def test_what_would_be_wrong_of_rows_alone_is_refused(use: Callable[[Tied], Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"of '.*': outside of the forward of unit '.*'"):
            use(model)

    with_sharded(body)


@pytest.mark.parametrize("shape", [(), (1,), (1, WIDTH)])
@pytest.mark.parametrize(
    "average",
    [
        lambda mean, p: mean.lerp_(p, 0.1),
        lambda mean, p: mean.data.mul_(0.9).add_(p.data, alpha=0.1),
        lambda mean, p: torch._foreach_lerp_([mean], [p.detach()], 0.1),
        lambda mean, p: mean.copy_(p),
    ],
)
def test_an_average_made_before_is_refused_on_ranks_without_rows(
    average: Callable[[torch.Tensor, nn.Parameter], Any], shape: tuple[int, ...]
) -> None:
    """Where torch broadcasts, or says something of shapes."""

    def body(comm: Communicator) -> bool:
        model = nn.Module()
        model.scale = nn.Parameter(torch.ones(shape))
        model.forward = lambda x: x * model.scale  # type: ignore[assignment]
        mean = torch.zeros(shape)
        fully_shard(model, comm)
        with torch.no_grad():
            model.scale.add_(torch.ones(()))  # a number
            if not local(model.scale).numel():
                with pytest.raises(RuntimeError, match=r"of 'scale': outside of the forward"):
                    average(mean, model.scale)
                return False
            average(mean, model.scale)
        assert mean.gt(0).all()
        return True

    assert sorted(run_threads(body, RANKS)) == [False, True]


class Unevenly(nn.Module):
    """Of two parameters of one shape, two ranks share out only the second: one row each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 64)), nn.Parameter(torch.ones(2, 64))
        self.c = nn.Parameter(torch.ones(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a.T @ self.b + self.c


@pytest.mark.parametrize(
    "use",
    [
        lambda m: torch._foreach_add_([m.a], [m.b]),
        lambda m: torch._foreach_lerp_([m.a.data], [m.b.data], 0.5),
        lambda m: m.a.add_(m.b),
        lambda m: m.a - m.b,
    ],
)
def test_one_row_of_another_parameter_is_not_broadcast(use: Callable[[Any], Any]) -> None:
    def body(comm: Communicator) -> None:
        model = Unevenly()
        fully_shard(model, comm)
        rows = [len(local(each)) for each in (model.a, model.b)]
        assert rows == ([2, 1] if comm.rank == 0 else [0, 1])
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"with a tensor of shape"):
            use(model)

    run_threads(body, 2)


@pytest.mark.parametrize("quantile", [torch.quantile, torch.nanquantile])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_quantile_is_refused_on_ranks_with_rows_and_without(
    rows: int, quantile: Callable[[torch.Tensor, float], torch.Tensor]
) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(64, rows, bias=False)
        fully_shard(model, comm)
        if len(local(model.weight)) == rows:
            return
        with pytest.raises(RuntimeError, match=r"quantile of 'weight': outside of the forward"):
            quantile(model.weight.detach(), 0.5)

    run_threads(body, RANKS)


@pytest.mark.parametrize("index", [0, -1, 5, slice(0, 1), (slice(None), 0), [0, 1]])
@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.data, lambda p: p.grad])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_index_is_refused_on_ranks_with_rows_and_without(
    rows: int, of: Callable[[nn.Parameter], Any], index: Any
) -> None:
    """Of 2 rows a rank has one, which would be all that it takes; of one, a rank has none."""

    def body(comm: Communicator) -> None:
        model = nn.Linear(64, rows, bias=False)
        fully_shard(model, comm)
        model(values(3, 64)).sum().backward()
        assert len(local(model.weight)) == 1 or rows == 1
        if len(local(model.weight)) == rows:
            return
        with torch.no_grad():
            for use in (
                lambda: of(model.weight)[index],
                lambda: of(model.weight).__setitem__(index, 0.0),
            ):
                with pytest.raises(RuntimeError, match=r"item__ of 'weight': outside of the forw"):
                    use()
            for everything in (..., slice(None), (slice(None), ...)):
                of(model.weight)[everything] = 2.0
                assert local(of(model.weight)).eq(2.0).all()

    run_threads(body, RANKS)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: setattr(m.embed.weight, "data", torch.zeros(5, WIDTH)),
        lambda m: setattr(m.embed, "weight", nn.Parameter(torch.zeros(5, WIDTH))),
        lambda m: setattr(m.blocks[0], "weight", m.blocks[1].weight),
        lambda m: setattr(m, "head", nn.Linear(WIDTH, 2)),
        lambda m: m.blocks.append(nn.Linear(WIDTH, WIDTH)),
        lambda m: (m.blocks.insert(0, nn.Linear(WIDTH, WIDTH)), m.blocks.pop(-1)),
        lambda m: (setattr(m, "blocks", m.blocks[:1]), m.blocks.insert(0, nn.Linear(WIDTH, WIDTH))),
        lambda m: (setattr(m, "new", nn.ParameterList()), m.new.append(torch.ones(1))),
        lambda m: (setattr(m, "new", nn.ModuleDict()), m.new.update({"q": nn.Linear(2, 2)})),
        lambda m: (
            m.blocks.insert(0, nn.Sequential()),
            m(IDS),
            m.blocks[0].append(nn.Linear(2, 2)),
        ),
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda m: parametrize.register_parametrization(m.embed, "weight", nn.Identity()),
        lambda m: torch.func.functional_call(m, {"embed.weight": torch.zeros(5, WIDTH)}, (IDS,)),
    ],
)
def test_what_would_not_be_trained_is_refused(change: Callable[[Tied], Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"(after|before)\s+fully_shard"):
            (change(model), model(IDS))

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_gradient_is_changed_by_its_parameter_under_no_grad_alone(strategy: str) -> None:
    """Torch refuses it: gradients are views, made under `no_grad`."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight, whole = model.embed.weight, twin.embed.weight
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            weight.grad.add_(weight, alpha=0.1)
        with torch.no_grad():
            for each in (weight, whole):
                each.grad.add_(each, alpha=0.1)
        full = getattr(weight.grad, "full_tensor", lambda: weight.grad)()
        torch.testing.assert_close(full, whole.grad)

    with_sharded(body, strategy=strategy)


def test_a_gradient_that_is_set_has_the_rows_shape() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = model.embed.weight
        with pytest.raises(RuntimeError, match=r"'embed.weight' was given .* \(5, 8\); accepted"):
            weight.grad = torch.ones(5, WIDTH)
        weight.grad = torch.ones_like(weight)
        assert torch.equal(weight.grad.full_tensor(), torch.ones(5, WIDTH))

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to("meta")]
)
def test_conversions_are_refused(change: Callable[[Tied], Any], strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"after\s+fully_shard"):
            (change(model), model(IDS))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_model_is_not_pickled(strategy: str, closed: bool) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        if closed:
            engine.close()
        with pytest.raises(
            RuntimeError, match=r"cannot be pickled.* Save .* torch.distributed.checkpoint"
        ):
            torch.save(nn.Sequential(model), io.BytesIO())

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("name", ["full_tensor", "to_local", "placements"])
def test_a_state_dicts_entries_say_that_they_are_no_dtensors(name: str) -> None:
    """As scripts with FSDP2 take them to make a whole checkpoint."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        entry = next(iter(model.state_dict().values()))
        with pytest.raises(AttributeError, match=rf"no {name}.* Take engine.full_state_dict\(\)"):
            getattr(entry, name)
        assert not hasattr(entry, "something_else")

    with_sharded(body)


def test_sentences_say_what_to_call_of_what_was_given() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight, whole = model.embed.weight, twin.embed.weight.detach()
        grad = weight.grad
        assert grad is not None
        for call in (lambda: grad.mean(0), lambda: grad[0], lambda: (grad * 2).sum(1), grad.tolist):
            with pytest.raises(RuntimeError, match=r"take full_tensor\(\) of this gradient"):
                call()
        with pytest.raises(RuntimeError, match=r"compute in that forward"):
            weight.detach().mean(0)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"values by load_state_dict"):
            weight.copy_(whole)
        with pytest.raises(RuntimeError, match=r"pickled.* take to_local\(\) .* full_tensor\(\)"):
            torch.save(grad, io.BytesIO())

    with_sharded(body)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_number_is_not_formatted_from_rows() -> None:
    def body(comm: Communicator) -> None:
        model = Scaled()
        fully_shard(model, comm)
        with pytest.raises(RuntimeError, match=r"__format__ of 'scale'.* full_tensor\(\)"):
            f"{model.scale.detach():.2f}"
        assert f"{model.scale}".startswith("ShardedParameter(rows of 'scale'")
        assert f"{model.scale.full_tensor():.2f}" == "2.50"  # type: ignore[operator]

    run_threads(body, RANKS)


def test_a_number_that_a_rank_has_is_formatted() -> None:
    def body(comm: Communicator) -> None:
        model = Scaled()
        fully_shard(model, comm, strategy="no_shard")
        assert f"{model.scale.detach():.2f}" == "2.50"

    run_threads(body, RANKS)


def test_a_group_of_modules_is_no_model() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=r"model is a list; .* the whole model, .* units="):
            fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], comm)  # type: ignore[arg-type]

    run_threads(body, 1)


def test_fully_shard_is_called_once() -> None:
    def body(comm: Communicator) -> None:
        model = model_of()
        fully_shard(model.embed, comm)
        with pytest.raises(ValueError, match=r"once, with the whole model, .* units="):
            fully_shard(model, comm)

    run_threads(body, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_copies_are_not_trained(strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"before (fully_shard|it is sharded)"):
            copy.deepcopy(model)(IDS)

    with_sharded(body, strategy=strategy)


def test_a_teacher_from_before_says_how_it_is_updated() -> None:
    def body(model: Tied, engine: Engine, teacher: Tied) -> None:
        mean, param = teacher.embed.weight, model.embed.weight
        with pytest.raises(RuntimeError, match=r"ExponentialMovingAverage.*engine\.gathered"):
            mean.data = 0.9 * mean.data + 0.1 * param.data

    with_sharded(body)


@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}, {"strategy": "no_shard"}])
def test_nobody_gives_parameters_other_memory(options: dict[str, Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = model.embed.weight
        for call in (model.share_memory, lambda: weight.set_(torch.zeros_like(weight))):  # type: ignore[call-overload]
            with torch.no_grad(), pytest.raises(RuntimeError, match="memory belongs to the engine"):
                call()

    with_sharded(body, **options)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_parameter_that_forward_has_from_a_list_says_so_in_backward(strategy: str) -> None:
    class Listed(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.tied = [self.embed.weight]

        def forward(self, ids: torch.Tensor, *, tied: bool = False) -> torch.Tensor:
            return F.linear(super().forward(ids), self.tied[0])

    nets = [Listed() for _ in range(RANKS)]

    def rank(comm: Communicator) -> None:
        model = nets[comm.rank]
        fully_shard(model, comm, units=[nn.Linear, nn.Embedding], strategy=strategy)
        with pytest.raises(
            RuntimeError, match=r"a gradient came to parameter 'embed\.weight' as it"
        ):
            model(IDS).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"a gradient came to parameter 'embed\.weight' as it"
        ):
            torch.autograd.grad(model(IDS).sum(), model.tied)

    run_threads(rank, RANKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_shallow_copy_is_refused_when_it_is_called(strategy: str) -> None:
    """It would call the original, with the original's attributes."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        copied = copy.copy(model)
        with pytest.raises(RuntimeError, match=r"a copy of unit '\(root\)'"):
            copied(IDS)
        model(IDS)
        engine.close()
        assert "__getstate__" not in vars(model)

    with_sharded(body, strategy=strategy)


def test_a_backward_of_a_graph_from_before_says_so() -> None:
    nets = [model_of() for _ in range(RANKS)]

    def rank(comm: Communicator) -> None:
        loss = nets[comm.rank](IDS).sum()
        fully_shard(nets[comm.rank], comm, units=nn.Linear)
        with pytest.raises(RuntimeError, match=r"a gradient came to parameter .* as it was before"):
            loss.backward()

    run_threads(rank, RANKS)


def sgd_by_hand(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "use",
    [
        lambda params: nn.utils.clip_grad_norm_(params, 1.0),
        sgd_by_hand,
        lambda params: torch.optim.SGD(params, lr=0.1).zero_grad(),
    ],
)
def test_a_list_of_parameters_that_was_taken_before_has_no_gradients(
    use: Callable[[list[nn.Parameter]], object], strategy: str
) -> None:
    """Without gradients nothing would be clipped or trained, silently."""

    def body(comm: Communicator) -> None:
        model = model_of()
        params, other = list(model.parameters()), nn.Linear(WIDTH, 3)
        before = model.embed.weight.sum()
        model.embed.bias = other.bias
        fully_shard(model, comm, strategy=strategy)
        model(IDS).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"\.grad was read of parameter .* after fully_shard"
        ):
            use(params)
        with pytest.raises(RuntimeError, match=r"a gradient came to parameter .* as it was before"):
            before.backward()
        copied = copy.deepcopy(params)
        assert {type(each) for each in copied} == {nn.Parameter}
        copied[0].sum().backward()
        assert copied[0].grad is not None
        gone = weakref.ref(params[0])
        del params, before
        gc.collect()
        assert gone() is None
        fully_shard(other, comm)  # with a parameter that this model has, too
        other(torch.ones(2, WIDTH)).sum().backward()

    run_threads(body, RANKS)


@pytest.mark.parametrize(
    ("use", "error", "says"),
    [
        (lambda e: e(IDS), TypeError, r"engine = fully_shard\(model, \.\.\.\), and call the model"),
        (lambda e: e.parameters(), AttributeError, r"engine\.model\.parameters"),
        (lambda e: e.eval(), AttributeError, r"engine\.model\.eval"),
        (lambda e: e.set_requires_gradient_sync(False), AttributeError, r"engine\.no_sync\(\)"),
        (lambda e: e.unshard(), AttributeError, r"engine\.unit\(module\)\.unshard\(\)"),
        (lambda e: e.nothing, AttributeError, "an Engine has no 'nothing'"),
    ],
)
def test_an_engine_is_not_the_model(
    use: Callable[[Any], Any], error: type[Exception], says: str
) -> None:
    """As it would be after `model = fully_shard(model, ...)`, which PyTorch's FSDP2 allows."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(error, match=says):
            use(engine)
        assert engine.model is model

    with_sharded(body)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mesh": None}, "mesh=, of PyTorch's FSDP2, is here: comm="),
        ({"mp_policy": None}, r"mixed_precision=shardcomm\.MixedPrecision"),
        ({"offload_policy": None}, "cpu_offload=True"),
        ({"shard_placement_fn": None}, "shard_dim="),
        ({}, r"comm is missing: give shardcomm\.Communicator\.from_env\(\)"),
        ({"comm": None, "unit": 1}, "there is no argument unit=; accepted: model, comm, units, "),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_fully_shard_does_not_have_are_told(
    arguments: dict[str, Any], says: str
) -> None:
    shard: Any = fully_shard
    with pytest.raises(TypeError, match=says):
        shard(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "hook",
    [
        lambda params: params[0].register_hook(lambda grad: grad),
        lambda params: register_multi_grad_hook(params, lambda grads: None),
        lambda params: get_gradient_edge(params[0]),
        lambda params: params[0].expand_as(params[0]).grad_fn.next_functions,
    ],
)
def test_a_gradient_hook_is_refused(hook: Callable[[list[Any]], object], strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match="use register_post_accumulate_grad_hook"):
            hook(list(model.parameters()))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, params: loss.backward(inputs=list(params)),
        lambda loss, params: loss.backward(inputs=next(params)),
        lambda loss, params: torch.autograd.backward(loss, inputs=tuple(params)),
        lambda loss, params: torch.autograd.backward([loss], None, None, False, None, next(params)),
    ],
)
def test_a_backward_to_some_inputs_says_that_parameters_are_none(
    backward: Callable[[torch.Tensor, Any], None], strategy: str
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"call loss\.backward\(\) without inputs"):
            backward(model(IDS).square().sum(), model.parameters())
        model.zero_grad()
        model(IDS).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, q.grad)
        x = torch.ones(2, WIDTH, requires_grad=True)
        model.blocks[0](x).sum().backward(inputs=[x])
        assert x.grad is not None

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_parameter_is_not_made_of_another(strategy: str, granularity: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with pytest.raises(RuntimeError, match=r"nn\.Parameter of 'embed\.weight', a parameter of"):
            nn.Parameter(model.embed.weight)
        with pytest.raises(RuntimeError, match=r"(nn\.Parameter|norm_except_dim) of 'blocks\.0\.w"):
            nn.utils.parametrizations.weight_norm(model.blocks[0])
        # As loops of mixed precision have it.
        master = nn.Parameter(model.embed.weight.detach().clone())
        plain = nn.Parameter(twin.embed.weight.detach().clone())
        master.grad, plain.grad = model.embed.weight.grad, twin.embed.weight.grad
        for each in (master, plain):
            torch.optim.SGD([each], lr=0.1).step()
        whole = master.full_tensor() if hasattr(master, "full_tensor") else master.detach()
        torch.testing.assert_close(whole, plain.detach())

    with_sharded(body, strategy=strategy, granularity=granularity)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_that_are_returned_are_refused(allow_unused: bool, strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        loss = model(IDS).square().sum()
        with pytest.raises(RuntimeError, match=r"loss\.backward\(\)"):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
        model.zero_grad()
        loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, q.grad)

    with_sharded(body, strategy=strategy)


def test_a_whole_parameter_beside_one_that_another_rank_has_is_refused() -> None:
    """The rank that owns the weight of a LayerNorm, and not its bias."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(x)
            return out

    def body(comm: Communicator) -> None:
        model = Norms()
        fully_shard(model, comm, granularity="tensor")
        with pytest.raises(RuntimeError, match=r"'norm\.(weight|bias)': outside of the forward of"):
            model.norm(torch.ones(2, WIDTH))

    run_threads(body, RANKS)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize(
    "average",
    [
        lambda comm, p: comm.all_reduce(p.grad, "avg"),
        lambda comm, p: comm.all_reduce(p),
        lambda comm, p: comm.broadcast(p.data),
        lambda comm, p: shardcomm.reduce_scatter_tensor(p.grad, torch.ones(16), group=comm),
        lambda comm, p: dist.all_reduce(p.grad),
        lambda comm, p: dist.broadcast(p.data, 0),
        lambda comm, p: dist.all_gather([p.data, p.data], p.grad),
    ],
)
def test_rows_are_not_mixed_with_other_ranks_rows(
    average: Callable[[Communicator, Any], Any], granularity: str
) -> None:
    """With another name for each collective that averages gradients, or starts alike, by hand."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        grads = [each.grad.full_tensor() for each in model.parameters()]  # type: ignore[union-attr]
        for param in model.parameters():  # also where this rank has all of its rows, or none
            with pytest.raises(RuntimeError, match=r"leave the call out, take full_tensor\(\)"):
                average(engine.mesh.shard, param)
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert torch.equal(param.grad.full_tensor(), grad)  # type: ignore[union-attr]
            rows = param.to_local()  # type: ignore[attr-defined]
            counts = torch.tensor([float(rows.numel())])
            engine.mesh.shard.all_reduce(counts)  # plain tensors are
            assert counts == grad.numel()

    with_sharded(body, granularity=granularity)


def with_a_hook(model: nn.Linear) -> None:
    model.weight.register_hook(lambda grad: grad * 0)  # type: ignore[no-untyped-call]


def with_an_optimizer_in_backward(model: nn.Linear) -> None:
    model.weight.register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[no-untyped-call]


def with_a_gradient(model: nn.Linear) -> None:
    model(torch.ones(WIDTH)).sum().backward()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    ("before", "what"),
    [
        (with_a_hook, "hooks"),
        (with_an_optimizer_in_backward, "hooks"),
        (with_a_gradient, "a gradient"),
    ],
)
def test_what_hangs_on_parameters_before_is_refused(
    before: Callable[[nn.Linear], None], what: str, strategy: str
) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        before(model)
        with pytest.raises(ValueError, match=f"parameter 'weight' has {what} already"):
            fully_shard(model, comm, strategy=strategy)

    run_threads(body, RANKS)


TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "torch.jit.trace": lambda module, x: torch.jit.trace(module, (x,)),  # type: ignore[no-untyped-call]
    "make_fx": lambda module, x: make_fx(module)(x),
}


@pytest.mark.parametrize("by", TRACERS)
def test_a_trace_is_made_inside_of_gathered(by: str) -> None:
    model = model_of().requires_grad_(False)
    engine = fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear)
    for module, x in ((model, IDS), (model.blocks[0], torch.ones(2, WIDTH))):
        with pytest.raises(RuntimeError, match=rf"{by} of .* trace inside of engine.gathered\(\)"):
            TRACERS[by](module, x)
    with engine.gathered(), torch.no_grad():
        traced = TRACERS[by](model, IDS)
    assert torch.equal(traced(IDS), model(IDS))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_sharded_module_is_not_scripted(strategy: str) -> None:
    """TorchScript computes past torch's functions in Python: with rows, as if they were the whole."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for module in (model, model.blocks, model.blocks[0], model.embed):
            with pytest.raises(
                RuntimeError, match=r"torch.jit.script of .* engine.full_state_dict\(\)"
            ):
                torch.jit.script(module)
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_parameters_are_not_swapped(strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for param in model.parameters():
            other = nn.Parameter(torch.zeros(local(param).shape))
            for pair in ((param, other), (other, param)):
                with pytest.raises(RuntimeError, match="the engine; call it before fully_shard"):
                    torch.utils.swap_tensors(*pair)  # type: ignore[no-untyped-call]
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_quantised_modules_know_that_they_are_not_the_engines(inplace: bool) -> None:
    model = model_of()
    fully_shard(model, Communicator.local_group(1)[0], units=nn.Linear, strategy="no_shard")
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=inplace)
    with pytest.raises(RuntimeError, match=r"load its full_state_dict\(\) into another one"):
        quantised(IDS)


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_that_renames_what_is_loaded_is_registered_before(before: bool) -> None:
    def rename(state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}table")

    state = model_of(1).state_dict()
    named = {name.replace("embed.weight", "embed.table"): each for name, each in state.items()}
    nets = [model_of() for _ in range(RANKS)]

    def body(comm: Communicator) -> None:
        model = nets[comm.rank]
        hooked = model.embed._register_load_state_dict_pre_hook
        if before:
            hooked(rename)
        engine = fully_shard(model, comm, units=[nn.Linear, nn.Embedding])
        if not before:
            hooked(rename)
            with pytest.raises(RuntimeError, match=r"copy_ with a tensor of shape .* of 'embed\.w"):
                model.load_state_dict(named)
            return
        model.load_state_dict(named)
        for name, each in engine.full_state_dict().items():
            assert torch.equal(each, state[name])

    run_threads(body, RANKS)
