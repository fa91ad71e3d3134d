"""Arrays of other libraries as operands. On a GPU: test_local_gpu.py."""

from __future__ import annotations

import re
import sys
from array import array
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from shardcomm import Communicator, CopyPlan
from shardcomm.arguments.arrays import as_tensor
from support.thread_ranks import run_threads


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
    with pytest.raises(TypeError, match=r"all_reduce: buffer is an array of >f4: DLPack only"):
        comm.all_reduce(np.ones(4, dtype=">f4"))
    with pytest.raises(
        TypeError, match=r"all_reduce: buffer is of torch\.int16; accepted: torch\.uint8"
    ):
        comm.all_reduce(np.ones(4, dtype=np.int16))


def test_masked_arrays_are_refused() -> None:
    hidden = np.ma.masked_greater(np.array([1.0, 99.0]), 9.0)
    comm = Communicator.local_group(1)[0]
    with pytest.raises(TypeError, match=r"all_reduce: buffer is a masked array, .* filled\(\)"):
        comm.all_reduce(hidden)
    with pytest.raises(TypeError, match=r"sources\[0\] is a masked array"):
        CopyPlan.pack([2], [0], torch.float64, torch.float64).run(
            [hidden], [torch.zeros(2).double()]
        )


def test_buffers_of_python_go_through_collectives() -> None:
    def body(comm: Communicator) -> None:
        part = array("f", [comm.rank, 0.5])
        whole = memoryview(bytearray(4 * 2 * comm.size)).cast("f")
        comm.all_gather(whole, part)
        assert whole.tolist() == [x for rank in range(comm.size) for x in (rank, 0.5)]
        word = bytearray(b"??" if comm.rank else b"ok")
        comm.broadcast(word)
        assert word == b"ok"
        letters = bytearray(comm.size)
        comm.all_gather(letters, b"ab"[comm.rank : comm.rank + 1])  # bytes, which cannot change
        assert letters == b"ab"

    run_threads(body, 2)


def test_buffers_that_no_tensor_can_be_are_refused() -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match="broadcast: buffer is a read-only buffer"):
        comm.broadcast(b"ab")
    with pytest.raises(ValueError, match=r"all_reduce: buffer has strides \(2,\) in bytes"):
        comm.all_reduce(memoryview(bytearray(4))[::2])
    with pytest.raises(
        TypeError, match=r"all_reduce: buffer is a buffer of elements of format '[uw]'"
    ):
        comm.all_reduce(memoryview(array("u", "ab")))
    with pytest.raises(TypeError, match=r"buffer is a list; accepted: a torch\.Tensor"):
        comm.all_reduce([1.0])  # type: ignore[arg-type]


class OnlyDLPack:
    """An array that other libraries see through DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **asked: Any) -> Any:
        return self.array.__dlpack__(**asked)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """Before DLPack 1.0."""

    def __dlpack__(self, **asked: Any) -> Any:
        if "max_version" in asked:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**asked)


class PlayedJax(OnlyDLPack):
    """As JAX 0.10 does (to_dlpack in jax/_src/dlpack.py): takes a version, and says nothing of who may write."""

    def __dlpack__(self, **asked: Any) -> Any:
        return self.array.__dlpack__()


def test_what_dlpack_says_of_its_memory_is_heard() -> None:
    comm = Communicator.local_group(1)[0]
    array = np.zeros(4, dtype=np.float32)
    for kind in (OnlyDLPack, OldDLPack):
        comm.all_gather(kind(array), torch.ones(4))
        assert array.tolist() == [1.0] * 4
        array[:] = 0
    array.flags.writeable = False
    with pytest.raises(ValueError, match="all_gather: recv is a read-only array; it is written to"):
        comm.all_gather(OnlyDLPack(array), torch.ones(4))
    assert array.tolist() == [0.0] * 4
    whole = torch.ones(4)
    comm.all_gather(whole, OnlyDLPack(array))
    assert whole.tolist() == [0.0] * 4


class BrokenDLPack(OnlyDLPack):
    def __dlpack__(self, **asked: Any) -> Any:
        raise RuntimeError("no such device")


class WithoutCuda:
    """Of a CUDA device, which torch cannot reach."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (4,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}


def test_what_an_array_raises_is_said_of_the_operand() -> None:
    comm = Communicator.local_group(1)[0]
    broken = BrokenDLPack(np.ones(4, dtype=np.float32))
    with pytest.raises(TypeError, match="all_reduce: buffer is an array of BrokenDLPack: no such"):
        comm.all_reduce(broken)
    with pytest.raises(TypeError, match="all_gather: send is an array of BrokenDLPack: no such"):
        comm.all_gather(torch.ones(4), broken)
    if not torch.cuda.is_available():
        with pytest.raises(TypeError, match="all_reduce: buffer is an array of WithoutCuda: "):
            comm.all_reduce(WithoutCuda())


def played_jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where jax is not installed: what shardcomm, and torch, see of it."""
    module = ModuleType("jax")
    module.Array = PlayedJax  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", module)
    return lambda: PlayedJax(np.zeros(4, dtype=np.float32))


def real_jax() -> Any:
    jax = pytest.importorskip("jax")
    return lambda: jax.numpy.zeros(4)


@pytest.mark.parametrize("played", [True, False], ids=["played", "real"])
def test_arrays_of_jax_are_sent_and_never_written(
    monkeypatch: pytest.MonkeyPatch, played: bool
) -> None:
    new = played_jax(monkeypatch) if played else real_jax()
    comm = Communicator.local_group(1)[0]
    array = new()
    refused = "is a JAX array, which cannot change; give a torch.Tensor or a NumPy array, and make"
    for name, call in {
        "all_gather: recv": lambda: comm.all_gather(array, torch.ones(4)),
        "reduce_scatter: recv": lambda: comm.reduce_scatter(array, torch.ones(4)),
        "all_reduce: buffer": lambda: comm.all_reduce(array),
        "broadcast: buffer": lambda: comm.broadcast(array),
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"{name} {refused}")):
            call()
    plan = CopyPlan.pack([4], [0], torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"destinations\[0\] is a JAX array"):
        plan.run([torch.ones(4)], [array])
    whole = torch.ones(4)
    comm.all_gather(whole, array)
    assert whole.tolist() == [0.0] * 4  # it has not changed


def test_arrays_of_jax_without_values_are_refused() -> None:
    jax = pytest.importorskip("jax")
    comm = Communicator.local_group(1)[0]

    def sent(x: Any) -> Any:
        comm.all_gather(torch.ones(3), x)
        return x.sum()

    def summed(x: Any) -> Any:
        comm.all_reduce(x)
        return x

    for call in (jax.jit(sent), jax.grad(sent), jax.jit(summed)):
        with pytest.raises(
            TypeError, match=r"without values, .* the collectives of shardcomm\.jax"
        ):
            call(jax.numpy.ones(3))
    gone = jax.numpy.ones(3)
    gone.delete()
    with pytest.raises(ValueError, match="all_gather: send is a JAX array that was deleted"):
        comm.all_gather(torch.ones(3), gone)
    with pytest.raises(TypeError, match=r"all_gather: send is an array of int4: .* no DLPack"):
        comm.all_gather(torch.ones(3), jax.numpy.ones(3, jax.numpy.int4))


def test_a_bare_capsule_is_no_array() -> None:
    capsule: Any = torch.utils.dlpack.to_dlpack(torch.zeros(4))
    with pytest.raises(TypeError, match="all_reduce: buffer is a PyCapsule; accepted"):
        Communicator.local_group(1)[0].all_reduce(capsule)


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
