"""Lightning's Fabric and Trainer over the engine: what they compute, save and refuse, compared with their DDP.

All that ranks do is done in one launch for each number of ranks.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcomm
from shardcomm import launch

STEPS = 3  # before a checkpoint, and after it
OURS = "ShardcommStrategy"
PRELOADED = [
    "lightning.fabric",
    "lightning.pytorch",
]  # by the fork server, in whose ranks it would take seconds

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs: pip install lightning"
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def quiet() -> int:
    """Without Lightning's announcements; returns the number of ranks."""
    warnings.simplefilter("ignore")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel("ERROR")
    return int(os.environ["LOCAL_WORLD_SIZE"])  # Lightning removes WORLD_SIZE after a run


# Fabric.


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


# The Trainer.


def module(which: str = OURS, *, manual: bool, late: bool) -> Any:
    from lightning.pytorch import LightningModule

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.losses: list[float] = []
            self.net: nn.Module | None = None
            if not late:
                self.configure_model()

        def configure_model(self) -> None:
            if self.net is None:
                self.net, self.scale = net(), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.scale  # type: ignore[misc, no-any-return]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = (self(batch[0]) - 1).square().mean()
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
            self.log("training", loss, sync_dist=True)
            if not manual and batch_idx == 1 and self.trainer.current_epoch == 0 and which == OURS:
                engine: shardcomm.Engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
                assert engine.traffic.reduced_bytes == 0  # of the batch before
            if manual:
                optimizer: Any = self.optimizers()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # A parameter of the module itself, outside of its forward.
            out = self.net(batch[0]) * self.scale  # type: ignore[misc]
            self.log("loss", (out - 1).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self(batch[0])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Net()


def fit(
    folder: Path,
    which: str,
    *,
    epochs: int = 2,
    resume: Path | None = None,
    save: Path | None = None,
    manual: bool = False,
    late: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """What a run of the Trainer computes: losses of training, and of validation, test and the best checkpoint after."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from shardcomm.interop.lightning import ShardcommTrainerStrategy

    ranks = quiet()
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    loader: DataLoader[Any] = DataLoader(data, batch_size=8 // ranks)
    ours = which == OURS
    best = ModelCheckpoint(folder / f"best-{ranks}-{len([*folder.iterdir()])}", monitor="loss")
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ShardcommTrainerStrategy(units=nn.Linear, **settings) if ours else DDPStrategy(),
        max_epochs=epochs,
        gradient_clip_val=None if manual else 0.5,
        accumulate_grad_batches=1 if manual else 2,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = module(which, manual=manual, late=late)
    trainer.fit(model, loader, loader, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    after = {
        "training": model.losses,
        "validation": trainer.validate(model, loader, verbose=False)[0]["loss"],
        "test": trainer.test(model, loader, verbose=False)[0]["loss"],
        "best": trainer.test(ckpt_path="best", dataloaders=loader, verbose=False)[0]["loss"],
    }
    predicted: Any = trainer.predict(model, loader)
    total = torch.cat(predicted).sum()
    after["predicted"] = float(trainer.strategy.reduce(total, reduce_op="sum"))
    return after


def refused_by_trainer(folder: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from shardcomm.interop.lightning import ShardcommTrainerStrategy

    with pytest.raises(TypeError, match="mesh is no argument"):
        ShardcommTrainerStrategy(mesh=None)

    def trainer(**settings: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=2,
            strategy=settings.pop("strategy", None) or ShardcommTrainerStrategy(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            **settings,
        )

    model = module(manual=False, late=False)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 8)))
    with pytest.raises(RuntimeError, match="the model is not sharded yet"):
        trainer().strategy.lightning_module_state_dict()
    with pytest.raises(ValueError, match="sync_batchnorm is True; convert the model"):
        trainer(sync_batchnorm=True).validate(model, loader, verbose=False)
    trainer().validate(model, loader, verbose=False)
    with pytest.raises(ValueError, match="is a Net that is sharded already"):
        trainer().validate(model, loader, verbose=False)
    for kind in ("full", "sharded"):
        strategy = ShardcommTrainerStrategy(state_dict_type=kind)  # type: ignore[arg-type]
        weights = folder / f"weights-{kind}"
        other = trainer(strategy=strategy)
        model = module(manual=False, late=False)
        other.validate(model, loader, verbose=False)
        other.save_checkpoint(weights, weights_only=True)
        other.validate(model, loader, ckpt_path=weights, verbose=False)
        with pytest.raises(KeyError, match="checkpoint contains only the model"):
            other.fit(model, loader, ckpt_path=weights)

        for strict in (True, False):
            more = module(manual=False, late=False)
            more.extra, more.strict_loading = nn.Linear(2, 2), strict
            another = trainer(strategy=ShardcommTrainerStrategy(state_dict_type=kind))  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match=r"extra\.bias") if strict else nullcontext():
                another.validate(more, loader, ckpt_path=weights, verbose=False)

        mine = {"mine": model.net.state_dict()}
        model.on_save_checkpoint = lambda checkpoint, mine=mine: checkpoint.update(mine)
        with pytest.raises(TypeError, match=r"\['mine'\]\['0.weight'\] is .*; leave the model out"):
            other.save_checkpoint(weights)
    del model.on_save_checkpoint
    elsewhere = trainer(
        strategy=ShardcommTrainerStrategy(state_dict_type="sharded"), plugins=[AsyncCheckpointIO()]
    )
    elsewhere.validate(module(manual=False, late=False), loader, verbose=False)
    with pytest.raises(
        TypeError, match="AsyncCheckpointIO is for checkpoints of one file, and with"
    ):
        elsewhere.save_checkpoint(weights)
    with pytest.raises(TypeError, match="storage_options is for checkpoints of one file"):
        other.save_checkpoint(weights, storage_options={})
    for average in (EMAWeightAveraging(), StochasticWeightAveraging(1e-2)):
        with pytest.raises(ValueError, match=r"averages copies .* shardcomm\.Exponential"):
            trainer(callbacks=[average]).fit(module(manual=False, late=False), loader)


# What ranks do.


def consolidated(folder: Path) -> None:
    """Lightning's own command makes of a folder the file that it would have been."""
    from lightning.fabric.utilities.consolidate_checkpoint import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    made = _format_checkpoint(_load_distributed_checkpoint(folder / "sharded.ckpt"))
    file = torch.load(folder / "full.ckpt", weights_only=False)
    assert made.keys() == file.keys()
    assert made["state_dict"].keys() == file["state_dict"].keys()
    for name, weight in file["state_dict"].items():
        torch.testing.assert_close(made["state_dict"][name], weight)


def at_two_ranks(folder: Path) -> dict[Any, Any]:
    fabric: dict[Any, Any] = {}
    trainer: dict[Any, Any] = {}
    for which in (OURS, "DDP"):
        for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"):
            fabric[which, precision] = train(fabric_of(which, precision), 2 * STEPS)
        fabric[which, "by value"] = train(fabric_of(which), STEPS, value=0.01)
        trainer[which] = fit(folder, which)
        trainer[which, "manual"] = fit(folder, which, manual=True)
    shapes = {"granularity": "tensor", "strategy": "shard_grad_op"}
    fabric["tensors"] = train(fabric_of(OURS, **shapes), 2 * STEPS)
    fabric["hybrid"] = train(fabric_of(OURS, strategy="hybrid_shard", replicas=2), 2 * STEPS)
    trainer["late"] = fit(folder, OURS, late=True)
    for kind in ("full", "sharded"):
        train(fabric_of(OURS, state_dict_type=kind), STEPS, save=folder / kind)
        fit(folder, OURS, epochs=1, save=folder / f"{kind}.ckpt", state_dict_type=kind)
    if torch.distributed.get_rank() == 0:
        consolidated(folder)
    train(fabric_of(OURS, **shapes), STEPS, save=folder / "of tensors")
    train(fabric_of("DDP"), STEPS, save=folder / "of DDP")
    fabric["DDP resumes"] = train(fabric_of("DDP"), STEPS, load=folder / "full")
    trainer["DDP resumes"] = fit(folder, "DDP", resume=folder / "full.ckpt")
    others = other_ways()
    only_some(folder)
    without_state(folder)
    refused_by_fabric(folder)
    refused_by_trainer(folder)
    return {"fabric": fabric, "trainer": trainer, "others": others}


def resumed(folder: Path) -> dict[Any, Any]:
    files = ("full", "sharded", "of tensors", "of DDP")
    return {
        "fabric": [train(fabric_of(OURS), STEPS, load=folder / name) for name in files],
        "trainer": [
            fit(folder, OURS, resume=folder / f"{kind}.ckpt", state_dict_type=kind)
            for kind in ("full", "sharded")
        ],
    }


def close(to: Any, rel: float = 2e-6) -> Any:
    return pytest.approx(to, rel=rel, abs=1e-7)


def all_close(runs: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert runs[name] == close(value), name


@needs_lightning
@pytest.mark.slow
def test_losses_are_those_of_ddp_and_checkpoints_go_on_with_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    ran, _ = launch(at_two_ranks, 2, (tmp_path,), timeout_s=180)
    fabric, trainer = ran["fabric"], ran["trainer"]
    whole = fabric["DDP", "32-true"]
    for precision, rel in (("32-true", 2e-6), ("64-true", 1e-12)):
        for ours, ddp in zip(fabric[OURS, precision], fabric["DDP", precision], strict=True):
            assert ours == close(ddp, rel)
    for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
        for ours, ddp in zip(fabric[OURS, precision], fabric["DDP", precision], strict=True):
            assert ours == close(ddp, 2e-2)
    for name in ("tensors", "hybrid"):
        assert [*map(close, whole)] == fabric[name]
    assert [*map(close, fabric["DDP", "by value"])] == fabric[OURS, "by value"]
    assert [*map(close, whole[STEPS:])] == fabric["DDP resumes"]

    all_close(trainer[OURS], trainer["DDP"])
    all_close(trainer["late"], trainer["DDP"])
    all_close(trainer[OURS, "manual"], trainer["DDP", "manual"])
    then = {**trainer["DDP"], "training": trainer["DDP"]["training"][4:]}
    all_close(trainer["DDP resumes"], then)

    others = ran["others"]
    assert others["apart"] == close(others["expected"])
    assert others["stepped"] < others["apart"]
    assert others["score by Fabric"] == close(others["score"])

    for ranks in (1, 2, 4):
        again = launch(resumed, ranks, (tmp_path,), timeout_s=180)[0]
        for losses in again["fabric"]:
            assert [*map(close, whole[STEPS:])] == losses, ranks
        for run in again["trainer"]:
            all_close(run, then)


def test_shardcomm_imports_without_lightning() -> None:
    """And the package for Lightning, or for accelerate, says what is missing."""
    program = (
        "import importlib, sys\n"
        "sys.modules.update(lightning=None, accelerate=None, transformers=None)\n"
        "import shardcomm\n"
        "for name in ('lightning', 'accelerate'):\n"
        "    try:\n"
        "        importlib.import_module(f'shardcomm.interop.{name}')\n"
        "    except ImportError as error:\n"
        "        print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    for name, said in zip(("lightning", "accelerate"), ran.stdout.splitlines(), strict=True):
        assert f"needs the package {name}: pip install {name}" in said


def test_shardcomm_does_not_import_the_frameworks() -> None:
    program = (
        "import sys, shardcomm\n"
        "print([m for m in ('lightning', 'accelerate', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "[]"
