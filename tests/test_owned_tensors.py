"""Optimizers of one's own on owned parameters: each by itself is as without sharding, several together are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_ranks import run_threads
from torch import nn

from shardcomm import Communicator, fully_shard
from shardcomm.sharded_parameter import ShardedParameter

WIDTH, LAYERS = 6, 5
Params = list[nn.Parameter]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def backward(model: nn.Module, step: int = 0) -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    (model(x) + step).square().sum().backward()


class Own(torch.optim.Optimizer):
    """Its step is `update`, of the parameters with a gradient and their states."""

    def __init__(self, params: Any, update: Callable[[Params, list[dict[str, Any]]], Any]) -> None:
        super().__init__(params, {})
        self.update = update
        self.result: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.result = self.update(params, [self.state[p] for p in params])


def added(params: Params) -> torch.Tensor:
    total = torch.zeros(())
    for p in params:
        total.add_(grad(p).norm().square())
    return total


def grad(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


OF_ALL: dict[str, Callable[[Params], Any]] = {
    "norms": lambda ps: sum(grad(p).norm() ** 2 for p in ps),
    "norms of data": lambda ps: sum(grad(p).data.norm(2).item() ** 2 for p in ps),
    "squares": lambda ps: sum(grad(p).pow(2).sum() for p in ps),
    "squares as numbers": lambda ps: sum((grad(p) * grad(p)).sum().item() for p in ps),
    "a total in place": added,
    "a stack of norms": lambda ps: torch.stack([grad(p).detach().norm() for p in ps]).norm() ** 2,
    "foreach": lambda ps: torch.stack(torch._foreach_norm([grad(p) for p in ps])).norm() ** 2,
    "flat": lambda ps: torch.cat([grad(p).flatten() for p in ps]).norm() ** 2,
    "vector_norm": lambda ps: sum(torch.linalg.vector_norm(grad(p)) ** 2 for p in ps),
    "get_total_norm": lambda ps: torch.nn.utils.get_total_norm([grad(p) for p in ps]) ** 2,
    "dot": lambda ps: sum(torch.dot(grad(p).view(-1), grad(p).view(-1)) for p in ps),
    "maximum": lambda ps: max(grad(p).abs().max() for p in ps),
    "maximum as a number": lambda ps: max(grad(p).abs().max().item() for p in ps),
    "parameters": lambda ps: sum(torch.dot(p.flatten(), grad(p).flatten()).item() for p in ps),
    "scaled by another's": lambda ps: torch._foreach_mul([grad(p) for p in ps], grad(ps[0]).norm()),
}


@pytest.mark.parametrize("what", OF_ALL)
@pytest.mark.parametrize("granularity", ["row", "element", "tensor"])
def test_what_is_of_all_parameters_is_right_or_refused_in_a_step(
    granularity: str, what: str
) -> None:
    compute = OF_ALL[what]
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    backward(plain)
    expected = compute(list(plain.parameters()))

    def body(comm: Communicator) -> None:
        model = nets[comm.rank]
        fully_shard(model, comm, granularity=granularity)  # type: ignore[arg-type]
        backward(model)
        optimizer = Own(model.parameters(), lambda params, _: compute(params))
        if granularity == "tensor":
            with pytest.raises(RuntimeError, match=r"^Own\.step: .* of '.*' and '.*' together"):
                optimizer.step()
            return
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "this rank has only its rows" in str(error)  # noqa: PT017
        else:
            got = optimizer.result
            if isinstance(got, float | torch.Tensor):
                torch.testing.assert_close(float(got), float(expected))
            else:
                for ours, theirs in zip(got, expected, strict=True):
                    torch.testing.assert_close(ours.full_tensor(), theirs)

    run_threads(body, 2)


def by_trust_ratio(params: Params, states: list[dict[str, Any]]) -> None:
    """As LAMB does, with numbers and with tensors, and with a scratch tensor for all."""
    scratch = torch.zeros(())
    for param, state in zip(params, states, strict=True):
        mean = state.setdefault("mean", torch.zeros_like(param))
        square = state.setdefault("square", torch.zeros_like(param))
        mean.lerp_(grad(param), 0.1)
        square.mul_(0.9).addcmul_(grad(param), grad(param), value=0.1)
        update = mean / (square.sqrt() + 1e-6)
        scratch.copy_(update.norm())
        ratio = param.norm().item() / max(scratch.item(), 1e-6)
        state["ratio"] = ratio
        param.add_(update * (param.norm() / scratch), alpha=-0.01 * min(ratio, 1.0))
        scratch.zero_()


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """One after another, or many at once."""
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


def by_matrices(of_each: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def update(params: Params, states: list[dict[str, Any]]) -> None:
        for param, state in zip(params, states, strict=True):
            momentum = state.setdefault("momentum", torch.zeros_like(grad(param)))
            momentum.lerp_(grad(param), 0.5)
            if param.ndim == 2:
                param.add_(of_each(momentum), alpha=-0.1)

    return update


def by_a_stack(params: Params, states: list[dict[str, Any]]) -> None:
    """Lists of all, and matrices in one batch."""
    matrices = [param for param in params if param.ndim == 2]
    if not matrices:
        return
    torch._foreach_mul_(matrices, 0.99)
    updates = orthogonal(torch.stack([grad(param) for param in matrices]))
    torch._foreach_add_(matrices, list(updates.unbind()), alpha=-0.1)


compiled = torch.compile(orthogonal, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "update",
    [by_trust_ratio, by_matrices(orthogonal), by_matrices(compiled), by_a_stack],
    ids=["trust ratio", "matrices", "compiled", "stack"],
)
def test_what_is_done_to_each_is_as_without_sharding(update: Any) -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]

    def train(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Own(model.parameters(), update)
        for step in range(3):
            backward(model, step)
            optimizer.step()
            kinds = {type(value) for state in optimizer.state.values() for value in state.values()}
            assert kinds <= {torch.Tensor, float} or step == 0
            optimizer.zero_grad()
        return optimizer

    train(plain)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, granularity="tensor")
        optimizer = train(model)
        pickle.dumps([dict(state) for state in optimizer.state.values()])
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=name)


def test_steps_after_the_first_see_plain_tensors() -> None:
    seen: list[set[type]] = []

    def look(params: Params, states: list[dict[str, Any]]) -> None:
        seen.append({type(param) for param in params} | {type(grad(param)) for param in params})

    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        fully_shard(model, comm, granularity="tensor")
        optimizer = Own(model.parameters(), look)
        for _ in range(3):
            optimizer.step()  # without gradients: it is not the first
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

    run_threads(body, 2)
    assert seen.count({nn.Parameter, torch.Tensor}) == 4


def test_a_first_step_that_fails_leaves_nothing_behind() -> None:
    calls: list[bool] = []
    kept: list[Any] = []

    def fail(params: Params, states: list[dict[str, Any]]) -> None:
        kept.extend([grad(params[0]) * 2, grad(params[0]).norm().item()])
        raise ZeroDivisionError

    @torch.compile(backend="eager")
    def looking(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    def body(comm: Communicator) -> None:
        model = net()
        fully_shard(model, comm, granularity="tensor")
        backward(model)
        with pytest.raises(ZeroDivisionError):
            Own(model.parameters(), fail).step()
        backward(model)
        assert {type(param) for param in model.parameters()} == {ShardedParameter}

    run_threads(body, 2)
    looking(torch.ones(1))
    assert calls == [True]
    tensors, numbers = kept[::2], kept[1::2]
    assert torch.stack([tensor.norm() for tensor in tensors]).ndim == 1
    assert {type(tensor) for tensor in tensors} == {torch.Tensor}
    assert type(numbers[0] + numbers[1]) is float
