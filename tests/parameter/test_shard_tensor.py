"""What a rank holds, as rectangles of the whole tensor."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)

from shardcomm import Bucket, Communicator, Layout, ParamSpec, RowBlock
from shardcomm.parameter.shard_tensor import Part, Rectangle, ShardTensor, rectangles

AT_ONCE = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> ParamSpec:
    shape = draw(shapes)
    granularity = draw(st.sampled_from(["element", "row", "tensor", RowBlock(2)]))
    return ParamSpec(
        "p", shape, granularity, draw(st.integers(-max(len(shape), 1), max(len(shape) - 1, 0)))
    )


@given(shapes, st.data())
def test_rectangles_cover_a_run_of_elements_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    whole = torch.arange(numel).view(shape)
    found = [whole[r.slices].flatten() for r in rectangles(shape, begin, end)]
    assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(begin, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_the_drawing_in_the_docstring() -> None:
    assert rectangles((4, 6), 4, 17) == [
        Rectangle((0, 4), (1, 2)),
        Rectangle((1, 0), (1, 6)),
        Rectangle((2, 0), (1, 5)),
    ]


@given(st.lists(specs(), min_size=1, max_size=4), st.integers(1, 9))
def test_the_parts_of_all_ranks_tile_every_tensor(params: list[ParamSpec], ranks: int) -> None:
    layout = Layout.plan(params, ranks, align_bytes=4)
    wholes = [torch.arange(1.0, math.prod(p.shape) + 1).view(p.shape) for p in params]
    seen = [torch.zeros(p.shape) for p in params]
    for rank, comm in enumerate(Communicator.local_group(ranks)):
        bucket = Bucket(layout, comm, full_buffer=torch.empty(layout.flat_numel))
        bucket.load(wholes)
        for index, (placement, shard) in enumerate(
            zip(layout.placements, bucket.shards, strict=True)
        ):
            held = Part(placement, layout.piece(rank, index), ranks).of(shard)
            assert held.shape == wholes[index].shape
            for rectangle, part in zip(held.rectangles, held.parts, strict=True):
                assert torch.equal(part, wholes[index][rectangle.slices])
                assert part.numel() == 0 or _in(part, bucket.shard), "a copy"
                seen[index][rectangle.slices] += 1
    assert all(torch.equal(count, torch.ones_like(count)) for count in seen)


def _in(part: torch.Tensor, memory: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def some(ranks: int = 1) -> ShardTensor:
    layout = Layout.plan([ParamSpec("p", (4, 6), "element")], 1)
    return Part(layout.placements[0], layout.piece(0, 0), ranks).of(torch.arange(24.0))


@pytest.mark.parametrize("stager", [BlockingAsyncStager(), DefaultStager(AT_ONCE)])
def test_a_staged_copy_is_apart(stager: AsyncStager) -> None:
    tensor = some()
    staged = stager.stage({"p": tensor})["p"]  # type: ignore[index]
    tensor.parts[0].zero_()
    assert isinstance(staged, ShardTensor)
    assert staged.rectangles == tensor.rectangles
    assert staged.part is tensor.part, "a copy, perhaps of process groups"
    assert torch.equal(staged.parts[0], torch.arange(24.0).view(4, 6))


def test_a_copy_holds_its_own_part_alone() -> None:
    layout = Layout.plan([ParamSpec("p", (4, 6))], 1)
    memory = torch.arange(1000.0)
    tensor = Part(layout.placements[0], layout.piece(0, 0), 1).of(memory[24:48].view(4, 6))
    for copied in (copy.deepcopy(tensor), tensor.to(torch.float64), tensor.detach().clone()):
        assert isinstance(copied, ShardTensor)
        assert copied.parts[0].dtype == copied.dtype
        assert copied.parts[0].untyped_storage().nbytes() == 24 * copied.itemsize
        assert torch.equal(copied.parts[0], torch.arange(24, 48, dtype=copied.dtype).view(4, 6))
    assert torch.equal(torch.zeros_like(tensor).parts[0], torch.zeros(4, 6))


def test_it_is_not_for_computing() -> None:
    with pytest.raises(NotImplementedError, match=r"add.Tensor of a ShardTensor, which is for che"):
        _ = some() + 1


def test_ranks_without_a_process_group_cannot_save() -> None:
    with pytest.raises(RuntimeError, match=r"each of the 2 ranks would write a checkpoint of its "):
        some(ranks=2).__create_write_items__("p", None)
    assert len(some(ranks=1).__create_write_items__("p", None)) == 1
