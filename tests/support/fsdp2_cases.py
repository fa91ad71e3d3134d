"""Models that torch's FSDP2 shards, the ways to use it, and a training loop for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

STEPS = 2  # the second sees what the first has made; test_fsdp2_attach.py trains for longer, too
WIDTH = 12
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)  # seven rows: uneven on 2, 3 and 4 ranks
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # one row: most ranks have none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Even(nn.Sequential):
    """Dims that divide by 2, 3 and 4, as torch demands of Shard(1)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 24, bias=False)
        )


class Renormed(nn.Module):
    """Its forward writes into its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.embed(torch.arange(WIDTH))


def shard(net: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Each block, and the rest."""
    for block in getattr(net, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def shard_in_groups(net: Net, mesh: DeviceMesh, **options: Any) -> None:
    """Nested in a block, two blocks as one group, the first and last layer as one."""
    fully_shard(net.blocks[0].up, mesh=mesh, **options)
    fully_shard(net.blocks[0], mesh=mesh, **options)
    fully_shard([net.blocks[1], net.blocks[2]], mesh=mesh, **options)
    fully_shard([net.embed, net.head], mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def freeze(net: Net) -> None:
    net.embed.requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    net.blocks[2].up.bias.requires_grad_(False)


def freeze_in_another_dtype(net: Net) -> None:
    """Gathered as bytes, since a group's dtypes differ."""
    for block in net.blocks:
        block.scale.requires_grad_(False)
        block.scale.data = block.scale.data.to(BF16)


def recompute(net: Net) -> None:
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(block)


def prefetch(net: Net) -> None:
    first, second, third = fsdp_modules(net.blocks)
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    net.unshard(async_op=True)


def separate_reduce_group(net: Net) -> None:
    if hasattr(net, "set_separate_reduce_scatter_group"):
        net.set_separate_reduce_scatter_group(True)


def divide_by_three(net: Net) -> None:
    for module in fsdp_modules(net):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)


def multiply_before_the_sum(net: Net) -> None:
    """By PREMUL_SUM, which torch takes unless told otherwise, and Gloo does not have."""
    for module in fsdp_modules(net):
        module.set_force_sum_reduction_for_comms(False)


def fsdp_modules(net: nn.Module) -> list[FSDPModule]:
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True)
class Case:
    """One way to use FSDP2. Without `tolerance` results are bitwise Gloo's at two ranks, and close to it beyond."""

    net: Callable[[], Any] = Net
    mesh: tuple[int, ...] = ()
    shard: Callable[..., None] = shard
    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], None] = lambda net: None
    after: Callable[[Any], None] = lambda net: None
    attached: Callable[[Any], None] = lambda net: None
    micro_batches: int = 1
    until_last: str = "set_requires_gradient_sync"
    tolerance: float | None = None
    not_full: str = ""
    """Why a module of it stays at level "copies"."""


CASES = {
    "blocks": Case(),
    "groups": Case(shard=shard_in_groups),
    "kept after forward": Case(options={"reshard_after_forward": False}),
    "bf16": Case(options={"mp_policy": MixedPrecisionPolicy(BF16)}, tolerance=5e-3),
    "bf16, reduced in fp32": Case(
        options={"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}, tolerance=5e-3
    ),
    "reduced in fp16": Case(
        options={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, tolerance=5e-3
    ),
    "frozen": Case(before=freeze),
    "frozen, another dtype": Case(
        before=freeze_in_another_dtype, not_full="its parameters have different dtypes"
    ),
    "Shard(1)": Case(
        net=Even,
        options={"shard_placement_fn": lambda param: Shard(1)},
        not_full="a parameter is sharded on another dim than 0",
    ),
    "renormed": Case(
        net=Renormed,
        not_full="an Embedding with max_norm writes into its parameter, which all ranks share",
    ),
    "accumulation": Case(micro_batches=3),
    "recomputed": Case(before=recompute),
    "prefetched": Case(after=prefetch),
    "separate reduce group": Case(after=separate_reduce_group),
    "divided by 3": Case(after=divide_by_three),
    "divided by 3 before the sum": Case(
        after=divide_by_three, attached=multiply_before_the_sum, tolerance=1e-5
    ),
    "offloaded": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}
CASES_OF_4 = {
    "HSDP": Case(mesh=(2, 2)),
    "HSDP, bf16": Case(
        mesh=(2, 2), options={"mp_policy": MixedPrecisionPolicy(BF16)}, tolerance=5e-3
    ),
    "HSDP, accumulation": Case(mesh=(2, 2), micro_batches=2),
    "HSDP, accumulation of shards": Case(
        mesh=(2, 2), micro_batches=2, until_last="set_requires_all_reduce"
    ),
    "resharded to 2": Case(
        options={"reshard_after_forward": 2},
        not_full="after forward it is resharded to other ranks",
    ),
}


def make(case: Case, mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    net = case.net()
    case.before(net)
    case.shard(net, mesh, **case.options)
    case.after(net)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(
        trained, lr=0.05, momentum=0.9
    )  # unlike Adam, it shows a gradient's scale


def step(
    net: Any, optimizer: torch.optim.Optimizer, seed: int, case: Case = CASES["blocks"]
) -> float:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    total = 0.0
    for i in range(case.micro_batches):
        getattr(net, case.until_last)(i == case.micro_batches - 1)
        width = 5 if isinstance(net, Net) else WIDTH
        loss = (net(torch.randn(4, width, generator=generator)) - 1).square().mean()
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


def local(net: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of the parameters, which is the same however the model is attached."""
    return {name: p.to_local().detach().clone() for name, p in net.state_dict().items()}


def train(net: Any, case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and this rank's part of the parameters."""
    optimizer = optimizer_of(net)
    losses = [step(net, optimizer, seed, case) for seed in range(STEPS)]
    return losses, local(net)
