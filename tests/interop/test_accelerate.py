"""accelerate, and the Trainer of transformers, over the engine: what they compute, save and refuse."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcomm
from shardcomm import launch

PRELOADED = ["accelerate"]
BATCHES = 8  # 4 steps of two micro-batches

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs: pip install accelerate"
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def accelerator_of(kind: str, **arguments: Any) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    from shardcomm.interop.accelerate import Accelerator

    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel("ERROR")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    arguments = {"cpu": True, "gradient_accumulation_steps": 2, **arguments}
    if kind == "engine":
        return Accelerator(**{"sharding": {"units": nn.Linear}, **arguments})
    return accelerate.Accelerator(**arguments)


def train(
    kind: str,
    *,
    batches: range = range(BATCHES),
    save: Path | None = None,
    load: Path | None = None,
    **arguments: Any,
) -> list[tuple[float, float]]:
    """The mean losses of micro-batches, and the norms that were clipped after every second one."""
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = accelerator_of(kind, **arguments)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    loader: Any = DataLoader(data, batch_size=4 // accelerator.num_processes)
    optimizer, model, loader, schedule = accelerator.prepare(optimizer, model, loader, schedule)
    if load is not None:
        accelerator.load_state(load)
    results = []
    for number, [x] in enumerate(loader):
        if number not in batches:
            continue
        with accelerator.accumulate(model):
            loss = (model(x) - 1).square().mean()
            accelerator.backward(loss)
            if kind == "engine" and number == 0:
                assert accelerator.engine_of(model).traffic.reduced_bytes == 0
            norm = 0.0
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        results.append((float(accelerator.reduce(loss.detach(), "mean")), float(norm)))
    if save is not None:
        accelerator.save_state(save)
    weights = accelerator.get_state_dict(model)
    if kind == "engine":
        assert isinstance(accelerator.engine_of(model), shardcomm.Engine)
        assert isinstance(model, nn.Sequential)
        expected = [p.shape for p in net().parameters()] if accelerator.is_main_process else []
        assert [w.shape for w in weights.values()] == expected
    return results


def whole_models(folder: Path) -> None:
    """What `save_model` writes, in one file or several, is loaded by a model that is not sharded."""
    from accelerate.utils import load_checkpoint_in_model

    accelerator = accelerator_of("engine")
    model = accelerator.prepare(net())
    for number, options in enumerate(
        ({}, {"safe_serialization": False}, {"max_shard_size": "1KB"})
    ):
        accelerator.save_model(model, folder / f"whole{number}", **options)
        accelerator.wait_for_everyone()
        other = net()
        for param in other.parameters():
            nn.init.zeros_(param)
        load_checkpoint_in_model(other, folder / f"whole{number}")
        for name, weight in net().state_dict().items():
            assert torch.equal(other.state_dict()[name], weight), (name, options)
    assert len([*(folder / "whole2").iterdir()]) > 2


def states(folder: Path) -> None:
    """Two models with an optimizer each, of which one has no state; and what is not of what is saved."""
    accelerator = accelerator_of("engine")
    first, second = net(), nn.Linear(4, 2)
    adam = torch.optim.AdamW(first.parameters())
    sgd = torch.optim.SGD(second.parameters(), lr=0.1)
    first, second, adam, sgd = accelerator.prepare(first, second, adam, sgd)
    accelerator.backward(second(first(torch.ones(2, 8))).sum())
    adam.step()
    sgd.step()
    saved = [p.full_tensor() for p in (*first.parameters(), *second.parameters())]
    accelerator.save_state(folder / "two")
    adam.step()
    sgd.step()
    accelerator.load_state(folder / "two")
    for param, before in zip((*first.parameters(), *second.parameters()), saved, strict=True):
        assert torch.equal(param.full_tensor(), before)

    accelerator = accelerator_of("engine")
    longer = accelerator.prepare(nn.Sequential(*net(), nn.Linear(4, 4)))
    with pytest.raises(
        RuntimeError, match=r"another model_0: it lacks model_0\.5\.bias, model_0\.5"
    ):
        accelerator.load_state(folder / "two")
    accelerator.load_state(folder / "two", strict=False)
    assert torch.equal(longer[0].weight.full_tensor(), saved[0])
    accelerator = accelerator_of("engine")
    accelerator.prepare(net()[:1])
    with pytest.raises(
        RuntimeError, match=r"lacks nothing, and has model_0\.2\.bias, model_0\.2\.w"
    ):
        accelerator.load_state(folder / "two")
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match="has no folder 'sharded', where save_state puts"):
        accelerator.load_state(folder / "empty")


def refused(folder: Path) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from shardcomm.interop.accelerate import prepared

    for wrong in ("unit", "comm"):
        with pytest.raises(
            TypeError, match=f"sharding: {wrong} is no argument; accepted are .* units,"
        ):
            accelerator_of("engine", sharding={wrong: nn.Linear})
    with pytest.raises(TypeError, match=r"sharding is a type; it must be a dict"):
        accelerator_of("engine", sharding=nn.Linear)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(
            ValueError, match=r"accelerate launch asks for FSDP, .* launch without it"
        ):
            accelerator_of("engine")
    accelerator = accelerator_of("engine")
    first, second = accelerator.prepare(net(), nn.Linear(4, 2))
    of_both = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    accelerator.prepare(of_both)
    with pytest.raises(ValueError, match=r"is of 2 models, .* by accelerator\.prepare"):
        accelerator.save_state(folder / "refused")
    with pytest.raises(ValueError, match="fsdp_plugin is a FullyShardedDataParallelPlugin, and"):
        accelerator_of("engine", fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator = accelerator_of("engine")
    early = net()
    optimizer = torch.optim.AdamW(early.parameters())
    model = accelerator.prepare(early)
    with pytest.raises(ValueError, match="made before the model was sharded; prepare both"):
        accelerator.prepare(optimizer)
    assert accelerator.prepare(model) is model
    with pytest.raises(ValueError, match=r"was not prepared; call accelerator\.prepare"):
        accelerator.engine_of(net())
    accelerator.free_memory()
    with pytest.raises(ValueError, match="was not prepared"):
        accelerator.engine_of(model)

    sharded = net()
    engine = shardcomm.fully_shard(sharded, shardcomm.Communicator.from_process_group())
    with pytest.raises(ValueError, match="is a Sequential that is sharded already"):
        accelerator.prepare(sharded)
    theirs = accelerator_of("DDP")
    with pytest.raises(RuntimeError, match="DistributedDataParallel of a model that fully_shard"):
        theirs.prepare(sharded)
    assert theirs.prepare(prepared(engine)) is sharded


def at_two_ranks(folder: Path) -> dict[str, Any]:
    from accelerate import InitProcessGroupKwargs

    half = BATCHES // 2
    ran: dict[str, Any] = {}
    group = InitProcessGroupKwargs(backend="shardcomm", timeout=timedelta(seconds=60))
    accelerator_of("engine", kwargs_handlers=[group])  # begins the process group
    for precision in ("no", "bf16"):
        for kind in ("engine", "DDP"):
            ran[f"{kind} {precision}"] = train(kind, mixed_precision=precision)
    ran["backend"] = dist.get_backend()
    train("engine", batches=range(half), save=folder / "state")
    whole_models(folder)
    states(folder)
    refused(folder)
    return ran


def resumed(folder: Path) -> list[tuple[float, float]]:
    return train("engine", batches=range(BATCHES // 2, BATCHES), load=folder / "state")


def close(to: Any, rel: float = 2e-6) -> Any:
    return pytest.approx(to, rel=rel, abs=1e-7)


@needs_accelerate
@pytest.mark.slow
def test_an_accelerator_shards_and_its_losses_are_those_of_ddp(tmp_path: Path) -> None:
    ran, _ = launch(at_two_ranks, 2, (tmp_path,), timeout_s=120)
    assert [*map(close, ran["DDP no"])] == ran["engine no"]
    assert ran["engine bf16"] != ran["engine no"]
    for ours, ddp in zip(ran["engine bf16"], ran["DDP bf16"], strict=True):
        assert ours == close(ddp, 2e-2)
    assert ran["backend"] == "shardcomm"
    for ranks in (1, 2, 4):
        again = launch(resumed, ranks, (tmp_path,), timeout_s=120)[0]
        assert [*map(close, ran["DDP no"][BATCHES // 2 :])] == again, ranks
