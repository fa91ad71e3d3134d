"""What ranks do with Lightning's Trainer, over the engine and over its DDP."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcomm
from support.lightning_ranks import OURS, net, quiet


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


def ended_by_rank_1(folder: Path, kind: str) -> tuple[str, str, list[str]]:
    """What leaves a run in which rank 1 raises, its context, and warnings, where a callback saves then."""
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from shardcomm.interop.lightning import ShardcommTrainerStrategy

    quiet()

    class Failing(Callback):
        def on_train_batch_start(
            self, trainer: Any, model: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_rank == 1 and batch_idx == 1:
                try:
                    raise ValueError("before it")
                except ValueError:
                    raise KeyError("of rank 1")  # noqa: B904 - a context of its own

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardcommTrainerStrategy(units=nn.Linear, state_dict_type=kind),  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[Failing(), OnExceptionCheckpoint(folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 8)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises((KeyError, shardcomm.CommError)) as ended:
            trainer.fit(module(manual=False, late=False), loader)
    said = [str(each.message) for each in caught if "no checkpoint is saved" in str(each.message)]
    return repr(ended.value), repr(ended.value.__context__), said
