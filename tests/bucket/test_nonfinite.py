"""The flag for NaN and Inf, of everything that writes a reduced gradient, against torch.isfinite of the result."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardcomm import _C, Bucket, Communicator, CopyPlan, Stream, launch
from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.segment import ZEROS, Segment
from support.instruction_sets import instruction_set  # noqa: F401  (a fixture)
from support.random_plans import FLOATS, RandomPlan, expect, plans, rectangle, values
from support.thread_ranks import run_threads

CPU = 0  # in place of a number of the CUDA kernel's threads
NONFINITE = [float("nan"), float("inf"), -float("inf")]


def new_flag(device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def is_finite(result: Tensor) -> bool:
    return bool(result.isfinite().all())


def reduce(
    dst: Tensor, sources: list[Tensor], scale: float, accumulate: bool, threads: int
) -> bool:
    """Whether the flag was set; by the CPU's code, or by the CUDA kernel's of so many threads."""
    flag = new_flag()
    arguments = (
        dst.data_ptr(), core_dtype(dst.dtype), scale, accumulate,
        [source.data_ptr() for source in sources], core_dtype(sources[0].dtype), _C.RedOp.sum, dst.numel(),
    )  # fmt: skip
    if threads == CPU:
        _C.reduce(*arguments, flag.data_ptr())
    else:
        _C.walk_reduce(*arguments, threads, flag.data_ptr())
    return bool(flag)


def ordinary(choose: random.Random, count: int, dtype: torch.dtype) -> Tensor:
    """Finite numbers: around 1, subnormal, or so large that some sums and conversions overflow."""
    limits = torch.finfo(dtype)
    size = choose.choice([1.0, 1.0, limits.tiny / 16, limits.max / 16, limits.max])
    return (torch.rand(count, dtype=torch.float64).mul(2).sub(1) * size).to(dtype)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("threads", [CPU, 32])
def test_reductions_find_what_is_not_finite_wherever_it_is(threads: int, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    found = 0
    for case in range(1500):
        src, dst = choose.choice([*[(a, b) for a in FLOATS for b in FLOATS], (torch.float64,) * 2])
        count = choose.choice([1, 7, 8, 127, 128, 129, choose.randrange(1, 700)])
        start = choose.choice([0, 0, 1, 3])  # within a vector
        sources = [
            ordinary(choose, start + count, src)[start:] for _ in range(choose.randrange(1, 5))
        ]
        result = ordinary(choose, start + count, dst)[start:]
        scale, accumulate = choose.choice([1.0, 0.25, -2.0]), choose.random() < 0.5
        poison = choose.random() < 0.3
        if poison:
            at = choose.choice([0, count - 1, choose.randrange(count)])
            operand = choose.choice([*sources, result] if accumulate else sources)
            operand[at] = choose.choice(NONFINITE)
        flagged = reduce(result, sources, scale, accumulate, threads)
        assert flagged == (not is_finite(result)), (seed, case, src, dst, count, scale, accumulate)
        assert flagged or not poison
        found += flagged
    assert 300 < found < 1300  # neither all nor none


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_is_told(dtype: torch.dtype) -> None:
    run = 64  # as long as vectors are
    patterns = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    everywhere = patterns.repeat_interleave(run)
    result = torch.empty(run, dtype=dtype)
    wide = core_dtype(dtype)
    flag = new_flag()
    for i, finite in enumerate(patterns.float().isfinite().tolist()):
        source = everywhere.data_ptr() + i * run * dtype.itemsize
        flag.zero_()
        _C.reduce(
            result.data_ptr(), wide, 1.0, False, [source], wide, _C.RedOp.sum, run, flag.data_ptr()
        )
        assert flag.item() != finite, i


@pytest.mark.parametrize(
    ("src", "dst", "value", "finite"),
    [
        (torch.float32, torch.float16, 65519.0, True),  # rounds to the largest
        (torch.float32, torch.float16, 65520.0, False),
        (torch.bfloat16, torch.float16, -1e5, False),
        (torch.float32, torch.bfloat16, torch.finfo(torch.float32).max, False),
        (torch.float32, torch.bfloat16, torch.finfo(torch.bfloat16).max, True),
        (torch.float32, torch.float32, torch.finfo(torch.float32).max, True),
        (torch.float32, torch.float32, 1e-45, True),
    ],
)
def test_overflow_of_a_conversion_counts(
    src: torch.dtype, dst: torch.dtype, value: float, finite: bool
) -> None:
    source = torch.zeros(300, dtype=src)
    source[-1] = value
    result = torch.zeros(300, dtype=dst)
    for threads in (CPU, 32):
        assert reduce(result, [source], 1.0, False, threads) != finite
    plan = CopyPlan.pack([300], [0], src, dst)
    flag = new_flag()
    plan.bind([source], [result]).run(nonfinite=flag)
    assert bool(flag) != finite


def test_sums_overflow() -> None:
    large = torch.full((10,), torch.finfo(torch.float32).max)
    assert not reduce(large.clone(), [large], 1.0, False, CPU)
    assert reduce(large.clone(), [large, large], 1.0, False, CPU)
    assert reduce(large.clone(), [large], 1.0, True, CPU)
    assert reduce(large.clone(), [large], 2.0, False, CPU)


def test_integers_are_finite_and_a_flag_is_never_cleared() -> None:
    ones = torch.full((100,), -1, dtype=torch.int64)
    assert not reduce(ones.clone(), [ones], 1.0, False, CPU)
    flag = new_flag().fill_(1)
    plan = CopyPlan.pack([4], [0], torch.float32, torch.float32)
    plan.bind([torch.ones(4)], [torch.empty(4)]).run(nonfinite=flag)
    assert flag.item() == 1


@settings(max_examples=50, deadline=None)
@given(
    plan=plans(),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.5]),
    accumulate=st.booleans(),
    poison=st.one_of(st.none(), st.tuples(st.integers(0, 1 << 20), st.sampled_from(NONFINITE))),
    walked=st.booleans(),
)
def test_copies_look_at_what_they_write_and_at_nothing_else(
    plan: RandomPlan,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
    poison: tuple[int, float] | None,
    walked: bool,
) -> None:
    segments, src_sizes, dst_sizes = plan
    src, dst = dtypes
    sources: list[Tensor | None] = [values(n, src, seed=i) for i, n in enumerate(src_sizes)]
    destinations = [torch.full((size,), float("nan"), dtype=dst) for size in dst_sizes]
    if accumulate:
        for to in destinations:
            to.fill_(1.0)
    if poison is not None and sources:
        at, value = poison
        chosen = sources[at % len(sources)]
        assert chosen is not None
        if chosen.numel():
            chosen[at % chosen.numel()] = value
    written = [
        rectangle(expected[s.dst], s.dst_offset, s.dst_pitch, s.rows, s.cols)
        for expected in [expect(segments, sources, destinations, scale, accumulate)]
        for s in segments
    ]
    flag = new_flag()
    core = CopyPlan(tuple(segments), src, dst).core
    pointers = [
        [0 if each is None else each.data_ptr() for each in operands]
        for operands in (sources, destinations)
    ]
    if walked:
        _C.walk_launches(
            core, *pointers, scale, accumulate, 1024, 4000, 3, 32, flag.data_ptr()
        )  # fmt: skip
    else:
        _C.BoundCopy(core, *pointers).run(scale, accumulate, flag.data_ptr())
    assert bool(flag) != all(map(is_finite, written))


@pytest.mark.parametrize("at", [0, 1, 1_500_000, 2_499_999])
def test_large_copies_past_the_caches_and_on_threads_look_too(at: int) -> None:
    source = torch.ones(2_500_000)
    source[at] = float("nan")
    segment = Segment(0, 0, 0, source.numel(), 1, source.numel(), 1, source.numel())
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.empty(source.numel() + 1, dtype=dtype)
        flag = new_flag()
        plan = CopyPlan((segment,), torch.float32, dtype)
        plan.bind([source], [target], threads=2).run(nonfinite=flag)
        assert flag.item() == 1
        zeros = CopyPlan((segment._replace(src=ZEROS, src_offset=0),), torch.float32, dtype)
        flag = new_flag()
        zeros.bind([], [target], threads=2).run(nonfinite=flag)
        assert flag.item() == 0


def scattered(comm: Communicator, seed: int) -> None:
    """Rank 0 or another makes an element bad, in the part of one rank: its flag is set, and nobody else's."""
    choose = random.Random(seed)
    stream = comm.streams.reduce
    for case in range(60):
        src, dst = choose.choice([*[(a, b) for a in FLOATS for b in FLOATS], (torch.float64,) * 2])
        part = choose.choice([1, 8, 129, 1000])
        bad_rank, bad_part = choose.randrange(comm.size), choose.randrange(comm.size)
        at, value = choose.choice([0, part - 1]), choose.choice([1.0, *NONFINITE])
        options = {"scale": choose.choice([1.0, 0.5]), "accumulate": choose.random() < 0.5}
        queued = choose.choice([None, stream])
        send = torch.ones(comm.size * part, dtype=src, device=comm.device)
        if choose.random() < 0.5:
            send = comm.allocate(comm.size * part, dtype=src, use="reduce").fill_(1)
        if comm.rank == bad_rank:
            send[bad_part * part + at] = value
        result = torch.ones(part, dtype=dst, device=comm.device)
        flag = new_flag(comm.device)
        comm.streams.after_compute(stream)
        comm.reduce_scatter(result, send, nonfinite=flag, stream=queued, **options)
        stream.record().wait()
        assert bool(flag) == (not is_finite(result)) == (comm.rank == bad_part and value != 1.0), (
            seed,
            case,
            src,
            dst,
            part,
        )
        comm.barrier()


def scattered_between_processes(seed: int) -> None:
    for transport in ("shm", "c10d"):
        with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
            assert comm.transport == transport
            scattered(comm, seed)


@pytest.mark.covers("NaN and Inf flags")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_reduce_scatter_sets_the_flag_of_the_rank_whose_part_it_is(ranks: int, seed: int) -> None:
    run_threads(lambda comm: scattered(comm, seed), ranks)


@pytest.mark.covers("NaN and Inf flags")
def test_a_reduce_scatter_between_processes_does_so_too(seed: int) -> None:
    launch(scattered_between_processes, 2, (seed,), timeout_s=60)


@pytest.mark.covers("NaN and Inf flags")
@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_reduce_scatter_on_a_gpu_does_so_too(ranks: int, seed: int) -> None:
    run_threads(lambda comm: scattered(comm, seed), ranks, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_buckets_flag_tells_of_its_gradients(ranks: int, dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"a": torch.ones(64, 32, dtype=dtype)}, comm)
        bucket.nonfinite = new_flag()
        for value in (1.0, float("inf")):
            bucket.reduce_scatter([torch.full((64, 32), value, dtype=dtype)])  # the second is added
            assert bool(bucket.nonfinite) == (value != 1.0)

    run_threads(body, ranks)


@pytest.mark.parametrize(
    "flag", [torch.zeros(1), torch.zeros(2, dtype=torch.int32), new_flag("meta")]
)
def test_flags_that_are_none_are_refused(flag: Tensor) -> None:
    comm = Communicator.local_group(1)[0]
    message = r"nonfinite is .*; it must be one of torch.int32 on cpu"
    with pytest.raises(ValueError, match="reduce_scatter: " + message):
        comm.reduce_scatter(torch.ones(1), torch.ones(1), nonfinite=flag)
    plan = CopyPlan.pack([1], [0], torch.float32, torch.float32)
    with pytest.raises(ValueError, match="run: " + message):
        plan.bind([torch.ones(1)], [torch.ones(1)]).run(nonfinite=flag)
    integers = CopyPlan.pack([1], [0], torch.int32, torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="nonfinite need f32, bf16 or f16, not i32"):
        integers.bind([one], [one.clone()]).run(nonfinite=new_flag())


@pytest.mark.parametrize(
    "flag", [torch.zeros(1), torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)]
)
def test_bucket_refuses_what_is_no_flag(flag: Tensor) -> None:
    (comm,) = Communicator.local_group(1)
    bucket = Bucket.from_tensors({"w": torch.ones(4, 2)}, comm)
    with pytest.raises(ValueError, match=r"Bucket: nonfinite is .* it must be one of torch\.int32"):
        bucket.nonfinite = flag


def test_queued_reduce_keeps_its_flag() -> None:
    def body(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"w": torch.ones(256, 2)}, comm)  # every rank has rows of it
        flag = new_flag()
        bucket.nonfinite = flag
        work = bucket.reduce_scatter([torch.full((256, 2), float("nan"))], async_op=True)
        gone = weakref.ref(flag)
        bucket.nonfinite = None
        del flag
        kept = gone()
        assert kept is not None
        work.wait()
        assert bool(kept)
        del kept
        assert gone() is None

    run_threads(body, 2)


def test_bound_reduce_refuses_another_size_or_dtype() -> None:
    def body(comm: Communicator) -> None:
        send = comm.allocate(8, use="reduce")
        reduce = comm.bind_reduction(torch.zeros(4), send)
        stream = Stream()
        for recv in (torch.zeros(2), torch.zeros(4, dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"it was bound with 4 of torch\.float32"):
                reduce(stream, None, recv, 1.0, False, None)

    run_threads(body, 2)
