"""Communicators with sums="exact": sums that are rounded once, against fractions; and who refuses them."""

import itertools
import math
import os
import random
import socket
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardcomm
from shardcomm import _C, Communicator
from shardcomm.arguments.dtype import core_dtype
from support.exact_sums import exact_sum, exact_sums, rounded
from support.instruction_sets import instruction_set  # noqa: F401  (a fixture)
from support.thread_ranks import run_group

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NARROW = [torch.float32, torch.bfloat16, torch.float16]


def as_bits(x: Tensor) -> Tensor:
    """Bits, with one NaN for all."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(kinds[x.itemsize])


def awkward(count: int, dtype: torch.dtype, choose: random.Random, sources: int) -> list[Tensor]:
    """Columns that cancel, tie, spread over the format, are subnormal, overflow, or are not finite."""
    info = torch.finfo(dtype)
    # Exponents up to which a tensor of doubles can be made, and the step of subnormal numbers.
    low = round(math.log2(info.smallest_normal * info.eps))
    high = round(math.log2(info.max))
    columns = []
    for _ in range(count):
        kind = choose.randrange(8)
        middle = choose.randint(low, high)
        spread = choose.choice([0, 3, 14, 26, 30, 60, 3000])
        column = [
            choose.choice([-1, 1])
            * (1 + choose.randrange(64) * info.eps)
            * 2.0 ** min(max(middle + choose.randint(-spread, spread), low), high - 1)
            for _ in range(sources)
        ]
        if kind == 0:  # what cancels leaves what is small
            column[-1] = -column[0]
        elif kind == 1:  # half a unit in the last place of the first, and perhaps a little more
            column = [x if k == 0 else 0.0 for k, x in enumerate(column)]
            column[-1] = column[0] * choose.choice([-1, 1]) * info.eps / 2
            if sources > 2:
                column[1] = choose.choice([0, -1, 1]) * 2.0**low
        elif kind == 2:
            column = [choose.choice([0.0, -0.0]) for _ in column]
        elif kind == 3:
            column[choose.randrange(sources)] = choose.choice([math.inf, -math.inf, math.nan])
            column[choose.randrange(sources)] = choose.choice([math.inf, -math.inf, 1.0])
        elif kind == 4:  # partial sums overflow
            column[:2] = [info.max, choose.choice([-1, 1]) * info.max][: min(2, sources)]
        elif kind == 5:
            column = [choose.randint(-9, 9) * 2.0**low for _ in column]
        choose.shuffle(column)
        columns.append(column)
    return list(torch.tensor(columns, dtype=torch.float64).to(dtype).T.contiguous())


def reduce_cpu(sources: list[Tensor], dst: Tensor, op: Any, scale: float = 1.0) -> Tensor:
    _C.reduce(
        dst.data_ptr(),
        core_dtype(dst.dtype),
        scale,
        False,
        [source.data_ptr() for source in sources],
        core_dtype(sources[0].dtype),
        op,
        dst.numel(),
    )
    return dst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_awkward_sums_are_rounded_once_in_any_order(
    dtype: torch.dtype,
    ranks: int,
    seed: int,
    instruction_set: str,  # noqa: F811
) -> None:
    choose = random.Random(seed)
    for recv in NARROW if dtype is not torch.float64 else [dtype]:
        # Long runs of one kind: the fastest way must be right alone.
        sources = awkward(400, dtype, choose, ranks)
        sources = [torch.cat([s, torch.randn(300).to(dtype)]) for s in sources]
        wanted = exact_sums(sources, recv)
        for _ in range(3):
            choose.shuffle(sources)
            got = reduce_cpu(sources, torch.empty(700, dtype=recv), _C.RedOp.exact_sum)
            torch.testing.assert_close(as_bits(got), as_bits(wanted), rtol=0, atol=0)


# One bit decides: 1 + 2^-24 ties to even, and 2^-149, far below, makes it more or less than a tie.
@example(columns=[[1.0, 2.0**-24, 2.0**-149], [1.0, 2.0**-24, -(2.0**-149)]])
@example(columns=[[1.0, 2.0**-24, 0.0], [1.0 + 2.0**-23, 2.0**-24, -0.0]])
@example(columns=[[2.0**127, 2.0**127, -(2.0**127)], [2.0**-149, 2.0**127, -(2.0**127)]])
@given(
    columns=st.lists(
        st.lists(
            st.floats(width=32) | st.sampled_from([0.0, -0.0, 2.0**-149, 2.0**-24, 1.0, 2.0**127]),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_floats_are_summed_exactly(columns: list[list[float]]) -> None:
    sources = list(torch.tensor(columns, dtype=torch.float32).T.contiguous())
    for recv in NARROW:
        got = reduce_cpu(sources, torch.empty(len(columns), dtype=recv), _C.RedOp.exact_sum)
        assert torch.equal(as_bits(got), as_bits(exact_sums(sources, recv)))


@example(columns=[[-0.0] * 5])
@given(columns=st.lists(st.lists(st.floats(), min_size=5, max_size=5), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_doubles_are_summed_exactly(columns: list[list[float]]) -> None:
    sources = list(torch.tensor(columns, dtype=torch.float64).T.contiguous())
    got = reduce_cpu(sources, torch.empty(len(columns), dtype=torch.float64), _C.RedOp.exact_sum)
    assert torch.equal(as_bits(got), as_bits(exact_sums(sources, torch.float64)))
    for column, value in zip(columns, got.tolist(), strict=True):
        if all(abs(x) < 1e300 for x in column):
            assert value == math.fsum(column)


def test_reference_rounds_as_ieee_754_says() -> None:
    assert rounded(1 + Fraction(1, 2**24), torch.float32) == 1.0
    assert rounded(1 + Fraction(3, 2**24), torch.float32) == 1 + 2.0**-22
    assert exact_sum([65504.0, 15.9], torch.float16) == 65504.0
    assert exact_sum([65504.0, 16.0], torch.float16) == math.inf
    assert exact_sum([2.0**-25], torch.float16) == 0.0
    assert exact_sum([3 * 2.0**-25], torch.float16) == 2.0**-23


def reduced(comm: Communicator, values: list[Tensor], dtype: torch.dtype, pieces: int) -> Tensor:
    """The sum on every rank, in pieces, by each way there is."""
    own = values[comm.rank]
    whole = own.clone()
    for piece in whole.tensor_split(pieces):
        comm.all_reduce(piece)
    parts = []
    for piece in own.tensor_split(pieces):
        numel = -(-piece.numel() // comm.size)
        send = comm.allocate(numel * comm.size, dtype=dtype, use="reduce")
        send[: piece.numel()] = piece
        recv, full = torch.empty(numel, dtype=dtype), torch.empty(numel * comm.size, dtype=dtype)
        comm.reduce_scatter(recv, send if pieces % 2 else send.clone())
        comm.all_gather(full, recv)
        parts.append(full[: piece.numel()])
    assert torch.equal(as_bits(torch.cat(parts)), as_bits(whole))
    return whole


def exact_over_shm(values: list[Tensor], pieces: int) -> Tensor:
    with Communicator.from_env(sums="exact", transport="shm") as comm:
        assert comm.sums == "exact"
        return reduced(comm, values, values[0].dtype, pieces)


@pytest.mark.covers("collectives", transports=["shm", "local"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permutations_buckets_and_transports_give_the_same_bits(
    dtype: torch.dtype, seed: int
) -> None:
    values = awkward(1500, dtype, random.Random(seed), 3)
    wanted = exact_sums(values, dtype)
    for order, pieces in zip(itertools.permutations(range(3)), [1, 2, 3, 7, 1, 2], strict=True):
        given = [values[k] for k in order]
        results = run_group(
            lambda comm, given=given, pieces=pieces: reduced(comm, given, dtype, pieces),
            Communicator.local_group(3, sums="exact"),
        )
        for result in results:
            assert torch.equal(as_bits(result), as_bits(wanted)), (order, pieces)
    for result in shardcomm.launch(exact_over_shm, 3, (values[::-1], 2), timeout_s=60):
        assert torch.equal(as_bits(result), as_bits(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_is_the_exact_sum_over_the_number_of_ranks(dtype: torch.dtype, seed: int) -> None:
    sources = awkward(500, torch.float32, random.Random(seed), 4)
    sums = [exact_sum(c, torch.float32) for c in zip(*(s.tolist() for s in sources), strict=True)]
    wanted = (torch.tensor(sums, dtype=torch.float32) / 4).to(dtype)
    if dtype is torch.bfloat16:  # rounded once, and a quarter of that
        wanted = exact_sums(sources, dtype) / 4
    got = reduce_cpu(sources, torch.empty(500, dtype=dtype), _C.RedOp.exact_avg)
    normal = ~(wanted.abs() < 2**-120) & wanted.isfinite()  # others are rounded or overflow again
    assert torch.equal(as_bits(got)[normal], as_bits(wanted)[normal])


def test_integers_are_summed_as_ever() -> None:
    sources = [torch.arange(300) * k for k in (1, 2, 4)]
    got = reduce_cpu(sources, torch.empty(300, dtype=torch.int64), _C.RedOp.exact_sum)
    assert torch.equal(got, 7 * torch.arange(300))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(model: nn.Module, order: tuple[int, ...], comm: Communicator) -> list[Tensor]:
    """Two steps in which this rank has the batch that `order` says; this rank's rows then."""
    shardcomm.fully_shard(model, comm, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + order[comm.rank])
        model(torch.randn(5, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [cast("shardcomm.ShardedParameter", p).to_local().clone() for p in model.parameters()]


def whole(results: list[list[Tensor]]) -> Tensor:
    """All ranks' rows, in the order of parameters and ranks."""
    parameters = zip(*results, strict=True)
    return torch.cat([torch.cat([part.flatten() for part in parts]) for parts in parameters])


@pytest.mark.covers("training parity", strategies=["full_shard"])
def test_training_does_not_depend_on_which_rank_has_which_batch() -> None:
    def run(order: tuple[int, ...], sums: Any) -> Tensor:
        group = Communicator.local_group(3, sums=sums)
        models = [net() for _ in group]
        return whole(run_group(lambda comm: trained(models[comm.rank], order, comm), group))

    orders = list(itertools.permutations(range(3)))
    first, *others = [run(order, "exact") for order in orders]
    assert all(torch.equal(first, other) for other in others)
    # With sums that are rounded at each addition it does: the numbers here are not too simple.
    rounded_first, *rounded_others = [run(order, "fast") for order in orders]
    assert not all(torch.equal(rounded_first, other) for other in rounded_others)


def join_with(sums: list[Any]) -> str:
    try:
        Communicator.from_env(sums=sums[int(os.environ["RANK"])]).close()
    except (ValueError, shardcomm.CommError) as error:
        return str(error)
    return "joined"


def test_all_ranks_must_ask_for_the_same_sums() -> None:
    for said in shardcomm.launch(join_with, 2, (["exact", "fast"],), timeout_s=60):
        assert "the ranks gave different ones: exact, fast" in said


def over_c10d(sums: Any) -> str:
    try:
        Communicator.from_env(sums=sums, transport="c10d").close()
    except (ValueError, shardcomm.CommError) as error:
        return str(error)
    return "joined"


def test_what_has_no_exact_sums_refuses_them() -> None:
    for said in shardcomm.launch(over_c10d, 2, ("exact",), timeout_s=60):
        assert "sums is 'exact', but transport is 'c10d'" in said
        assert "'shm', or of 'local'" in said
    with pytest.raises(ValueError, match="sums is 'precise'; accepted: 'fast', 'exact'"):
        Communicator.local_group(2, sums="precise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sums is 'exact', but transport is 'hosts'"):
        Communicator.from_env(sums="exact", transport="hosts")
    on_host = _C.make_local_group(2, 60.0, -1, True)[0]
    sockets = [end.detach() for _ in range(2) for end in socket.socketpair()]
    with pytest.raises(ValueError, match="on_host has exact sums, and hosts exchange rounded ones"):
        _C.make_hosts(on_host, sockets, 0, 2)


def test_rows_and_columns_refuse_them() -> None:
    exact = Communicator.local_group(2, sums="exact")[0]
    plain = Communicator.local_group(2)[0]
    alone = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match="rounded in shard and again in replicate"):
        shardcomm.Mesh(shard=exact, replicate=plain)
    assert shardcomm.Mesh(shard=exact, replicate=alone).shard is exact
