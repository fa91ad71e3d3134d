"""What ranks do with Lightning's Fabric, over the engine and over its DDP."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcomm
from support.lightning_ranks import OURS, net, quiet


def fabric_of(which: str, precision: str = "32-true", **settings: Any) -> Any:
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from shardcomm.interop.lightning import ShardcommStrategy

    ours = which == OURS
    fabric = Fabric(
        accelerator="cpu",
        devices=quiet(),
        strategy=ShardcommStrategy(units=nn.Linear, **settings) if ours else DDPStrategy(),
        precision=precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    return fabric


def train(
    fabric: Any,
    steps: int,
    *,
    save: Path | None = None,
    load: Path | None = None,
    value: Any = None,
) -> list[tuple[float, float]]:
    """The mean losses of steps of two micro-batches, and the norms that were clipped (or 0, clipped by `value`)."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if load is not None:
        assert fabric.load(load, state) == {}
    results = []
    for step in range(state["step"], state["step"] + steps):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        for micro, part in enumerate(batch.chunk(2)):
            x = part.chunk(fabric.world_size)[fabric.global_rank]
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = (model(x) - 1).square().mean() / 2
                fabric.backward(loss)
            if step == 0 and micro == 0 and hasattr(fabric.strategy, "engine_of"):
                assert fabric.strategy.engine_of(model).traffic.reduced_bytes == 0
        clip = {"clip_val": value} if value else {"max_norm": 0.5}
        norm = fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        results.append((float(fabric.all_reduce(loss.detach())), float(norm or 0)))
        state["step"] += 1
    if save is not None:
        fabric.save(save, state)
    return results


class Scored(nn.Module):
    """A model with a method that computes, beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x) * self.scale
        return out

    def score(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x).square().mean() * self.scale.sum()
        return out


def other_ways() -> dict[str, float]:
    """Losses by other ways of setting a model up; each begins with the values of `net`."""
    fabric = fabric_of(OURS)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    losses = {"expected": float((net()(x)).square().mean()), "score": float(Scored().score(x))}

    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loss = model(x).square().mean()
    losses["apart"] = float(loss)
    fabric.backward(loss)
    optimizer.step()
    losses["stepped"] = float(model(x).square().mean())

    with fabric.init_module(empty_init=True):
        empty = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    assert empty[0].weight.is_meta
    assert fabric.setup(empty)(x).isfinite().all()

    scored = fabric.setup(Scored())
    scored.mark_forward_method("score")
    losses["score by Fabric"] = float(scored.score(x))
    engine = fabric.strategy.engine_of(scored)
    assert isinstance(engine, shardcomm.Engine)
    assert engine.model is scored.module
    return losses


class Harmful:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def only_some(folder: Path) -> None:
    """A filter, and names that are not there."""
    for kind in ("full", "sharded"):
        fabric = fabric_of(OURS, state_dict_type=kind)
        model = fabric.setup(net())
        path = folder / f"filtered-{kind}"
        wanted = {"model": lambda name, value: name == "0.bias"}
        fabric.save(path, {"model": model, "a": 1, "b": 2}, filter=wanted)
        if kind == "full" and fabric.global_rank == 0:
            assert [*torch.load(path)["model"]] == ["0.bias"]
        fabric.barrier()
        with pytest.raises(RuntimeError, match=r"it lacks model\.|Missing key"):
            fabric.load(path, {"model": model})
        with torch.no_grad():
            model.module[2].bias.fill_(3)
            model.module[0].bias.fill_(3)
        fabric.load(path, {"model": model}, strict=False)
        assert torch.equal(model.module[2].bias.full_tensor(), torch.full((16,), 3.0))
        assert torch.equal(model.module[0].bias.full_tensor(), net()[0].bias)  # type: ignore[arg-type]
        short = fabric.setup(net()[:1])
        fabric.save(path, {"model": fabric.setup(net())})
        with pytest.raises(RuntimeError, match=r"has model\.2\.bias, .* beside|Unexpected key"):
            fabric.load(path, {"model": short})
    whole = folder / "folder"
    fabric.save(whole, {"model": model, "a": 1, "b": 2})
    state = {"model": model, "a": 0}
    assert fabric.load(whole, state) == {"b": 2}
    assert state["a"] == 1
    with pytest.raises(KeyError, match="has no 'c'; it has"):
        fabric.load(whole, {"model": model, "c": 0})
    fabric.load(whole, {"model": model, "c": 0}, strict=False)
    other = fabric.setup(nn.Linear(2, 2))
    with pytest.raises(KeyError, match="has no 'other'; it has"):
        fabric.load(whole, {"model": model, "other": other})
    fabric.load(whole, {"model": model, "other": other}, strict=False)

    fabric.barrier()
    (whole / ".metadata").write_bytes(pickle.dumps(Harmful()))
    fabric.barrier()
    with pytest.raises(shardcomm.CheckpointError, match="refused"):
        fabric.load(whole, {"model": model})


def without_state(folder: Path) -> None:
    """SGD without momentum has no state, of which DCP writes nothing."""
    for kind in ("full", "sharded"):
        fabric = fabric_of(OURS, state_dict_type=kind)
        path = folder / f"without state {kind}"
        state: dict[str, Any] = {}
        for lr in (0.1, 0.2):  # the second takes the first's state
            model = net()
            sgd = torch.optim.SGD(model.parameters(), lr=lr)
            plain = sgd.state_dict()
            state["model"], state["sgd"] = fabric.setup(model, sgd)
            if lr == 0.1:
                fabric.save(path, state)
        fabric.load(path, state)
        assert state["sgd"].param_groups[0]["lr"] == 0.1
        if kind == "full":
            assert torch.load(path)["sgd"]["param_groups"] == [
                {**plain["param_groups"][0], "lr": 0.1}
            ]


def refused_by_fabric(folder: Path) -> None:
    from shardcomm.interop.lightning import ShardcommStrategy

    with pytest.raises(TypeError, match=r"comm is no argument; .* those of fully_shard: units,"):
        ShardcommStrategy(comm=None)
    with pytest.raises(ValueError, match="state_dict_type is 'one'; accepted: 'full'"):
        ShardcommStrategy(state_dict_type="one")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="replicas is 0; it must be"):
        ShardcommStrategy(replicas=0)
    with pytest.raises(ValueError, match="replicas is 3, which does not divide the 2 ranks"):
        fabric_of(OURS, replicas=3).setup(net())
    fabric = fabric_of(OURS)
    early = net()
    optimizer = torch.optim.AdamW(early.parameters())
    model = fabric.setup_module(early)
    with pytest.raises(ValueError, match=r"made before .*; set both up together"):
        fabric.setup_optimizers(optimizer)
    with pytest.raises(ValueError, match="is a Sequential that is sharded already"):
        fabric.setup(early)
    with pytest.raises(ValueError, match="is of no model that is sharded"):
        fabric.save(folder / "refused", {"model": model, "optimizer": optimizer})
    with pytest.raises(RuntimeError, match=r"as by fabric\.setup\(model, optimizer\)"):
        optimizer.step()
    other = fabric.setup(nn.Linear(2, 2))
    of_both = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match=r"is of 2 models, .* one nn\.ModuleDict"):
        fabric.save(
            folder / "refused", {"model": model, "optimizer": fabric.setup_optimizers(of_both)}
        )
    for kind in ("full", "sharded"):
        saving = fabric_of(OURS, state_dict_type=kind)
        shards = {"a": 1, "weights": saving.setup(net()).state_dict()}
        with pytest.raises(
            TypeError, match=r"^state\['weights'\]\['0.weight'\] is this rank's part"
        ):
            saving.save(folder / "refused", shards)
        with pytest.raises(RuntimeError, match=r"in a framework by fabric\.save"):
            torch.save(shards, folder / "refused")
    with pytest.raises(ValueError, match="that is not set up"):
        fabric.strategy.engine_of(net())
    with pytest.raises(ValueError, match="must be a path that all ranks see"):
        fabric.save("s3://bucket/name", {"model": model})
    (folder / "some folder").mkdir(exist_ok=True)
    with pytest.raises(IsADirectoryError, match="a folder that is no checkpoint"):
        fabric.save(folder / "some folder", {"model": model})
    stepped = net()
    optimizer = torch.optim.AdamW(stepped.parameters())
    stepped(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="keeps state of the full parameters already"):
        fabric.setup(stepped, optimizer)
