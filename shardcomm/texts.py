"""Texts of any length, which every rank shows to all others."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from shardcomm.communicator import Communicator


def all_gather_text(groups: Sequence[Communicator], text: str) -> list[str]:
    """Every rank's `text`; collective.

    `groups`: one communicator, or a mesh's two, the row first: the result then counts the ranks row by row.
    """
    everybody = [text]
    for comm in groups:
        parts = _all_gather_bytes(comm, json.dumps(everybody).encode())
        everybody = [each for part in parts for each in json.loads(part)]
    return everybody


def _all_gather_bytes(comm: Communicator, payload: bytes) -> list[bytes]:
    length = torch.tensor([len(payload)], device=comm.device)
    lengths = length.new_empty(comm.size)
    comm.all_gather(lengths, length)
    longest = int(lengths.max())
    mine = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8).to(comm.device)
    everybody = mine.new_empty(comm.size * longest)
    comm.all_gather(everybody, mine)
    return [row.numpy().tobytes() for row in everybody.cpu().view(comm.size, longest)]
