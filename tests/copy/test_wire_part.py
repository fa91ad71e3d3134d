"""What a rank sends in a gather in a block format: every element once, in the run of its kind, and in equal parts."""

from __future__ import annotations

import random

import pytest

from shardcomm import BlockFormat, Layout, ParamSpec, RowBlock
from shardcomm.copy.wire_part import WirePart, part_bytes
from shardcomm.layout.param_spec import Granularity

GRANULARITIES: list[Granularity] = ["element", "row", "tensor", RowBlock(3)]


def random_layout(seed: int, format: BlockFormat) -> tuple[Layout, int]:
    """The layout of random parameters, no block of which has elements of two, and how many of them are coded."""
    made = random.Random(seed)
    shapes = [
        made.choice(
            [(made.randint(0, 500),), (made.randint(1, 6), format.block * made.randint(1, 6))]
        )
        for _ in range(made.randint(1, 9))
    ]
    specs = [
        ParamSpec(
            f"p{i}",
            shape,
            made.choice(GRANULARITIES),
        )
        for i, shape in enumerate(shapes)
    ]
    owners = None
    if all(spec.granularity == "tensor" for spec in specs):
        owners = [made.randint(0, 1) for _ in specs]
    layout = Layout.plan(
        specs, made.randint(2, 6), align_bytes=max(128, 4 * format.block), owners=owners
    )
    return layout, made.randint(0, len(specs))


def places(
    part: WirePart, format: BlockFormat
) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """Of each element of the shard that is coded, its block and its place in it; and the place of each wide one."""
    coded = {
        run.start + i: (run.place + i // format.block, i % format.block)
        for run in part.coded
        for i in range(run.numel)
    }
    wide = {run.start + i: run.place + i for run in part.wide for i in range(run.numel)}
    return coded, wide


@pytest.mark.covers("block formats", "granularity")
@pytest.mark.parametrize("block", [32, 128])
def test_each_element_is_once_in_the_part_in_the_run_of_its_kind(block: int) -> None:
    format = BlockFormat("mxint8", block)
    mixed = 0
    for seed in range(300):
        layout, number = random_layout(seed, format)
        for rank in range(layout.world_size):
            part = WirePart.of(layout, rank, format, number, 2)
            coded, wide = places(part, format)
            assert len(set(coded.values())) == len(coded)
            assert len(set(wide.values())) == len(wide)
            in_block: dict[int, set[int]] = {}
            for i in range(len(layout.placements)):
                piece = layout.piece(rank, i)
                held = range(piece.offset, piece.offset + piece.numel)
                assert wide.keys().isdisjoint(held) if i < number else coded.keys().isdisjoint(held)
                if i >= number:
                    assert all(place in wide for place in held)
                    continue
                for place in held:
                    in_block.setdefault(coded[place][0], set()).add(i)
            assert all(len(params) == 1 for params in in_block.values())
            assert len(coded) + len(wide) <= layout.shard_numels[rank]
            blocks = max((block for block, _ in coded.values()), default=-1) + 1
            assert part.coded_bytes == format.nbytes(blocks * block)
            behind = 2 * (max(wide.values(), default=-1) + 1)
            assert part.nbytes == part.coded_bytes + -(-behind // 128) * 128
            mixed += bool(part.coded and part.wide and part.coded[-1].start > part.wide[0].start)
    assert mixed > 10  # shards that do not have coded elements before wide ones


@pytest.mark.covers("block formats", "granularity")
def test_parts_are_as_long_as_the_longest_where_shards_are_equal() -> None:
    format = BlockFormat("mxfp8", 64)
    for seed in range(300):
        layout, number = random_layout(seed, format)
        each = [WirePart.of(layout, r, format, number, 4).nbytes for r in range(layout.world_size)]
        expected = each if layout.counts else [max(each)] * layout.world_size
        assert list(part_bytes(layout, format, number, 4)) == expected


def test_parts_of_a_hundred_thousand_ranks_are_those_of_a_few() -> None:
    layout = Layout.plan([ParamSpec("w", (400_000, 64)), ParamSpec("b", (400,))], 100_000)
    format = BlockFormat("mxint8")
    with_bias = layout.placements[1].offset // layout.shard_numel
    longest = WirePart.of(layout, with_bias, format, 1, 4).nbytes
    assert longest > format.nbytes(layout.shard_numel)
    assert part_bytes(layout, format, 1, 4) == (longest,) * 100_000
