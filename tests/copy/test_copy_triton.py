"""The Triton executor of a CopyPlan, against the CPU executor and PyTorch's copies.

On a GPU where there is one. Elsewhere the machine of `support/ptx_machine.py` runs the instructions that Triton's
compiler makes for a GPU.

The PTX ISA leaves open which NaN an instruction computes. NVIDIA's GPUs have one, and a CPU keeps an operand's payload:
a comparison takes any NaN for any NaN, except of copies that only move.
"""

from __future__ import annotations

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
    SOME_PAIRS,
    UNKNOWN_TO_CORE,
    RandomPlan,
    bits,
    expect,
    plans,
    same_bits,
    values,
    whole,
)

pytest.importorskip("triton", reason="the Triton executor needs triton: pip install triton")

from shardcomm.copy.triton import TritonCopy
from support.played_triton import DEVICE, triton_gpu, why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]


def triton_copy(
    plan: CopyPlan, sources: list[Tensor | None], destinations: list[Tensor]
) -> TritonCopy:
    addresses = [plan.source_pointers(sources, DEVICE), [each.data_ptr() for each in destinations]]
    return TritonCopy(plan.core, *addresses, DEVICE)


def check(
    segments: list[Segment],
    sources: list[Tensor | None],
    destinations: list[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
    watched: bool = False,
    capability: int = 90,
) -> None:
    """The kernel writes what the CPU executor and PyTorch write, and touches nothing but the operands."""
    scale = float(torch.tensor(scale))  # what a float32 can hold
    src_dtype = next((each.dtype for each in sources if each is not None), destinations[0].dtype)
    dst_dtype = destinations[0].dtype
    plan = CopyPlan(tuple(segments), src_dtype, dst_dtype)
    by_pytorch = expect(segments, sources, destinations, scale, accumulate)
    by_cpu = [each.clone() for each in destinations]
    flag, wanted_flag = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1).int()
    plan.bind(sources, by_cpu).run(
        scale=scale, accumulate=accumulate, nonfinite=wanted_flag if watched else None
    )
    by_triton = [each.to(DEVICE, copy=True) for each in destinations]
    there = [None if each is None else each.to(DEVICE) for each in sources]
    with triton_gpu(capability) as gpu:
        gpu.may_read(*there)
        gpu.may_write(*by_triton, flag)
        copy = triton_copy(plan, there, by_triton)
        copy.run(scale, accumulate, flag.data_ptr() if watched else 0)

    computes = src_dtype != dst_dtype or scale != 1.0 or accumulate or watched
    for result, cpu, pytorch in zip(by_triton, by_cpu, by_pytorch, strict=True):
        found = result.cpu()
        if computes:
            assert same_bits(found, cpu)
            assert same_bits(found, pytorch)
        else:
            assert torch.equal(bits(found), bits(cpu))
    assert flag.cpu() == wanted_flag


@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_every_conversion_equals_pytorch_bit_for_bit(
    src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    narrow = src_dtype != torch.float32
    source = (
        every_16_bit_pattern().view(src_dtype) if narrow else awkward_floats()[::3].contiguous()
    )
    n = source.numel()
    check(whole(n), [source], [torch.zeros(n, dtype=dst_dtype)])


@pytest.mark.parametrize("dst_dtype", FLOATS)
def test_a_product_is_rounded_before_it_is_added(dst_dtype: torch.dtype) -> None:
    source = awkward_floats()[::29].contiguous()
    n = source.numel()
    segments = [*whole(n), Segment(ZEROS, 0, 0, 9, n, 9, 1, 9)]
    destination = awkward_floats()[1 : 1 + n + 9].to(dst_dtype)
    for scale in (0.75, 1 / 3, 2.0**-130, -float("inf")):
        for accumulate in (False, True):
            check(segments, [source], [destination], scale, accumulate)
    numbers = torch.randn(n, generator=torch.Generator().manual_seed(1))
    check(segments, [numbers], [destination], 1 / 3, accumulate=True)


@settings(max_examples=25, deadline=None)
@given(
    plan=plans(),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.bfloat16),
            (torch.float16, torch.float32),
            (torch.uint8, torch.uint8),
            (torch.int64, torch.int64),
        ]
    ),
    accumulate=st.booleans(),
    missing=st.sampled_from([None, 0, 1]),
)
def test_copies_as_the_cpu_and_pytorch_do(
    plan: RandomPlan,
    dtypes: tuple[torch.dtype, torch.dtype],
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
    adds = accumulate and dtypes[0] != dtypes[1]
    check(segments, sources, destinations, 0.3 if adds else 1.0, adds)


@pytest.mark.parametrize("dtypes", SOME_PAIRS)
def test_rows_of_any_alignment_in_vectors_and_what_is_left(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    for odd in ("rows", "src_offset", "dst_offset", "src_pitch", "dst_pitch"):
        for count in (1, 3):
            segments, end = [], 0
            for cols in (5, 16, 17, 48, 63, 2064):
                even = Segment(0, 0, 32, 4096, end, 4096, count, cols)
                segments.append(even._replace(**{odd: getattr(even, odd) + 1}))
                end += 4 * 4096 + 16
            size = end + 4096
            sources: list[Tensor | None] = [values(4 * 4096 + 32, dtypes[0], 1)]
            check(segments, sources, [values(size, dtypes[1], 2)])


def test_a_plain_copy_keeps_the_payloads_of_nans() -> None:
    for dtype in FLOATS[1:]:
        source = every_16_bit_pattern().view(dtype)
        check(whole(2**16), [source], [torch.zeros_like(source)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_is_set_if_what_is_written_is_not_finite(dtype: torch.dtype) -> None:
    segments = [Segment(0, 0, 0, 1000, 1, 1000, 1, 1000), Segment(1, 0, 0, 30, 1002, 30, 1, 30)]
    for value in (1.0, 1e5, float("nan"), float("inf"), -float("inf")):
        for at in (0, 999):
            source, before = torch.ones(1000), torch.ones(1100, dtype=dtype)
            source[at] = value
            before[0] = float("nan")  # not written
            check(segments, [source, None], [before], accumulate=True, watched=True)
            if dtype == torch.float32:
                check(segments, [source, None], [before], watched=True)


@settings(max_examples=20, deadline=None)
@given(plan=plans(), dtype=st.sampled_from(OTHERS + UNKNOWN_TO_CORE))
def test_dtypes_without_conversion_are_moved(
    plan: tuple[list[Segment], list[int], list[int]], dtype: torch.dtype
) -> None:
    segments, src_sizes, dst_sizes = plan
    sources: list[Tensor | None] = [values(size, dtype, i) for i, size in enumerate(src_sizes)]
    check(segments, sources, [values(size, dtype, 7) for size in dst_sizes])


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


def test_zero_sized_plans_do_nothing() -> None:
    nothing = torch.empty(0, device=DEVICE)
    one_of_nothing = CopyPlan.pack([0], [0], torch.float32, torch.float32)
    with triton_gpu():
        triton_copy(CopyPlan((), torch.float32, torch.float32), [], []).run()
        triton_copy(one_of_nothing, [nothing], [nothing]).run()


def test_a_copy_reads_new_sources() -> None:
    plan = CopyPlan.pack([4], [0], torch.float32, torch.float32)
    first, second = torch.ones(4, device=DEVICE), torch.full((4,), 2.0, device=DEVICE)
    flat = torch.empty(4, device=DEVICE)
    with triton_gpu() as gpu:
        gpu.may_read(first, second)
        gpu.may_write(flat)
        copy = triton_copy(plan, [first], [flat])
        copy.run()
        assert flat.tolist() == [1.0] * 4
        copy.set_operands(plan.source_pointers([second], DEVICE), [flat.data_ptr()])
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


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    integers = CopyPlan.pack([1], [0], torch.int32, torch.int32)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with triton_gpu(), pytest.raises(ValueError, match="scale, accumulate and nonfinite need"):
        triton_copy(integers, [one], [one.clone()]).run(scale=2.0)
    with pytest.raises(TypeError, match="the copy is on the CPU; Triton compiles for GPUs"):
        TritonCopy(integers.core, [0], [0], torch.device("cpu"))
    monkeypatch.setattr("shardcomm.copy.triton._copy_tile", "what the interpreter runs")
    with pytest.raises(TypeError, match="TRITON_INTERPRET was set when"):
        TritonCopy(integers.core, [0], [0], torch.device("cuda", 0))


@pytest.mark.parametrize("capability", [80, 100])
def test_other_gpus_compute_the_same(capability: int) -> None:
    source, destination = values(6000, torch.float32, 1), values(6000, torch.bfloat16, 2)
    check(whole(6000), [source], [destination], 0.3, True, True, capability)
