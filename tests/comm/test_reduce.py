"""The arithmetic of reduce-scatter and all-reduce, against PyTorch's: of the CPU, and the CUDA kernel's code walked."""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardcomm import _C
from shardcomm.arguments.dtype import core_dtype
from shardcomm.stream.streams import compute_stream
from support.instruction_sets import instruction_set  # noqa: F401  (a fixture)
from support.rank_sums import combined

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int32, torch.int64]
OPS = {op.name: op for op in (_C.RedOp.sum, _C.RedOp.avg, _C.RedOp.max, _C.RedOp.min)}


def values(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        x = 10 * torch.randn(count, generator=generator, dtype=torch.float64)
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1e-40])
        where = torch.rand(count, generator=generator) < 0.02
        chosen = torch.randint(len(special), (count,), generator=generator)
        return torch.where(where, special[chosen], x).to(dtype)
    limits = torch.iinfo(dtype)
    low, high = (limits.min, limits.max) if dtype != torch.int64 else (-(2**62), 2**62)
    return torch.randint(low, high, (count,), generator=generator, dtype=dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in FLOATS else dtype


def expect(
    sources: list[Tensor],
    op: str,
    dst: Tensor,
    scale: float = 1.0,
    accumulate: bool = False,
    divisor: int = 0,
) -> Tensor:
    """As a tree, in the accumulator's precision, rounded once at the end."""
    wide = [source.to(accumulator(source.dtype)) for source in sources]
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    value = combined(wide, combine)
    n = divisor or len(sources)
    if op == "avg":
        if value.dtype.is_floating_point:
            value = value * (torch.ones((), dtype=value.dtype) / n)
        else:
            value = torch.div(value, n, rounding_mode="trunc")
    if scale != 1.0:
        value = value * scale
    if accumulate:
        value = dst.to(value.dtype) + value
    return value.to(dst.dtype)


CPU = 0
walked_threads = st.sampled_from([CPU, 1, 5, 256])


def run(
    dst: Tensor,
    sources: list[Tensor],
    op: str,
    scale: float = 1.0,
    accumulate: bool = False,
    threads: int = CPU,
    divisor: int = 0,
) -> None:
    """On the CPU, or the kernel's code, thread by thread of a launch of so many."""
    arguments = (
        dst.data_ptr(),
        core_dtype(dst.dtype),
        scale,
        accumulate,
        [source.data_ptr() for source in sources],
        core_dtype(sources[0].dtype),
        OPS[op],
        sources[0].numel(),
    )
    if threads == CPU:
        _C.reduce(*arguments, divisor=divisor)
    else:
        _C.walk_reduce(*arguments, threads, divisor=divisor)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))
    if result.dtype.is_floating_point:
        assert torch.equal(result.isinf(), expected.isinf())


@settings(max_examples=150, deadline=None)
@given(
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    op=st.sampled_from(sorted(OPS)),
    num_sources=st.integers(1, 9),
    count=st.integers(0, 700),
    epilogue=st.tuples(st.sampled_from([1.0, 0.25, -1.7]), st.booleans()),
    misalignment=st.integers(0, 3),
    threads=walked_threads,
    seed=st.integers(0, 10_000),
)
def test_floats_reduce_in_float32_as_a_tree(
    dtypes: tuple[torch.dtype, torch.dtype],
    op: str,
    num_sources: int,
    count: int,
    epilogue: tuple[float, bool],
    misalignment: int,
    threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    src_dtype, dst_dtype = dtypes
    scale, accumulate = float(torch.tensor(epilogue[0])), epilogue[1]
    sources = [
        values(count + misalignment, src_dtype, generator)[misalignment:]
        for _ in range(num_sources)
    ]
    guarded = values(count + 16, dst_dtype, generator)
    before = guarded.clone()
    dst = guarded[8 : 8 + count]
    expected = expect(sources, op, dst, scale, accumulate)

    run(dst, sources, op, scale, accumulate, threads)

    assert_same(dst, expected)
    assert_same(guarded[:8], before[:8])
    assert_same(guarded[8 + count :], before[8 + count :])


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([*INTEGERS, torch.float64]),
    op=st.sampled_from(sorted(OPS)),
    num_sources=st.integers(1, 5),
    count=st.integers(0, 700),
    accumulate=st.booleans(),
    threads=walked_threads,
    seed=st.integers(0, 10_000),
)
def test_integers_wrap_and_doubles_stay_doubles(
    dtype: torch.dtype,
    op: str,
    num_sources: int,
    count: int,
    accumulate: bool,
    threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sources = [values(count, dtype, generator) for _ in range(num_sources)]
    dst = values(count, dtype, generator)
    expected = expect(sources, op, dst, accumulate=accumulate)
    run(dst, sources, op, accumulate=accumulate, threads=threads)
    assert_same(dst, expected)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.float64])
def test_every_instruction_set_agrees(dtype: torch.dtype, op: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for num_sources in (1, 2, 3):
        sources = [values(5003, dtype, generator) for _ in range(num_sources)]
        dst = torch.empty_like(sources[0])
        run(dst, sources, op)
        assert_same(dst, expect(sources, op, dst))


@pytest.mark.parametrize("threads", [CPU, 64])
@pytest.mark.parametrize("num_sources", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_destination_may_be_a_source(
    dtype: torch.dtype, num_sources: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(6)
    for aliased in range(num_sources):
        sources = [values(3001, dtype, generator) for _ in range(num_sources)]
        expected = expect(sources, "sum", sources[aliased])
        run(sources[aliased], sources, "sum", threads=threads)
        assert_same(sources[aliased], expected)


@pytest.mark.parametrize("threads", [CPU, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_partial_sums_are_divided_by_the_number_of_ranks(dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for num_sources, ranks in ((1, 3), (2, 16), (3, 12)):
        sources = [values(1000, dtype, generator) for _ in range(num_sources)]
        dst = torch.empty_like(sources[0])
        run(dst, sources, "avg", threads=threads, divisor=ranks)
        assert_same(dst, expect(sources, "avg", dst, divisor=ranks))
        run(dst, sources, "max", threads=threads, divisor=ranks)
        assert_same(dst, expect(sources, "max", dst))


@pytest.mark.gpu
@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", sorted(OPS))
def test_a_gpu_reduces_as_pytorch_does(op: str, dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    stream = compute_stream(torch.device("cuda", torch.cuda.current_device()))
    for num_sources in (1, 2, 3, 8, 9):
        for count, misalignment in ((0, 0), (700, 0), (700, 1), (100_003, 0), (40_000_000, 0)):
            large = (2, "avg", torch.float32, torch.bfloat16)
            if count > 100_003 and (num_sources, op, dtype, dst_dtype) != large:
                continue
            sources = [
                values(count + misalignment, dtype, generator)[misalignment:]
                for _ in range(num_sources)
            ]
            dst = values(count, dst_dtype, generator)
            expected = expect(sources, op, dst, 0.25, True, divisor=10)
            there, on_gpu = dst.cuda(), [source.cuda() for source in sources]
            # Its first element is as misaligned as the host's.
            on_gpu = [torch.cat((s[:misalignment], s))[misalignment:] for s in on_gpu]
            _C.reduce_cuda(
                stream, there.data_ptr(), core_dtype(dst_dtype), 0.25, True,
                [source.data_ptr() for source in on_gpu], core_dtype(dtype), OPS[op], count,
                divisor=10,
            )  # fmt: skip
            assert_same(there.cpu(), expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_from_either_side(op: str) -> None:
    nan = float("nan")
    dst = torch.zeros(3)
    run(dst, [torch.tensor([nan, 1.0, nan]), torch.tensor([1.0, nan, nan])], op)
    assert dst.isnan().all()


def test_the_average_over_a_power_of_two_is_exact() -> None:
    source = torch.arange(1000, dtype=torch.float32) / 256
    dst = torch.empty(1000)
    run(dst, [source] * 8, "avg")
    assert torch.equal(dst, source)


def test_wrong_calls_are_refused() -> None:
    x, i = torch.ones(4), torch.ones(4, dtype=torch.int32)
    f32, i32 = _C.DType.f32, _C.DType.i32
    with pytest.raises(ValueError, match="num_sources is 0"):
        _C.reduce(x.data_ptr(), f32, 1.0, False, [], f32, _C.RedOp.sum, 4)
    with pytest.raises(ValueError, match="count is -1"):
        _C.reduce(x.data_ptr(), f32, 1.0, False, [x.data_ptr()], f32, _C.RedOp.sum, -1)
    with pytest.raises(ValueError, match="divisor is -2"):
        run(x, [x], "avg", divisor=-2)
    with pytest.raises(ValueError, match="no conversion from i32 to f32"):
        _C.reduce(x.data_ptr(), f32, 1.0, False, [i.data_ptr()], i32, _C.RedOp.sum, 4)
    with pytest.raises(ValueError, match="it must be 1 for i32"):
        run(i, [i], "sum", scale=2.0)
    with pytest.raises(TypeError, match=r"is of torch\.bool; accepted: torch\.uint8"):
        core_dtype(torch.bool)


@pytest.mark.parametrize("threads", [CPU, 5])
@pytest.mark.parametrize("num_sources", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_zeros_keep_their_sign(dtype: torch.dtype, num_sources: int, threads: int) -> None:
    """-0.0 + -0.0 is -0.0, as PyTorch has it; to begin with 0.0 would lose the sign."""
    for signs in (-1.0, 1.0):
        sources = [torch.full((77,), signs * 0.0, dtype=dtype) for _ in range(num_sources)]
        dst = torch.ones(77, dtype=dtype)
        run(dst, sources, "sum", threads=threads)
        assert torch.equal(dst.signbit(), reduce(torch.add, sources).signbit())
