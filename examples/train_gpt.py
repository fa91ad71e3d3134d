"""A small GPT in a training loop of one's own: parameters, gradients and optimizer state sharded over all ranks.

torchrun --nproc-per-node 2 examples/train_gpt.py
"""

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import nn

import shardcomm

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 4, 4, 64, 16


class GPT(nn.Module):
    """Bytes (batch, up to CONTEXT) to logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Each block is one unit: gathered before it is called, and again before its backward."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def loss_on(model: GPT, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mean loss on random windows of `text`."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def main(steps: int) -> list[float]:
    """Returns the validation losses, the same on every rank."""
    comm = shardcomm.Communicator.from_env()
    source = inspect.getsource(argparse).encode()  # what it learns to write
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().to(comm.device)
    training, validation = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])

    model = GPT()
    engine = shardcomm.fully_shard(model, comm, units=nn.TransformerEncoderLayer)
    optimizer = shardcomm.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    draw = torch.Generator().manual_seed(comm.rank)  # every rank has its own part of the batch
    losses = []
    for step in range(steps):
        with engine.no_sync():  # two micro-batches a step, reduced once
            (loss_on(model, training, draw) / 2).backward()
        (loss_on(model, training, draw) / 2).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                loss = loss_on(model, validation, torch.Generator().manual_seed(comm.rank))
            comm.all_reduce(loss, "avg")
            losses.append(loss.item())
            if comm.rank == 0:
                print(f"step {step + 1}: validation loss {loss.item():.3f}")
    state = engine.full_state_dict()  # names and shapes of the model itself, on every rank
    if comm.rank == 0:
        print(f"trained {sum(value.numel() for value in state.values()):,} parameters; {comm}")
    engine.close()
    comm.close()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    main(parser.parse_args().steps)
