"""The layout's rules on random units, its padding on real ones, against the least-common-multiple method."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcomm import Layout, ParamSpec, RowBlock
from shardcomm.layout.param_spec import Granularity
from shardcomm.models.shapes import SHAPES

# The largest layout a machine could hold is no test of arithmetic; small ones meet every boundary case.
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
granularities = st.one_of(
    st.sampled_from(["element", "row", "tensor"]), st.integers(1, 4).map(RowBlock)
)


@st.composite
def units(draw: st.DrawFn) -> tuple[list[ParamSpec], int, int]:
    params = []
    for i in range(draw(st.integers(0, 8))):
        shape = draw(shapes)
        dim = draw(
            st.one_of(st.integers(-max(len(shape), 1), max(len(shape) - 1, 0)), st.just("auto"))
        )
        params.append(ParamSpec(f"p{i}", shape, draw(granularities), dim))
    return params, draw(st.integers(1, 9)), draw(st.sampled_from([4, 8, 32, 128]))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of random units, or of their parameters with random owners."""
    params, ranks, align_bytes = draw(units())
    owners = None
    if draw(st.booleans()):
        params = [replace(param, granularity="tensor") for param in params]
        owners = [draw(st.integers(0, ranks - 1)) for _ in params]
    layout = Layout.plan(params, ranks, align_bytes=align_bytes, itemsize=4, owners=owners)
    assert layout.align == align_bytes // 4
    return layout


def granule_numel(layout: Layout, index: int) -> int:
    placement = layout.placements[index]
    granularity = placement.spec.granularity
    row = math.prod(placement.stored_shape[1:])
    if granularity == "element":
        return 1
    if granularity == "tensor":
        return max(placement.numel, 1)
    return max(row * (granularity.rows if isinstance(granularity, RowBlock) else 1), 1)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_parameters_are_aligned_and_disjoint_and_shards_follow_each_other(layout: Layout) -> None:
    assert len(layout.shard_numels) == layout.world_size
    assert layout.flat_numel == sum(layout.shard_numels)
    assert layout.shard_numel == max(layout.shard_numels)
    for rank, numel in enumerate(layout.shard_numels):
        assert numel % layout.align == 0
        assert layout.starts[rank] == sum(layout.shard_numels[:rank])
    equal = layout.shard_numels == (layout.shard_numel,) * layout.world_size
    assert layout.counts == (None if equal else layout.shard_numels)
    end = 0
    for placement in sorted(layout.placements, key=lambda p: (p.offset, p.numel)):
        assert placement.numel == math.prod(placement.spec.shape)
        assert sorted(placement.stored_shape) == sorted(placement.spec.shape)
        if placement.numel:
            assert placement.offset % layout.align == 0
            assert placement.offset >= end
            end = placement.offset + placement.numel
    assert end <= layout.flat_numel


@settings(max_examples=100, deadline=None)
@given(units())
def test_shards_are_equal_where_no_parameter_has_an_owner(
    unit: tuple[list[ParamSpec], int, int],
) -> None:
    params, ranks, align_bytes = unit
    assert Layout.plan(params, ranks, align_bytes=align_bytes, itemsize=4).counts is None


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_boundary_never_cuts_a_granule(layout: Layout) -> None:
    for index, placement in enumerate(layout.placements):
        for start in layout.starts[1:-1]:
            inside = start - placement.offset
            if 0 < inside < placement.numel:
                assert inside % granule_numel(layout, index) == 0


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_pieces_tile_every_parameter_exactly_once(layout: Layout) -> None:
    for index, placement in enumerate(layout.placements):
        held = 0
        row = 0
        for rank, start in enumerate(layout.starts[:-1]):
            piece = layout.piece(rank, index)
            assert math.prod(piece.shape) == piece.numel
            if piece.numel:
                assert piece.start == row
                row = piece.stop
                # Where the piece lies in the flat buffer is where the parameter's rows lie.
                assert start + piece.offset == placement.offset + held
                assert piece.offset + piece.numel <= layout.shard_numels[rank]
            held += piece.numel
        assert held == placement.numel


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_gaps_are_what_no_parameter_covers(layout: Layout) -> None:
    covered = [0] * layout.flat_numel
    for placement in layout.placements:
        for i in range(placement.offset, placement.offset + placement.numel):
            covered[i] += 1
    for start, stop in layout.gaps():
        assert start < stop
        for i in range(start, stop):
            covered[i] += 1
    assert covered == [1] * layout.flat_numel
    assert layout.padding == sum(stop - start for start, stop in layout.gaps())


@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, max_size=8), st.integers(1, 9), st.randoms(use_true_random=False))
def test_owners_hold_their_parameters_whole_and_nothing_else(
    param_shapes: list[tuple[int, ...]], ranks: int, random: random.Random
) -> None:
    specs = [ParamSpec(str(i), shape, "tensor") for i, shape in enumerate(param_shapes)]
    owners = [random.randrange(ranks) for _ in specs]
    layout = Layout.plan(specs, ranks, align_bytes=16, itemsize=4, owners=owners)
    for rank in range(ranks):
        mine = 0
        for index, placement in enumerate(layout.placements):
            held = placement.numel if owners[index] == rank else 0
            assert layout.piece(rank, index).numel == held
            mine += math.ceil(held / 4) * 4
        assert layout.shard_numels[rank] == mine  # padded to the alignment, and no more


def test_the_drawing_of_owners_in_the_docstring() -> None:
    shapes = {"a": (4, 6), "b": (5, 4), "c": (6,)}
    specs = [ParamSpec(name, shape, "tensor") for name, shape in shapes.items()]
    layout = Layout.plan(specs, 2, align_bytes=1, itemsize=1, owners=[1, 0, 1])
    assert [placement.offset for placement in layout.placements] == [20, 0, 44]
    assert layout.shard_numels == (20, 30)
    assert "S = [20, 30]" in repr(layout)
    assert "rank 1: a[0:4] at 0, c[0:6] at 24" in repr(layout)


@pytest.mark.parametrize(
    ("owners", "granularity", "message"),
    [
        ([0], "tensor", "owners has 1 entries; it must have one for each of 2 params"),
        ([0, 2], "tensor", "the owner of 'b' is 2; it must be a rank, 0 to 1"),
        ([0, -1], "tensor", "the owner of 'b' is -1"),
        ([0, 1.0], "tensor", "the owner of 'b' is 1.0"),
        ([0, 1], "row", "'a' has an owner and granularity 'row'; with owners it must be 'tensor'"),
    ],
)
def test_owners_that_are_none_are_refused(
    owners: list[int], granularity: Granularity, message: str
) -> None:
    specs = [ParamSpec(name, (3,), granularity) for name in "ab"]
    with pytest.raises(ValueError, match=message):
        Layout.plan(specs, 2, owners=owners)
    with pytest.raises(TypeError, match="owners is a dict; it must be a list or a tuple"):
        Layout.plan(specs, 2, owners={"a": 0})  # type: ignore[arg-type]


def lcm_shard(params: Sequence[ParamSpec], ranks: int, align: int) -> int:
    """Round up to a common multiple of all rows: then any boundary lies between rows of any parameter that starts at a
    multiple of its row. One after the other, each at a multiple of its row and of the alignment."""
    granules = [max(math.prod(p.shape[1:]), 1) for p in params]
    multiple = math.lcm(align, *granules)
    end = 0
    for param, granule in zip(params, granules, strict=True):
        start = math.ceil(end / math.lcm(granule, align)) * math.lcm(granule, align)
        end = start + math.prod(param.shape)
    return max(math.ceil(end / ranks / multiple), 1) * multiple


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple), min_size=1, max_size=9
    ),
    st.integers(1, 16),
)
def test_never_more_padding_than_the_common_multiple_of_all_rows(
    param_shapes: list[tuple[int, ...]], ranks: int
) -> None:
    params = [ParamSpec(str(i), shape) for i, shape in enumerate(param_shapes)]
    layout = Layout.plan(params, ranks, align_bytes=16, itemsize=4)
    assert layout.shard_numel <= lcm_shard(params, ranks, align=4)


def smallest_in_order(sizes: Sequence[tuple[int, int]], ranks: int) -> int:
    """The true optimum for parameters (rows, row size) in this order, unaligned: by trying everything."""

    def fits(shard: int) -> bool:
        def place(index: int, start: int) -> bool:
            if index == len(sizes):
                return True
            rows, row = sizes[index]
            for offset in range(start, shard * ranks - rows * row + 1):
                inside = [
                    b - offset
                    for b in range(shard, shard * ranks, shard)
                    if 0 < b - offset < rows * row
                ]
                if all(distance % row == 0 for distance in inside):
                    return place(index + 1, offset + rows * row)
            return False

        return place(0, 0)

    shard = 1
    while not fits(shard):
        shard += 1
    return shard


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_shard_is_no_longer_than_the_best_of_this_order(
    sizes: list[tuple[int, int]], ranks: int
) -> None:
    params = [ParamSpec(str(i), size) for i, size in enumerate(sizes)]
    layout = Layout.plan(params, ranks, align_bytes=1, itemsize=1)
    assert layout.shard_numel <= smallest_in_order(sizes, ranks)


def test_order_is_given_up_where_another_is_shorter() -> None:
    # (rows, row size, rows that stay together): 18 holds them all, by trying every order and offset.
    sizes = [(4, 4, 3), (9, 6, 3), (1, 5, 2), (2, 7, 2)]
    params = [ParamSpec(str(i), (r, n), RowBlock(g)) for i, (r, n, g) in enumerate(sizes)]
    assert Layout.plan(params, 5, align_bytes=1, itemsize=1).shard_numel == 18


def block_of(model: str, dim: object = 0) -> list[ParamSpec]:
    return [
        ParamSpec(name, shape, shard_dim=dim if len(shape) > 1 else 0)  # type: ignore[arg-type]
        for name, shape in SHAPES[model].block.items()
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 24, 32, 64])
def test_padding_of_a_llama_block_is_under_one_percent(ranks: int) -> None:
    assert Layout.plan(block_of("llama3-8b"), ranks).padding_fraction < 0.01


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
def test_padding_of_a_gpt2_block_is_under_one_percent(ranks: int) -> None:
    assert Layout.plan(block_of("gpt2"), ranks).padding_fraction < 0.01


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_choosing_dims_keeps_padding_under_two_percent(ranks: int) -> None:
    assert Layout.plan(block_of("llama3-8b", "auto"), ranks).padding_fraction < 0.02
    if ranks <= 64:
        assert Layout.plan(block_of("gpt2", "auto"), ranks).padding_fraction < 0.02


def test_what_forces_the_shard_is_named() -> None:
    layout = Layout.plan([ParamSpec("long", (100, 6)), ParamSpec("short", (2, 7))], 8)
    assert layout.forced_by == ("long",)
    assert "forced by long" in repr(layout)


def test_whole_tensors_are_packed_like_boxes() -> None:
    params = [ParamSpec(str(i), (n,), "tensor") for i, n in enumerate([64, 32, 32, 96, 32])]
    layout = Layout.plan(params, 4, align_bytes=128)
    assert layout.shard_numel == 96  # 96 | 64 + 32 | 32 + 32 | -


def test_planning_is_deterministic() -> None:
    assert Layout.plan(block_of("llama3-8b", "auto"), 24) == Layout.plan(
        block_of("llama3-8b", "auto"), 24
    )


def test_row_sizes_without_a_usable_common_multiple() -> None:
    params = [ParamSpec(str(n), (n, n)) for n in (4093, 4099, 4111, 4127, 4129, 4133, 4139)]
    layout = Layout.plan(params, 64)
    assert layout.flat_numel >= layout.numel
    for index, placement in enumerate(layout.placements):
        assert sum(layout.piece(r, index).numel for r in range(64)) == placement.numel


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.plan([], 0), "world_size is 0"),
        (
            lambda: Layout.plan([ParamSpec("w", (2**40, 2**40))], 1),
            "2305843009213693952 elements or",
        ),
        (lambda: Layout.plan([], 1, align_bytes=6), "align_bytes is 6 and itemsize 4"),
        (lambda: ParamSpec("w", (2, -1)), r"'w': shape is \(2, -1\)"),
        (lambda: ParamSpec("w", (2,), "rows"), "granularity is 'rows'; accepted: 'element'"),  # type: ignore[arg-type]
        (
            lambda: ParamSpec("w", (2, 3), shard_dim=2),
            r"shard_dim is 2; accepted for shape \(2, 3\): -2 to 1, 'auto'",
        ),
        (lambda: RowBlock(0), "rows is 0"),
    ],
)
def test_bad_arguments_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_dim_is_left_where_another_gains_nothing() -> None:
    for shape in ((64, 48), (48, 64)):  # either dim gives shards of half the elements
        layout = Layout.plan([ParamSpec("w", shape, shard_dim="auto")], 2)
        assert layout.padding == 0
        assert layout.placements[0].shard_dim == 0


def test_a_block_is_no_larger_than_its_parameter() -> None:
    specs = [ParamSpec(name, (3, 64), granularity=RowBlock(100)) for name in "ab"]
    assert Layout.plan(specs, 2).shard_numel == 3 * 64


def test_what_one_boundary_cuts_between_rows_forces_nothing() -> None:
    layout = Layout.plan([ParamSpec("w", (8, 48))], 2)
    assert layout.padding == 0
    assert layout.forced_by == ()


def test_gaps_are_filled_by_what_fits_into_them(seed: int) -> None:
    """More parameters than all orders are tried of: most layouts have gaps, and small ones go there."""
    chance = random.Random(seed)
    for _ in range(2000):
        specs = [
            ParamSpec(
                str(i),
                (chance.choice((1, 2, 3, 5, 9, 40)), chance.choice((7, 33, 48, 100, 321))),
                granularity=chance.choice(("row", "tensor")),
            )
            for i in range(chance.randint(6, 14))
        ]
        layout = Layout.plan(specs, chance.randint(2, 9))
        ends = 0
        for placement in sorted(layout.placements, key=lambda p: p.offset):
            assert placement.offset >= ends, layout
            ends = placement.offset + placement.numel
        assert ends <= layout.flat_numel
