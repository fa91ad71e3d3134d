"""A loop of Hugging Face's accelerate, its model sharded by the engine: trained, saved, and its weights exported.

pip install accelerate
torchrun --nproc-per-node 2 examples/accelerate_engine.py [FOLDER TO SAVE IN]
"""

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from shardcomm.interop.accelerate import Accelerator  # before: from accelerate
except ModuleNotFoundError as error:
    sys.exit(f"This example needs accelerate: {error}")


def main(folder: str | None = None) -> list[float]:
    """Trains for some epochs; returns their last losses, the same on every rank."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, sharding={"units": nn.Linear}
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50)
    loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=16, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for epoch in range(5):
        for [x] in loader:
            with accelerator.accumulate(model):  # reduced once in two batches
                loss = (model(x) - x.roll(1, dims=1)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}")

    # Collective: every rank calls both, and not only the main process.
    if folder is not None:
        accelerator.save_state(folder)  # any number of ranks loads it, by load_state
    weights = accelerator.get_state_dict(model)  # full on rank 0, {} on others
    if accelerator.is_main_process:
        with tempfile.TemporaryFile() as file:
            torch.save(weights, file)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
