"""Arrays of other libraries as operands. On a GPU: test_local_gpu.py."""

import numpy as np
import pytest
import torch
from thread_ranks import run_threads

from shardcomm import Communicator, CopyPlan
from shardcomm.arrays import as_tensor


def test_numpy_arrays_are_packed_where_they_are() -> None:
    sources = [np.arange(6, dtype=np.float32), np.ones((2, 2), dtype=np.float32)]
    flat = np.zeros(10, dtype=np.float32)
    CopyPlan.pack([6, 4], [0, 6], torch.float32, torch.float32).run(sources, [flat])
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 1]


def test_numpy_arrays_go_through_collectives() -> None:
    def body(comm: Communicator) -> None:
        whole = np.zeros(2 * comm.size, dtype=np.float32)
        comm.all_gather(whole, np.full(2, comm.rank, dtype=np.float32))
        assert whole.tolist() == [rank for rank in range(comm.size) for _ in range(2)]
        total = np.full(3, comm.rank, dtype=np.int64)
        comm.all_reduce(total)
        assert total.tolist() == [comm.size * (comm.size - 1) // 2] * 3

    run_threads(body, 3)


def test_arrays_that_run_backwards_or_must_not_be_written_are_refused() -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match=r"all_reduce: buffer has strides \(-4,\) in bytes"):
        comm.all_reduce(np.ones(4, dtype=np.float32)[::-1])
    frozen = np.ones(4, dtype=np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="all_reduce: buffer is a read-only array"):
        comm.all_reduce(frozen)
    whole = np.zeros(4, dtype=np.float32)
    comm.all_gather(whole, frozen)  # which only reads it
    assert whole.tolist() == [1.0] * 4
    with pytest.raises(TypeError, match="all_reduce: buffer: DLPack only supports"):
        comm.all_reduce(np.array(["a"]))


def test_a_tensor_is_itself() -> None:
    tensor = torch.ones(2)
    assert as_tensor("x", tensor) is tensor


def test_what_is_no_array_is_refused_by_name() -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises(TypeError, match="all_gather: send is a list; accepted"):
        comm.all_gather(torch.zeros(2), [1.0, 2.0])  # type: ignore[arg-type]
    plan = CopyPlan.pack([2], [0], torch.float32, torch.float32)
    with pytest.raises(TypeError, match=r"sources\[0\] is a NoneType|sources\[0\] is a str"):
        plan.run(["x"], [torch.zeros(2)])  # type: ignore[list-item]
