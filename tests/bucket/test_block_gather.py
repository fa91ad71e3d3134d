"""Buckets whose gathers code their first parameters, and send the others as they are, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardcomm import BlockFormat, Bucket, Communicator, Layout, ParamSpec, RowBlock
from shardcomm.layout.param_spec import Granularity
from support.block_reference import encoded, values_of
from support.thread_ranks import run_threads

SHAPES = {"a": (19, 48), "b": (47, 33), "norm": (48,), "bias": (47,), "scalar": (), "empty": (0, 3)}
CODED = 2


def made(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]


def layout_of(ranks: int, granularity: Granularity, block: int, **options: Any) -> Layout:
    specs = [ParamSpec(name, shape, granularity) for name, shape in SHAPES.items()]
    return Layout.plan(specs, ranks, align_bytes=max(128, 2 * block), itemsize=2, **options)


def on_wire(flat: Tensor, format: BlockFormat) -> Tensor:
    blocks = nn.functional.pad(flat.double(), (0, -flat.numel() % format.block))
    values = values_of(format.name, *encoded(format.name, blocks.view(-1, format.block)))
    return values.flatten()[: flat.numel()]


def expected(
    layout: Layout, weights: list[Tensor], format: BlockFormat, to: torch.dtype
) -> list[Tensor]:
    """The parameters as ranks compute with them: the coded ones piece by piece, since a piece begins a block."""
    values = []
    for i, weight in enumerate(weights):
        if i >= CODED:
            values.append(weight.to(to))
            continue
        numels = [layout.piece(rank, i).numel for rank in range(layout.world_size)]
        pieces = weight.flatten().split(numels)
        values.append(torch.cat([on_wire(each, format) for each in pieces]).to(weight.dtype).to(to))
    return [value.view(weight.shape) for value, weight in zip(values, weights, strict=True)]


@pytest.mark.covers("block formats", "buckets", "granularity", "mixed precision")
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("granularity", ["element", "row", "tensor", RowBlock(4)], ids=str)
@pytest.mark.parametrize(("ranks", "shared"), [(2, True), (3, True), (3, False)])
def test_one_gather_codes_the_first_parameters_and_sends_the_others_as_they_are(
    ranks: int, shared: bool, granularity: Granularity, dtypes: tuple[str, str]
) -> None:
    """Ranks that share the full buffer decode a part each; others decode all parts."""
    dtype, param_dtype = (getattr(torch, name) for name in dtypes)
    weights, format = made(dtype), BlockFormat("mxint8", 64)
    layout = layout_of(ranks, granularity, format.block)
    wanted = expected(layout, weights, format, param_dtype)

    def run(comm: Communicator) -> None:
        bucket = Bucket(
            layout,
            comm,
            dtype=dtype,
            param_dtype=param_dtype,
            gather_format=format,
            coded=CODED,
            full_buffer=None if shared else torch.zeros(layout.flat_numel, dtype=param_dtype),
        )
        bucket.load(weights)
        for async_op in (False, True):
            bucket.all_gather(async_op=async_op).wait()
            for param, value in zip(bucket.params, wanted, strict=True):
                torch.testing.assert_close(param, value, rtol=0, atol=0, equal_nan=True)
            comm.barrier()  # the ranks of a host may share the full parameters
            for param in bucket.params:
                param.data.fill_(torch.nan)  # the next gather writes them all
            comm.barrier()

    run_threads(run, ranks)


@pytest.mark.covers("block formats", "buckets")
def test_a_shard_may_have_wide_elements_before_coded_ones() -> None:
    """The layout takes the order that needs the least padding: on rank 0 the wide `c` lies between `a` and `b`."""
    weights = [torch.randn(5, 32), torch.randn(4, 192), torch.randn(2, 128)]
    specs = [ParamSpec(n, tuple(w.shape)) for n, w in zip("abc", weights, strict=True)]
    layout = Layout.plan(specs, 2)
    assert [layout.piece(0, i).offset for i in range(3)] == [0, 416, 160]
    wanted = expected(layout, weights, BlockFormat("mxint8"), torch.float32)

    def run(comm: Communicator) -> None:
        bucket = Bucket(layout, comm, gather_format=BlockFormat("mxint8"), coded=CODED)
        bucket.load(weights)
        bucket.all_gather()
        assert all(map(torch.equal, bucket.params, wanted))

    run_threads(run, 2)


@pytest.mark.covers("block formats", "buckets")
def test_owners_send_what_they_own() -> None:
    weights, format = made(torch.float32), BlockFormat("mxfp8")
    layout = layout_of(3, "tensor", format.block, owners=[2, 0, 2, 1, 1, 0])
    wanted = expected(layout, weights, format, torch.float32)

    def run(comm: Communicator) -> int:
        bucket = Bucket(layout, comm, gather_format=format, coded=CODED)
        bucket.load(weights)
        bucket.all_gather()
        assert all(map(torch.equal, bucket.params, wanted))
        return bucket.gather_bytes

    # b on rank 0 in 49 blocks; bias and scalar on rank 1, from 64 elements on; a in 29 blocks and norm on rank 2.
    parts = [13 * 128, 3 * 128, 8 * 128 + 2 * 128]
    assert run_threads(run, 3) == [sum(parts) - part for part in parts]


def test_nan_in_a_wide_parameter_is_no_cost_of_the_format() -> None:
    weights, format = made(torch.float32), BlockFormat("mxint8")
    weights[2][:] = torch.nan
    weights[3][0] = 1e30
    layout = layout_of(2, "row", format.block)

    def run(comm: Communicator) -> None:
        bucket = Bucket(layout, comm, gather_format=format, coded=CODED)
        bucket.load(weights)
        bucket.all_gather()
        assert bucket.params[2].isnan().all()
        error = bucket.gathering.take_error()
        assert error is not None
        assert error.flagged == 0
        assert error.bound < 1.0

    run_threads(run, 2)


@pytest.mark.parametrize("coded", [-1, 7, True, 1.0, "all"])
def test_other_numbers_of_coded_parameters_are_refused(coded: object) -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match=r"coded is .*; it must be a whole number from 0 to 6"):
        Bucket(
            layout_of(1, "row", 32),
            comm,
            gather_format=BlockFormat("mxint8"),
            coded=coded,  # type: ignore[arg-type]
        )
