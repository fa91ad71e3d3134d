"""The Triton executor of a CopyPlan, against the CPU executor and PyTorch's copies.

Compiled where there is a GPU; by Triton's interpreter, on the CPU, elsewhere.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import ZEROS, Segment
from shardcomm.stream.streams import TorchStream
from support.awkward_floats import awkward_floats, every_16_bit_pattern
from support.random_plans import (
    FLOATS,
    OTHERS,
    UNKNOWN_TO_CORE,
    bits,
    expect,
    plans,
    same_bits,
    values,
)

pytest.importorskip("triton", reason="the Triton executor needs triton: pip install triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# Read where a kernel is defined: Triton itself, and what else uses it in this process, compile.
with pytest.MonkeyPatch.context() as environment:
    if DEVICE.type == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    from shardcomm.copy.triton import TritonCopy

pytestmark = [
    # The interpreter's numpy reports each overflow to infinity.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow,
]


def triton_copy(
    plan: CopyPlan,
    sources: list[Tensor | None],
    destinations: list[Tensor],
) -> TritonCopy:
    addresses = [plan.source_pointers(sources, DEVICE), [each.data_ptr() for each in destinations]]
    return TritonCopy(plan.core, *addresses, DEVICE)


def check(
    segments: list[Segment],
    sources: list[Tensor | None],
    destinations: list[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Triton's result on the device is that of the CPU executor and of PyTorch."""
    scale = float(torch.tensor(scale))  # what a float32 can hold
    src_dtype = next((each.dtype for each in sources if each is not None), destinations[0].dtype)
    plan = CopyPlan(tuple(segments), src_dtype, destinations[0].dtype)
    by_pytorch = expect(segments, sources, destinations, scale, accumulate)
    by_cpu = [each.clone() for each in destinations]
    plan.run(sources, by_cpu, scale=scale, accumulate=accumulate)

    by_triton = [each.to(DEVICE, copy=True) for each in destinations]
    there = [None if each is None else each.to(DEVICE) for each in sources]
    triton_copy(plan, there, by_triton).run(scale, accumulate)

    for result, cpu, pytorch in zip(by_triton, by_cpu, by_pytorch, strict=True):
        if result.dtype in FLOATS:
            assert same_bits(result.cpu(), cpu)
            assert same_bits(result.cpu(), pytorch)
        else:
            assert torch.equal(result.cpu().view(torch.uint8), cpu.view(torch.uint8))
            assert torch.equal(result.cpu().view(torch.uint8), pytorch.view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(
    plan=plans(),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.5, -1 / 3]),
    accumulate=st.booleans(),
    missing=st.sampled_from([None, 0, 1]),
)
def test_copies_as_the_cpu_and_pytorch_do(
    plan: tuple[list[Segment], list[int], list[int]],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
    missing: int | None,
) -> None:
    segments, src_sizes, dst_sizes = plan
    sources: list[Tensor | None] = [
        None if i == missing else values(size, dtypes[0], seed=i)
        for i, size in enumerate(src_sizes)
    ]
    # Where a plan does not write, the comparison shows that nothing did.
    destinations = [values(size, dtypes[1], seed=9) for size in dst_sizes]
    check(segments, sources, destinations, scale, accumulate)


@settings(max_examples=20, deadline=None)
@given(plan=plans(), dtype=st.sampled_from(OTHERS + UNKNOWN_TO_CORE))
def test_dtypes_without_conversion_are_moved(
    plan: tuple[list[Segment], list[int], list[int]], dtype: torch.dtype
) -> None:
    segments, src_sizes, dst_sizes = plan
    sources: list[Tensor | None] = [values(size, dtype, i) for i, size in enumerate(src_sizes)]
    check(segments, sources, [values(size, dtype, 7) for size in dst_sizes])


@pytest.mark.parametrize("dtypes", [(a, b) for a in FLOATS for b in FLOATS] + [(torch.uint8,) * 2])
@pytest.mark.parametrize("odd", ["nothing", "src_offset", "dst_offset", "src_pitch", "dst_pitch"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_in_vectors_and_what_is_left(
    dtypes: tuple[torch.dtype, torch.dtype], odd: str, rows: int
) -> None:
    segments, end = [], 0
    for cols in (5, 16, 17, 48, 63, 2064):
        even = Segment(0, 0, 32, 4096, end, 4096, rows, cols)
        segments.append(
            even._replace(**{odd: getattr(even, odd) + 1} if odd in even._fields else {})
        )
        end += rows * 4096 + 16
    size = end + 4096
    check(segments, [values(size, dtypes[0], 1)], [values(size, dtypes[1], 2)])


@pytest.mark.parametrize(("dtype", "accumulate"), [(torch.float32, False), (torch.bfloat16, True)])
def test_300_tensors_of_any_size_in_one_launch(
    dtype: torch.dtype, accumulate: bool, seed: int
) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, rng.randrange(40), rng.randrange(3000)]) for _ in range(300)]
    sizes[rng.randrange(300)] = 40_001
    gaps = [rng.randrange(5) for _ in sizes]
    ends = [0]
    for size, gap in zip(sizes, gaps, strict=True):
        ends.append(ends[-1] + size + gap)
    segments = [
        Segment(i, 0, 0, size, start, size, 1, size)
        for i, (size, start) in enumerate(zip(sizes, ends, strict=False))
    ]
    segments += [
        Segment(ZEROS, 0, 0, gap, end - gap, gap, 1, gap)
        for gap, end in zip(gaps, ends[1:], strict=True)
    ]
    sources = [
        None if rng.random() < 0.1 else values(size, torch.float32, i)
        for i, size in enumerate(sizes)
    ]
    check(segments, sources, [values(ends[-1], dtype, 301)], 0.3, accumulate)


def some_awkward_floats(every: int) -> Tensor:
    """Where the interpreter runs, which is slow, one in so many, and all around the overflow of narrow floats."""
    floats = awkward_floats()
    if DEVICE.type != "cpu":
        return floats
    largest = torch.tensor([torch.finfo(dtype).max for dtype in FLOATS[1:]]).view(torch.int32)
    steps = torch.tensor([-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    around = (largest.unsqueeze(1) + steps.int()).view(torch.float32).flatten()
    return torch.cat([floats[::every], around, -around])


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_every_conversion_equals_pytorch_bit_for_bit(
    src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    narrow = src_dtype != torch.float32
    source = every_16_bit_pattern().view(src_dtype) if narrow else some_awkward_floats(5)
    n = source.numel()
    check([Segment(0, 0, 0, n, 0, n, 1, n)], [source], [torch.zeros(n, dtype=dst_dtype)])


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("scale", [0.75, 2.0**-130, -float("inf")])
def test_scale_and_accumulate_round_as_pytorch_does(dst_dtype: torch.dtype, scale: float) -> None:
    source = some_awkward_floats(31)
    n = source.numel()
    segments = [Segment(0, 0, 0, n, 0, n, 1, n), Segment(ZEROS, 0, 0, 9, n, 9, 1, 9)]
    destination = awkward_floats()[1 : 1 + n + 9].to(dst_dtype)
    for accumulate in (False, True):
        check(segments, [source], [destination], scale, accumulate)


def test_nan_payloads_survive_a_plain_copy() -> None:
    for dtype in FLOATS[1:]:
        source = every_16_bit_pattern().view(dtype).to(DEVICE)
        flat = torch.zeros_like(source)
        triton_copy(CopyPlan.pack([2**16], [0], dtype, dtype), [source], [flat]).run()
        assert torch.equal(bits(flat), bits(source))


def test_zero_sized_plans_do_nothing() -> None:
    nothing = torch.empty(0, device=DEVICE)
    triton_copy(CopyPlan((), torch.float32, torch.float32), [], []).run()
    triton_copy(CopyPlan.pack([0], [0], torch.float32, torch.float32), [nothing], [nothing]).run()


def test_a_copy_reads_new_sources() -> None:
    flat = torch.empty(4, device=DEVICE)
    plan = CopyPlan.pack([4], [0], torch.float32, torch.float32)
    ones = torch.ones(4, device=DEVICE)
    copy = triton_copy(plan, [ones], [flat])
    copy.run()
    assert flat.tolist() == [1.0] * 4
    source = torch.full((4,), 2.0, device=DEVICE)
    copy.set_operands(plan.source_pointers([source], DEVICE), [flat.data_ptr()])
    copy.run()
    assert flat.tolist() == [2.0] * 4


@pytest.mark.gpu
def test_streams_see_the_sources_they_were_queued_with() -> None:
    n = 1 << 20
    plan = CopyPlan.pack([n], [0], torch.float32, torch.bfloat16)
    sources = [torch.full((n,), float(i), device=DEVICE) for i in range(8)]
    flat = torch.empty(n, dtype=torch.bfloat16, device=DEVICE)
    copy = triton_copy(plan, [sources[0]], [flat])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for i, source in enumerate(sources):
        stream = streams[i // 2 % 2]
        stream.wait_stream(streams[1 - i // 2 % 2])
        copy.set_operands(plan.source_pointers([source], DEVICE), [flat.data_ptr()])
        copy.run(stream=TorchStream(stream))
        with torch.cuda.stream(stream):
            results.append(flat.clone())
    torch.cuda.synchronize()
    assert [each.unique().tolist() for each in results] == [[float(i)] for i in range(8)]


@pytest.mark.parametrize("value", [1.0, 1e5, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_is_set_if_what_it_writes_is_not_finite(dtype: torch.dtype, value: float) -> None:
    plan = CopyPlan.pack([1000, 30], [1, 1002], torch.float32, dtype)
    for at, accumulate in ((0, False), (999, True)):
        sources: list[Tensor | None] = [torch.ones(1000, device=DEVICE), None]
        assert sources[0] is not None
        sources[0][at] = value
        flat = torch.ones(1100, dtype=dtype, device=DEVICE)
        flat[0] = float("nan")  # not written
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        triton_copy(plan, sources, [flat]).run(1.0, accumulate, flag.data_ptr())
        assert bool(flag) == (not flat[1:].isfinite().all())
        assert bool(flag) == (value != 1.0 and not (value == 1e5 and dtype != torch.float16))


def test_what_it_cannot_do_is_refused() -> None:
    integers = CopyPlan.pack([1], [0], torch.int32, torch.int32)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="scale, accumulate and nonfinite need float32"):
        triton_copy(integers, [one], [one.clone()]).run(scale=2.0)
    elsewhere = torch.device("cpu" if DEVICE.type == "cuda" else "cuda")
    with pytest.raises(TypeError, match="TRITON_INTERPRET must be"):
        TritonCopy(integers.core, [0], [0], elsewhere)
