"""The CUDA executor of a CopyPlan: its kernel's code walked on the CPU, and, where there is a GPU, run."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardcomm import _C
from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import ZEROS, Segment
from support.random_plans import (
    FLOATS,
    OTHERS,
    RandomPlan,
    bits,
    expect,
    plans,
    rectangle,
    same_bits,
    values,
)

GUARD = 16
"""Elements before and after a destination that nobody may touch."""


def walk(
    plan: CopyPlan,
    sources: list[Tensor | None],
    destinations: list[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
    tile_elements: int = 1024,
    most_operands: int = 4000,
    blocks: int = 3,
    threads: int = 32,
) -> None:
    """The kernel's code for every block and thread of a launch, one after the other, on the CPU."""
    _C.walk_launches(
        plan.core,
        [0 if source is None else source.data_ptr() for source in sources],
        [destination.data_ptr() for destination in destinations],
        scale,
        accumulate,
        tile_elements,
        most_operands,
        blocks,
        threads,
    )


launches = st.fixed_dictionaries(
    {
        "tile_elements": st.sampled_from([128, 1024, 65536]),
        "most_operands": st.sampled_from([2, 3, 4000]),
        "blocks": st.integers(1, 7),
        "threads": st.sampled_from([1, 32, 256]),
    }
)


@settings(max_examples=100, deadline=None)
@given(plan=plans(), launch=launches)
def test_walked_grid_writes_each_element_exactly_once(
    plan: RandomPlan, launch: dict[str, int]
) -> None:
    segments, src_sizes, dst_sizes = plan
    ones: list[Tensor | None] = [torch.ones(size) for size in src_sizes]
    written = [torch.zeros(size) for size in dst_sizes]

    # Whoever adds twice to an element is seen; zeros, which do not add, are in the next test.
    walk(CopyPlan(tuple(segments), FLOATS[0], FLOATS[0]), ones, written, accumulate=True, **launch)

    wanted = [torch.zeros(size) for size in dst_sizes]
    for s in segments:
        if s.src >= 0:
            rectangle(wanted[s.dst], s.dst_offset, s.dst_pitch, s.rows, s.cols).add_(1)
    assert all(map(torch.equal, written, wanted))


@settings(max_examples=150, deadline=None)
@given(
    plan=plans(),
    launch=launches,
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    accumulate=st.booleans(),
    missing=st.sampled_from([None, 0, 1]),
    starts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_walked_grid_copies_as_pytorch_does_and_touches_nothing_else(
    plan: RandomPlan,
    launch: dict[str, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
    missing: int | None,
    starts: tuple[int, int],
) -> None:
    segments, src_sizes, dst_sizes = plan
    src_dtype, dst_dtype = dtypes
    src_start, dst_start = starts  # anywhere within a vector
    scale = float(torch.tensor(scale))  # what a float32 can hold
    sources: list[Tensor | None] = [
        None if i == missing else values(src_start + size, src_dtype, seed=i)[src_start:]
        for i, size in enumerate(src_sizes)
    ]
    guarded = [values(dst_start + size + GUARD, dst_dtype, seed=9) for size in dst_sizes]
    before = [each.clone() for each in guarded]
    destinations = [
        each[dst_start : dst_start + size] for each, size in zip(guarded, dst_sizes, strict=True)
    ]
    expected = expect(segments, sources, destinations, scale, accumulate)

    walk(
        CopyPlan(tuple(segments), src_dtype, dst_dtype),
        sources, destinations, scale, accumulate, **launch,
    )  # fmt: skip

    assert all(map(same_bits, destinations, expected))
    for now, then in zip(guarded, before, strict=True):
        assert torch.equal(bits(now[:dst_start]), bits(then[:dst_start]))
        assert torch.equal(bits(now[-GUARD:]), bits(then[-GUARD:]))


@settings(max_examples=100, deadline=None)
@given(plan=plans(), dtype=st.sampled_from(OTHERS), start=st.integers(0, 9))
def test_walked_grid_moves_dtypes_without_conversion(
    plan: RandomPlan, dtype: torch.dtype, start: int
) -> None:
    segments, src_sizes, dst_sizes = plan
    sources: list[Tensor | None] = [
        values(start + n, dtype, i)[start:] for i, n in enumerate(src_sizes)
    ]
    destinations = [values(n, dtype, 7) for n in dst_sizes]
    expected = expect(segments, sources, destinations)

    walk(CopyPlan(tuple(segments), dtype, dtype), sources, destinations)

    for result, wanted in zip(destinations, expected, strict=True):
        assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))


def test_walked_launches_split_where_their_arguments_are_full() -> None:
    sizes = list(range(1, 5001))
    offsets = [0, *torch.tensor(sizes).cumsum(0).tolist()[:-1]]
    sources: list[Tensor | None] = [values(size, torch.float32, 3) for size in sizes]
    flat = torch.zeros(sum(sizes), dtype=torch.bfloat16)
    walk(CopyPlan.pack(sizes, offsets, torch.float32, torch.bfloat16), sources, [flat])
    assert torch.equal(flat, torch.cat([s for s in sources if s is not None]).bfloat16())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tile_elements": 100}, "tile_elements is 100, it must be a positive multiple of 128"),
        ({"most_operands": 1}, "2 to 4000 operands"),
        ({"blocks": 0}, "at least one block"),
    ],
)
def test_impossible_launches_are_refused(changed: dict[str, int], message: str) -> None:
    plan = CopyPlan((Segment(0, 0, 0, 4, 0, 4, 1, 4),), torch.float32, torch.float32)
    with pytest.raises(ValueError, match=message):
        walk(plan, [torch.zeros(4)], [torch.zeros(4)], **changed)


# On a GPU.

VECTORS: RandomPlan = ([Segment(0, 0, 0, 8000, 0, 8000, 1, 8000)], [8000], [8000])
PITCHED: RandomPlan = ([Segment(0, 0, 2, 40, 1, 41, 5, 37)], [202], [206])
SEVERAL_TILES: RandomPlan = ([Segment(1, 0, 3, 16800, 5, 16700, 3, 16700)], [0, 50403], [50105])
FILLED: RandomPlan = (
    [Segment(ZEROS, 0, 0, 33, 7, 40, 3, 33), Segment(0, 1, 0, 21, 0, 21, 1, 21)], [21], [127, 21]
)  # fmt: skip


@pytest.mark.gpu
@settings(max_examples=100, deadline=None)
@example(VECTORS, (torch.bfloat16, torch.float32), 0.5, True, None, (0, 0))
@example(VECTORS, (torch.float32, torch.bfloat16), 1.0, False, None, (1, 3))
@example(PITCHED, (torch.float32, torch.float16), 1.0, False, None, (0, 5))
@example(PITCHED, (torch.bfloat16, torch.bfloat16), 1 / 3, True, None, (2, 0))
@example(SEVERAL_TILES, (torch.float16, torch.float16), 1.0, False, None, (0, 1))
@example(FILLED, (torch.float32, torch.bfloat16), 1.0, False, 0, (0, 1))
@given(
    plan=plans(),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    accumulate=st.booleans(),
    missing=st.sampled_from([None, 0, 1]),
    starts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_gpu_copies_as_pytorch_does_and_touches_nothing_else(
    plan: RandomPlan,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
    missing: int | None,
    starts: tuple[int, int],
) -> None:
    segments, src_sizes, dst_sizes = plan
    src_dtype, dst_dtype = dtypes
    src_start, dst_start = starts
    scale = float(torch.tensor(scale))
    sources: list[Tensor | None] = [
        None if i == missing else values(src_start + size, src_dtype, seed=i).cuda()[src_start:]
        for i, size in enumerate(src_sizes)
    ]
    guarded = [values(dst_start + size + GUARD, dst_dtype, seed=9).cuda() for size in dst_sizes]
    before = [each.clone() for each in guarded]
    destinations = [
        each[dst_start : dst_start + size] for each, size in zip(guarded, dst_sizes, strict=True)
    ]
    expected = expect(segments, sources, destinations, scale, accumulate)

    CopyPlan(tuple(segments), src_dtype, dst_dtype).run(
        sources, destinations, scale=scale, accumulate=accumulate
    )

    assert all(map(same_bits, destinations, expected))
    for now, then in zip(guarded, before, strict=True):
        assert torch.equal(bits(now[:dst_start]), bits(then[:dst_start]))
        assert torch.equal(bits(now[-GUARD:]), bits(then[-GUARD:]))


@pytest.mark.gpu
def test_gpu_packs_thousands_of_tensors() -> None:
    sizes = [1 + i % 700 for i in range(2500)]
    offsets = [0, *torch.tensor(sizes).cumsum(0).tolist()[:-1]]
    sources: list[Tensor | None] = [values(size, torch.float32, 3).cuda() for size in sizes]
    flat = torch.zeros(sum(sizes), dtype=torch.bfloat16, device="cuda")
    CopyPlan.pack(sizes, offsets, torch.float32, torch.bfloat16).run(sources, [flat])
    assert torch.equal(flat, torch.cat([s for s in sources if s is not None]).bfloat16())


@pytest.mark.gpu
def test_gpu_copy_is_captured_in_a_graph() -> None:
    source = torch.randn(100_000, device="cuda")
    flat = torch.zeros(100_000, dtype=torch.bfloat16, device="cuda")
    bound = CopyPlan.pack([100_000], [0], torch.float32, torch.bfloat16).bind([source], [flat])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.run()
    source.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(flat, source.bfloat16())
