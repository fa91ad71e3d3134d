"""Partial sums that cross between hosts as bfloat16 or in blocks, against their definitions.

Two hosts of two ranks, which are one host here that says it is two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardcomm import BlockFormat, CommError, Communicator, Transport, launch
from shardcomm.comm import introduction
from shardcomm.copy.blocks import ReduceFormat
from shardcomm.copy.wire_stats import WireError, WireStats
from support.block_reference import bounds_of, encoded, scales_of, values_of

RANKS, HOSTS = 4, 2
NEAREST = [torch.bfloat16, BlockFormat("mxint8"), BlockFormat("mxfp8", 128)]

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def connected(deadline_s: float = 60.0) -> Communicator:
    rank = int(os.environ["RANK"])
    introduction.host_identity = lambda: "AABB"[rank]  # type: ignore[assignment]
    return Communicator.from_env(transport="hosts", deadline_s=deadline_s)


def drawn(seed: int, rank: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-9, 3, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), exponents)


def in_blocks(sums: Tensor, format: BlockFormat) -> Tensor:
    return nn.functional.pad(sums.double(), (0, -sums.numel() % format.block)).view(
        -1, format.block
    )


def on_wire(sums: Tensor, format: ReduceFormat) -> Tensor:
    """What a host's sums for one rank are after they have crossed. Blocks begin where the rank's part does."""
    if not isinstance(format, BlockFormat):
        return sums.to(format).float()
    blocks = in_blocks(sums, format)
    return values_of(format.name, *encoded(format.name, blocks)).flatten()[: sums.numel()].float()


def bound_of(sums: Tensor, format: ReduceFormat) -> float:
    """The largest bound of a block; in bfloat16, half a step of 8 bits below the largest element's first."""
    if not sums.numel():
        return 0.0
    if not isinstance(format, BlockFormat):
        return float(sums.abs().max()) * 2**-8
    blocks = in_blocks(sums, format)
    stochastic = format.rounding == "stochastic"
    return float(bounds_of(format.name, blocks, scales_of(format.name, blocks), stochastic).max())


def host_sums(values: Sequence[Tensor]) -> list[Tensor]:
    """In float32, and so as they are taken: of two ranks there is one order."""
    return [values[0].float() + values[1].float(), values[2].float() + values[3].float()]


def reduce(
    comm: Communicator,
    recv: Tensor,
    send: Tensor,
    format: ReduceFormat,
    stats: WireStats,
    op: Any = "sum",
    counts: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    bound = comm.bind_reduction(recv, send, op, counts=counts, format=format, stats=stats)
    bound(comm.streams.reduce, None, recv, scale, accumulate, None).wait()


def reductions(seed: int) -> None:
    torch.set_num_threads(1)
    with connected() as comm:
        host, index = divmod(comm.rank, RANKS // HOSTS)
        for format in NEAREST:
            for numel, dtype in [
                (1, torch.float32),
                (1000, torch.bfloat16),
                (300_000, torch.float32),
            ]:
                counts = [numel, 0, 2 * numel, 37]
                everybody = [drawn(seed, r, sum(counts)).to(dtype) for r in range(RANKS)]
                # What the other rank of the host reads where it is, and what it cannot reach.
                reached = comm.allocate(sum(counts), dtype=dtype, use="reduce")
                reached.copy_(everybody[comm.rank])
                parts = [each.split(counts) for each in host_sums(everybody)]
                wanted = sum(on_wire(part[comm.rank], format) for part in parts)
                stats = WireStats()
                recv = torch.full((counts[comm.rank],), torch.nan)
                reduce(comm, recv, everybody[comm.rank], format, stats, counts=counts)
                assert recv.equal(wanted), (format, numel)
                again = torch.full_like(recv, torch.nan)
                reduce(comm, again, reached, format, WireStats(), counts=counts)
                reached.fill_(torch.nan)  # nobody reads it any more
                assert again.equal(wanted), (format, numel)

                # This rank has sent its host's sums for the ranks with its index.
                sent = parts[host][index::2]
                seen = max(
                    [float((s - on_wire(s, format)).abs().max()) for s in sent if s.numel()],
                    default=0.0,
                )
                assert stats.seen == seen, (format, numel)
                assert stats.bound == max(bound_of(s, format) for s in sent), (format, numel)
                assert stats.flagged == 0
                assert stats.seen <= stats.bound

                mean = torch.ones(counts[comm.rank], dtype=torch.bfloat16)
                send = everybody[comm.rank]
                reduce(comm, mean, send, format, stats, "avg", counts, scale=0.5, accumulate=True)
                expected = (1 + 0.5 * (wanted / RANKS)).bfloat16()
                torch.testing.assert_close(mean, expected, rtol=2**-7, atol=0)


@pytest.mark.covers("collectives", transports=["hosts"])
def test_hosts_exchange_coded_sums(seed: int) -> None:
    launch(reductions, RANKS, (seed,), timeout_s=120)


def with_nan(format: ReduceFormat) -> tuple[Tensor, WireError]:
    with connected() as comm:
        send = torch.ones(4 * 64)
        if comm.rank == 3:
            send[5], send[64 + 40] = torch.nan, torch.inf  # for ranks 0 and 1
        recv, stats = torch.empty(64), WireStats()
        reduce(comm, recv, send, format, stats)
        return recv, stats.take()


@pytest.mark.parametrize("format", [torch.bfloat16, BlockFormat("mxint8")], ids=str)
def test_nan_and_inf_are_flagged_and_arrive(format: ReduceFormat) -> None:
    told = launch(with_nan, RANKS, (format,), timeout_s=60)
    (first, second, *others), errors = zip(*told, strict=True)
    wholes = isinstance(format, BlockFormat)  # of which a block is NaN as a whole
    assert first.isnan().nonzero().flatten().tolist() == (list(range(32)) if wholes else [5])
    if wholes:
        assert second.isnan().nonzero().flatten().tolist() == list(range(32, 64))
    else:
        assert second.isinf().nonzero().flatten().tolist() == [40]
    assert all(other.equal(torch.full((64,), 4.0)) for other in others)
    assert [error.flagged for error in errors] == [0, 0, 1, 1]  # rank 2 sends to 0, and 3 to 1


def stochastic(times: int) -> Tensor:
    """The sums of the same values `times` times, with the error of each."""
    format = BlockFormat("mxint8", rounding="stochastic")
    with connected() as comm:
        everybody = [drawn(5, r, 4 * 64) for r in range(RANKS)]
        exact = sum(host_sums(everybody)).view(RANKS, -1)[comm.rank]
        results = []
        for _ in range(times):
            recv, stats = torch.empty(64), WireStats()
            reduce(comm, recv, everybody[comm.rank], format, stats)
            bounds = torch.tensor([stats.seen, stats.bound])
            assert stats.seen <= stats.bound
            comm.all_reduce(bounds, "max")
            assert float((recv - exact).abs().max()) <= HOSTS * float(bounds[1]) * 1.001
            results.append((recv - exact) / bounds[1])
        return torch.stack(results)


def test_stochastic_sums_are_right_on_average_and_the_same_in_each_run() -> None:
    times = 400
    first, second = (launch(stochastic, RANKS, (times,), timeout_s=60) for _ in range(2))
    for once, again in zip(first, second, strict=True):
        assert once.equal(again)
        assert not once[0].equal(once[1])  # each call draws for itself
        # The error of a mean of independent errors in +-2 bounds, by Hoeffding: beyond it once in 10^10.
        assert float(once.mean(0).abs().max()) < 2 * (2 * 24 / times) ** 0.5
    one_rank = first[0]
    assert float(one_rank.abs().max()) > 0.1  # it can tell


def differing() -> str:
    with connected(20.0) as comm:
        format = BlockFormat("mxint8") if comm.rank < 2 else torch.bfloat16
        with pytest.raises(CommError) as raised:
            reduce(comm, torch.empty(64), torch.ones(256), format, WireStats())
        return str(raised.value)


def test_ranks_with_other_formats_end_all() -> None:
    errors = launch(differing, RANKS, timeout_s=60)
    named = "sum, mxint8 in blocks of 32 between hosts"
    assert any(named in error and "sum, bf16 between hosts" in error for error in errors), errors


def refused(transport: Transport) -> str:
    with Communicator.from_env(transport=transport) as comm:
        with pytest.raises(ValueError, match="leave it out") as raised:
            comm.bind_reduction(torch.empty(4), torch.ones(8), format=torch.bfloat16)
        comm.barrier()
        return str(raised.value)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_transports_without_sums_of_hosts_refuse(transport: Transport) -> None:
    for error in launch(refused, 2, (transport,), timeout_s=60):
        assert f"transport '{transport}' has no such sums; leave it out" in error


def test_other_formats_and_dtypes_are_refused() -> None:
    launch(refuses_arguments, RANKS, timeout_s=60)


def refuses_arguments() -> None:
    with connected() as comm:
        for format in (torch.float16, "mxint8", BlockFormat):
            with pytest.raises(TypeError, match=r"it must be torch\.bfloat16, a shardcomm\.Block"):
                comm.bind_reduction(torch.empty(4), torch.ones(16), format=format)  # type: ignore[arg-type]
        whole = torch.ones(16, dtype=torch.float64)
        recv = torch.empty(4, dtype=torch.float64)
        bound = comm.bind_reduction(recv, whole, format=torch.bfloat16)
        with pytest.raises(ValueError, match=r"dtype is f64, and partial sums are coded; accepted"):
            bound(comm.streams.reduce, None, recv, 1.0, False, None)
        comm.barrier()
