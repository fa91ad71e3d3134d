"""Views that are not what is in memory, and buffers that overlap: right against torch's arithmetic, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcomm
from shardcomm import Bucket, CommError, Communicator, CopyPlan, fully_shard, launch
from support.thread_ranks import run_threads
from support.twins import local

TRANSPORTS = ["shm", "c10d"]


def negated(*values: float) -> torch.Tensor:
    """A contiguous tensor that holds these values, and whose memory holds their negatives."""
    view = torch._neg_view(-torch.tensor(values, dtype=torch.float32))
    assert view.is_neg()
    assert view.is_contiguous()
    assert view.tolist() == list(values)
    return view


def on_every_transport(body: Callable[[Communicator], None], ranks: int) -> None:
    run_threads(body, ranks)
    for transport in TRANSPORTS:
        launch(called, ranks, (body, transport), timeout_s=60)


def called(body: Callable[[Communicator], None], transport: str) -> None:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        body(comm)


def send_negated(comm: Communicator) -> None:
    ranks = torch.arange(float(comm.size))
    gathered = torch.zeros(comm.size * 2)
    comm.all_gather(gathered, negated(comm.rank, 5.0))
    assert torch.equal(gathered, torch.stack([ranks, torch.full_like(ranks, 5)], 1).view(-1))
    shardcomm.all_gather_into_tensor(gathered, negated(comm.rank, 7.0), comm)
    assert torch.equal(gathered, torch.stack([ranks, torch.full_like(ranks, 7)], 1).view(-1))
    total = torch.zeros(1)
    comm.reduce_scatter(total, negated(*range(comm.size)))
    assert total.item() == comm.size * comm.rank
    shardcomm.reduce_scatter_tensor(total, negated(*range(comm.size)), group=comm)
    assert total.item() == comm.size * comm.rank


def test_what_is_sent_is_resolved() -> None:
    on_every_transport(send_negated, 2)


def send_misaligned(comm: Communicator) -> None:
    shifted = torch.frombuffer(bytearray(13), dtype=torch.float32, count=3, offset=1)
    aligned = torch.zeros(3 * comm.size)
    refusal = "begins at an address that is no multiple of 4, the size of an element of f32"
    with pytest.raises(ValueError, match=f"all_gather: send {refusal}"):
        comm.all_gather(aligned, shifted)
    with pytest.raises(ValueError, match=f"reduce_scatter: recv {refusal}"):
        comm.reduce_scatter(shifted, aligned)
    with pytest.raises(ValueError, match=f"all_reduce: buffer {refusal}"):
        comm.all_reduce(shifted)
    with pytest.raises(ValueError, match=f"broadcast: buffer {refusal}"):
        comm.broadcast(shifted)


def test_what_is_not_aligned_is_refused() -> None:
    run_threads(send_misaligned, 2)


def write_negated(comm: Communicator) -> None:
    plain = torch.zeros(2 * comm.size)
    view = negated(*range(2 * comm.size))
    calls: list[Callable[[], object]] = [
        lambda: comm.all_gather(view, plain[:2].clone()),
        lambda: comm.reduce_scatter(view[:2], plain),
        lambda: comm.all_reduce(view),
        lambda: comm.broadcast(view),
        lambda: comm.broadcast(torch.zeros(2, dtype=torch.complex64).conj()),
        lambda: shardcomm.all_gather_into_tensor(view, plain[:2].clone(), comm),
        lambda: shardcomm.reduce_scatter_tensor(view[:2], plain, group=comm),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"is a view that negates or conjugates .* give"):
            call()
    assert view.tolist() == list(range(2 * comm.size))
    comm.barrier()


def test_what_is_written_must_be_itself() -> None:
    on_every_transport(write_negated, 2)


def bind_negated(comm: Communicator) -> None:
    """What is bound is sent in every step: a copy of now would be another step's."""
    with pytest.raises(ValueError, match="send is a view that negates"):
        comm.bind_all_gather(torch.zeros(2), negated(1.0, 2.0))
    with pytest.raises(ValueError, match="send is a view that negates"):
        comm.bind_reduce_scatter(torch.zeros(2), negated(1.0, 2.0))
    plan = CopyPlan.pack([2], [0], torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"sources\[0\] is a view that negates"):
        plan.bind([negated(1.0, 2.0)], [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"sources\[0\] is a view that negates"):
        plan.bind([torch.zeros(2)], [torch.zeros(2)]).set_sources([negated(1.0, 2.0)])


def test_what_is_bound_must_be_itself() -> None:
    bind_negated(Communicator.local_group(1)[0])


def test_copy_plans_resolve_sources() -> None:
    flat = torch.zeros(3)
    CopyPlan.pack([2], [1], torch.float32, torch.float32).run([negated(3.0, 4.0)], [flat])
    assert flat.tolist() == [0.0, 3.0, 4.0]
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    copied = torch.zeros(2, dtype=torch.complex64)
    CopyPlan.pack([2], [0], torch.complex64, torch.complex64).run([conjugate], [copied])
    assert torch.equal(copied, conjugate)
    with pytest.raises(ValueError, match=r"destinations\[0\] is a view that negates"):
        CopyPlan.pack([2], [0], torch.float32, torch.float32).run(
            [torch.ones(2)], [negated(0.0, 0.0)]
        )


def test_buckets_resolve_parameters_and_gradients() -> None:
    def rank(comm: Communicator) -> None:
        bucket = Bucket.from_tensors({"w": negated(1.0, 2.0, 3.0, 4.0)}, comm)
        bucket.all_gather()
        assert bucket.params[0].tolist() == [1.0, 2.0, 3.0, 4.0]
        bucket.reduce_scatter([negated(4.0, 3.0, 2.0, 1.0)])
        flat = torch.zeros(bucket.layout.flat_numel)
        comm.all_gather(flat, bucket.grad)
        begin = bucket.layout.placements[0].offset
        assert flat[begin : begin + 4].tolist() == [4.0, 3.0, 2.0, 1.0]

    run_threads(rank, 2)


class Complex(nn.Module):
    """Its gradients are real and imaginary parts of a conjugate, of which autograd makes negated views."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(self.real, self.imag).conj()
        return (turned * torch.complex(x, 2 * x)).sum().imag


def test_gradients_that_autograd_leaves_negated() -> None:
    x = torch.tensor([1.0])
    plain = Complex()
    plain(x).backward()
    assert plain.imag.grad is not None
    assert plain.imag.grad.is_neg()  # else this tests nothing

    def rank(comm: Communicator) -> list[float]:
        net = Complex()
        engine = fully_shard(net, comm)
        net(x).backward()
        grads = [local(p.grad) for p in net.parameters() if p.grad is not None]
        square = sum(float(grad.square().sum()) for grad in grads)
        signed = sum(float(grad.sum()) for grad in grads)
        both = torch.tensor([square, signed])
        comm.all_reduce(both)
        engine.close()
        return both.tolist()

    expected = [
        float(sum(p.grad.square().sum() for p in plain.parameters())),  # type: ignore[union-attr,misc]
        float(sum(p.grad.sum() for p in plain.parameters())),  # type: ignore[union-attr,misc]
    ]
    for ranks in (1, 2):
        assert run_threads(rank, ranks) == [expected] * ranks


def as_gloo_does(seed: int) -> None:
    """Every way in which torch.distributed takes a view, on our backend, against Gloo on resolved copies."""
    dist.init_process_group("shardcomm")
    gloo = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.randint(
        -9, 9, (size * 4,), generator=torch.Generator().manual_seed(seed + rank)
    )
    plain = numbers.float()
    view = negated(*plain.tolist())
    ours, theirs = torch.zeros(2, size * size * 4).unbind()
    dist.all_gather_into_tensor(ours, view)
    dist.all_gather_into_tensor(theirs, plain, group=gloo)
    assert torch.equal(ours, theirs)
    dist.reduce_scatter_tensor(ours[:4], view)
    dist.reduce_scatter_tensor(theirs[:4], plain, group=gloo)
    assert torch.equal(ours, theirs)
    for call in (dist.all_reduce, lambda t, **k: dist.broadcast(t, size - 1, **k)):
        mine, gloos = plain.clone(), plain.clone()
        call(mine)
        call(gloos, group=gloo)
        assert torch.equal(mine, gloos)
    lists = [[torch.zeros(size * 4) for _ in range(size)] for _ in range(2)]
    dist.all_gather(lists[0], view)
    dist.all_gather(lists[1], plain, group=gloo)
    assert torch.equal(torch.stack(lists[0]), torch.stack(lists[1]))
    # An input that overlaps the output is what it was before.
    for at in range(size):
        ours, theirs = plain.clone(), plain.clone()
        dist.all_gather_into_tensor(ours, ours[at * 4 : at * 4 + 4])
        dist.all_gather_into_tensor(theirs, plain[at * 4 : at * 4 + 4].clone(), group=gloo)
        assert torch.equal(ours, theirs)
        ours, theirs = plain.clone(), plain.clone()
        dist.reduce_scatter_tensor(ours[at * 4 : at * 4 + 4], ours)
        dist.reduce_scatter_tensor(theirs[at * 4 : at * 4 + 4], plain.clone(), group=gloo)
        assert torch.equal(ours, theirs)
    dist.destroy_process_group()


def test_the_backend_takes_every_view_that_gloo_takes(seed: int) -> None:
    launch(as_gloo_does, 3, (seed,), timeout_s=60)


def quantised_on_the_backend() -> None:
    dist.init_process_group("shardcomm")
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(NotImplementedError):  # as Gloo
        dist.broadcast(quantised, 0)
    dist.destroy_process_group()


def test_the_backend_refuses_quantised_tensors_as_gloo_does() -> None:
    launch(quantised_on_the_backend, 2, timeout_s=60)


def in_place(comm: Communicator) -> None:
    size, rank, n = comm.size, comm.rank, 70_001  # several staged chunks
    everybody = [torch.arange(size * n, dtype=torch.float64) % 1000 + r for r in range(size)]
    own = slice(rank * n, (rank + 1) * n)
    windows: list[torch.Tensor | None] = [None]
    if comm.transport != "c10d":
        windows.append(comm.allocate(size * n, dtype=torch.float64, use="gather"))
    for window in windows:
        full = torch.zeros(size * n, dtype=torch.float64) if window is None else window
        full[own] = everybody[rank][own]
        comm.all_gather(full, full[own])
        expected = torch.cat([everybody[r][r * n : (r + 1) * n] for r in range(size)])
        assert torch.equal(full, expected)
        comm.barrier()
    total = torch.stack(everybody).sum(0)
    for given in (
        everybody[rank].clone(),
        comm.allocate(size * n, dtype=torch.float64, use="reduce"),
    ):
        given.copy_(everybody[rank])
        comm.reduce_scatter(given[own], given)
        assert torch.equal(given[own], total[own])
        rest = [r for r in range(size) if r != rank]
        assert all(
            torch.equal(given[r * n : (r + 1) * n], everybody[rank][r * n : (r + 1) * n])
            for r in rest
        )
        comm.barrier()


def test_in_place_is_as_in_nccl() -> None:
    on_every_transport(in_place, 3)


def overlapping(comm: Communicator) -> None:
    size, rank, n = comm.size, comm.rank, 4
    memory = torch.zeros(size * n + n)
    whole, after = memory[: size * n], (rank + 1) % size * n
    for send in (
        whole[after : after + n],
        memory[rank * n + 1 : rank * n + 1 + n],
        memory[-n - 1 : -1],
    ):
        with pytest.raises(ValueError, match=rf"send overlaps recv; .* here recv\[{rank * n} : "):
            comm.all_gather(whole, send)
        with pytest.raises(ValueError, match=rf"recv overlaps send, .* here send\[{rank * n} : "):
            comm.reduce_scatter(send, whole)
    half = torch.zeros(size * n, dtype=torch.float16)
    with pytest.raises(ValueError, match="of recv's dtype"):  # a conversion in place
        comm.all_gather(half.view(torch.bfloat16), half[rank * n : (rank + 1) * n])
    queue = comm.bind_reduction(torch.zeros(n), whole)
    with pytest.raises(ValueError, match="recv overlaps send"):
        queue(comm.streams.reduce, None, whole[after : after + n], 1.0, False, None)
    with pytest.raises(ValueError, match=r"strides|must have"):
        queue(comm.streams.reduce, None, torch.zeros(2 * n)[::2], 1.0, False, None)
    comm.all_gather(whole, memory[-n:])  # beside it
    comm.reduce_scatter(memory[-n:], whole)
    comm.barrier()


def test_other_overlaps_are_refused() -> None:
    on_every_transport(overlapping, 2)


def shared_by_all(comm: Communicator) -> None:
    window = comm.allocate(4 * comm.size, use="gather")
    own = torch.ones(4 * comm.size)
    for call in (
        lambda: comm.reduce_scatter(torch.zeros(4), window),
        lambda: comm.reduce_scatter(window[:4], own),
        lambda: comm.all_reduce(window),
    ):
        with pytest.raises(ValueError, match="in communication memory that all ranks share"):
            call()
    comm.barrier()
    window.copy_(torch.ones(4 * comm.size))
    comm.broadcast(window)  # all have the one value
    comm.barrier()


def test_no_rank_reduces_what_all_ranks_share() -> None:
    run_threads(shared_by_all, 2)
    launch(called, 2, (shared_by_all, "shm"), timeout_s=60)


def parts_of_one_window(comm: Communicator) -> str:
    window = comm.allocate(3 * comm.size, use="gather")
    with pytest.raises(CommError) as caught:
        comm.all_gather(window[comm.rank : comm.rank + comm.size], torch.ones(1))
    return str(caught.value)


def test_ranks_gather_into_one_place_of_a_window() -> None:
    for said in run_threads(parts_of_one_window, 2):
        assert "recv begins at byte" in said
        assert "it must be one place for all" in said


def parameter_in_half(comm: Communicator) -> None:
    leaf = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    comm.all_reduce(leaf)
    assert leaf.tolist() == [float(comm.size)] * 4
    comm.broadcast(leaf)
    comm.reduce_scatter(leaf[:2] if comm.size == 2 else leaf, torch.ones(4, dtype=torch.bfloat16))
    comm.barrier()


def test_parameters_that_need_gradients_are_written_as_torchs_collectives_do() -> None:
    on_every_transport(parameter_in_half, 2)
