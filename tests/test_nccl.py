"""The `nccl` transport: how ranks meet, on any machine; and its collectives, by processes that may share one GPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_communicator import OPS, reduced, values
from test_engine import make, reference, sgd_of
from test_local_gpu import train

from shardcomm import _C, CommError, Communicator, Stream, launch, nccl
from shardcomm.dtype import core_dtype
from shardcomm.operands import RED_OPS
from shardcomm.rendezvous import over_store

RANKS = 3


def each_rank(fn: Callable[[int], Any], ranks: int = RANKS) -> list[Any]:
    """fn(rank) in a thread each; its result or its exception."""
    results: list[Any] = [None] * ranks

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NCCL: an id is 128 numbered bytes, and a communicator is the arguments that it was made from."""
    made: list[bytes] = []

    def unique_id() -> bytes:
        made.append(bytes([len(made)]) * 128)
        return made[-1]

    monkeypatch.setattr(_C, "nccl_unique_id", unique_id)
    monkeypatch.setattr(_C, "make_nccl", lambda *arguments: arguments)


def meet(store: dist.Store, rank: int, deadline_s: float = 30.0) -> Any:
    return nccl.connect(over_store(store, rank, RANKS, deadline_s), rank, RANKS, 0, deadline_s)


@pytest.mark.usefixtures("ids")
def test_all_ranks_get_the_id_that_rank_0_made() -> None:
    for group in range(3):
        store = dist.PrefixStore(f"{group}", dist.HashStore())
        made = each_rank(lambda rank, store=store: meet(store, rank))
        assert made == [(bytes([group]) * 128, rank, RANKS, 0, 30.0) for rank in range(RANKS)]


@pytest.mark.usefixtures("ids")
def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        return meet(dist.FileStore(str(tmp_path / "store"), RANKS), rank)[0]

    assert each_rank(body) == [bytes(128)] * RANKS


def test_error_of_rank_0_reaches_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise RuntimeError("there is no NCCL to use: it is lost")

    monkeypatch.setattr(_C, "nccl_unique_id", fail)
    store = dist.HashStore()
    own, *others = each_rank(lambda rank: meet(store, rank, 600.0))
    assert not isinstance(own, CommError)
    assert "it is lost" in str(own)
    for rank, error in enumerate(others, start=1):
        assert isinstance(error, CommError)
        assert f"rank {rank} of {RANKS}: rank 0 could not make NCCL's id" in str(error)
        assert "it is lost" in str(error)


def test_rank_0_that_does_not_come_is_a_comm_error() -> None:
    with pytest.raises(CommError, match=r"rank 1 of 3: not all ranks came .* within 0.2 s"):
        meet(dist.HashStore(), 1, 0.2)


def test_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; it must be 0 to size - 1 = 1"):
        nccl.connect(lambda payload: [payload], 2, 2, 0)


# On a GPU.


def connect(deadline_s: float = 60.0) -> _C.Communicator:
    """The launched ranks, with a GPU each as far as there are so many."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    devices = torch.cuda.device_count()
    if devices < size:
        share_gpu(rank)
    torch.cuda.set_device(rank % devices)
    store, _, _ = next(dist.rendezvous("env://"))
    exchange = over_store(dist.PrefixStore("test", store), rank, size, deadline_s)
    return nccl.connect(exchange, rank, size, rank % devices, deadline_s)


def share_gpu(rank: int) -> None:
    """Lets NCCL put several ranks on a GPU; before it reads its environment."""
    if nccl.status().version >= 23003:
        os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="4", NCCL_NVLS_ENABLE="0")
    else:  # they look like different hosts to it
        os.environ.update(
            NCCL_HOSTID=f"shardcomm-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_MNNVL_ENABLE="0"
        )


def current_stream() -> _C.Stream:
    stream = torch.cuda.current_stream()
    return Stream.from_cuda(stream.device_index, stream.cuda_stream)


def all_gather(comm: _C.Communicator, recv: torch.Tensor, send: torch.Tensor) -> None:
    dtypes = core_dtype(send.dtype), core_dtype(recv.dtype)
    comm.all_gather(
        send.data_ptr(), dtypes[0], recv.data_ptr(), dtypes[1], send.numel(), 0, current_stream()
    )


def reduce_scatter(
    comm: _C.Communicator,
    recv: torch.Tensor,
    send: torch.Tensor,
    op: str = "sum",
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    comm.reduce_scatter(
        send.data_ptr(), core_dtype(send.dtype), recv.data_ptr(), core_dtype(recv.dtype), scale,
        accumulate, recv.numel(), RED_OPS[op], 0, current_stream(),
    )  # fmt: skip


def all_reduce(comm: _C.Communicator, buffer: torch.Tensor, op: str = "sum") -> None:
    comm.all_reduce(
        buffer.data_ptr(), core_dtype(buffer.dtype), buffer.numel(), RED_OPS[op], current_stream()
    )


def allocate(comm: _C.Communicator, numel: int, dtype: torch.dtype, use: _C.Use) -> torch.Tensor:
    memory = comm.allocate(numel * dtype.itemsize, use)
    return torch.as_tensor(memory, device="cuda").view(dtype)


def receipt(comm: _C.Communicator, operation: str) -> tuple[str, int, str, str, str]:
    (found,) = [each for each in comm.receipts() if each[0] == operation]
    return found


def gathers() -> None:
    comm = connect()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        everybody = [values(1, r, 1001, dtype) for r in range(comm.size)]
        result = torch.zeros(1001 * comm.size, dtype=dtype, device="cuda")
        all_gather(comm, result, everybody[comm.rank].cuda())
        assert torch.equal(result.cpu(), torch.cat(everybody))
        # In place, in the communicator's memory.
        window = allocate(comm, 1001 * comm.size, dtype, _C.Use.gather)
        assert not window.any()
        mine = window[comm.rank * 1001 : (comm.rank + 1) * 1001]
        mine.copy_(everybody[comm.rank])
        all_gather(comm, window, mine)
        assert torch.equal(window.cpu(), torch.cat(everybody))
    shards = [
        torch.randn(70001, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)
    ]
    for dtype in (torch.bfloat16, torch.float16):
        result = torch.zeros(70001 * comm.size, dtype=dtype, device="cuda")
        all_gather(comm, result, shards[comm.rank].cuda())
        assert torch.equal(result.cpu(), torch.cat(shards).to(dtype))
    comm.close()


def reduces() -> None:
    comm = connect()
    for case, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int32)):
        for op in OPS:
            everybody = [values(case, r, 1001 * comm.size, dtype) for r in range(comm.size)]
            total = reduced(everybody, op)
            send = everybody[comm.rank].cuda()
            result = torch.zeros(1001, dtype=dtype, device="cuda")
            reduce_scatter(comm, result, send, op)
            own = total[comm.rank * 1001 : (comm.rank + 1) * 1001]
            assert torch.equal(result.cpu(), own), (dtype, op)
            if dtype is not torch.int32 or op != "avg":
                all_reduce(comm, send, op)
                assert torch.equal(send.cpu(), total), (dtype, op)
    comm.close()


def epilogues() -> None:
    comm = connect()
    for dtype in (torch.float32, torch.bfloat16):
        everybody = [values(0, r, 777 * comm.size, dtype) for r in range(comm.size)]
        own = reduced(everybody, "sum")[comm.rank * 777 : (comm.rank + 1) * 777].float()
        result = torch.full((777,), 3.0, device="cuda")
        reduce_scatter(comm, result, everybody[comm.rank].cuda(), "sum", scale=0.5, accumulate=True)
        assert torch.equal(result.cpu(), 3 + own / 2)
    taken = {torch.float32: "nccl", torch.bfloat16: "exchange"}
    for dtype, path in taken.items():
        send = torch.ones(4 * comm.size, dtype=dtype, device="cuda")
        reduce_scatter(comm, torch.zeros(4, dtype=dtype, device="cuda"), send)
        assert receipt(comm, "reduce_scatter")[3] == path
    comm.close()


def halves() -> None:
    # 256 + 1 + 1 in bf16 steps of 2: rounding after each addition loses both ones.
    comm = connect()
    first = 256.0 if comm.rank == 0 else 1.0
    send = torch.full((3 * comm.size,), first, dtype=torch.bfloat16, device="cuda")
    result = torch.zeros(3, dtype=torch.bfloat16, device="cuda")
    reduce_scatter(comm, result, send)
    assert torch.equal(result.cpu(), torch.full((3,), 255.0 + comm.size).bfloat16())
    comm.close()


def others() -> None:
    comm = connect()
    for root in range(comm.size):
        value = torch.arange(1000, device="cuda") * (comm.rank + 1)
        comm.broadcast(value.data_ptr(), value.numel() * value.itemsize, root, current_stream())
        assert torch.equal(value.cpu(), torch.arange(1000) * (root + 1))
    for _ in range(3):
        comm.barrier(0, current_stream())
    torch.cuda.synchronize()
    empty = torch.zeros(0, device="cuda")
    all_gather(comm, empty, empty)
    assert receipt(comm, "all_gather")[1] == receipt(comm, "barrier")[1] + 1
    comm.close()


def overlap() -> None:
    comm = connect()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    gathered = [torch.zeros(2 * comm.size, device="cuda") for _ in range(50)]
    summed = [torch.full((5,), float(comm.rank + i), device="cuda") for i in range(50)]
    mine = torch.full((2,), float(comm.rank), device="cuda")
    torch.cuda.synchronize()

    def gather() -> None:
        with torch.cuda.stream(streams[0]):
            for result in gathered:
                all_gather(comm, result, mine)

    thread = threading.Thread(target=gather)
    thread.start()
    with torch.cuda.stream(streams[1]):
        for value in summed:
            all_reduce(comm, value)
    thread.join()
    torch.cuda.synchronize()
    ranks = torch.arange(comm.size).float()
    for i in range(50):
        assert torch.equal(gathered[i].cpu(), ranks.repeat_interleave(2))
        assert torch.equal(summed[i].cpu(), torch.full((5,), float(ranks.sum()) + i * comm.size))
    comm.close()


def captured() -> None:
    comm = connect()
    mine = torch.zeros(64, device="cuda")
    result = torch.zeros(64 * comm.size, dtype=torch.bfloat16, device="cuda")
    all_gather(comm, result, mine)  # connects, which is no work for a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_gather(comm, result, mine)
    mine.fill_(comm.rank + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    ranks = torch.arange(1, comm.size + 1)
    assert torch.equal(result.cpu(), ranks.repeat_interleave(64).bfloat16())
    del graph
    comm.close()


def memory_outlives() -> None:
    comm = connect()
    window = allocate(comm, 1 << 20, torch.float32, _C.Use.gather)
    early = allocate(comm, 1 << 10, torch.float32, _C.Use.reduce)
    _, _, requested, taken, reason = receipt(comm, "allocate")
    assert requested == "window"
    assert (taken == "window") == (reason == "")
    del early
    window.fill_(7)
    comm.close()
    comm.close()
    del comm
    assert torch.equal(window.cpu(), torch.full((1 << 20,), 7.0))


def borrowed() -> None:
    owner = connect()
    rank, size, device = owner.rank, owner.size, torch.cuda.current_device()
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        comm = nccl.borrow(backend._comm_ptr(), device, 60.0)
        assert (comm.rank, comm.size, comm.transport) == (rank, size, "nccl")
        value = torch.ones(4, device="cuda")
        all_reduce(comm, value)
        comm.close()
        dist.all_reduce(value)  # its owner's goes on
        assert torch.equal(value.cpu(), torch.full((4,), float(size * size)))
    finally:
        dist.destroy_process_group()
        owner.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "body", [gathers, reduces, epilogues, halves, others, overlap, captured, memory_outlives]
)
def test_gpu_ranks(body: Callable[[], None]) -> None:
    launch(body, 2, deadline_s=240)


@pytest.mark.gpu
def test_gpu_ranks_of_a_torch_process_group_are_borrowed() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    launch(borrowed, 2, deadline_s=240)


def errors_after(comm: _C.Communicator) -> str:
    """What every call says from now on."""
    with pytest.raises(CommError) as caught:
        comm.barrier(0, current_stream())
    with pytest.raises(CommError) as again:
        all_reduce(comm, torch.zeros(4, device="cuda"))
    assert str(caught.value) == str(again.value)
    return str(caught.value)


def other_rank_dies(rank: int, port: int, tell: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    comm = connect(deadline_s=15.0)
    value = torch.zeros(4, device="cuda")
    all_reduce(comm, value)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(CommError):  # NCCL may have noticed already
        all_reduce(comm, value)
    torch.cuda.synchronize()  # ends, as the watchdog aborts
    tell.send(errors_after(comm))


@pytest.mark.gpu
def test_gpu_killed_rank_ends_the_other_within_the_deadline() -> None:
    context = get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listen, tell = context.Pipe(duplex=False)
    processes = [
        context.Process(target=other_rank_dies, args=(rank, store.port, tell)) for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        tell.close()
        assert listen.poll(120)
        assert listen.recv().startswith("rank 0 of 2: ")
    finally:
        for process in processes:
            process.kill()
            process.join(10)
            process.close()


def mismatch() -> str:
    comm = connect(deadline_s=3.0)
    value = torch.zeros(4, device="cuda")
    all_reduce(comm, value)
    torch.cuda.synchronize()
    with suppress(CommError):  # a first call connects, and may wait for that itself
        if comm.rank == 0:  # the other has gone to another channel
            all_reduce(comm, value)
        else:
            comm.barrier(0, current_stream())
    torch.cuda.synchronize()
    return errors_after(comm)


@pytest.mark.gpu
def test_gpu_mismatch_ends_at_the_deadline() -> None:
    first, second = launch(mismatch, 2, deadline_s=120)
    assert first.startswith("rank 0 of 2: all_reduce(f32, count 4, sum) #2 ")
    assert second.startswith("rank 1 of 2: barrier() #1 ")


def aborted() -> str:
    comm = connect(deadline_s=60.0)
    value = torch.zeros(4, device="cuda")
    all_reduce(comm, value)
    torch.cuda.synchronize()
    if comm.rank == 0:
        all_reduce(comm, value)  # the other never comes
        comm.abort("enough")
        torch.cuda.synchronize()
        return errors_after(comm)
    comm.abort("enough")
    return errors_after(comm)


@pytest.mark.gpu
def test_gpu_abort_ends_what_runs() -> None:
    messages = launch(aborted, 2, deadline_s=120)
    assert messages == [f"rank {rank} of 2: aborted: enough" for rank in range(2)]


def refused() -> None:
    comm = connect()
    value = torch.zeros(4, device="cuda")
    with pytest.raises(ValueError, match="count is -1"):
        comm.all_reduce(value.data_ptr(), _C.DType.f32, -1, _C.RedOp.sum, current_stream())
    with pytest.raises(ValueError, match="send is null"):
        comm.all_gather(0, _C.DType.f32, value.data_ptr(), _C.DType.f32, 2, 0, current_stream())
    with pytest.raises(ValueError, match="root is 2; it must be a rank, 0 to 1"):
        comm.broadcast(value.data_ptr(), 16, 2, current_stream())
    all_reduce(comm, value)  # and it goes on
    comm.close()


@pytest.mark.gpu
def test_gpu_bad_arguments_are_named() -> None:
    launch(refused, 2, deadline_s=120)


def train_20_steps() -> dict[str, torch.Tensor]:
    rank = int(os.environ["RANK"])
    devices = torch.cuda.device_count()
    if devices < int(os.environ["WORLD_SIZE"]):
        share_gpu(rank)
    device = f"cuda:{rank % devices}"
    torch.cuda.set_device(device)
    with Communicator.from_env(transport="nccl", device=device, deadline_s=60) as comm:
        assert comm.transport == "nccl"
        state = train(comm, make(), steps=20)
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.gpu
def test_gpu_training_equals_the_cpus() -> None:
    expected = reference(make(), 2, steps=20, optimizer_of=sgd_of).state_dict()
    for state in launch(train_20_steps, 2, deadline_s=200):
        for name, value in expected.items():
            if not name.endswith("calls"):
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)
