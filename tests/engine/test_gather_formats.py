"""Parameters that are gathered in a block format, against plain models that compute with the values on the wire."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardcomm import (
    BlockFormat,
    Bucket,
    Communicator,
    Engine,
    Layout,
    MemoryPlan,
    Mesh,
    MixedPrecision,
    ParamSpec,
    Policy,
    Transport,
    fully_shard,
    launch,
)
from shardcomm.bucket.block_gather import BlockWire
from shardcomm.bucket.reduction import Reduction
from shardcomm.comm import introduction
from shardcomm.comm.bound_collective import BoundCollective
from shardcomm.comm.core import CoreCommunicator
from shardcomm.interop.chakra import write_step
from shardcomm.stream.work import Work
from shardcomm.unit.mixed_precision import GatherFormatOf
from support.block_reference import encoded, values_of
from support.thread_ranks import run_mesh, run_threads

STEPS, LR = 4, 0.1


class Net(nn.Module):
    """Layers whose rows no number of ranks shares evenly, and one that a rank has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 48)
        self.norm = nn.LayerNorm(48)
        self.hidden = nn.Linear(48, 47)
        self.out = nn.Linear(47, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.norm(self.embed(tokens)))))


torch.manual_seed(3)
INITIAL = Net().state_dict()  # once, since ranks that are threads share torch's generator


def made_net() -> Net:
    net = Net()
    net.load_state_dict(INITIAL)
    return net


def on_wire(rows: Tensor, format: BlockFormat) -> Tensor:
    """The values that a rank's rows of one parameter have on the wire, by the definition of the format."""
    flat = rows.detach().double().flatten()
    blocks = nn.functional.pad(flat, (0, -flat.numel() % format.block)).view(-1, format.block)
    values = values_of(format.name, *encoded(format.name, blocks))
    return values.flatten()[: flat.numel()].view_as(rows).to(rows.dtype)


Formats = Callable[[str, Tensor], BlockFormat | None]
"""The format of a parameter, by its name."""


class Trained(NamedTuple):
    """What a rank has seen: all parameters before each step and at the end, and how many rows each rank has of them."""

    values: list[dict[str, Tensor]]
    rows: dict[str, list[int]]


def check_steps(seen: Trained, ranks: int, format_of: Formats) -> None:
    """Each step is that of plain SGD on the mean of all ranks' losses, which computes with the values on the wire.

    Step by step: from parameters that differ in a bit, other values can be on the wire.
    """
    for step, (before, after) in enumerate(pairwise(seen.values)):
        sent = {}
        for name, value in before.items():
            format = format_of(name, value)
            parts = [value] if format is None else value.split(seen.rows[name])
            on_ranks = [each if format is None else on_wire(each, format) for each in parts]
            sent[name] = torch.cat(on_ranks).requires_grad_()
        model = partial(functional_call, made_net(), sent)
        loss = sum(loss_of(model, step, rank) for rank in range(ranks))
        grads = torch.autograd.grad(loss / ranks, list(sent.values()))
        for (name, value), grad in zip(before.items(), grads, strict=True):
            expected = value - LR * grad
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    tokens = torch.arange(8) * (rank + 3) % 19
    return nn.functional.cross_entropy(model(tokens), (tokens + step) % 19)


def sharded(where: Communicator | Mesh, format: GatherFormatOf, **arguments: Any) -> Engine:
    return fully_shard(
        made_net(),
        where,
        units=[nn.Linear, nn.Embedding],
        mixed_precision=MixedPrecision(gather_format=format),
        **arguments,
    )


def trained(engine: Engine, rank: int) -> Trained:
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=LR)
    values = [engine.full_state_dict()]
    for step in range(STEPS):
        loss_of(engine.model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(engine.full_state_dict())
    rows = {}
    for unit in engine.units:
        for bucket, params in unit.buckets:
            for i, param in enumerate(params):
                held = [bucket.layout.piece(r, i).numel for r in range(bucket.layout.world_size)]
                rows[param.name] = [n // max(1, math.prod(param.full.shape[1:])) for n in held]
    return Trained(values, rows)


def of_matrices(format: BlockFormat) -> Formats:
    return lambda _, param: format if param.ndim > 1 else None


@pytest.mark.covers("block formats", "training parity")
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("name", ["mxint8", "mxfp8"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_computes_with_the_values_on_the_wire(
    ranks: int, strategy: str, name: str, block: int
) -> None:
    format = BlockFormat(name, block)
    seen, *_ = run_threads(
        lambda comm: trained(sharded(comm, format, strategy=strategy), comm.rank), ranks
    )
    check_steps(seen, ranks, of_matrices(format))
    with pytest.raises(AssertionError, match="weight"):  # it can tell
        check_steps(seen, ranks, lambda *_: None)


@pytest.mark.covers("block formats")
def test_replicas_compute_with_the_values_on_the_wire() -> None:
    format = BlockFormat("mxfp8")
    seen, *_ = run_mesh(
        lambda mesh: trained(
            sharded(mesh, format, strategy="hybrid_shard"),
            2 * mesh.replicate.rank + mesh.shard.rank,
        ),
        2,
        2,
    )
    check_steps(seen, 4, of_matrices(format))


def keeps_embedding(name: str, param: nn.Parameter) -> BlockFormat | None:
    return None if "embed" in name or param.ndim < 2 else BlockFormat("mxint8")


@pytest.mark.covers("block formats")
def test_a_function_decides_for_each_parameter() -> None:
    def run(comm: Communicator) -> tuple[Trained, set[str]]:
        engine = sharded(comm, keeps_embedding)
        coded = {
            param.name
            for unit in engine.units
            for bucket, params in unit.buckets
            for param in params[: bucket.coded if bucket.gather_format else 0]
        }
        return trained(engine, comm.rank), coded

    seen, coded = run_threads(run, 2)[0]
    assert coded == {"hidden.weight", "out.weight"}
    check_steps(seen, 2, keeps_embedding)


def over_processes(transport: Transport) -> Trained:
    with Communicator.from_env(deadline_s=60.0, transport=transport) as comm:
        assert comm.transport == transport
        return trained(sharded(comm, BlockFormat("mxint8")), comm.rank)


@pytest.mark.covers("block formats")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_processes_compute_with_the_values_on_the_wire(transport: Transport) -> None:
    seen, *_ = launch(over_processes, 2, (transport,), timeout_s=120)
    check_steps(seen, 2, of_matrices(BlockFormat("mxint8")))


def over_hosts() -> Trained:
    rank = int(os.environ["RANK"])
    introduction.host_identity = lambda: "AABB"[rank]  # type: ignore[assignment]
    with Communicator.from_env(deadline_s=60.0, transport="hosts") as comm:
        return trained(sharded(comm, BlockFormat("mxint8")), comm.rank)


@pytest.mark.covers("block formats", transports=["hosts"])
def test_hosts_compute_with_the_values_on_the_wire() -> None:
    """Two hosts of two ranks, which are one host here that says it is two. A rank decodes parts of several ranks."""
    seen, *_ = launch(over_hosts, 4, timeout_s=120)
    check_steps(seen, 4, of_matrices(BlockFormat("mxint8")))


def test_the_errors_are_those_of_the_gathered_values() -> None:
    def run(comm: Communicator) -> None:
        net = made_net()
        engine = fully_shard(
            net,
            comm,
            units=[nn.Linear, nn.Embedding],
            mixed_precision=MixedPrecision(gather_format=BlockFormat("mxfp8")),
        )
        seen = dict.fromkeys((unit.name for unit in engine.units), 0.0)

        def look(unit: str, param: str) -> Callable[[nn.Module, object], None]:
            def hook(module: nn.Module, _: object) -> None:
                difference = module.weight.detach() - INITIAL[param]
                seen[unit] = float(difference.abs().max())

            return hook

        for unit in ("embed", "hidden", "out"):
            net.get_submodule(unit).register_forward_pre_hook(look(unit, f"{unit}.weight"))
        loss_of(net, 0, comm.rank).backward()
        errors = engine.wire_error()
        assert set(errors) == {"embed", "hidden", "out"}
        both = torch.tensor([[errors[unit].seen for unit in errors]]).repeat(comm.size, 1)
        everywhere = torch.empty_like(both)
        comm.all_gather(everywhere, both[0].contiguous())
        for i, (unit, error) in enumerate(errors.items()):
            assert error.seen <= error.bound, unit
            assert error.seen > 0 or unit != "hidden"  # of which each rank has rows
            assert error.flagged == 0
            assert float(everywhere[:, i].max()) == pytest.approx(seen[unit], rel=1e-6)
        assert all(error == (0, 0, 0) for error in engine.wire_error().values())  # taken

    run_threads(run, 2)


def test_nan_is_flagged_and_reaches_the_loss() -> None:
    def run(comm: Communicator) -> tuple[float, int, int]:
        net = made_net()
        with torch.no_grad():
            net.hidden.weight[5, 7] = torch.inf
        wire = MixedPrecision(gather_format=BlockFormat("mxint8"))
        engine = fully_shard(net, comm, units=[nn.Linear], mixed_precision=wire)
        loss = loss_of(net, 0, comm.rank)
        errors = engine.wire_error()
        return loss.item(), errors["hidden"].flagged, errors["out"].flagged

    losses, flagged, others = zip(*run_threads(run, 2), strict=True)
    assert torch.tensor(losses).isnan().all()
    assert sum(flagged) == 1
    assert sum(others) == 0


@pytest.mark.covers("block formats", "state dicts", "gathered and unshard")
def test_what_is_saved_and_shown_outside_of_forward_is_exact() -> None:
    def run(comm: Communicator) -> None:
        net = made_net()
        engine = fully_shard(
            net, comm, mixed_precision=MixedPrecision(gather_format=BlockFormat("mxint8"))
        )
        loss_of(net, 0, comm.rank).backward()
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, INITIAL[name]), name
        with engine.gathered():
            assert torch.equal(net.hidden.weight, INITIAL["hidden.weight"])

    run_threads(run, 2)


PLANS = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "bf16": {"param_dtype": torch.bfloat16},
    "tensor": {"granularity": "tensor"},
    "cpu_offload": {"cpu_offload": True},
}


@pytest.mark.covers("block formats", "CPU offload", "granularity")
@pytest.mark.parametrize("case", PLANS)
def test_the_plan_is_what_a_rank_holds_and_receives(case: str) -> None:
    """`fully_shard` itself compares the plan with what is held, to the byte."""
    given = dict(PLANS[case])
    wire = MixedPrecision(
        param_dtype=given.pop("param_dtype", None), gather_format=BlockFormat("mxint8", 64)
    )
    arguments = {"units": [nn.Linear, nn.Embedding], "mixed_precision": wire, **given}

    def run(comm: Communicator) -> tuple[int, int]:
        net = made_net()
        engine = fully_shard(net, comm, **arguments)
        loss_of(net, 0, comm.rank).backward()
        plan = MemoryPlan.of(made_net(), 3, rank=comm.rank, **arguments)
        assert engine.footprint() == plan.footprint
        assert engine.footprint().wire_bytes > 0
        gathers = [unit.full.gather_bytes for unit in engine.units]
        assert gathers == [unit.gather_bytes for unit in plan.units]
        # From first principles: of the weight a byte an element, and one of 64 for scales; of the bias what it takes in
        # param_dtype; both up to a multiple of 128. Parts are equal where shards are.
        ((bucket, _),) = engine.unit(net.hidden).buckets
        layout = bucket.layout
        weights, biases = ([layout.piece(r, i).numel for r in range(3)] for i in (0, 1))
        sizes = [-(-n // 64) * 65 for n in weights], [n * bucket.full.itemsize for n in biases]
        parts = [sum(-(-size // 128) * 128 for size in part) for part in zip(*sizes, strict=True)]
        if len(set(layout.shard_numels)) == 1:
            parts = [max(parts)] * 3
        assert bucket.gather_bytes == sum(parts) - parts[comm.rank]
        return comm.rank, bucket.gather_bytes

    run_threads(run, 3)


def test_a_rank_alone_rounds_nothing() -> None:
    net, plain = made_net(), made_net()
    wire = MixedPrecision(gather_format=BlockFormat("mxint8"))
    engine = fully_shard(net, Communicator.local_group(1)[0], mixed_precision=wire)
    tokens = torch.arange(5)
    assert torch.equal(net(tokens), plain(tokens))
    assert set(engine.wire_error().values()) == {(0.0, 0.0, 0)}
    assert engine.footprint().wire_bytes == 0


@pytest.mark.covers("block formats")
@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}], ids=["cut", "owned"])
def test_a_unit_makes_one_gather_and_one_reduce(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Tensor] = []
    reduced: list[Reduction] = []
    bind, reduce = CoreCommunicator.bind_all_gather, Reduction.reduce

    def binding(self: CoreCommunicator, recv: Tensor, *args: Any, **given: Any) -> BoundCollective:
        bound.append(recv)
        return bind(self, recv, *args, **given)

    def reducing(self: Reduction, **given: Any) -> Work:
        reduced.append(self)
        return reduce(self, **given)

    monkeypatch.setattr(CoreCommunicator, "bind_all_gather", binding)
    monkeypatch.setattr(Reduction, "reduce", reducing)

    def run(comm: Communicator) -> None:
        engine = sharded(comm, BlockFormat("mxint8"), **options)
        units = [unit for unit in engine.units if unit.params]
        assert [len(unit.buckets) for unit in units] == [1] * 4
        loss_of(engine.model, 0, comm.rank).backward()

    run_threads(run, 2)
    assert len(bound) == 2 * 4  # each rank binds the gather of each unit once
    assert len(reduced) == 2 * 4


@pytest.mark.covers("block formats", "mixed precision")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_stays_wide_is_as_without_a_format(
    ranks: int, param_dtype: torch.dtype | None
) -> None:
    """To the bit, while the matrices beside it are what the format makes of their rows."""
    wire = MixedPrecision(param_dtype=param_dtype, gather_format=BlockFormat("mxint8", 128))

    def run(comm: Communicator) -> None:
        net = made_net()
        engine = fully_shard(net, comm, mixed_precision=wire)  # one unit of all parameters
        ((bucket, _),) = (entry for unit in engine.units for entry in unit.buckets)
        rows = {
            placed.spec.name: [bucket.layout.piece(rank, i).numel for rank in range(ranks)]
            for i, placed in enumerate(bucket.layout.placements)
        }
        seen: dict[str, Tensor] = {}

        def look(*_: object) -> None:
            seen.update({name: param.detach().clone() for name, param in net.named_parameters()})

        net.register_forward_pre_hook(look)
        loss_of(net, 0, comm.rank)
        assert set(seen) == set(INITIAL)
        for name, value in INITIAL.items():
            expected = value
            if value.ndim > 1:
                pieces = value.flatten().split(rows[name])
                expected = torch.cat(
                    [on_wire(piece, BlockFormat("mxint8", 128)) for piece in pieces]
                )
            assert torch.equal(
                seen[name], expected.view_as(value).to(param_dtype or value.dtype)
            ), name

    run_threads(run, ranks)


def formats_of_groups(
    format: GatherFormatOf, model: nn.Module, ranks: int
) -> list[tuple[str, int, int]]:
    """Of each bucket of a unit its format, how many parameters are coded, and how many there are."""

    def run(comm: Communicator) -> list[tuple[str, int, int]]:
        engine = fully_shard(
            copy.deepcopy(model), comm, mixed_precision=MixedPrecision(gather_format=format)
        )
        (unit,) = engine.units
        return [
            (bucket.gather_format.name if bucket.gather_format else "", bucket.coded, len(params))
            for bucket, params in unit.buckets
        ]

    return run_threads(run, ranks)[0]


@pytest.mark.covers("block formats")
def test_what_stays_wide_joins_the_first_format() -> None:
    def of(name: str, param: nn.Parameter) -> BlockFormat | None:
        if param.ndim < 2:
            return None
        return BlockFormat("mxfp8" if name.startswith("out") else "mxint8")

    assert formats_of_groups(of, made_net(), 2) == [("mxint8", 2, 6), ("mxfp8", 1, 1)]


@pytest.mark.covers("block formats")
def test_what_stays_wide_has_a_bucket_where_it_is_most_of_a_unit() -> None:
    """Equal parts would all be as long as that of the rank whose elements are all wide."""
    model = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 2000), nn.LayerNorm(64))

    def of(name: str, param: nn.Parameter) -> BlockFormat | None:
        return BlockFormat("mxint8") if name == "1.weight" else None

    assert formats_of_groups(of, model, 4) == [("", 0, 4), ("mxint8", 1, 1)]
    assert formats_of_groups(BlockFormat("mxint8"), model, 4) == [("mxint8", 2, 5)]


@pytest.mark.covers("block formats", "reshard_after_forward")
def test_a_secondary_shard_has_the_values_on_the_wire() -> None:
    format = BlockFormat("mxint8")
    hosts = [Communicator.local_group(2) for _ in range(2)]

    def run(comm: Communicator) -> Trained:
        host = hosts[comm.rank // 2][comm.rank % 2]
        return trained(sharded(comm, format, slots=2, reshard_after_forward=host), comm.rank)

    seen, *_ = run_threads(run, 4)
    check_steps(seen, 4, of_matrices(format))


@pytest.mark.covers("block formats", "units that differ")
def test_a_unit_may_have_a_format_of_its_own() -> None:
    def run(comm: Communicator) -> list[str]:
        net = made_net()
        own = Policy(mixed_precision=MixedPrecision(gather_format=BlockFormat("mxfp8", 128)))
        engine = fully_shard(
            net,
            comm,
            units={nn.Embedding: None, nn.Linear: own},
            mixed_precision=MixedPrecision(gather_format=BlockFormat("mxint8")),
        )
        loss_of(net, 0, comm.rank).backward()
        return [
            f"{unit.name} {bucket.gather_format.name}"
            for unit in engine.units
            for bucket, _ in unit.buckets
            if bucket.gather_format
        ]

    assert run_threads(run, 2)[0] == ["embed mxint8", "hidden mxfp8", "out mxfp8"]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("mxint8", TypeError, "it must be a shardcomm.BlockFormat such as"),
        (BlockFormat, TypeError, "it must be a shardcomm.BlockFormat such as"),
        (torch.int8, TypeError, "it must be a shardcomm.BlockFormat such as"),
        (BlockFormat("mxint8", rounding="stochastic"), ValueError, 'accepted: rounding="nearest"'),
        (lambda *_: "mxint8", TypeError, "returned 'mxint8'; it must return a BlockFormat or None"),
        (
            lambda *_: BlockFormat("mxfp8", rounding="stochastic"),
            ValueError,
            'accepted: rounding="nearest"',
        ),
    ],
    ids=[
        "a-name",
        "the-class",
        "a-dtype",
        "stochastic",
        "function-of-names",
        "function-stochastic",
    ],
)
def test_other_formats_are_refused(given: object, error: type[Exception], said: str) -> None:
    def run(comm: Communicator) -> None:
        wire = MixedPrecision(gather_format=given)  # type: ignore[arg-type]
        fully_shard(made_net(), comm, mixed_precision=wire)

    with pytest.raises(error, match=said):
        run_threads(run, 2)


def test_parameters_that_no_format_can_hold_are_refused() -> None:
    def run(comm: Communicator) -> None:
        net = nn.Linear(4, 4, dtype=torch.float64)
        wire = MixedPrecision(gather_format=lambda *_: BlockFormat("mxint8"))
        fully_shard(net, comm, mixed_precision=wire)

    with pytest.raises(ValueError, match=r"'weight'.*for a parameter of torch\.float64"):
        run_threads(run, 2)
    layout = Layout.plan([ParamSpec("w", (4, 4))], 1, itemsize=8)
    comm = Communicator.local_group(1)[0]
    with pytest.raises(ValueError, match=r"gather_format is .* and dtype is torch\.int64"):
        Bucket(layout, comm, dtype=torch.int64, gather_format=BlockFormat("mxint8"))


def test_ranks_that_differ_in_it_are_told() -> None:
    def run(comm: Communicator) -> None:
        format = BlockFormat("mxint8" if comm.rank else "mxfp8")
        fully_shard(made_net(), comm, mixed_precision=MixedPrecision(gather_format=format))

    with pytest.raises(Exception, match="gather_format"):
        run_threads(run, 2)


@pytest.mark.covers("block formats")
@pytest.mark.parametrize("planned", [False, True])
def test_a_bucket_by_hand(planned: bool) -> None:
    torch.manual_seed(5)
    weights = {"w": torch.randn(6, 40), "b": torch.randn(6)}
    format = BlockFormat("mxfp8")

    def run(comm: Communicator) -> list[Tensor]:
        layout = Layout.plan([ParamSpec(n, tuple(t.shape)) for n, t in weights.items()], comm.size)
        if planned:
            bucket = Bucket(layout, comm, gather_format=format)
            bucket.load(list(weights.values()))
        else:
            bucket = Bucket.from_tensors(weights, comm, gather_format=format)
        bucket.all_gather()
        bucket.all_gather(async_op=True).wait()
        return [param.clone() for param in bucket.params]

    layout = Layout.plan([ParamSpec(n, tuple(t.shape)) for n, t in weights.items()], 2)
    for gathered in run_threads(run, 2):
        for i, (weight, value) in enumerate(zip(weights.values(), gathered, strict=True)):
            held = [layout.piece(rank, i).numel for rank in range(2)]
            rows = weight.split([n // weight[0].numel() for n in held])
            expected = torch.cat([on_wire(each, format) for each in rows])
            assert torch.equal(value, expected)


def test_a_function_is_asked_once_for_each_parameter() -> None:
    asked: list[str] = []

    def once(name: str, param: nn.Parameter) -> BlockFormat | None:
        asked.append(name)
        return None if param.ndim < 2 or len(asked) > 2 else BlockFormat("mxint8")

    engine = fully_shard(
        made_net(),
        Communicator.local_group(1)[0],
        mixed_precision=MixedPrecision(gather_format=once),
    )
    assert sorted(asked) == sorted(INITIAL)
    coded = [b.gather_format for unit in engine.units for b, _ in unit.buckets if b.gather_format]
    assert coded == [BlockFormat("mxint8")]


def test_the_error_is_that_of_gathers_that_have_ended() -> None:
    def run(comm: Communicator) -> None:
        bucket = Bucket(
            Layout.plan([ParamSpec("w", (64, 512))], comm.size),
            comm,
            gather_format=BlockFormat("mxint8"),
        )
        bucket.load([torch.full((64, 512), 1.01)])
        for _ in range(200):
            work = bucket.all_gather(async_op=True)
            error = bucket.gathering.take_error()
            assert error is not None
            assert error.bound == 2**-7
            work.wait()
            assert bucket.gathering.take_error() == (0.0, 0.0, 0)

    run_threads(run, 2)


def test_memory_that_a_wire_does_not_fit_into_is_refused() -> None:
    def run(comm: Communicator) -> None:
        layout = Layout.plan([ParamSpec("w", (64, 64))], comm.size)
        with pytest.raises(TypeError, match=r"wire .*must be a BlockWire"):
            Bucket(layout, comm, gather_format=BlockFormat("mxint8"), wire=torch.zeros(10))  # type: ignore[arg-type]
        wire = BlockWire(comm, 128, 256)
        with pytest.raises(ValueError, match="wire has 128 bytes to send from, and 256 to receive"):
            Bucket(layout, comm, gather_format=BlockFormat("mxint8"), wire=wire)

    run_threads(run, 2)


def test_plans_with_block_formats_are_refused_where_they_are_not_told(tmp_path: Path) -> None:
    wire = MixedPrecision(gather_format=BlockFormat("mxint8"))
    plan = MemoryPlan.of(made_net(), 2, units=[nn.Linear], mixed_precision=wire)
    with pytest.raises(ValueError, match="in a block format, which an execution trace does not"):
        write_step(plan, tmp_path, tokens=8)
