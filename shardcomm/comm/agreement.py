"""Agreement: at set-up the ranks compare what must be the same on all of them, before anything depends on it.

Each rank describes what it has by items in order, each with facts::

    rank 0   the call {strategy: 'full_shard', ...}    unit 'blocks.0' {...}    parameter 'w' {shape: (8, 16), ...}
    rank 1   the call {strategy: 'full_shard', ...}    unit 'blocks.0' {...}    parameter 'w' {shape: (16, 8), ...}

The ranks show each other digests of their descriptions (32 bytes each). Only where these differ do they show the
descriptions as well, and all know the first difference: "parameter 'w' has shape (8, 16) on rank 0 and (16, 8) on
rank 1".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import NamedTuple

import torch

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.texts import all_gather_text
from shardcomm.layout.layout import Layout

_MOST_SHOWN = 4  # different values, or runs of ranks, in an error


class Item(NamedTuple):
    """Something that a rank has.

    Attributes:
        name: What the error calls it: "parameter 'w'".
        facts: What is known of it, as the error shows it: {"shape": "(8, 16)"}.
    """

    name: str
    facts: dict[str, str]


def difference(groups: Sequence[Communicator], items: Sequence[Item]) -> str:
    """The first difference between the ranks' `items`, and on which ranks it is; "" if there is none. Collective.

    The result is the same on every rank.

    Args:
        groups: As in `all_gather_text`.
        items: What this rank has, in an order that all ranks share.
    """
    for comm in groups:
        comm.check()
    groups = [comm for comm in groups if comm.size > 1]
    text = json.dumps(items)
    if not groups or _equal_on_all(groups, blake2b(text.encode(), digest_size=32).digest()):
        return ""
    everybody = [
        [Item(*item) for item in json.loads(each)] for each in all_gather_text(groups, text)
    ]
    return _first_difference(everybody)


def layout_items(layout: Layout, facts: dict[str, str]) -> list[Item]:
    """An item for each parameter of a layout: what decides its place, and `facts`, which all of them share."""
    items = [
        Item(
            f"parameter {placed.spec.name!r}",
            {
                "shape": str(tuple(placed.spec.shape)),
                **facts,
                "granularity": repr(placed.spec.granularity),
                "shard_dim": repr(placed.spec.shard_dim),
            },
        )
        for placed in layout.placements
    ]
    if items:  # what follows from all parameters comes last
        places = [(placed.offset, placed.shard_dim) for placed in layout.placements]
        items[-1].facts["shard_numels"] = str(layout.shard_numels)
        items[-1].facts["(offset, shard_dim) of all"] = str(places)
    return items


def _equal_on_all(groups: Sequence[Communicator], digest: bytes) -> bool:
    known = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(groups[0].device)
    for comm in groups:
        gathered = known.new_empty(comm.size * known.numel())
        comm.all_gather(gathered, known)
        known = gathered
    rows = known.view(-1, len(digest))
    return bool((rows == rows[0]).all())


def _first_difference(everybody: Sequence[Sequence[Item]]) -> str:
    before = ""
    for items in zip_longest(*everybody):
        names = ["nothing" if item is None else item.name for item in items]
        if len(set(names)) > 1:
            return f"{before and f'after {before} '}comes {_by_rank(names)}"
        before = names[0]
        for noun in items[0].facts:
            values = [item.facts.get(noun, "nothing") for item in items]
            if len(set(values)) > 1:
                return f"{before} has {noun} {_by_rank(values)}"
    raise AssertionError("descriptions of different digests are equal")


def _by_rank(values: Sequence[str]) -> str:
    """E.g. "(8, 16) on ranks 0, 2 and (16, 8) on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = [f"{value} on {_named(where)}" for value, where in ranks.items()]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN - 1], f"{len(shown) - _MOST_SHOWN + 1} others elsewhere"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _named(ranks: Sequence[int]) -> str:
    """E.g. "rank 1", "ranks 0, 2", "ranks 0 to 7, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[:_MOST_SHOWN], "..."]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"
