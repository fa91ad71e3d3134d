"""The `local` transport, buckets and the engine on one GPU, by as many threads as there are ranks."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from shardcomm import Bucket, Communicator, CopyPlan, Mesh, MixedPrecision, fully_shard
from support import nets
from support.nets import batch, loss_of, make, reference, sgd_of
from support.random_collectives import random_collectives
from support.thread_ranks import run_mesh, run_threads

pytestmark = pytest.mark.gpu
train = partial(nets.train, optimizer_of=sgd_of)


@pytest.mark.covers("collectives")
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_random_collectives(ranks: int, seed: int) -> None:
    run_threads(
        lambda comm: random_collectives(comm, seed, 300), ranks, deadline_s=120, device="cuda"
    )


@pytest.mark.covers("streams and lifetimes")
def test_collectives_come_after_what_was_queued_before_and_before_what_comes_after() -> None:
    def body(comm: Communicator) -> None:
        full = comm.allocate(comm.size << 22, use="gather")
        for step in range(20):
            # Long enough that a collective which does not wait would read the step before.
            mine = torch.zeros(1 << 22, device=comm.device)
            for _ in range(10):
                mine += 0.1
            mine.fill_(step * 10 + comm.rank)
            comm.all_gather(full, mine)
            expected = torch.arange(comm.size, device=comm.device) + step * 10.0
            assert torch.equal(full.view(comm.size, -1).amin(1), expected)
            assert torch.equal(full.view(comm.size, -1).amax(1), expected)

    run_threads(body, 4, device="cuda")


@pytest.mark.covers("training parity")
@pytest.mark.parametrize(
    "variant", ["", "tied", "frozen", "unused", "twice", "reversed", "checkpoint"]
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_data_parallel_on_the_cpu(variant: str, ranks: int) -> None:
    expected = reference(make(variant), ranks, optimizer_of=sgd_of).state_dict()
    for state in run_threads(lambda comm: train(comm, make(variant)), ranks, device="cuda"):
        for name, value in expected.items():
            if not name.endswith("calls"):
                torch.testing.assert_close(state[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.covers("prefetch and slots", "training parity")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (1, 3), (9, None)])
def test_strategy_prefetch_and_slots_do_not_change_results(
    strategy: str, prefetch: int, slots: int | None
) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        return train(comm, make(width=64), strategy=strategy, prefetch=prefetch, slots=slots)

    plain = run_threads(lambda comm: train(comm, make(width=64)), 2, device="cuda")[0]
    for state in run_threads(body, 2, device="cuda"):
        for name, value in plain.items():
            assert torch.equal(state[name], value), name


@pytest.mark.covers("training parity")
@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (2, 2)])
def test_hybrid_shard_equals_data_parallel_on_the_cpu(replicas: int, shards: int) -> None:
    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        return train(mesh, make(), strategy="hybrid_shard")

    expected = reference(make(), replicas * shards, optimizer_of=sgd_of).state_dict()
    for state in run_mesh(body, replicas, shards, device="cuda"):
        for name, value in expected.items():
            if not name.endswith("calls"):
                torch.testing.assert_close(state[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.covers("mixed precision")
def test_half_precision_trains() -> None:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = reference(make(), 2, optimizer_of=sgd_of).state_dict()
    for state in run_threads(
        lambda comm: train(comm, make(), mixed_precision=half), 2, device="cuda"
    ):
        for name, value in expected.items():
            assert state[name].dtype == value.dtype
            if not name.endswith("calls"):
                torch.testing.assert_close(state[name].cpu(), value, rtol=0.05, atol=0.05, msg=name)


def test_a_step_does_not_wait_for_the_device() -> None:
    """Neither host nor device copies, and no synchronisation, between the start of forward and the end of backward."""

    def body(comm: Communicator) -> None:
        model = make(width=64)
        fully_shard(model, comm)
        tokens = batch(comm.rank, 0).to(comm.device)
        for _ in range(2):
            loss_of(model, tokens).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss_of(model, tokens).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run_threads(body, 1, device="cuda")


def test_gathers_overlap_computation() -> None:
    """While the device computes a unit, the next one's gather has begun and ended."""

    def body(comm: Communicator) -> float:
        blocks = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(6)]
        model = torch.nn.Sequential(*blocks)
        engine = fully_shard(model, comm, units=torch.nn.Linear)
        engine.traffic.time_waits()
        x = torch.randn(4096, 2048, device=comm.device)
        for _ in range(3):
            model(x).sum().backward()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = engine.traffic.exposed_s
        begin.record()
        model(x).sum().backward()
        end.record()
        torch.cuda.synchronize()
        return (engine.traffic.exposed_s - before) / (begin.elapsed_time(end) * 1e-3)

    assert all(share < 0.9 for share in run_threads(body, 2, device="cuda"))


@pytest.mark.covers("training parity")
@pytest.mark.parametrize("variant", ["", "checkpoint", "checkpoint-reentrant"])
def test_a_rank_alone_trains_by_autograds_own_thread(variant: str) -> None:
    """Autograd calls the engine's hooks, and recomputes checkpoints, in its thread of the GPU."""
    expected = reference(make(variant), 1, optimizer_of=sgd_of).state_dict()
    comm = Communicator.local_group(1, device="cuda")[0]
    for name, value in train(comm, make(variant)).items():
        if not name.endswith("calls"):
            torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_gradients_of_a_rank_alone_take_no_memory_in_a_forward() -> None:
    comm = Communicator.local_group(1, device="cuda")[0]
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    fully_shard(model, comm, units=torch.nn.Linear)
    held: list[int] = []
    model[-1].register_forward_hook(lambda *_: held.append(torch.cuda.memory_allocated()))
    for _ in range(2):
        model(torch.ones(1, 512, device=comm.device)).sum().backward()
        model.zero_grad()
    assert held[1] - held[0] < 512 * 512 * 4


def test_backward_in_autograds_own_thread_is_refused() -> None:
    """Autograd has one thread for each GPU, where one rank's backward would wait for another's, behind it."""
    comms = Communicator.local_group(2, device="cuda", deadline_s=20)
    messages = ["", ""]

    def body(rank: int) -> None:
        model = make()
        fully_shard(model, comms[rank])
        loss = loss_of(model, batch(rank, 0).cuda())
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        messages[rank] = str(caught.value)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all("set_multithreading_enabled(False)" in message for message in messages)


def test_cupy_arrays_are_operands() -> None:
    cupy = pytest.importorskip("cupy")
    source = cupy.arange(1000, dtype=cupy.float32)
    packed = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    CopyPlan.pack([1000], [0], torch.float32, torch.bfloat16).run([source], [packed])
    assert torch.equal(packed.float().cpu(), torch.arange(1000.0).bfloat16().float())

    def body(comm: Communicator) -> None:
        part = cupy.full(8, comm.rank, dtype=cupy.float32)
        whole = cupy.zeros(8 * comm.size, dtype=cupy.float32)
        comm.all_gather(whole, part)
        torch.cuda.synchronize()
        assert whole.reshape(comm.size, 8)[:, 0].tolist() == list(range(comm.size))

    run_threads(body, 2, device="cuda")


def test_memory_outlives_its_communicator() -> None:
    comm = Communicator.local_group(1, device="cuda")[0]
    memory = comm.allocate(1000, use="gather")
    assert memory.device.type == "cuda"
    assert not memory.any()
    comm.close()
    del comm
    memory.fill_(3.0)
    assert memory.sum().item() == 3000.0


def test_tensors_of_the_host_are_refused() -> None:
    comm = Communicator.local_group(1, device="cuda")[0]
    with pytest.raises(ValueError, match="recv is on cpu; this communicator works on cuda:0"):
        comm.all_gather(torch.zeros(4), torch.zeros(4))
    bucket = Bucket.from_tensors({"a": torch.ones(4)}, comm)
    assert bucket.shard.device.type == "cuda"
