"""Experts that are parts of DTensors over an expert mesh: the ranks train as one process does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from shardcomm import Communicator, Engine, Policy, fully_shard, launch

EXPERTS, WIDTH, STEPS = 4, 5, 3
ORDERS = (0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf)
DEADLINE_S = 60


class Experts(nn.Module):
    """`mine` of `EXPERTS`, all of whose outputs are summed; their weights are one parameter."""

    def __init__(self, mine: slice = slice(None)) -> None:
        super().__init__()
        self.mine = mine
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (
            param.to_local() if hasattr(param, "to_local") else param[self.mine]  # type: ignore[operator]
            for param in (self.weight, self.bias)
        )
        return torch.tanh(x @ weight + bias).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.experts(self.before(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


@contextlib.contextmanager
def ranks(*shape: int) -> Iterator[tuple[Communicator, DeviceMesh]]:
    """All of them, and as a mesh of those with the same experts by those with other ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with Communicator.from_process_group() as comm:
            yield comm, init_device_mesh("cpu", shape, mesh_dim_names=("same", "ep"))
            comm.barrier()
    finally:
        dist.destroy_process_group()


def spread(model: Net, ep: DeviceMesh, placement: Shard | Replicate) -> None:
    for name, param in list(model.experts.named_parameters()):
        part = distribute_tensor(param.detach(), ep, [placement])
        setattr(model.experts, name, nn.Parameter(part))


def backward_of_all(model: Net, step: int, parts: int) -> None:
    """In one process: as each rank does with its experts, and their mean."""
    per_part = EXPERTS // parts
    for rank in range(4):
        part = rank % parts
        model.experts.mine = slice(part * per_part, (part + 1) * per_part)
        (model(tokens(rank, step)).square().sum() / 4).backward()


def close(got: object, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got).detach() + 0, expected.detach(), msg=lambda said: f"{what}: {said}"
    )


def train(folder: str, parts: int, strategy: str, granularity: str) -> None:
    with ranks(4 // parts, parts) as (comm, mesh):
        model, plain = net(), net()
        spread(model, mesh["ep"], Shard(0))
        policy = Policy(comm=mesh["same"], strategy=strategy)
        engine = fully_shard(model, comm, units={Experts: policy}, granularity=granularity)  # type: ignore[arg-type]
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain)]
        for step in range(STEPS):
            model(tokens(comm.rank, step)).square().sum().backward()
            backward_of_all(plain, step, parts)
            compare_norms(model, plain)
            expected = clip_grad_norm_(plain.parameters(), 0.1)
            clip = engine.clip_grad_norm_ if step else None
            close(clip(0.1) if clip else clip_grad_norm_(model.parameters(), 0.1), expected, "clip")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained = engine.full_state_dict()
        assert list(trained) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=name)
        state = {"model": engine, "optimizer": engine.optimizer_state(optimizers[0])}
        dcp.save(state, checkpoint_id=folder)
        loaded = {"model": {name: torch.zeros_like(v) for name, v in trained.items()}}
        dcp.load(loaded, checkpoint_id=folder)
        for name, value in trained.items():
            assert torch.equal(loaded["model"][name], value), name
        engine.close()


def compare_norms(model: Net, plain: Net) -> None:
    for order in ORDERS:
        for foreach in (True, False):
            got, expected = (
                get_total_norm([p.grad for p in each.parameters()], order, foreach=foreach)  # type: ignore[misc]
                for each in (model, plain)
            )
            close(got, expected, f"order {order}")
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        for order in (1.0, 2.0, math.inf):
            close(p.grad.norm(order), q.grad.norm(order), name)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)  # type: ignore[attr-defined]


@pytest.mark.covers("expert meshes", "gradient clipping", "state dicts", "tensor parallel")
@pytest.mark.parametrize(
    ("parts", "strategy", "granularity"),
    [
        (2, "full_shard", "row"),
        (2, "full_shard", "element"),
        (2, "full_shard", "tensor"),
        (2, "no_shard", "row"),
        (4, "full_shard", "row"),
    ],
)
def test_training_norms_and_state_dicts_equal_one_process(
    parts: int, strategy: str, granularity: str, tmp_path: Path
) -> None:
    launch(train, 4, (str(tmp_path), parts, strategy, granularity), timeout_s=DEADLINE_S)


def refused() -> None:
    with ranks(2, 2) as (comm, mesh):
        alone = Communicator.local_group(1)[0]
        for placement, given in ((Shard(0), alone), (Replicate(), mesh["same"])):
            model = net()
            spread(model, mesh["ep"], placement)
            with pytest.raises(
                ValueError,
                match=r"'experts\.weight' is a DTensor of which ranks 0 and \d have the same part",
            ):
                fully_shard(model, comm, units={Experts: Policy(comm=given)})
            comm.barrier()
        model = net()
        spread(model, mesh._flatten("all"), Shard(0))
        with pytest.raises(ValueError, match=r"over ranks \[0, 1, 2, 3\], of which .* comm has 2"):
            fully_shard(model, mesh["ep"], units={Experts: Policy(comm=alone)})


def test_ranks_that_have_the_same_part_must_be_together() -> None:
    launch(refused, 4, timeout_s=DEADLINE_S)


def norms_of_modules() -> None:
    """Experts that are modules: the norm of one is of the ranks that have it."""
    with ranks(2, 2) as (comm, mesh):
        mine = mesh["ep"].get_local_rank()
        shared, expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH + mine)
        model = nn.ModuleDict({"shared": shared, f"expert{mine}": expert})
        model.forward = lambda x: expert(shared(x))  # type: ignore[method-assign]
        engine: Engine = fully_shard(model, comm, units={expert: Policy(comm=mesh["same"])})
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0 + mine)
        for param, numel in zip(
            expert.parameters(), (WIDTH * (WIDTH + mine), WIDTH + mine), strict=True
        ):
            expected = torch.tensor((1.0 + mine) * math.sqrt(numel))
            assert param.grad is not None
            close(param.grad.norm(), expected, "alone")
            [norm] = torch._foreach_norm([param.grad])
            close(norm, expected, "of a list")
            close(param.grad.norm(math.inf), torch.tensor(1.0 + mine), "maximum")
        number = torch.tensor(6.0)  # of parameters: two are shared, and two are of each expert
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        close(get_total_norm(grads, 0.0), number, "of order 0")
        engine.close()


@pytest.mark.covers("expert meshes", "gradient clipping")
def test_the_norm_of_a_module_is_of_the_ranks_that_have_it() -> None:
    launch(norms_of_modules, 4, timeout_s=DEADLINE_S)
