"""FSDP2's copies, made by CopyPlan in memory that a `GroupCopies` owns, and by torch in all other memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule  # noqa: F401  (with it the operators come)

from shardcomm import fsdp2, launch
from shardcomm.interop.fsdp2.copies import GroupCopies
from support.fsdp2_cases import Case, make, optimizer_of, step

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
CHUNK_CATS = [
    name for name in ("chunk_cat", "chunk_cat_mixed_dtype") if hasattr(torch.ops.fsdp, name)
]


@pytest.fixture
def copies() -> Iterator[GroupCopies]:
    owner = GroupCopies("cpu")
    yield owner
    owner.close()


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=generator).float()


def sizes_of(generator: torch.Generator) -> list[int]:
    return torch.randint(0, 40, (7,), generator=generator).tolist()  # type: ignore[no-any-return]


def plans(copies: GroupCopies) -> int:
    return len(copies._plans)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_in_fills_this_ranks_slot_only(
    copies: GroupCopies, generator: torch.Generator, dtype: torch.dtype
) -> None:
    sizes = sizes_of(generator)
    total = sum(sizes)
    inputs = [random(generator, size).to(dtype) for size in sizes]
    memory = copies.own(torch.zeros(3 * total, dtype=dtype))
    slot, output = torch.ops.fsdp.all_gather_copy_in(inputs, memory, sizes, total, 1)
    assert torch.equal(slot, torch.cat(inputs))
    assert torch.equal(output, torch.cat([torch.zeros_like(slot), slot, torch.zeros_like(slot)]))
    assert slot.data_ptr() == memory[total:].data_ptr()
    assert plans(copies) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_out_is_torchs_split(
    copies: GroupCopies, generator: torch.Generator, dtype: torch.dtype
) -> None:
    sizes, ranks = sizes_of(generator), 4
    memory = copies.own(random(generator, ranks * sum(sizes)).to(dtype)).view(ranks, -1)
    out = [torch.empty(ranks, size, dtype=dtype) for size in sizes]
    torch.ops.fsdp.split_with_sizes_copy(memory, sizes, dim=1, out=out)
    assert all(map(torch.equal, out, memory.split(sizes, dim=1)))
    assert plans(copies) == 1


@pytest.mark.parametrize("operator", CHUNK_CATS)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_chunk_cat_is_torchs(
    copies: GroupCopies, generator: torch.Generator, wire: torch.dtype, operator: str
) -> None:
    grads = [random(generator, rows, 6).t().contiguous().t() for rows in (1, 2, 7, 12)]
    expected = torch._chunk_cat(grads, 0, 4)
    memory = copies.own(torch.full_like(expected, 7.0, dtype=wire).flatten())
    getattr(torch.ops.fsdp, operator)(grads, dim=0, num_chunks=4, out=memory.view(4, -1))
    assert torch.equal(memory.view(4, -1), expected.to(wire))
    assert plans(copies) == 1


def test_memory_of_others_and_freed_memory_are_torchs(
    copies: GroupCopies, generator: torch.Generator
) -> None:
    grads = [random(generator, 5, 3)]
    for memory in (torch.empty(2, 9), copies.own(torch.empty(18)).clone().view(2, 9)):
        torch.ops.fsdp.chunk_cat(grads, dim=0, num_chunks=2, out=memory)
        assert torch.equal(memory, torch._chunk_cat(grads, 0, 2))
    assert plans(copies) == 0


def test_a_copy_that_no_plan_makes_is_torchs(
    copies: GroupCopies, generator: torch.Generator
) -> None:
    memory = copies.own(random(generator, 12)).view(4, 3)
    out = [torch.empty(1, 3), torch.empty(3, 3)]
    torch.ops.fsdp.split_with_sizes_copy(memory, [1, 3], dim=0, out=out)
    assert all(map(torch.equal, out, memory.split([1, 3])))
    assert plans(copies) == 0


def test_closed_all_are_torchs(generator: torch.Generator) -> None:
    owner = GroupCopies("cpu")
    memory = owner.own(torch.empty(18)).view(2, 9)
    owner.close()
    torch.ops.fsdp.chunk_cat([random(generator, 5, 3)], dim=0, num_chunks=2, out=memory)
    assert plans(owner) == 0


def test_a_step_makes_all_its_copies_by_plan() -> None:
    launch(record_copies, 2, timeout_s=60)


def record_copies() -> None:
    dist.init_process_group("gloo")
    net = make(Case(), init_device_mesh("cpu", (2,)))
    made: list[str] = []
    run = GroupCopies._run

    def recorded(owner: GroupCopies, key: tuple[str, object], *args: object) -> None:
        made.append(key[0])
        run(owner, key, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupCopies, "_run", recorded)
        attached = fsdp2.attach(net, level="copies")
        step(net, optimizer_of(net), 0)
    # Four modules, three of which are gathered again for backward.
    assert [made.count(kind) for kind in ("in", "out", "cat")] == [7, 7, 4], made
    attached.detach()
    dist.destroy_process_group()


def test_copies_of_one_shape_in_several_dtypes_are_planned_apart() -> None:
    copies = GroupCopies("cpu")
    try:
        for wide, narrow in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
            grads = [torch.randn(5, 3, dtype=wide), torch.randn(2, dtype=wide)]
            expected = torch._chunk_cat(grads, 0, 2).to(narrow)
            out = torch.empty_like(expected)
            copies.chunk_cat(grads, 0, 2, out=out)
            assert torch.equal(out, expected)
    finally:
        copies.close()
