"""FSDP2 as PyTorch has it, on the shardcomm backend; with "gloo" as the argument, on Gloo.

torchrun --nproc-per-node 2 examples/backend.py
torchrun --nproc-per-node 2 examples/backend.py gloo
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardcomm  # registers the backend


def main(backend: str) -> list[float]:
    """Trains for ten steps; returns the losses of this rank."""
    dist.init_process_group(backend)  # the one line that differs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(16, 64)
    losses = []
    for _ in range(10):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{backend}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        if backend != "gloo":
            for receipt in shardcomm.backend.receipts():
                print(f"  {receipt.operation}: {receipt.taken}; {receipt.reason}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shardcomm")
