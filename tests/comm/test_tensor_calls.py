"""The usual calls cross into the core once; what is not usual is left to the checks, and is not called there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from shardcomm import _C, Communicator
from shardcomm.comm import core
from support.thread_ranks import run_threads

RANKS, PART = 2, 6
DTYPES = [
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]

pytestmark = pytest.mark.covers("collectives")


@pytest.fixture
def alone() -> Iterator[_C.Communicator]:
    """A group of one rank: nothing that is wrongly called there can wait for another."""
    (comm,) = _C.make_local_group(1, 30.0)
    yield comm
    comm.close()


CALLS = _C.TensorCalls(torch.Tensor)

# Each takes two tensors of one rank, of which the first is written.
OPERATIONS: dict[str, Callable[[_C.Communicator, torch.Tensor, torch.Tensor], bool]] = {
    "all_gather": CALLS.all_gather,
    "reduce_scatter": lambda comm, to, of: CALLS.reduce_scatter(comm, to, of, _C.RedOp.sum),
    "all_reduce": lambda comm, to, _: CALLS.all_reduce(comm, to, _C.RedOp.sum),
    "broadcast": lambda comm, to, _: CALLS.broadcast(comm, to, 0),
}

USUAL: dict[str, Callable[[], torch.Tensor]] = {
    "flat": lambda: torch.ones(PART),
    "matrix": lambda: torch.ones(2, 3),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.empty(0, 3),
    "view": lambda: torch.ones(3, PART)[1],
    "one long in a dimension": lambda: torch.ones(PART, 1).T,
    "needs a gradient": lambda: torch.ones(PART, requires_grad=True),
} | {str(dtype): lambda dtype=dtype: torch.ones(PART).to(dtype) for dtype in DTYPES}  # type: ignore[misc]


def without_memory(index: int) -> torch.Tensor:
    """A part of what FSDP leaves of full parameters between their uses."""
    part = torch.ones(2, PART)[index]
    part.untyped_storage().resize_(0)
    return part


UNUSUAL: dict[str, Callable[[], object]] = {
    "strided": lambda: torch.ones(PART, 2)[:, 0],
    "transposed": lambda: torch.ones(2, 3).T,
    "expanded": lambda: torch.ones(1).expand(PART),
    "negated": lambda: torch.ones(PART)._neg_view(),
    "one negated element": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "conjugated": lambda: torch.ones(PART, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "without its memory": lambda: without_memory(0),
    "at the end of what was freed": lambda: without_memory(1),
    "on no device": lambda: torch.empty(PART, device="meta"),
    "a parameter": lambda: nn.Parameter(torch.ones(PART)),
    "a dtype that is only moved": lambda: torch.ones(PART, dtype=torch.int16),
    "bytes": lambda: torch.ones(PART, dtype=torch.uint8),
    "which DLPack calls bytes": lambda: torch.empty(PART, dtype=torch.uint4),
    "a list": lambda: [1.0],
    "nothing": lambda: None,
}


@pytest.mark.parametrize("of", USUAL)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_usual_tensors_cross_once(alone: _C.Communicator, operation: str, of: str) -> None:
    assert OPERATIONS[operation](alone, USUAL[of](), USUAL[of]())


@pytest.mark.parametrize("of", UNUSUAL)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_others_are_left_to_the_checks(alone: _C.Communicator, operation: str, of: str) -> None:
    run, dense = OPERATIONS[operation], torch.ones(PART)
    assert not run(alone, UNUSUAL[of](), dense)  # type: ignore[arg-type]
    if operation in ("all_gather", "reduce_scatter"):
        assert not run(alone, dense, UNUSUAL[of]())  # type: ignore[arg-type]
    assert alone.receipts() == []


@pytest.mark.parametrize("numel", [0, 1, PART - 1, PART + 1, 2 * PART])
def test_other_sizes_are_left_to_the_checks(alone: _C.Communicator, numel: int) -> None:
    assert not CALLS.all_gather(alone, torch.ones(PART), torch.ones(numel))
    assert not CALLS.reduce_scatter(alone, torch.ones(PART), torch.ones(numel), _C.RedOp.sum)


def test_a_type_without_the_interface_has_no_usual_tensors(alone: _C.Communicator) -> None:
    class Other:
        pass

    assert not _C.TensorCalls(Other).all_gather(alone, Other(), Other())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_right_and_each_call_crossed_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks, of what the communicator itself calls."""
    crossed: list[str] = []

    class Seen:
        def __getattr__(self, operation: str) -> Callable[..., bool]:
            def call(*args: object) -> bool:
                crossed.append(operation)
                ran: bool = getattr(CALLS, operation)(*args)
                return ran

            return call

    monkeypatch.setattr(core, "_CALLS", Seen())

    def body(comm: Communicator) -> None:
        own = torch.arange(1, PART + 1).to(dtype) * (comm.rank + 1)
        whole = torch.arange(RANKS * PART).to(dtype) + comm.rank
        gathered, scattered = torch.empty(RANKS * PART, dtype=dtype), torch.empty(PART, dtype=dtype)
        comm.all_gather(gathered, own)
        comm.reduce_scatter(scattered, whole, "max")
        reduced, sent = whole.clone(), own.clone()
        comm.all_reduce(reduced, "sum")
        comm.broadcast(sent, 1)

        ranks = torch.arange(1, RANKS + 1).unsqueeze(1)
        parts = torch.arange(RANKS * PART)
        begin = comm.rank * PART
        assert torch.equal(gathered, (torch.arange(1, PART + 1) * ranks).flatten().to(dtype))
        assert torch.equal(scattered, (parts + RANKS - 1)[begin : begin + PART].to(dtype))
        assert torch.equal(reduced, (RANKS * parts + 1).to(dtype))
        assert torch.equal(sent, (torch.arange(1, PART + 1) * 2).to(dtype))

    run_threads(body, RANKS)
    assert sorted(crossed) == sorted(RANKS * list(OPERATIONS))
