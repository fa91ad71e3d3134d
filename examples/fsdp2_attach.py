"""An FSDP2 loop on CPU ranks: some steps as it is, some attached to shardcomm at each level, some as it was.

torchrun --nproc-per-node 2 examples/fsdp2_attach.py
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardcomm.fsdp2

WIDTH, LAYERS, STEPS = 256, 4, 5


def main() -> None:
    """Prints the time of a step under each, and what is in force."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(name: str) -> None:
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = (model(torch.randn(8, WIDTH)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            milliseconds = (time.perf_counter() - start) / STEPS * 1e3
            print(f"{name:10}  {milliseconds:6.1f} ms a step, loss {loss.item():.4f}")

    train("FSDP2")
    for level in ("hooks", "copies", "full"):
        attached = shardcomm.fsdp2.attach(model, level=level)
        train(level)
        if dist.get_rank() == 0:
            print(attached)
        attached.detach()
    train("detached")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
