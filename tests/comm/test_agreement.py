"""Ranks that shard different models are told so, all in the same words, and nothing has happened to their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import (
    Bucket,
    CommError,
    Communicator,
    Mesh,
    MixedPrecision,
    RowBlock,
    fully_shard,
    launch,
)
from shardcomm.comm import agreement
from shardcomm.comm.agreement import Item, difference
from support.thread_ranks import run_mesh, run_threads


class Net(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 16, turned: bool = False) -> None:
        super().__init__()
        if turned:
            self.head = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, hidden), nn.Linear(hidden, 8)) for _ in range(layers)
        )
        if not turned:
            self.head = nn.Linear(8, 8)
        self.tail = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tail(self.head(x))


def frozen(net: Net) -> Net:
    net.head.weight.requires_grad_(False)
    return net


def tied(net: Net, to: str) -> Net:
    net.tail.weight = net.get_submodule(to).weight  # type: ignore[assignment]
    return net


def reshaped(net: Net) -> Net:
    net.head.weight = nn.Parameter(net.head.weight.detach().reshape(4, 16))
    return net


def said_by_all(comm: Communicator, net: nn.Module, **options: Any) -> str:
    """What `fully_shard` raises on this rank, after which model and communicator are as before."""
    before = {name: (param, param.detach().clone()) for name, param in net.named_parameters()}
    with pytest.raises(CommError) as caught:
        fully_shard(net, comm, **options)
    for name, (param, value) in before.items():
        assert net.get_parameter(name) is param
        assert torch.equal(param, value)
    one = torch.ones(1)
    comm.all_reduce(one)
    assert one.item() == comm.size
    return str(caught.value)


def test_rank_0_may_be_the_one_with_fewer_trained_parameters() -> None:
    """Its last parameter of a kind is another one than on the other ranks."""

    def body(comm: Communicator) -> str:
        net = nn.Linear(8, 8)
        net.bias.requires_grad_(comm.rank != 0)
        return said_by_all(comm, net)

    first, second = run_threads(body, 2)
    assert first == second
    assert "on rank 0" in first
    assert "on rank 1" in first


@pytest.mark.covers("ranks that differ")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Net(layers=3), "'layers.1.1.bias' comes nothing on ranks 0, 2 and unit 'layers.2' on rank 1"),
        (lambda: Net(layers=1), "comes unit 'layers.1' on ranks 0, 2 and nothing on rank 1"),
        (lambda: Net(hidden=32), "parameter 'layers.0.0.weight' has shape (16, 8) on ranks 0, 2 and (32, 8) on rank 1"),
        (lambda: reshaped(Net()), "parameter 'head.weight' has shape (8, 8) on ranks 0, 2 and (4, 16) on rank 1"),
        (lambda: Net(turned=True).double(), "has dtype torch.float32 on ranks 0, 2 and torch.float64"),
        (lambda: frozen(Net()), "parameter 'head.weight' has requires_grad True on ranks 0, 2 and False on rank 1"),
        (lambda: tied(Net(), "head"), "parameter 'head.weight' has places ['head.weight'] on ranks 0, 2 and"),
    ],
)  # fmt: skip
def test_another_model_on_one_rank(other: Callable[[], Net], message: str) -> None:
    def rank(comm: Communicator) -> str:
        return said_by_all(comm, other() if comm.rank == 1 else Net())

    (said,) = set(run_threads(rank, 3, deadline_s=30))
    assert said.startswith("fully_shard: ranks differ: ")
    assert message in said


def with_a_hook(net: Net) -> Net:
    net.head.weight.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    return net


def with_a_gradient(net: Net) -> Net:
    net.head.weight.grad = torch.ones_like(net.head.weight)
    return net


def with_renormalised_rows(net: Net) -> Net:
    net.head = nn.Embedding(8, 8, max_norm=1.0)  # type: ignore[assignment]
    return net


def odd(name: str, param: nn.Parameter) -> str:
    raise LookupError(name)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("change", "options", "refusal", "message"),
    [
        (with_a_hook, {}, ValueError, "parameter 'head.weight' has hooks already"),
        (with_a_gradient, {}, ValueError, "parameter 'head.weight' has a gradient already"),
        (with_renormalised_rows, {}, ValueError, "has max_norm=1.0"),
        (lambda net: net, {"granularity": odd}, LookupError, "head.weight"),
    ],
)
def test_what_one_rank_alone_is_refused_all_are_told(
    change: Callable[[Net], Net],
    options: dict[str, Any],
    refusal: type[Exception],
    message: str,
    bad: int,
) -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank != bad:
            said = said_by_all(comm, Net())
            assert said.startswith("fully_shard: ranks differ: the call has error ")
            assert f"on rank {bad}" in said
        else:
            net = change(Net())
            with pytest.raises(refusal) as caught:
                fully_shard(net, comm, **options)
            one = torch.ones(1)
            comm.all_reduce(one)
            said = str(caught.value)
        assert message in said

    run_threads(rank, 3, deadline_s=20)


def test_another_order_of_registration() -> None:
    def rank(comm: Communicator) -> str:
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        net = nn.Module()
        for name, layer in [("a", a), ("b", b)] if comm.rank else [("b", b), ("a", a)]:
            net.add_module(name, layer)
        net.forward = lambda x: b(a(x))
        return said_by_all(comm, nn.Sequential(net))

    (said,) = set(run_threads(rank, 2, deadline_s=30))
    assert "comes parameter '0.b.weight' on rank 0 and parameter '0.a.weight' on rank 1" in said


def test_a_parameter_tied_to_another_one() -> None:
    def rank(comm: Communicator) -> str:
        return said_by_all(comm, tied(Net(hidden=8), "layers.0.1" if comm.rank else "layers.1.1"))

    (said,) = set(run_threads(rank, 2, deadline_s=30))
    assert "parameter 'layers.0.1.weight'" in said


@pytest.mark.covers("ranks that differ")
@pytest.mark.parametrize(
    ("mine", "others", "message"),
    [
        ({"strategy": "no_shard"}, {}, "the call has strategy 'full_shard' on ranks 0, 2 and 'no_shard' on rank 1"),
        ({"prefetch": 2}, {}, "the call has prefetch 1 on ranks 0, 2 and 2 on rank 1"),
        ({"backward_prefetch": 2}, {}, "the call has backward_prefetch 1 on ranks 0, 2 and 2 on rank 1"),
        ({"slots": 3}, {}, "the call has slots None on ranks 0, 2 and 3 on rank 1"),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, {}, "the call has mixed_precision"),
        ({"cpu_offload": True}, {}, "the call has cpu_offload False on ranks 0, 2 and True on rank 1"),
        ({"on_nonfinite": "skip"}, {}, "the call has on_nonfinite None on ranks 0, 2 and 'skip' on rank 1"),
        ({"granularity": RowBlock(2)}, {}, "has granularity 'row' on ranks 0, 2 and RowBlock(rows=2) on rank 1"),
        ({"shard_dim": "auto"}, {}, "has shard_dim 0 on ranks 0, 2 and 'auto' on rank 1"),
        ({"units": nn.Linear}, {}, "on rank 1"),
    ],
)  # fmt: skip
def test_another_argument_on_one_rank(mine: Any, others: Any, message: str) -> None:
    def rank(comm: Communicator) -> str:
        return said_by_all(comm, Net(), **(mine if comm.rank == 1 else others))

    (said,) = set(run_threads(rank, 3, deadline_s=30))
    assert message in said


@pytest.mark.covers("ranks that differ")
def test_ranks_of_a_mesh_are_counted_row_by_row() -> None:
    def rank(mesh: Mesh) -> str:
        net = Net(layers=3 if mesh.rank == 4 else 2)
        with pytest.raises(CommError) as caught:
            fully_shard(net, mesh, strategy="hybrid_shard")
        return str(caught.value)

    (said,) = set(run_mesh(rank, 2, 3, deadline_s=30))
    assert "comes nothing on ranks 0 to 3, 5 and unit 'layers.2' on rank 4" in said


def over(transport: str) -> str:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        return said_by_all(comm, Net(hidden=16 + comm.rank))


@pytest.mark.covers("ranks that differ")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_between_processes(transport: str) -> None:
    (said,) = set(launch(over, 2, (transport,), timeout_s=60))
    assert "parameter 'layers.0.0.weight' has shape (16, 8) on rank 0 and (17, 8) on rank 1" in said


def test_equal_ranks_show_each_other_digests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("descriptions were shown")

    monkeypatch.setattr(agreement, "all_gather_text", refused)

    def rank(comm: Communicator) -> str:
        fully_shard(Net(), comm).close()
        return difference([comm], [Item("a thing", {"colour": "red"})])

    assert run_threads(rank, 3) == ["", "", ""]


def test_values_are_shown_up_to_a_few() -> None:
    def rank(comm: Communicator) -> str:
        return difference([comm], [Item("a thing", {"size": str(comm.rank // 2)})])

    (said,) = set(run_threads(rank, 12))
    assert said == (
        "a thing has size 0 on ranks 0, 1, 1 on ranks 2, 3, 2 on ranks 4, 5 and 3 others elsewhere"
    )


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(8, 16), (16, 8)], [{}, {}], "parameter 'w' has shape (8, 16) on rank 0 and (16, 8) on rank 1"),
        ([(8, 16), (8, 16)], [{}, {"reduce_dtype": torch.bfloat16}], "has reduce_dtype torch.float32 on rank 0"),
    ],
)  # fmt: skip
def test_buckets_made_by_hand(
    shapes: list[tuple[int, int]], options: list[dict[str, Any]], message: str
) -> None:
    def rank(comm: Communicator) -> str:
        with pytest.raises(CommError) as caught:
            Bucket.from_tensors({"w": torch.zeros(shapes[comm.rank])}, comm, **options[comm.rank])
        comm.barrier()
        return str(caught.value)

    (said,) = set(run_threads(rank, 2, deadline_s=30))
    assert said.startswith("Bucket: ranks differ: ")
    assert message in said
