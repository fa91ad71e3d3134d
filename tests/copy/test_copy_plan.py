"""CopyPlan and its CPU executor, against PyTorch's copies and conversions."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardcomm import _C
from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import ZEROS, Segment
from support.awkward_floats import awkward_floats, every_16_bit_pattern
from support.instruction_sets import instruction_set  # noqa: F401  (a fixture)
from support.random_plans import (
    FLOATS,
    OTHERS,
    TILE_ELEMENTS,
    UNKNOWN_TO_CORE,
    RandomPlan,
    bits,
    expect,
    plans,
    rectangle,
    same_bits,
    values,
)


@settings(max_examples=250, deadline=None)
@given(plans())
def test_tiles_cover_every_destination_element_exactly_once(
    plan: RandomPlan,
) -> None:
    segments, _, dst_sizes = plan
    core = CopyPlan(tuple(segments), torch.float32, torch.bfloat16).core

    written = [torch.zeros(size, dtype=torch.int32) for size in dst_sizes]
    for tile in map(Segment._make, core.tiles):
        assert 0 < tile.rows * tile.cols <= TILE_ELEMENTS
        rectangle(written[tile.dst], tile.dst_offset, tile.dst_pitch, tile.rows, tile.cols).add_(1)

    wanted = [torch.zeros(size, dtype=torch.int32) for size in dst_sizes]
    for s in segments:
        rectangle(wanted[s.dst], s.dst_offset, s.dst_pitch, s.rows, s.cols).add_(1)
    assert all(map(torch.equal, written, wanted))
    assert core.elements == sum(s.rows * s.cols for s in segments)


@settings(max_examples=250, deadline=None)
@given(
    plan=plans(),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    accumulate=st.booleans(),
    missing=st.sampled_from([None, 0, 1]),
)
def test_copies_as_pytorch_does_and_touches_nothing_else(
    plan: RandomPlan,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
    missing: int | None,
) -> None:
    segments, src_sizes, dst_sizes = plan
    src_dtype, dst_dtype = dtypes
    scale = float(torch.tensor(scale))  # what a float32 can hold
    sources: list[Tensor | None] = [
        None if i == missing else values(size, src_dtype, seed=i)
        for i, size in enumerate(src_sizes)
    ]
    # The destinations have guards in front and behind, and start anywhere within a vector.
    guarded = [values(9 + size + 9, dst_dtype, seed=9) for size in dst_sizes]
    before = [each.clone() for each in guarded]
    destinations = [each[9 : 9 + size] for each, size in zip(guarded, dst_sizes, strict=True)]
    expected = expect(segments, sources, destinations, scale, accumulate)

    CopyPlan(tuple(segments), src_dtype, dst_dtype).run(
        sources, destinations, scale=scale, accumulate=accumulate
    )

    assert all(map(same_bits, destinations, expected))
    for now, then in zip(guarded, before, strict=True):
        assert torch.equal(bits(now[:9]), bits(then[:9]))
        assert torch.equal(bits(now[-9:]), bits(then[-9:]))


@settings(max_examples=100, deadline=None)
@given(plan=plans(), dtype=st.sampled_from(OTHERS + UNKNOWN_TO_CORE))
def test_dtypes_without_conversion_are_moved(plan: RandomPlan, dtype: torch.dtype) -> None:
    segments, src_sizes, dst_sizes = plan
    sources: list[Tensor | None] = [values(size, dtype, i) for i, size in enumerate(src_sizes)]
    destinations = [values(size, dtype, 7) for size in dst_sizes]
    expected = expect(segments, sources, destinations)

    CopyPlan(tuple(segments), dtype, dtype).run(sources, destinations)

    for result, wanted in zip(destinations, expected, strict=True):
        assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_every_conversion_equals_pytorch_bit_for_bit(
    src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    narrow = src_dtype != torch.float32
    source = every_16_bit_pattern().view(src_dtype) if narrow else awkward_floats()
    n = source.numel()
    destination = torch.empty(n, dtype=dst_dtype)
    CopyPlan.pack([n], [0], src_dtype, dst_dtype).run([source], [destination])
    assert same_bits(destination, source.to(dst_dtype))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dst_dtype", FLOATS)
def test_scale_and_accumulate_round_once(dst_dtype: torch.dtype) -> None:
    source = awkward_floats()
    destination = source.flip(0).to(dst_dtype)
    expected = (destination.float() + source * 0.75).to(dst_dtype)
    CopyPlan.pack([source.numel()], [0], torch.float32, dst_dtype).run(
        [source], [destination], scale=0.75, accumulate=True
    )
    assert same_bits(destination, expected)


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_threads_change_no_bit(dst_dtype: torch.dtype, accumulate: bool) -> None:
    sizes = [1, 300_001, 77, 0, 1_000_000, 128, 64_000]
    offsets = [sum(sizes[:i]) + i for i in range(len(sizes))]
    plan = CopyPlan.pack(sizes, offsets, torch.float32, dst_dtype)
    sources = [values(size, torch.float32, seed) for seed, size in enumerate(sizes)]
    start = values(offsets[-1] + sizes[-1], dst_dtype, seed=99)
    results = []
    for threads in (1, 2, 3, 5, 64):
        flat = start.clone()
        plan.run(sources, [flat], scale=0.3, accumulate=accumulate, threads=threads)
        results.append(flat)
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("misalignment", [0, 1, 31])
def test_runs_too_large_for_the_caches(dst_dtype: torch.dtype, misalignment: int) -> None:
    rows, cols, pitch = 33, 140_001, 140_007  # more than 8 MiB are written
    source = values(rows * pitch, torch.float32, seed=1)
    flat = torch.full((misalignment + rows * pitch,), 3.0).to(dst_dtype)
    segments = [Segment(0, 0, 0, pitch, misalignment, pitch, rows, cols)]
    (expected,) = expect(segments, [source], [flat])
    CopyPlan(tuple(segments), torch.float32, dst_dtype).run([source], [flat], threads=2)
    assert torch.equal(bits(flat), bits(expected))


def test_unpack_undoes_pack() -> None:
    sizes, offsets = [5, 0, 4, 6], [0, 5, 5, 12]
    tensors = [values(size, torch.float32, seed) for seed, size in enumerate(sizes)]
    flat = torch.full((20,), 7.0)
    CopyPlan.pack(sizes, offsets, torch.float32, torch.float32, [(9, 12)]).run(tensors, [flat])
    gap, tail = torch.zeros(3), torch.full((2,), 7.0)
    assert torch.equal(flat, torch.cat([*tensors[:3], gap, tensors[3], tail]))

    back = [torch.empty(size) for size in sizes]
    CopyPlan.unpack(sizes, offsets, torch.float32, torch.float32).run([flat], back)
    assert all(map(torch.equal, back, tensors))


@pytest.mark.parametrize("dst_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_copy_out_is_torchs_split_with_sizes_copy(ranks: int, dst_dtype: torch.dtype) -> None:
    sizes = [5, 0, 128, 1, 77]
    gathered = values(ranks * sum(sizes), torch.bfloat16, 1)
    ours = [torch.zeros(ranks, size, dtype=dst_dtype) for size in sizes]
    theirs = [torch.zeros(ranks, size, dtype=torch.bfloat16) for size in sizes]
    CopyPlan.copy_out(sizes, ranks, torch.bfloat16, dst_dtype).run([gathered], ours)
    torch.split_with_sizes_copy(gathered.view(ranks, -1), sizes, dim=1, out=theirs)
    assert all(torch.equal(a, b.to(dst_dtype)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dst_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 50])
def test_chunk_cat_is_torchs(chunks: int, dst_dtype: torch.dtype) -> None:
    shapes = [(8, 3), (1,), (17, 2, 5), (3, 1), (40,), (9, 64)]
    grads = [values(torch.Size(shape).numel(), torch.bfloat16, 2).view(shape) for shape in shapes]
    expected = torch._chunk_cat(grads, 0, chunks)
    flat = values(expected.numel(), dst_dtype, 3)
    CopyPlan.chunk_cat(shapes, chunks, torch.bfloat16, dst_dtype).run(grads, [flat])
    assert torch.equal(flat.view(chunks, -1), expected.to(dst_dtype))


def test_rectangles_without_gaps_become_one_row() -> None:
    (tile,) = CopyPlan(
        (Segment(0, 0, 2, 8, 3, 8, 100, 8),), torch.float32, torch.float32
    ).core.tiles
    assert Segment._make(tile)[-2:] == (1, 800)


def test_tiles_of_a_segment_have_equal_work() -> None:
    cut_row = CopyPlan.pack([16385], [0], torch.float32, torch.float32).core.tiles
    assert [Segment._make(tile).cols for tile in cut_row] == [8320, 8065]  # a multiple of 128 first
    short_rows = CopyPlan((Segment(0, 0, 0, 9, 0, 8, 4096, 8),), torch.float32, torch.float32)
    assert [Segment._make(tile).rows for tile in short_rows.core.tiles] == [2048, 2048]


def test_bound_copy_reads_new_sources() -> None:
    flat = torch.empty(4)
    bound = CopyPlan.pack([4], [0], torch.float32, torch.float32).bind([torch.ones(4)], [flat])
    bound.run()
    assert flat.tolist() == [1.0] * 4
    bound.set_sources([torch.full((4,), 2.0)])
    bound.run()
    assert flat.tolist() == [2.0] * 4
    with pytest.raises(ValueError, match="needs 4"):
        bound.set_sources([torch.ones(3)])


def test_segments_may_come_as_an_array() -> None:
    rows = [[0, 0, 1, 5, 2, 6, 3, 4], [1, 0, 0, 2, 40, 2, 1, 2]]
    array = memoryview(torch.tensor(rows).numpy())
    f32 = _C.DType.f32
    assert _C.CopyPlan(array, f32, f32).segments == [tuple(row) for row in rows]
    with pytest.raises(ValueError, match=r"int64 array of shape \(n, 8\)"):
        _C.CopyPlan(memoryview(torch.zeros(2, 7, dtype=torch.int64).numpy()), f32, f32)


def test_repr_draws_the_segments() -> None:
    plan = CopyPlan(
        (Segment(1, 0, 40, 8, 16, 3, 2, 3), Segment(ZEROS, 0, 0, 4, 30, 4, 1, 4)),
        torch.float32,
        torch.bfloat16,
    )
    assert repr(plan).splitlines() == [
        "CopyPlan torch.float32 -> torch.bfloat16",
        "  1[40:]  2 x 3 / 8 -> 0[16:]  2 x 3",
        "  zeros -> 0[30:]  1 x 4",
    ]
    many = CopyPlan.pack([1] * 50, range(50), torch.float32, torch.float32)
    assert repr(many).endswith("... 38 more segments")


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(-2, 0, 0, 1, 0, 1, 1, 1), "segment 0: src is -2"),
        (Segment(0, -1, 0, 1, 0, 1, 1, 1), "segment 0: dst is -1"),
        (Segment(0, 0, -1, 1, 0, 1, 1, 1), "src_offset is -1"),
        (Segment(0, 0, 0, 1, -1, 1, 1, 1), "dst_offset is -1"),
        (Segment(0, 0, 0, 1, 0, 1, -1, 1), "rows is -1"),
        (Segment(0, 0, 0, 1, 0, 1, 1, -1), "cols is -1"),
        (Segment(0, 0, 0, 3, 0, 4, 2, 4), "src_pitch is 3"),
        (Segment(0, 0, 0, 4, 0, 3, 2, 4), "dst_pitch is 3"),
        (Segment(0, 0, 0, 2**62, 0, 2**62, 9, 4), "63 bits"),
        (Segment(2**40, 0, 0, 1, 0, 1, 1, 1), "31 bits"),
    ],
)
def test_wrong_segments_are_refused(segment: Segment, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CopyPlan((segment,), torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"),
    [
        (torch.int32, torch.float32),
        (torch.float64, torch.float32),
        (torch.bool, torch.uint8),
        (torch.int8, torch.bool),
        (torch.complex64, torch.float32),
    ],
)
def test_dtype_pairs_without_conversion_are_refused(
    src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match="no conversion"):
        CopyPlan.pack([1], [0], src_dtype, dst_dtype)


@pytest.mark.parametrize(
    ("sizes", "offsets", "zero_ranges", "message"),
    [
        ([4, 4], [0, 3], [], r"elements \[0, 4\) and \[3, 7\) of the flat tensor overlap"),
        ([4, 4], [4, 4], [], r"elements \[4, 8\) and \[4, 8\) of the flat tensor overlap"),
        ([4], [2], [(0, 3)], r"elements \[0, 3\) and \[2, 6\) of the flat tensor overlap"),
        ([4], [0], [4, 8], "zero_ranges has 4; each must be a pair of whole numbers"),
        ([4], [0], ["ab"], "zero_ranges has 'ab'; each must be a pair of whole numbers"),
    ],
)
def test_what_is_packed_twice_into_one_place_is_refused(
    sizes: list[int], offsets: list[int], zero_ranges: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CopyPlan.pack(sizes, offsets, torch.float32, torch.float32, zero_ranges)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_plans_are_values_and_bound_copies_are_not(copied: Callable[[Any], Any]) -> None:
    plan = CopyPlan.pack([2, 0, 1], [0, 1, 2], torch.float32, torch.bfloat16, [(3, 5)])
    again = copied(plan)
    assert again == plan
    flat = torch.empty(5, dtype=torch.bfloat16)
    again.run([torch.ones(2), torch.ones(0), torch.ones(1)], [flat])
    assert flat.tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(TypeError, match="a BoundCopy cannot be copied or pickled"):
        copied(plan.bind([None, None, None], [flat]))


def test_operands_that_are_not_aligned_to_their_elements_are_refused() -> None:
    # So many elements that the core would write past the caches, which needs aligned memory.
    numel = 1 << 21
    plan = CopyPlan([Segment(0, 0, 0, numel, 0, numel, 1, numel)], torch.float32, torch.float32)
    whole = torch.zeros(numel)
    shifted = torch.frombuffer(bytearray(4 * numel + 2), dtype=torch.float32, offset=2, count=numel)
    sentence = "0 begins at an address that is no multiple of 4, the size of an element of f32"
    with pytest.raises(ValueError, match=f"destination {sentence}"):
        plan.run([whole], [shifted])
    with pytest.raises(ValueError, match=f"source {sentence}"):
        plan.run([shifted], [whole])
    bound = plan.bind([None], [whole])
    with pytest.raises(ValueError, match=f"source {sentence}"):
        bound.set_sources([shifted])


def test_wrong_operands_are_refused() -> None:
    plan = CopyPlan.pack([4, 2], [0, 4], torch.float32, torch.bfloat16)
    a, b, flat = torch.ones(4), torch.ones(2), torch.ones(6, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sources has 1 tensors, the plan has 2"):
        plan.run([a], [flat])
    with pytest.raises(ValueError, match="destinations has 2 tensors, the plan has 1"):
        plan.run([a, b], [flat, flat])
    with pytest.raises(ValueError, match=r"sources\[0\] has 3 elements, the plan needs 4"):
        plan.run([a[:3], b], [flat])
    with pytest.raises(ValueError, match=r"destinations\[0\] has 5 elements, the plan needs 6"):
        plan.run([a, b], [flat[:5]])
    with pytest.raises(ValueError, match=r"sources\[1\] is not contiguous"):
        plan.run([a, torch.ones(4)[::2]], [flat])
    with pytest.raises(TypeError, match=r"destinations\[0\] is torch.float32 on cpu"):
        plan.run([a, b], [torch.ones(6)])
    with pytest.raises(TypeError, match=r"sources\[0\] is torch.float32 on meta"):
        plan.run([a.to("meta"), b], [flat])
    with pytest.raises(TypeError, match=r"destinations\[0\] is None"):
        plan.run([a, b], [None])
    with pytest.raises(ValueError, match="threads is 0"):
        plan.run([a, b], [flat], threads=0)
    integers = CopyPlan.pack([1], [0], torch.int32, torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="scale, accumulate and nonfinite need f32"):
        integers.run([one], [one.clone()], scale=2.0)
