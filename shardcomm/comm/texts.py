"""All-gathers of bytes and texts, whose lengths may differ between ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from shardcomm.comm.communicator import Communicator


def all_gather_text(groups: Sequence[Communicator], text: str) -> list[str]:
    """Every rank's `text`; collective.

    Args:
        groups: One communicator, or a mesh's two, the row first. With two the result is in the order of ranks that are
            counted row by row.
        text: This rank's text.
    """
    everybody = [text]
    for comm in groups:
        parts = all_gather_bytes(comm, json.dumps(everybody).encode())
        everybody = [each for part in parts for each in json.loads(part)]
    return everybody


def all_gather_bytes(comm: Communicator, payload: bytes) -> list[bytes]:
    """Every rank's `payload`, in rank order; collective."""
    length = torch.tensor([len(payload)], device=comm.device)
    lengths = length.new_empty(comm.size)
    comm.all_gather(lengths, length)
    of_ranks: list[int] = lengths.tolist()
    longest = max(of_ranks)
    if longest == 0:
        return [b""] * comm.size
    mine = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8).to(comm.device)
    everybody = mine.new_empty(comm.size * longest)
    comm.all_gather(everybody, mine)
    rows = everybody.cpu().view(comm.size, longest).numpy()
    return [row[:count].tobytes() for row, count in zip(rows, of_ranks, strict=True)]
