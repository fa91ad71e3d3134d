"""Optimizers on a rank's rows against the same optimizer on the whole model, on one batch that all ranks share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import AdamW, Communicator, fully_shard
from support.clipping import Clipping
from support.thread_ranks import run_threads

WIDTH = 8


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 3))


def convolution() -> nn.Sequential:
    """Parameters of four dims."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 5, 2), nn.Flatten(), nn.Linear(5, 3)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    x = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    for step in range(steps):
        model(x + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def matrices_decay(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups, told apart by the number of dims, which a rank's part has as the whole parameter has it."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.covers("optimizers", "granularity")
@pytest.mark.parametrize(("build", "shard_dim"), [(net, 0), (convolution, -1)])
@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.Adagrad(groups, lr=0.1),
        lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
        lambda groups: torch.optim.AdamW(groups, lr=0.05),
        lambda groups: AdamW(groups, lr=0.05),
    ],
    ids=["SGD", "Adagrad", "RMSprop", "AdamW", "shardcomm.AdamW"],
)
def test_elementwise_optimizers_and_groups_work_on_rows(
    make: Callable[[Any], torch.optim.Optimizer],
    granularity: str,
    build: Callable[[], nn.Module],
    shard_dim: int,
) -> None:
    plain = build()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    train(plain, make(matrices_decay(plain)))

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, granularity=granularity, shard_dim=shard_dim)  # type: ignore[arg-type]
        train(model, make(matrices_decay(model)))
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.covers("optimizers", "owners")
def test_adafactor_on_whole_parameters_is_exact() -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    train(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1), steps=20)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, granularity="tensor")
        train(model, torch.optim.Adafactor(model.parameters(), lr=0.1), steps=20)
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name


def test_gradients_that_a_program_has_set_are_there_after_a_step_on_whole_parameters() -> None:
    """On ranks that own none of the parameter, too, until they are zeroed."""

    def body(comm: Communicator) -> None:
        model = net()
        fully_shard(model, comm, granularity="tensor")
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        for param in model.parameters():
            param.grad = torch.full_like(param.detach(), 0.5)
        optimizer.step()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())

    run_threads(body, 2)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_lbfgs_is_refused_wherever_a_rank_has_only_some_parameters(granularity: str) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, 64)
        fully_shard(model, comm, granularity=granularity)
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(
            RuntimeError, match=r"LBFGS\.step: it takes products over all parameters"
        ):
            optimizer.step(lambda: torch.ones(()))

    run_threads(body, 2)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_that_look_at_whole_parameters_are_refused_on_some_rows(make: Any) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, 64, bias=False)
        fully_shard(model, comm)
        optimizer = make(model.parameters(), lr=0.1)
        model(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match='granularity="tensor"'):
            optimizer.step(lambda: torch.ones(()))

    run_threads(body, 2)


def test_adafactor_is_refused_on_a_rank_without_rows() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(64, 3, bias=False)  # three ranks have a row each
        fully_shard(model, comm)
        model(torch.ones(1, 64)).sum().backward()
        with pytest.raises(RuntimeError, match=r"Adafactor\.step of 'weight'"):
            torch.optim.Adafactor(model.parameters()).step()

    run_threads(body, 4)


class Watched(list[nn.Parameter]):
    """Parameters of a group, which notes in `seen` the classes that each look at all of them finds."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params)
        self.seen: list[set[type]] = []

    def __iter__(self) -> Iterator[nn.Parameter]:
        params = list(super().__iter__())
        self.seen.append({type(param) for param in params})
        return iter(params)


@pytest.mark.covers("optimizers", "granularity")
@pytest.mark.parametrize(("ranks", "granularity"), [(1, "row"), (2, "row"), (2, "tensor")])
def test_steps_and_zero_grad_see_plain_parameters(ranks: int, granularity: str) -> None:
    """Torch's fast kernels are for the classes of plain tensors; others it asks at each access what they are."""

    def run(comm: Communicator) -> None:
        model = net()
        engine = fully_shard(model, comm, units=nn.Linear, granularity=granularity)
        before = [type(param) for param in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        params = optimizer.param_groups[0]["params"] = Watched(model.parameters())
        model(torch.ones(2, WIDTH)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
        for call in (optimizer.step, optimizer.zero_grad):
            call()
            assert params.seen[-1] == {nn.Parameter}  # the last look is torch's own
            assert [type(param) for param in model.parameters()] == before
        assert all(param.grad is None for param in model.parameters())
        engine.close()

    run_threads(run, ranks)


class Normalized(torch.optim.Optimizer):
    """Steps as far whatever the gradients' norm is, which is that of all of them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=self.defaults["lr"])


def clipping_hook(params: Any, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=lr)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    optimizer.step()  # without gradients; hooks may come at any time
    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize(
    ("make", "granularity"),
    [
        (Clipping, "row"),
        (Clipping, "tensor"),
        (Normalized, "row"),
        (clipping_hook, "row"),
        (clipping_hook, "tensor"),
    ],
)
def test_norms_in_a_step_and_in_its_hooks_are_of_all_gradients(make: Any, granularity: str) -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    train(plain, make(plain.parameters(), lr=0.1))

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = fully_shard(nets[comm.rank], comm, granularity=granularity)
        train(nets[comm.rank], make(nets[comm.rank].parameters(), lr=0.1))
        return engine.full_state_dict()

    for state in run_threads(body, 2):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=name)


def test_a_norm_in_a_hook_after_the_step_is_of_all_parameters() -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]

    def norm_in_hook(model: nn.Module) -> torch.Tensor:
        norms: list[torch.Tensor] = []
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_post_hook(
            lambda *_: norms.append(torch.nn.utils.get_total_norm([p.detach() for p in params]))
        )
        train(model, optimizer, steps=1)
        return norms[0]

    def body(comm: Communicator) -> torch.Tensor:
        fully_shard(nets[comm.rank], comm)
        return norm_in_hook(nets[comm.rank])

    norm = norm_in_hook(plain)
    for each in run_threads(body, 2):
        torch.testing.assert_close(each, norm)


def test_rows_are_guarded_after_a_closure_that_fails() -> None:
    plain = net()
    nets = [copy.deepcopy(plain) for _ in range(2)]

    def norm_after(model: nn.Module) -> torch.Tensor:
        def closure() -> float:
            model(torch.ones(1, WIDTH)).sum().backward()
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            torch.optim.SGD(model.parameters(), lr=0.1).step(closure)
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    def body(comm: Communicator) -> torch.Tensor:
        fully_shard(nets[comm.rank], comm)
        return norm_after(nets[comm.rank])

    norm = norm_after(plain)
    for each in run_threads(body, 2):
        torch.testing.assert_close(each, norm)


def test_a_step_that_is_not_known_is_warned_of_once() -> None:
    def body(comm: Communicator) -> None:
        model = nets[comm.rank]
        fully_shard(model, comm, granularity="tensor")
        train(model, Normalized(model.parameters(), lr=1.0))

    nets = [net() for _ in range(2)]
    with pytest.warns(UserWarning, match=r"Normalized\.step is given .* owns") as warned:
        run_threads(body, 2)
    assert len(warned) == 1
