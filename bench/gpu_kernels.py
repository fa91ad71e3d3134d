"""The copy and reduce kernels on a GPU: against a device-to-device copy of as many bytes, and against PyTorch's own.

- pack and unpack one Llama-3-8B block and one GPT-2 block, and reduce the slices of 1, 2 and 8 ranks into a float32
  shard, scaled and added: the fraction of a plain copy's bandwidth, bytes counted read plus written (target: 0.9 past
  the L2 cache). torch does the same reduction beside it (target: never slower).
- the shapes of 8 ranks, rank 0's work: FSDP2's cast, copy-in and copy-out against our one cast (target: 4 times); its
  copy-out and its chunk-cat against our plans of the same copies, and against our pack; its cast and additions of the
  reduced gradients against our one unpack (target: never slower).
- 1,000 tensors of 4 KiB: one launch against torch._foreach_copy_ (target: 5 times).
- host time to issue a unit's gather and its reduce, one rank, beside FSDP2's copies for them (target: never slower).

An H200's L2 cache holds 60 MB. "Past L2", a contender goes round sets of operands that together are more than twice
that, so that each is in memory again when its turn comes; "in L2", it has one set that fits. A Llama block is past L2
by itself; the other figures of a GPT-2 block are in L2.

Random inputs; every result is compared with PyTorch's. A round times all contenders once, in turn; the ratio is that
of medians. `--device cpu` runs the same on small shapes, to try the script; its figures mean nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from fsdp2_copies import GatherCopies
from harness import Bound, Report, Times, arguments
from padding import BLOCKS, specs
from torch import Tensor

from shardcomm import _C, Bucket, Communicator
from shardcomm.arguments.dtype import core_dtype
from shardcomm.copy.plan import CopyPlan
from shardcomm.layout.layout import Layout
from shardcomm.stream.streams import compute_stream

RANKS = 8
L2_BYTES = 60_000_000
PAST_L2, IN_L2 = "past L2", "in L2"
Operation = Callable[[], object]


@dataclass(frozen=True)
class Place:
    """Where it runs, and how large."""

    device: torch.device
    l2_bytes: int
    repeats: int

    def seconds(self, operation: Operation) -> float:
        """Of one operation, on the device, back to back."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            operation()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.repeats):
            operation()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / self.repeats

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)


def require_equal(name: str, result: Tensor, expected: Tensor) -> None:
    if not torch.equal(result, expected):
        raise SystemExit(f"{name}: the result differs from PyTorch's")


def contest(place: Place, rounds: int, *operations: Operation) -> list[Times]:
    for operation in operations:
        operation()
    samples = [[place.seconds(operation) for operation in operations] for _ in range(rounds)]
    return [Times(tuple(row[i] for row in samples)) for i in range(len(operations))]


def sets_of(place: Place, nbytes: int, where: str) -> int:
    """How many sets of operands, of so many bytes each, a contender goes round."""
    return 1 if where == IN_L2 else 2 * place.l2_bytes // nbytes + 1


def in_turn(operations: Sequence[Operation]) -> Operation:
    turns = itertools.cycle(operations)
    return lambda: next(turns)()  # noqa: PLW0108  (another one at each call)


def against_a_copy(
    place: Place,
    rounds: int,
    report: Report,
    label: str,
    nbytes: int,
    where: str,
    *operations: Operation,
    at_least: float | None = None,
) -> list[Times]:
    """Times `operations`; reports the first as a fraction of the bandwidth of a copy that moves as many bytes."""
    sets = sets_of(place, nbytes, where)
    plain = torch.empty(sets, 2, nbytes // 2, dtype=torch.uint8, device=place.device).random_()
    copy = in_turn([lambda pair=pair: pair[0].copy_(pair[1]) for pair in plain])
    limit, *times = contest(place, rounds, copy, *operations)
    fraction = limit.median / times[0].median
    bandwidth = nbytes / limit.median / 1e9
    report.row(f"{label}, {where}", times[0], f"copy {bandwidth:.0f} GB/s", f"{fraction:.2f} of it")
    report.figures[f"{label}, {where}"] = {
        "median_s": times[0].median,
        "bytes": nbytes,
        "copy_bytes_per_s": nbytes / limit.median,
        "fraction_of_copy": fraction,
    }
    if at_least is not None:
        report.bounds.append(Bound(f"{label}, {where}, of a copy", fraction, at_least=at_least))
    return times


def copies(place: Place, rounds: int, report: Report) -> None:
    """Pack and unpack whole blocks, as fractions of a plain copy."""
    f32, bf16 = torch.float32, torch.bfloat16
    for block, shapes in blocks(place).items():
        layout = Layout.plan(specs(shapes, 0), RANKS, itemsize=2)
        sizes = [p.numel for p in layout.placements]
        offsets = [p.offset for p in layout.placements]
        numel = sum(sizes)
        for where in (PAST_L2, IN_L2):
            casts, moves, unpacks = [], [], []
            for _ in range(sets_of(place, 4 * numel, where)):
                wide = [place.random(n) for n in sizes]
                narrow = [each.to(bf16) for each in wide]
                flat = torch.zeros(layout.flat_numel, dtype=bf16, device=place.device)
                sums = [torch.zeros_like(each) for each in wide]
                cast = CopyPlan.pack(sizes, offsets, f32, bf16, layout.gaps()).bind(wide, [flat])
                cast.run()
                for size, offset, source in zip(sizes, offsets, narrow, strict=True):
                    require_equal("pack f32 to bf16", flat[offset : offset + size], source)
                move = CopyPlan.pack(sizes, offsets, bf16, bf16, layout.gaps()).bind(narrow, [flat])
                flat.zero_()
                move.run()
                for size, offset, source in zip(sizes, offsets, narrow, strict=True):
                    require_equal("pack bf16 to bf16", flat[offset : offset + size], source)
                unpack = CopyPlan.unpack(sizes, offsets, bf16, f32).bind([flat], sums)
                unpack.run(accumulate=True)
                unpack.run(accumulate=True)
                for total, source in zip(sums, narrow, strict=True):
                    require_equal("unpack, accumulate", total, source.float() * 2)
                casts.append(cast.run)
                moves.append(move.run)
                unpacks.append(lambda unpack=unpack: unpack.run(accumulate=True))
            at_least = 0.9 if block.startswith("Llama") else None
            for name, nbytes, ours in (
                ("pack f32 to bf16", 6 * numel, casts),
                ("pack bf16 to bf16", 4 * numel, moves),
                ("unpack bf16 to f32, accumulate", 10 * numel, unpacks),
            ):
                if where == IN_L2 and nbytes > place.l2_bytes:
                    continue
                against_a_copy(
                    place,
                    rounds,
                    report,
                    f"{block}: {name}",
                    nbytes,
                    where,
                    in_turn(ours),
                    at_least=at_least,
                )


def reductions(place: Place, rounds: int, report: Report) -> None:
    """What a reduce-scatter ends with: the ranks' slices, summed in float32, averaged, scaled, added to the shard."""
    f32 = torch.float32
    scale = 0.5
    for dtype, ranks, where in itertools.product(
        (f32, torch.bfloat16), (1, 2, 8), (PAST_L2, IN_L2)
    ):
        # The shard alone is as large as L2; or all that is read and written is half of it.
        each = ranks * dtype.itemsize + 8
        count = place.l2_bytes // (4 if where == PAST_L2 else 2 * each) // 1024 * 1024
        nbytes = count * each
        ours, theirs = [], []
        for _ in range(sets_of(place, nbytes, where)):
            slices = place.random(ranks, count, dtype=dtype)
            shard = place.random(count)
            reduce = reduction(place, shard, slices, scale)
            sums = [part.float() for part in slices]
            while len(sums) > 1:  # in pairs, which is the order of our sums
                sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
            expected = shard + scale * (sums[0] * (1 / ranks))
            reduce()
            require_equal(f"reduce of {ranks} ranks, {dtype}", shard, expected)
            ours.append(reduce)
            theirs.append(
                lambda shard=shard, slices=slices, alpha=scale / ranks: shard.add_(
                    slices.sum(0, dtype=f32), alpha=alpha
                )
            )
        name = f"reduce of {ranks} ranks, {str(dtype).removeprefix('torch.')}, scale and accumulate"
        mine, torchs = against_a_copy(
            place, rounds, report, name, nbytes, where, in_turn(ours), in_turn(theirs),
            at_least=0.9 if where == PAST_L2 else None,
        )  # fmt: skip
        result(report, f"{name}, {where}, against torch", mine, torchs, at_least=1.0)


def reduction(place: Place, shard: Tensor, slices: Tensor, scale: float) -> Operation:
    """The kernel that the transports launch, into `shard`."""
    arguments = (
        shard.data_ptr(), core_dtype(shard.dtype), scale, True,
        [each.data_ptr() for each in slices], core_dtype(slices.dtype), _C.RedOp.avg, shard.numel(),
    )  # fmt: skip
    if place.device.type == "cpu":
        return lambda: _C.reduce(*arguments)
    stream = compute_stream(place.device)
    assert isinstance(stream, _C.Stream)
    return lambda: _C.reduce_cuda(stream, *arguments)


def gathers(place: Place, rounds: int, report: Report) -> None:
    """Rank 0's copies of one gather among 8 ranks. Every first dimension here divides by 8."""
    bf16 = torch.bfloat16
    for block, shapes in blocks(place).items():
        numels = [math.prod(shape) for shape in shapes]
        parts = [n // RANKS for n in numels]
        shards = [place.random(n) for n in parts]
        fsdp2 = GatherCopies(shards, RANKS, bf16)
        fsdp2.gathered.copy_(place.random(RANKS * sum(parts)))

        copied = [torch.empty_like(each) for each in fsdp2.full]
        copy_out = CopyPlan.copy_out(parts, RANKS, bf16, bf16).bind([fsdp2.gathered], copied)
        copy_out.run()
        fsdp2.run()
        for mine, peers in zip(copied, fsdp2.full, strict=True):
            require_equal("copy-out", mine, peers)
        theirs, ours = contest(place, rounds, fsdp2.copy_out, copy_out.run)
        result(report, f"{block}: copy-out, were it needed", ours, theirs, at_least=1.0)

        comm = Communicator.local_group(1, device=place.device)[0]
        shard = place.random(sum(parts))
        slot = torch.empty(RANKS * shard.numel(), dtype=bf16, device=place.device)
        own_slice = slot[: shard.numel()]

        def our_gather() -> None:
            comm.all_gather(own_slice, shard)  # noqa: B023  (of one rank: the cast alone)

        our_gather()
        require_equal("gather", own_slice, shard.to(bf16))
        theirs, ours = contest(place, rounds, fsdp2.run, our_gather)
        result(report, f"{block}: gather's copies", ours, theirs, at_least=4.0)


def reduces(place: Place, rounds: int, report: Report) -> None:
    """Rank 0's copies of one reduce among 8 ranks."""
    f32, bf16 = torch.float32, torch.bfloat16
    for block, shapes in blocks(place).items():
        parts = [math.prod(shape) // RANKS for shape in shapes]
        grads = [place.random(*shape, dtype=bf16) for shape in shapes]
        layout = Layout.plan(specs(shapes, 0), RANKS, itemsize=2)
        sizes = [p.numel for p in layout.placements]
        offsets = [p.offset for p in layout.placements]
        for dtype in (bf16, f32):
            flat = torch.zeros(layout.flat_numel, dtype=dtype, device=place.device)
            pack = CopyPlan.pack(sizes, offsets, bf16, dtype, layout.gaps()).bind(grads, [flat])
            pack.run()
            for offset, grad in zip(offsets, grads, strict=True):
                piece = flat[offset : offset + grad.numel()]
                require_equal("pack", piece, grad.flatten().to(dtype))
            chunks = torch.empty(RANKS, sum(parts), dtype=dtype, device=place.device)
            interleaved = torch.empty_like(chunks)
            ours_too = CopyPlan.chunk_cat(shapes, RANKS, bf16, dtype).bind(grads, [interleaved])
            ours_too.run()

            def chunk_cat() -> None:
                torch._chunk_cat(grads, 0, RANKS, out=chunks)  # noqa: B023

            chunk_cat()
            require_equal("chunk-cat", interleaved, chunks)
            theirs, same, ours = contest(place, rounds, chunk_cat, ours_too.run, pack.run)
            name = str(dtype).removeprefix("torch.")
            result(report, f"{block}: chunk-cat, bf16 to {name}", same, theirs, at_least=1.0)
            result(report, f"{block}: pack, bf16 to {name}", ours, theirs, at_least=1.0)

        reduced = place.random(sum(parts), dtype=bf16)
        totals = [torch.zeros(n, device=place.device) for n in parts]
        own = torch.zeros(sum(parts), device=place.device)
        plan = CopyPlan.unpack([sum(parts)], [0], bf16, f32)
        ours_of_it = plan.bind([reduced], [own])

        def accumulate() -> None:
            ours_of_it.run(accumulate=True)  # noqa: B023

        def fsdp2_accumulate() -> None:
            new = torch.split(reduced.to(f32), parts)  # noqa: B023
            for total, part in zip(totals, new, strict=True):  # noqa: B023
                total.add_(part)

        accumulate()
        require_equal("accumulate", own, reduced.float())
        theirs, ours = contest(place, rounds, fsdp2_accumulate, accumulate)
        result(report, f"{block}: reduce's cast and accumulation", ours, theirs, at_least=1.0)


def many_small(place: Place, rounds: int, report: Report) -> None:
    tensors = [place.random(1024) for _ in range(1000)]
    flat = torch.zeros(1024 * 1000, device=place.device)
    views = list(flat.view(1000, 1024).unbind())
    plan = CopyPlan.pack([1024] * 1000, range(0, 1024 * 1000, 1024), torch.float32, torch.float32)
    pack = plan.bind(tensors, [flat])
    pack.run()
    require_equal("1,000 tensors", flat, torch.cat(tensors))
    theirs, ours = contest(place, rounds, lambda: torch._foreach_copy_(views, tensors), pack.run)
    result(report, "1,000 tensors of 4 KiB, against _foreach_copy_", ours, theirs, at_least=5.0)


def host_time(place: Place, rounds: int, report: Report) -> None:
    """How long the host is busy with one unit, the device working beside it.

    Beside it the copies that FSDP2 makes where it has peers.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    comm = Communicator.local_group(1, device=place.device)[0]
    shapes = blocks(place)["GPT-2"]
    numels = [math.prod(shape) for shape in shapes]
    shards = [place.random(*shape) for shape in shapes]
    bucket = Bucket.from_tensors(
        {str(i): shard for i, shard in enumerate(shards)}, comm, param_dtype=bf16
    )
    grads = [place.random(*shape, dtype=bf16) for shape in shapes]
    flats = [shard.flatten() for shard in shards]
    totals = [torch.zeros_like(flat) for flat in flats]
    fsdp2_gather = GatherCopies(flats, 1, bf16).run

    def fsdp2_reduce() -> None:
        chunks = torch.empty(1, sum(numels), dtype=bf16, device=place.device)
        torch._chunk_cat(grads, 0, 1, out=chunks)
        for total, part in zip(totals, chunks.view(-1).to(f32).split(numels), strict=True):
            total.add_(part)

    def host_seconds(*operations: Operation) -> list[Times]:
        samples: list[list[float]] = [[] for _ in operations]
        for _ in range(10 * rounds):
            for operation, seconds in zip(operations, samples, strict=True):
                start = time.perf_counter()
                operation()
                seconds.append(time.perf_counter() - start)
                if place.device.type == "cuda":
                    torch.cuda.synchronize()
        return [Times(tuple(seconds)) for seconds in samples]

    for name, operation, peer in (
        ("gather", lambda: bucket.all_gather(async_op=True), fsdp2_gather),
        ("reduce", lambda: bucket.reduce_scatter(grads, async_op=True), fsdp2_reduce),
    ):
        operation()
        peer()
        ours, theirs = host_seconds(operation, peer)
        label = f"host time of a unit's {name}, GPT-2 block, 1 rank"
        result(report, label, ours, theirs, at_least=1.0)


def blocks(place: Place) -> dict[str, Sequence[tuple[int, ...]]]:
    if place.device.type == "cuda":
        return dict(BLOCKS)
    return {
        name: [tuple(max(8, n // 32) for n in shape) for shape in shapes]
        for name, shapes in BLOCKS.items()
    }


def result(report: Report, name: str, ours: Times, theirs: Times, *, at_least: float) -> None:
    ratio = theirs.median / ours.median
    report.row(name, ours, f"{theirs}", f"{ratio:.2f} times")
    report.figures[name] = {
        "median_s": ours.median,
        "reference_median_s": theirs.median,
        "ratio": ratio,
    }
    report.bounds.append(Bound(f"{name}, theirs / ours", ratio, at_least=at_least))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda":
        place = Place(torch.device("cuda", torch.cuda.current_device()), L2_BYTES, 10)
    else:
        place = Place(device, L2_BYTES // 64, 1)
    report = Report(["operation", "ours, median (p10-p90)", "theirs, or bandwidth", "ratio"])
    copies(place, args.rounds, report)
    reductions(place, args.rounds, report)
    gathers(place, args.rounds, report)
    reduces(place, args.rounds, report)
    many_small(place, args.rounds, report)
    host_time(place, args.rounds, report)
    report.finish(args)


if __name__ == "__main__":
    main()
