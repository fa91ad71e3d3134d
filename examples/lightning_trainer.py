"""Lightning's Trainer, its module sharded over two processes: fitted, with the best checkpoint tested.

pip install lightning
python examples/lightning_trainer.py [FOLDER TO SAVE IN]
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
except ModuleNotFoundError:
    sys.exit("This example needs lightning: pip install lightning")

from shardcomm.interop.lightning import ShardcommTrainerStrategy


class Roller(LightningModule):
    """Learns to turn a vector by one place. Nothing in it knows of ranks or shards."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks: nn.Module | None = None

    def configure_model(self) -> None:
        if self.blocks is None:  # the Trainer calls it before each run
            width, layers = self.hparams["width"], self.hparams["layers"]
            self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.blocks(x)

    def training_step(self, batch, batch_idx):
        [x] = batch
        loss = (self(x) - x.roll(1, dims=1)).square().mean()
        self.log("training", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        [x] = batch
        self.log("loss", (self(x) - x.roll(1, dims=1)).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):  # called when the model is sharded
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: str | None = None) -> list[float]:
    """Returns the losses of validation after training, and of the best checkpoint, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    training, validation = (
        DataLoader(TensorDataset(torch.randn(rows, 64, generator=draw)), batch_size=16)
        for rows in (512, 64)
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardcommTrainerStrategy(units=nn.Linear),
        max_epochs=5,
        gradient_clip_val=1.0,  # of the norm of the whole model
        accumulate_grad_batches=2,  # reduced once
        callbacks=[ModelCheckpoint(folder, monitor="loss")],  # one file, which DDP loads, too
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Roller()
    trainer.fit(model, training, validation)
    losses = [
        trainer.validate(model, validation)[0]["loss"],
        trainer.test(ckpt_path="best", dataloaders=validation)[0]["loss"],
    ]
    weights = trainer.strategy.engine.full_state_dict(rank=0)  # {} on the other rank
    if trainer.is_global_zero:
        print(f"loss {losses[0]:.4f}; {sum(w.numel() for w in weights.values()):,} parameters")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
