"""Torch's wrappers that spread a model over ranks: refused around a sharded model, and as the model to shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate import replicate

from shardcomm import Communicator, fully_shard
from support.tied import model_of


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone() -> Communicator:
    return Communicator.local_group(1)[0]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "outer",
    [lambda model: model, nn.Sequential, lambda model: nn.ParameterList(model.parameters())],
)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_ddp_of_a_sharded_model_is_refused(outer: Callable[[Any], Any], strategy: str) -> None:
    """Of a list of its parameters, too, which `replicate` of torch.distributed makes of a model."""
    model = model_of()
    fully_shard(model, alone(), units=nn.Linear, strategy=strategy)
    with pytest.raises(RuntimeError, match="averages gradients already: call the model itself"):
        nn.parallel.DistributedDataParallel(outer(model))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_fsdp2_of_a_sharded_model_or_a_module_of_it_is_refused(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = fully_shard(model, alone(), units=nn.Linear, strategy=strategy)
    for module in (model, model[0]):
        with pytest.raises(AssertionError, match="fully_shard has already been applied"):
            fsdp.fully_shard(module)
    model(torch.ones(4)).sum().backward()  # it is as it was
    assert all(param.grad is not None for param in model.parameters())
    engine.close()
    if strategy == "no_shard":  # a plain model again
        model.zero_grad()
        fsdp.fully_shard(model)
        engine.close()  # once more, which leaves FSDP2's model as it is
        model(torch.ones(4)).sum().backward()
        with pytest.raises(ValueError, match="sharded already"):
            fully_shard(model, alone())
        with pytest.raises(AssertionError, match="fully_shard has already been applied"):
            fsdp.fully_shard(model)


@pytest.mark.usefixtures("group")
def test_replicate_leaves_a_sharded_model_as_it_is() -> None:
    """As it leaves one that FSDP2 has sharded: the engine averages gradients itself."""
    model = nn.Linear(4, 4)
    fully_shard(model, alone())
    outer = replicate(nn.Sequential(model, nn.Linear(4, 4)))
    outer(torch.ones(4)).sum().backward()
    assert all(param.grad is not None for param in outer.parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_fsdp1_of_a_sharded_model_is_refused(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], alone(), strategy=strategy)
    refusal = "FullyShardedDataParallel of a model that fully_shard|outside of the forward"
    with pytest.raises(RuntimeError, match=refusal):
        fsdp.FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))


@pytest.mark.usefixtures("group")
def test_fsdp1_may_ignore_a_sharded_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], alone(), strategy="no_shard")
    outer = fsdp.FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), ignored_modules=[model[0]]
    )
    outer(torch.ones(4)).sum().backward()
    assert all(param.grad is not None for param in model[0].parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "wrapper",
    [
        nn.parallel.DistributedDataParallel,
        lambda model: fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    ],
    ids=["DDP", "FSDP1"],
)
def test_a_wrapped_model_is_not_sharded(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrapper(nn.Linear(4, 4))
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(ValueError, match="spreads a model over ranks itself; give fully_shard"):
            fully_shard(model, alone())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("apply", [fsdp.fully_shard, replicate])
def test_what_torch_has_spread_is_not_sharded_again(apply: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apply(model[1])
    for whole in (model, model[1]):
        with pytest.raises(ValueError, match=rf"by {apply.__name__} of torch;.*fsdp2\.attach"):
            fully_shard(whole, alone())
