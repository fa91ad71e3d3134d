"""Collectives against torch's own arithmetic on exactly representable numbers, over every transport."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardcomm import (
    _C,
    Bucket,
    CommError,
    Communicator,
    Mesh,
    Stream,
    all_gather_into_tensor,
    fully_shard,
    launch,
)
from shardcomm.comm.core import CoreCommunicator
from shardcomm.stream.streams import Streams
from support.random_collectives import OPS, random_collectives, reduced, values
from support.thread_ranks import run_threads


def random_collectives_from_env(seed: int, cases: int, transport: str) -> None:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        assert comm.transport == transport
        random_collectives(comm, seed, cases)


@pytest.mark.covers("collectives")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_random_collectives_between_threads(ranks: int, seed: int) -> None:
    run_threads(lambda comm: random_collectives(comm, seed, 600), ranks, deadline_s=120)


@pytest.mark.covers("collectives")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_random_collectives_between_processes(ranks: int, seed: int) -> None:
    launch(random_collectives_from_env, ranks, (seed, 700, "shm"), timeout_s=120)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.allocate(10.5, use="gather"), "numel is 10.5; it must be a whole number"),
        (lambda c: c.allocate(2**62, use="gather"), "numel is 4611686018427387904"),
        (lambda c: c.allocate(1, dtype="float32", use="gather"), "dtype is 'float32'; it must be"),
        (lambda c: c.all_reduce(torch.ones(1), ["sum"]), r"op is \['sum'\]; accepted: 'sum'"),
        (lambda c: c.broadcast(torch.ones(1), "0"), "root is '0'; it must be a rank, 0 to 0"),
        (lambda _: Communicator.local_group(2, deadline_s=float("nan")), "deadline_s is nan"),
        (lambda _: Communicator.local_group(2, deadline_s=-1), "deadline_s is -1; it must be"),
        (lambda _: Communicator.local_group(1.5), "size is 1.5; it must be at least 1"),
        (lambda _: Communicator.local_group(1, device="meta"), "device is meta; accepted: 'cpu'"),
    ],
)
def test_arguments_that_are_no_such_thing_are_named(
    call: Callable[[Communicator], object], message: str
) -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises((ValueError, TypeError), match=message):
        call(comm)


@pytest.mark.skipif(_C.cuda_status().available, reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    reason = _C.cuda_status().reason.split("(", maxsplit=1)[0]
    for ask in (
        lambda: Communicator.local_group(2, device="cuda"),
        lambda: Communicator.from_env(device="cuda:0"),
        lambda: Communicator.from_env(transport="nccl"),
    ):
        with pytest.raises(_C.CudaError, match=f"device is cuda.*{reason}"):
            ask()


@pytest.mark.covers("streams and lifetimes")
def test_tensors_on_a_stream_live_until_it_is_done() -> None:
    def body(comm: Communicator) -> None:
        streams = Streams(comm.device)
        results = []
        for step in range(50):  # nobody else holds what is sent, and what takes its place is other
            whole = torch.empty(comm.size * 20_000)
            sent = torch.full((20_000,), float(step * 8 + comm.rank))
            comm.all_gather(whole, sent, stream=streams.gather)
            del sent
            torch.full((20_000,), float("nan"))
            results.append(whole)
        streams.gather.record().wait()
        for step, whole in enumerate(results):
            expected = torch.arange(comm.size, dtype=torch.float32) + step * 8
            assert torch.equal(whole.view(comm.size, -1)[:, 0], expected)
            assert torch.equal(whole.view(comm.size, -1)[:, -1], expected)

    run_threads(body, 2)


def gradient_of_dropped_works() -> float:
    with Communicator.from_env(transport="shm", deadline_s=30) as comm:
        bucket = Bucket.from_tensors({"a": torch.zeros(400, 400)}, comm)
        for step in range(10):
            bucket.shards[0].grad = None
            bucket.reduce_scatter([torch.full((400, 400), step + comm.rank * 1.0)], async_op=True)
            torch.full((400, 400), float("nan"))
        bucket.reduce_scatter([torch.full((400, 400), 3.0)], async_op=True).wait()
        return float(bucket.grad.sub(3.0 + 9 + 0.5).abs().max())


def test_gradients_live_though_their_work_is_dropped() -> None:
    assert launch(gradient_of_dropped_works, 2, timeout_s=60) == [0.0, 0.0]


def allocate_too_much() -> str:
    with Communicator.from_env(transport="shm", deadline_s=30) as comm:
        with pytest.raises(CommError) as caught:
            comm.allocate(1 << 44, dtype=torch.uint8, use="gather")
        return str(caught.value)


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    for message in launch(allocate_too_much, 2, timeout_s=60):
        assert f"cannot reserve {1 << 44} bytes of shared memory" in message


def allocate_beyond_the_limit(group: str) -> str:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    with Communicator.from_env(transport="shm", deadline_s=30) as comm:
        comm.allocate(1 << 20, dtype=torch.uint8, use="gather").fill_(1)
        with pytest.raises(CommError) as caught:
            comm.allocate(1 << 30, dtype=torch.uint8, use="gather")
        return str(caught.value)


@pytest.mark.parametrize("limit", ["memory/{}/memory.limit_in_bytes", "{}/memory.max"])
def test_more_memory_than_a_cgroup_has_is_refused_before_it_is_taken(limit: str) -> None:
    """Past its limit the kernel would end a rank, as in a container."""
    group = Path("/sys/fs/cgroup", limit.format(f"shardcomm-test-{os.getpid()}")).parent
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no such memory cgroup can be made here: {error}")
    try:
        if not (group / Path(limit).name).exists():
            pytest.skip(f"cgroups of this machine have no {Path(limit).name}")
        (group / Path(limit).name).write_text(str(512 << 20))
        for message in launch(allocate_beyond_the_limit, 2, (str(group),), timeout_s=60):
            assert f"cannot reserve {1 << 30} bytes of shared memory: " in message
            assert int(message.partition("memory: ")[2].split()[0]) <= 512 << 20
    finally:
        group.rmdir()


def exact_on_c10d() -> None:
    with Communicator.from_env(transport="c10d", deadline_s=30) as comm:
        for case, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
            everybody = [values(case, r, 12, dtype) for r in range(comm.size)]
            mine = everybody[comm.rank]
            part = 12 // comm.size
            gathered = torch.zeros(12 * comm.size, dtype=dtype)
            comm.all_gather(gathered, mine)
            assert torch.equal(gathered, torch.cat(everybody))
            scattered = torch.zeros(part, dtype=dtype)
            scale = 0.5 if dtype.is_floating_point else 1
            comm.reduce_scatter(scattered, mine, "sum", scale=scale)
            total = reduced(everybody, "sum") * scale
            assert torch.equal(scattered, total[comm.rank * part : (comm.rank + 1) * part])
            for op in OPS:
                buffer = mine.clone()
                comm.all_reduce(buffer, op)  # type: ignore[arg-type]
                torch.testing.assert_close(buffer, reduced(everybody, op))


@pytest.mark.covers("collectives")
def test_c10d_gives_the_same() -> None:
    launch(exact_on_c10d, 3, timeout_s=60)


@pytest.mark.parametrize("private", [True, False])
def test_gather_converts(private: bool) -> None:
    def body(comm: Communicator) -> None:
        numel = 70001  # several staged chunks, and no multiple of anything
        shards = [
            torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)
        ]
        for dtype in (torch.bfloat16, torch.float16):
            result = (
                torch.zeros(numel * comm.size, dtype=dtype)
                if private
                else comm.allocate(numel * comm.size, dtype=dtype, use="gather")
            )
            comm.all_gather(result, shards[comm.rank])
            assert torch.equal(result, torch.cat(shards).to(dtype))
            comm.barrier()

    run_threads(body, 3)


def large_buffers() -> None:
    with Communicator.from_env(deadline_s=30) as comm:
        numel = 300_001
        everybody = [values(0, r, numel * comm.size, torch.float32) for r in range(comm.size)]
        mine, total = everybody[comm.rank], reduced(everybody, "sum")
        gathered = torch.zeros(numel * comm.size)
        comm.all_gather(gathered, mine[:numel].clone())
        assert torch.equal(gathered, torch.cat([t[:numel] for t in everybody]))
        scattered = torch.ones(numel)
        comm.reduce_scatter(scattered, mine, accumulate=True)
        assert torch.equal(scattered, 1 + total[comm.rank * numel : (comm.rank + 1) * numel])
        comm.all_reduce(mine)
        assert torch.equal(mine, total)
        operations = ("all_gather", "reduce_scatter", "all_reduce")
        assert {r.operation: r.taken for r in comm.receipts()} == dict.fromkeys(
            operations, "staged"
        )


def test_private_buffers_larger_than_the_staging_area() -> None:
    launch(large_buffers, 3, timeout_s=60)


@pytest.mark.covers("receipts")
def test_receipts_say_the_path_and_why() -> None:
    def body(comm: Communicator) -> None:
        comm.all_gather(comm.allocate(8, use="gather"), torch.ones(4))
        (receipt,) = [r for r in comm.receipts() if r.operation == "all_gather"]
        assert (receipt.requested, receipt.taken, receipt.reason) == ("window", "window", "")
        comm.all_gather(torch.zeros(200_000), torch.ones(100_000))
        (receipt,) = [r for r in comm.receipts() if r.operation == "all_gather"]
        assert (receipt.requested, receipt.taken) == ("window", "direct")
        assert "not communication memory" in receipt.reason
        comm.all_gather(torch.zeros(8), torch.ones(4))
        (receipt,) = [r for r in comm.receipts() if r.operation == "all_gather"]
        assert (receipt.requested, receipt.taken, receipt.reason) == ("inline", "inline", "")

    run_threads(body, 2)


@pytest.mark.covers("sums in fp32")
def test_halves_are_summed_in_fp32() -> None:
    # 256 + 1 + 1 in bf16 steps of 2: rounding after each addition loses both ones.
    def body(comm: Communicator) -> torch.Tensor:
        value = torch.full((3,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
        comm.all_reduce(value)
        return value

    for result in run_threads(body, 3):
        assert torch.equal(result, torch.full((3,), 258.0, dtype=torch.bfloat16))


def test_nan_and_infinity_come_through() -> None:
    def body(comm: Communicator) -> None:
        bad = torch.tensor([float("nan"), float("inf"), 1.0])
        value = bad.clone() if comm.rank == 1 else torch.ones(3)
        for op in ("sum", "max", "min"):
            result = value.clone()
            comm.all_reduce(result, op)  # type: ignore[arg-type]
            assert result[0].isnan()
            assert result[1] == (1.0 if op == "min" else float("inf"))

    run_threads(body, 3)


@pytest.mark.covers("streams and lifetimes")
def test_gather_and_reduce_may_run_at_once() -> None:
    def body(comm: Communicator) -> None:
        gathers, reduces = Stream(), Stream()
        gathered = [torch.zeros(2 * comm.size) for _ in range(50)]
        summed = [torch.full((5,), float(comm.rank + i)) for i in range(50)]
        mine = torch.full((2,), float(comm.rank))
        for result in gathered:
            comm.all_gather(result, mine, stream=gathers)
        for value in summed:
            comm.all_reduce(value, stream=reduces)
        gathers.synchronize()
        reduces.synchronize()
        ranks = torch.arange(comm.size).float()
        for i in range(50):
            assert torch.equal(gathered[i], ranks.repeat_interleave(2))
            assert torch.equal(summed[i], torch.full((5,), float(ranks.sum()) + i * comm.size))

    run_threads(body, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_gather(torch.zeros(3), torch.zeros(2)), "recv must have 1 x 2 = 2"),
        (lambda c: c.reduce_scatter(torch.zeros(2), torch.zeros(3)), "send must have 1 x 2 = 2"),
        (lambda c: c.all_reduce(torch.zeros(2), "mean"), "op is 'mean'; accepted: 'sum', 'avg'"),
        (lambda c: c.all_reduce(torch.zeros(4, 4).t()[:2]), "must be contiguous"),
        (lambda c: c.broadcast(torch.zeros(2), 1), "root is 1; it must be a rank, 0 to 0"),
        (lambda c: c.allocate(4, use="both"), "use is 'both'; accepted: 'gather', 'reduce'"),
        (lambda c: c.allocate(-1, use="gather"), "numel is -1"),
        (
            lambda c: c.all_gather(torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
            "all_gather: no conversion from i32 to f32",
        ),
        (
            lambda c: c.reduce_scatter(torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
            "reduce_scatter: no conversion from i32 to f32",
        ),
        (lambda c: c.all_reduce(torch.zeros(2), tag=0.0), "all_reduce: tag is 0.0; it must be"),
        (lambda c: c.barrier(tag=0.0), "barrier: tag is 0.0; it must be"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[Communicator], object], message: str) -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call(comm)
    comm.barrier()  # and the communicator goes on


def test_buffer_that_leaves_its_window_is_refused() -> None:
    def body(comm: Communicator) -> None:
        window = comm.allocate(8, use="reduce")
        assert isinstance(comm, CoreCommunicator)
        f32, total = _C.DType.f32, _C.RedOp.sum
        with pytest.raises(ValueError, match=r"starts at byte 24 .* 32 bytes and is 16 bytes long"):
            _C.BoundCollective.all_reduce(comm._core, window[6:].data_ptr(), f32, 4, total, 0)()

    run_threads(body, 2)


def test_from_env_alone_and_with_missing_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Communicator.from_env().size == 1
    with pytest.raises(
        ValueError, match="transport is 'tcp'; accepted: 'auto', 'shm', 'nccl', 'hosts', 'c10d'"
    ):
        Communicator.from_env(transport="tcp")  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        Communicator.from_env()


def several_communicators() -> None:
    first = Communicator.from_env(deadline_s=30)
    dist.init_process_group("gloo")
    second = Communicator.from_process_group(deadline_s=30)
    third = Communicator.from_process_group(deadline_s=30, transport="c10d")
    with pytest.raises(ValueError, match="the 2 ranks are 2 processes; 'local' is for threads"):
        Communicator.from_process_group(transport="local")
    for comm in (first, second, third):
        value = torch.ones(4)
        comm.all_reduce(value)
        assert torch.equal(value, torch.full((4,), float(comm.size)))
    dist.destroy_process_group()


def test_communicators_live_side_by_side() -> None:
    launch(several_communicators, 2, timeout_s=60)


def of_a_group_with_nccl(config: str) -> None:
    dist.init_process_group("gloo")
    dist.get_backend_config = lambda _: config  # as torch made it without a backend's name on a GPU
    world = dist.group.WORLD
    assert world is not None
    way_out = "" if config == "cuda:nccl" else r".*: give device='cpu' to exchange those of CPUs"
    for bound, named in ((None, "cuda"), (torch.device("cuda", 3), "cuda:3")):
        world.bound_device_id = bound
        with pytest.raises(_C.CudaError, match=f"device is {named}:.*{way_out}"):
            Communicator.from_process_group()
        with pytest.raises(_C.CudaError, match=f"device is {named}:"):
            Communicator.from_process_group(device="cuda")
        with pytest.raises(_C.CudaError, match=f"device is {named}:") as refused:
            Communicator.from_process_group(transport="nccl")
        assert "device='cpu'" not in str(refused.value)  # which NCCL has nothing for
    world.bound_device_id = None
    for options in ({"device": "cpu"}, {"transport": "shm"}):
        with Communicator.from_process_group(**options) as comm:  # type: ignore[arg-type]
            assert comm.device.type == "cpu"
    dist.destroy_process_group()


@pytest.mark.skipif(_C.cuda_status().available, reason="there is a GPU here")
@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_that_has_nccl_is_of_the_gpu_unless_another_device_is_asked_for(
    config: str,
) -> None:
    launch(of_a_group_with_nccl, 1, (config,), timeout_s=60)


def give_a_group_that_is_no_more() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group()
    assert group is not None
    dist.destroy_process_group(group)
    said = "^{}: group is a ProcessGroup that was destroyed, .*; call this before destroy_process_group"
    with pytest.raises(ValueError, match=said.format("from_process_group")):
        Communicator.from_process_group(group)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=said.format("from_process_group")):
        Communicator.from_process_group(group)
    with pytest.raises(ValueError, match=said.format("all_gather_into_tensor")):
        all_gather_into_tensor(torch.ones(1), torch.ones(1), group=group)


def test_a_group_that_torch_does_not_know_is_refused() -> None:
    launch(give_a_group_that_is_no_more, 1, timeout_s=60)
    with pytest.raises(ValueError, match=r"that torch\.distributed did not make"):
        Communicator.from_process_group(dist.ProcessGroup(dist.HashStore(), 0, 1))


def wait_as_long_as_the_group() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=2))
    comm = Communicator.from_process_group(group)
    if comm.rank == 0:
        with pytest.raises(CommError, match=r"rank 1.* did not come within 2 s"):
            comm.barrier()
    dist.barrier()
    dist.destroy_process_group()


def test_a_groups_timeout_is_the_deadline_unless_another_is_given() -> None:
    launch(wait_as_long_as_the_group, 2, timeout_s=60)


def forked_child_lets_go() -> None:
    comm = Communicator.from_env(deadline_s=30)
    child = os.fork()
    if child == 0:
        comm.close()
        os._exit(0)
    os.waitpid(child, 0)
    value = torch.ones(4)
    comm.all_reduce(value)
    assert torch.equal(value, torch.full((4,), float(comm.size)))


@pytest.mark.covers("forks")
def test_a_forked_child_that_closes_or_drops_it_is_not_the_rank() -> None:
    launch(forked_child_lets_go, 2, timeout_s=60)


def memory_outlives() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Communicator.from_env(deadline_s=30) as comm:
        window = comm.allocate(1 << 20, use="gather")
        comm.all_gather(window, torch.full(((1 << 20) // comm.size,), float(comm.rank + 1)))
    del comm
    assert window[0] == 1
    assert window[-1] == int(os.environ["WORLD_SIZE"])
    maps = Path("/proc/self/maps")
    assert "memfd:shardcomm" in maps.read_text()
    del window
    assert "memfd:shardcomm" not in maps.read_text()
    # The rendezvous store keeps a connection; nothing of ours is open.
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_memory_outlives_the_communicator_and_is_gone_with_its_last_tensor() -> None:
    launch(memory_outlives, 2, timeout_s=60)


def test_second_thread_in_a_channel_is_refused() -> None:
    comms = Communicator.local_group(2, deadline_s=20)
    refused: list[str] = []

    def call() -> None:
        try:
            comms[0].barrier()
        except (ValueError, CommError) as error:
            refused.append(str(error))
            comms[1].abort("enough")  # lets go of the one that waits

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert "in use by another thread" in refused[0]
    assert "rank 1 aborted: enough" in refused[1]


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_is_not_copied_with_a_sentence_that_says_why(
    copies: Callable[[object], object],
) -> None:
    comm = Communicator.local_group(1)[0]
    mesh, bucket = Mesh(comm, comm), Bucket.from_tensors({"w": torch.ones(3)}, comm)
    engine = fully_shard(torch.nn.Linear(4, 4), comm)
    holders = [] if copies is copy.copy else [mesh, bucket, engine.mesh]
    for each in (comm, *holders):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.* makes its own, by"):
            copies(each)
