"""A loop of Lightning's Fabric, its model sharded over two processes: trained, saved in a folder, and resumed.

pip install lightning
python examples/lightning_fabric.py [FOLDER TO SAVE IN]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

try:
    from lightning import Fabric
except ModuleNotFoundError:
    sys.exit("This example needs lightning: pip install lightning")

from shardcomm.interop.lightning import ShardcommStrategy


def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


def train(fabric, path, steps):
    """Trains from the newest checkpoint on; returns the losses of the steps, the same on every rank."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)  # shards; the optimizer goes on with rows
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if path.exists():
        fabric.load(path, state)
    draw = torch.Generator().manual_seed(1000 * fabric.global_rank + state["step"])
    losses = []
    while state["step"] < steps:
        for last in (False, True):
            x = torch.randn(16, 64, generator=draw).to(fabric.device)
            with fabric.no_backward_sync(model, enabled=not last):  # reduced once a step
                loss = (model(x) - x.roll(1, dims=1)).square().mean()
                fabric.backward(loss / 2)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # the norm of the whole model
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        losses.append(fabric.all_reduce(loss.detach()).item())
    fabric.save(path, state)  # every rank calls it
    return losses


def main(folder: str | None = None) -> list[float]:
    """Trains 20 steps, and 20 more from the checkpoint."""
    # One file, as DDP's: state_dict_type="full". Gathered in bfloat16: mixed_precision=MixedPrecision(...).
    strategy = ShardcommStrategy(units=nn.Linear, state_dict_type="sharded")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    path = Path(fabric.broadcast(folder or tempfile.mkdtemp()), "checkpoint")
    losses = train(fabric, path, steps=20) + train(fabric, path, steps=40)
    fabric.print(f"loss {losses[0]:.4f} -> {losses[19]:.4f}, resumed -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
