"""Execution traces of a step: what their nodes are, in which order they may run, and the times of a measured step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from shardcomm import (
    Communicator,
    Machine,
    MemoryPlan,
    Mesh,
    MixedPrecision,
    Policy,
    Simulation,
    UnitTime,
    fully_shard,
)
from shardcomm.cli import plan as plan_command
from shardcomm.interop import chakra
from shardcomm.trace.timeline import RankTimeline, Span, Timeline
from support.execution_trace import (
    ALL_GATHER,
    ALL_REDUCE,
    COMM_COLL_NODE,
    COMP_NODE,
    REDUCE_SCATTER,
    Node,
    read,
)
from support.nets import batch, loss_of, make
from support.thread_ranks import run_mesh, run_threads

EVERY_STRATEGY: list[dict[str, Any]] = [
    {"strategy": "full_shard"},
    {"strategy": "shard_grad_op"},
    {"strategy": "no_shard"},
    {"strategy": "hybrid_shard", "replicas": 2},
]


def chain(layers: int, width: int = 16) -> nn.Sequential:
    """Each layer has width * (width + 1) parameters, of which no number of ranks here leaves a rest."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def written(plan: MemoryPlan, folder: Path, **how: Any) -> list[list[Node]]:
    chakra.write_step(plan, folder, **({"tokens": 10} | how))
    return [read(folder / f"step.{rank}.et")[1] for rank in range(plan.ranks)]


def groups_of(folder: Path) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = json.loads((folder / "comm_groups.json").read_text())
    return groups


def test_nodes_need_what_streams_and_channels_keep(tmp_path: Path) -> None:
    """By hand. Three layers of 1 KiB rotate over two slots; layer 2 takes the slot of layer 0, and 0 takes it back."""
    plan = MemoryPlan.of(chain(3), 4, units=nn.Linear)
    version, nodes = read_first(plan, tmp_path)
    assert version == "1.0.0"
    assert [node.id for node in nodes] == list(range(len(nodes)))
    needs = {node.name: [nodes[i].name for i in node.needs] for node in nodes[:12]}
    assert needs == {
        "gather 0": [],
        "gather 1": ["gather 0"],
        "forward 0": ["gather 0"],
        "gather 2": ["gather 1", "forward 0"],
        "forward 1": ["gather 1", "forward 0"],
        "forward 2": ["gather 2", "forward 1"],
        "forward (root)": ["forward 2"],
        "backward (root)": ["forward (root)"],
        "backward 2": ["gather 2", "backward (root)"],
        "reduce 2": ["backward 2"],
        "backward 1": ["gather 1", "backward 2"],
    } | {"gather 0": ["gather 2", "backward 2"]}  # the second of this name
    assert [node.name for node in nodes].count("gather 0") == 2
    last = nodes[-1]
    assert last.name == "optimizer"
    assert {"reduce 0", "reduce 1", "backward 0"} <= {nodes[i].name for i in last.needs}


def read_first(plan: MemoryPlan, folder: Path) -> tuple[str, list[Node]]:
    written(plan, folder)
    return read(folder / "step.0.et")


def test_computation_has_its_operations_and_bytes(tmp_path: Path) -> None:
    """2 operations for each of 256 parameters and 10 tokens, twice as many in backward; AdamW has 14 an element."""
    plan = MemoryPlan.of(chain(2), 2, units=nn.Linear)
    nodes = {node.name: node for node in written(plan, tmp_path)[0] if node.type == COMP_NODE}
    forward, backward = nodes["forward 0"].attributes, nodes["backward 0"].attributes
    assert (forward["num_ops"], forward["tensor_size"]) == (2 * 256 * 10, 4 * 256)
    assert (backward["num_ops"], backward["tensor_size"]) == (4 * 256 * 10, 2 * 4 * 256)
    optimizer = nodes["optimizer"].attributes
    assert (optimizer["num_ops"], optimizer["tensor_size"]) == (14 * 256, 4 * 4 * 256)
    assert not any(node.attributes["is_cpu_op"] for node in nodes.values())


def test_frozen_parameters_have_no_gradient_and_no_optimizer(tmp_path: Path) -> None:
    """In backward, 2 operations a parameter for the gradient of the input, and 2 for its own if it is trained."""
    model = chain(3)
    model[1].requires_grad_(False)
    plan = MemoryPlan.of(model, 2, units=nn.Linear)
    nodes = {node.name: node.attributes for node in written(plan, tmp_path)[0]}
    assert [nodes[f"backward {n}"]["num_ops"] for n in range(3)] == [10240, 5120, 10240]
    assert nodes["optimizer"]["num_ops"] == 14 * 2 * 256 // 2


def test_backward_does_not_come_to_frozen_units_in_front(tmp_path: Path) -> None:
    """Layers 0 to 2 are frozen. 2 is gathered ahead at backward 3; the optimizer waits for the reduces all the same."""
    model = chain(5)
    for layer in model[:3]:
        layer.requires_grad_(False)
    nodes = written(MemoryPlan.of(model, 2, units=nn.Linear), tmp_path)[0]
    behind = [node.name for node in nodes[[n.name for n in nodes].index("backward (root)") :]]
    assert behind == [
        "backward (root)",
        "backward 4",
        "reduce 4",
        "gather 2",
        "backward 3",
        "reduce 3",
        "optimizer",
    ]
    assert {"reduce 4", "reduce 3"} <= {nodes[need].name for need in nodes[-1].needs}


def test_every_computation_has_operations_and_bytes(tmp_path: Path) -> None:
    """Also that of a unit without parameters.

    Source: `Workload::issue_comp` of astra-sim/astra-sim (518bd51). It passes over a node whose `tensor_size` is
    0 without a look at those that wait for it, and divides by what `num_ops` gives.
    """
    nodes = written(MemoryPlan.of(chain(2), 2, units=nn.Linear), tmp_path)[0]
    computed = {node.name: node.attributes for node in nodes if node.type == COMP_NODE}
    assert {"forward (root)", "backward (root)"} < set(computed)
    for attributes in computed.values():
        assert int(attributes["num_ops"]) > 0
        assert int(attributes["tensor_size"]) > 0


@pytest.mark.parametrize("how", EVERY_STRATEGY, ids=lambda how: how["strategy"])
def test_collectives_move_the_bytes_that_the_engine_counts(
    how: dict[str, Any], tmp_path: Path
) -> None:
    def body(ranks: Communicator | Mesh) -> tuple[int, int]:
        model = make()
        engine = fully_shard(model, ranks, strategy=how["strategy"])
        loss_of(model, batch(ranks.rank, 0)).backward()
        return engine.traffic.gathered_bytes, engine.traffic.reduced_bytes

    hybrid = "replicas" in how
    counted = run_mesh(body, 2, 2) if hybrid else run_threads(body, 4)
    traces = written(MemoryPlan.of(make(), 4, **how), tmp_path)
    sizes = {name: len(ranks) for name, ranks in groups_of(tmp_path).items()}
    for nodes, (gathered, reduced) in zip(traces, counted, strict=True):
        moved = {ALL_GATHER: 0, REDUCE_SCATTER: 0, ALL_REDUCE: 0}
        for node in nodes:
            if node.type == COMM_COLL_NODE:
                size, nbytes = (
                    sizes[str(node.attributes["pg_name"])],
                    int(node.attributes["comm_size"]),
                )
                kind = int(node.attributes["comm_type"])
                moved[kind] += {
                    ALL_GATHER: nbytes * (size - 1),
                    REDUCE_SCATTER: nbytes * (size - 1) // size,
                    ALL_REDUCE: 2 * nbytes * (size - 1) // size,
                }[kind]
        assert moved[ALL_GATHER] == gathered
        assert moved[REDUCE_SCATTER] + moved[ALL_REDUCE] == reduced


@pytest.mark.parametrize("how", EVERY_STRATEGY, ids=lambda how: how["strategy"])
def test_ranks_of_a_group_make_the_same_collectives_in_the_same_order(
    how: dict[str, Any], tmp_path: Path
) -> None:
    """Else a simulator that matches them would wait for ever."""
    traces = written(MemoryPlan.of(chain(4), 8, units=nn.Linear, **how), tmp_path)
    for name, ranks in groups_of(tmp_path).items():
        made = [
            [
                (node.name, node.attributes["comm_type"], node.attributes["comm_size"])
                for node in traces[rank]
                if node.attributes.get("pg_name") == name
            ]
            for rank in ranks
        ]
        assert made[0]
        assert made == [made[0]] * len(ranks)
    for rank, nodes in enumerate(traces):
        names = {node.attributes["pg_name"] for node in nodes if node.type == COMM_COLL_NODE}
        assert all(rank in groups_of(tmp_path)[str(name)] for name in names)
        assert all(need < node.id for node in nodes for need in node.needs)


def issued(nodes: list[Node], random: Random) -> list[int]:
    """In which order a rank begins its collectives that makes one at a time, and beside it computes one thing.

    Whenever something has ended it begins the first that may begin. Everything takes a random time.

    Source: `HardwareResource::is_available` and `Workload::issue_dep_free_nodes` of astra-sim/astra-sim (518bd51).
    """
    left, ended, order = {node.id: node for node in nodes}, set[int](), list[int]()
    going_on: dict[int, tuple[float, int]] = {}  # by type: until when, and which
    now = 0.0
    while left or going_on:
        for node in list(left.values()):
            if node.type not in going_on and ended.issuperset(node.needs):
                going_on[node.type] = (now + random.random(), left.pop(node.id).id)
                order += [node.id] * (node.type == COMM_COLL_NODE)
        now, node_id = going_on.pop(min(going_on, key=lambda kind: going_on[kind]))
        ended.add(node_id)
    return order


@pytest.mark.parametrize(
    "how",
    [
        {"units": nn.Linear},
        {"units": nn.Linear, "slots": 3},
        {"units": [nn.Sequential, nn.Linear]},
        {"units": nn.Linear, "prefetch": 0, "slots": 2, "strategy": "hybrid_shard", "replicas": 2},
        {"units": nn.Linear, "slots": 4, "reshard_after_forward": 2},
    ],
    ids=["as it comes", "a slot more", "units in units", "hybrid", "hosts"],
)
def test_ranks_that_make_one_collective_at_a_time_make_them_in_one_order(
    how: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """Else one rank would wait in a gather and the other in a reduce, when they do not compute equally fast."""
    model = nn.Sequential(chain(1), chain(2), chain(2), chain(1))
    nodes = written(MemoryPlan.of(model, 4, **how), tmp_path)[0]
    order = [node.id for node in nodes if node.type == COMM_COLL_NODE]
    random = Random(seed)
    assert [issued(nodes, random) for _ in range(50)] == [order] * 50


def test_groups_are_replicas_hosts_and_shards(tmp_path: Path) -> None:
    written(MemoryPlan.of(chain(2), 6, strategy="hybrid_shard", replicas=2), tmp_path / "hybrid")
    assert groups_of(tmp_path / "hybrid") == {
        "1": [0, 1, 2],
        "2": [3, 4, 5],
        "3": [0, 3],
        "4": [1, 4],
        "5": [2, 5],
    }
    plan = MemoryPlan.of(chain(4), 4, units=nn.Linear, reshard_after_forward=2)
    nodes = written(plan, tmp_path / "hosts")[3]
    assert groups_of(tmp_path / "hosts") == {"1": [0, 1, 2, 3], "2": [0, 1], "3": [2, 3]}
    again = [node for node in nodes if node.name == "gather 0"]
    assert [node.attributes["pg_name"] for node in again] == ["1", "3"]
    assert [node.attributes["comm_size"] for node in again] == [256, 512]


def test_a_rank_alone_computes_and_nothing_else(tmp_path: Path) -> None:
    (nodes,) = written(MemoryPlan.of(chain(2), 1, units=nn.Linear), tmp_path)
    assert {node.type for node in nodes} == {COMP_NODE}
    assert groups_of(tmp_path) == {}


def measured() -> Timeline:
    def body(comm: Communicator) -> Timeline:
        model = make()
        engine = fully_shard(model, comm)
        with engine.trace() as trace:
            for step in range(3):
                with trace.step(step):
                    loss_of(model, batch(comm.rank, step)).backward()
        return trace.timeline()

    return run_threads(body, 2)[0]


def test_times_are_those_of_the_timeline(tmp_path: Path) -> None:
    """All computation together is the step without exposed communication, but for rounding to microseconds."""
    timeline = measured()
    traces = written(MemoryPlan.of(make(), 2), tmp_path, tokens=None, timeline=timeline)
    step = timeline.only(timeline.median_step())
    for nodes, rank, figures in zip(traces, step.ranks, step.figures(), strict=True):
        begin = next(span.begin_s for span in rank.spans if span.row == "step")
        computed = sum(node.duration_us for node in nodes if node.type == COMP_NODE)
        assert computed == pytest.approx(figures.compute_s * 1e6, abs=len(nodes))
        assert not any("num_ops" in node.attributes for node in nodes)
        for row in ("gather", "reduce"):
            spans = sorted((s for s in rank.spans if s.row == row), key=lambda s: s.begin_s)
            shown = [node for node in nodes if node.name.split()[0] == row]
            assert [node.name for node in shown] == [f"{row} {span.name}" for span in spans]
            for node, span in zip(shown, spans, strict=True):
                assert node.start_us == pytest.approx((span.begin_s - begin) * 1e6, abs=1)
                assert node.duration_us == pytest.approx((span.end_s - span.begin_s) * 1e6, abs=1)


def test_computation_ends_when_its_span_does_and_begins_after_the_one_before(
    tmp_path: Path,
) -> None:
    """By hand, in milliseconds: the step from 100 to 200, a wait from 110 to 120, and forward 0 to 130."""
    ms = 1e-3
    spans = (
        Span("step", "step 0", 100 * ms, 200 * ms, 0),
        Span("waiting", "gather 0", 110 * ms, 120 * ms, 0),
        Span("gather", "0", 101 * ms, 120 * ms, 512),
        Span("compute", "forward 0", 121 * ms, 130 * ms, 0),
        Span("compute", "forward (root)", 105 * ms, 140 * ms, 0),
        Span("compute", "backward 0", 160 * ms, 180 * ms, 0),
        Span("compute", "backward (root)", 155 * ms, 185 * ms, 0),
        Span("reduce", "0", 180 * ms, 195 * ms, 512),
        Span("waiting", "reduce 0", 185 * ms, 195 * ms, 0),
    )
    timeline = Timeline(tuple(RankTimeline(rank, spans, {}) for rank in range(2)), "played")
    plan = MemoryPlan.of(chain(1), 2, units=nn.Linear)
    nodes = written(plan, tmp_path, tokens=None, timeline=timeline)[0]
    assert {node.name: (node.start_us, node.duration_us) for node in nodes} == {
        "gather 0": (1000, 19000),
        "forward 0": (10000, 20000),
        "forward (root)": (30000, 10000),
        "backward (root)": (40000, 20000),
        "backward 0": (60000, 20000),
        "reduce 0": (80000, 15000),
        "optimizer": (90000, 10000),
    }


def test_a_backward_that_nothing_announces_ends_where_its_reduce_begins(tmp_path: Path) -> None:
    """By hand, in milliseconds. A unit that is not reduced either has none."""
    ms = 1e-3
    spans = (
        Span("step", "step 0", 0.0, 100 * ms, 0),
        Span("gather", "0", 0.0, 10 * ms, 512),
        Span("gather", "1", 0.0, 10 * ms, 512),
        Span("waiting", "gather 0", 0.0, 10 * ms, 0),
        Span("compute", "forward 0", 10 * ms, 20 * ms, 0),
        Span("compute", "forward 1", 20 * ms, 30 * ms, 0),
        Span("compute", "forward (root)", 10 * ms, 30 * ms, 0),
        Span("compute", "backward 1", 40 * ms, 60 * ms, 0),
        Span("reduce", "1", 60 * ms, 65 * ms, 512),
        Span("reduce", "0", 80 * ms, 85 * ms, 512),
        Span("reduce", "(root)", 85 * ms, 85 * ms, 0),  # which has no parameters
    )
    timeline = Timeline(tuple(RankTimeline(rank, spans, {}) for rank in range(2)), "played")
    plan = MemoryPlan.of(chain(2), 2, units=nn.Linear, slots=2)
    nodes = written(plan, tmp_path / "trained", tokens=None, timeline=timeline)[0]
    found = {node.name: (node.start_us, node.duration_us) for node in nodes}
    assert found["backward 1"] == (40000, 20000)
    assert found["backward 0"] == (60000, 20000)
    assert found["optimizer"] == (80000, 20000)

    frozen = chain(2)
    frozen[0].requires_grad_(False)
    less = tuple(span for span in spans if (span.row, span.name) != ("reduce", "0"))
    timeline = Timeline(tuple(RankTimeline(rank, less, {}) for rank in range(2)), "played")
    plan = MemoryPlan.of(frozen, 2, units=nn.Linear, slots=2)
    nodes = written(plan, tmp_path / "frozen", tokens=None, timeline=timeline)[0]
    found = {node.name: (node.start_us, node.duration_us) for node in nodes}
    assert "backward 0" not in found
    assert found["optimizer"] == (60000, 40000)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_model_of_plain_layers_is_written_as_it_was_measured(
    strategy: str, param_dtype: torch.dtype | None, frozen: int, tmp_path: Path
) -> None:
    """Its input has no gradient, its root no parameters; and under no_shard gathers are casts, reduces packing.

    Backward does not come to frozen layers in front, so that the first of two is not gathered for it.
    """
    options: dict[str, Any] = {
        "units": nn.Linear,
        "strategy": strategy,
        "mixed_precision": MixedPrecision(param_dtype),
    }

    def layers() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(frozen + 2)))
        for layer in model[:frozen]:
            layer.requires_grad_(False)
        return model

    def body(comm: Communicator) -> Timeline:
        model = layers()
        engine = fully_shard(model, comm, **options)
        with engine.trace() as trace, trace.step(0):
            model(torch.ones(4, 16)).float().square().mean().backward()
        return trace.timeline()

    timeline = run_threads(body, 2)[0]
    traces = written(
        MemoryPlan.of(layers(), 2, **options), tmp_path, tokens=None, timeline=timeline
    )
    for nodes, rank, figures in zip(traces, timeline.ranks, timeline.figures(), strict=True):
        computed = sum(node.duration_us for node in nodes if node.type == COMP_NODE)
        assert computed == pytest.approx(figures.compute_s * 1e6, abs=len(nodes))
        backwards = {node.name: node for node in nodes if node.name.startswith("backward ")}
        first, second = f"backward {frozen}", f"backward {frozen + 1}"
        assert set(backwards) == {first, second, "backward (root)"}
        (begin_s,) = (s.end_s for s in rank.spans if (s.row, s.name) == ("compute", second))
        (end_s,) = (s.begin_s for s in rank.spans if (s.row, s.name) == ("reduce", str(frozen)))
        waited_s = sum(
            max(0.0, min(s.end_s, end_s) - max(s.begin_s, begin_s))
            for s in rank.spans
            if s.row == "waiting"
        )
        assert backwards[first].duration_us == pytest.approx(
            (end_s - begin_s - waited_s) * 1e6, abs=1
        )


def test_frozen_blocks_under_a_trained_head_are_written_as_they_were_measured(
    tmp_path: Path,
) -> None:
    """The head is the root's, which is the first unit; so that only the trace tells where backward came."""

    def model() -> nn.Sequential:
        blocks = [nn.Sequential(nn.Linear(16, 16)) for _ in range(3)]
        return nn.Sequential(*(block.requires_grad_(False) for block in blocks), nn.Linear(16, 16))

    def body(comm: Communicator) -> Timeline:
        trained = model()
        engine = fully_shard(trained, comm, units=nn.Sequential)
        with engine.trace() as trace, trace.step(0):
            trained(torch.ones(4, 16)).square().mean().backward()
        return trace.timeline()

    timeline = run_threads(body, 2)[0]
    plan = MemoryPlan.of(model(), 2, units=nn.Sequential)
    for nodes in written(plan, tmp_path, tokens=None, timeline=timeline):
        assert [n.name for n in nodes if "backward" in n.name] == ["backward (root)"]
        gathers = [node.name for node in nodes if node.name.startswith("gather")]
        assert gathers == ["gather (root)", "gather 0", "gather 1", "gather 2"]


def test_a_simulated_timeline_is_refused_as_one(tmp_path: Path) -> None:
    plan = MemoryPlan.of(chain(2), 2, units=nn.Linear)
    step = Simulation.of(plan, [UnitTime(1.0, 2.0)] * 3, Machine.load("8xH100"))
    step.timeline().save(tmp_path / "step.json")
    for timeline in (step.timeline(), Timeline.load(tmp_path / "step.json")):
        with pytest.raises(ValueError, match="timeline is of a simulation; it must be measured"):
            chakra.write_step(plan, tmp_path / "none", timeline=timeline)


def test_a_timeline_of_something_else_is_refused(tmp_path: Path) -> None:
    timeline = measured()
    others = {
        "2 ranks, and plan of 4": MemoryPlan.of(make(), 4),
        "no forward blocks.4, which the plan has": MemoryPlan.of(make(layers=5), 2),
        "one more forward blocks.3 than the plan": MemoryPlan.of(make(layers=3), 2),
        "B in a gather of .*, and the plan": MemoryPlan.of(make(width=8), 2),
        "one gather of blocks.0 less than the plan|one more gather": MemoryPlan.of(
            make(), 2, strategy="shard_grad_op"
        ),
    }
    for sentence, plan in others.items():
        with pytest.raises(ValueError, match=sentence):
            chakra.write_step(plan, tmp_path / "none", timeline=timeline)
    assert not (tmp_path / "none").exists()
    unmarked = Timeline(tuple(RankTimeline(rank, (), {}) for rank in range(2)), "")
    with pytest.raises(ValueError, match="timeline has no steps"):
        chakra.write_step(MemoryPlan.of(make(), 2), tmp_path / "none", timeline=unmarked)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"tokens": 0}, ValueError, "tokens is 0; it must be a whole number above 0"),
        ({}, ValueError, "tokens and timeline are None; give tokens"),
        ({"tokens": 1, "plan": 3}, TypeError, "plan is a int; it must be a shardcomm.MemoryPlan"),
        ({"timeline": "trace.json"}, TypeError, "timeline is a str; it must be a Timeline"),
    ],
    ids=["no tokens", "nothing given", "no plan", "no timeline"],
)
def test_odd_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    plan = MemoryPlan.of(chain(2), 2)
    with pytest.raises(error, match=sentence):
        chakra.write_step(**{"plan": plan, "folder": tmp_path} | arguments)


def test_an_offloaded_plan_is_refused(tmp_path: Path) -> None:
    plan = MemoryPlan.of(chain(2), 2, cpu_offload=True)
    with pytest.raises(
        ValueError, match=r"plan has parameters in host memory, .* leave cpu_offload"
    ):
        chakra.write_step(plan, tmp_path, tokens=1)


def test_parts_of_different_sizes_and_folders_with_something_are_refused(tmp_path: Path) -> None:
    uneven = MemoryPlan.of(chain(3), 2, units=nn.Linear, granularity="tensor")
    with pytest.raises(ValueError, match="in parts of different sizes"):
        chakra.write_step(uneven, tmp_path, tokens=1)
    alone = Policy(comm=Communicator.local_group(1)[0])
    with pytest.raises(ValueError, match="on other ranks than the rest"):
        chakra.write_step(MemoryPlan.of(chain(2), 2, units={nn.Linear: alone}), tmp_path, tokens=1)
    (tmp_path / "step.7.et").touch()
    with pytest.raises(ValueError, match="is not empty; it must be a new or empty one"):
        chakra.write_step(MemoryPlan.of(chain(2), 2), tmp_path, tokens=1)


def command(*args: str) -> int:
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["plan", *args])
    status: int = parsed.run(parsed)
    return status


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "traces")
    model = ["--params", "1e6", "--layers", "4", "--ranks", "3", "--chakra", folder]
    for missing, sentence in (
        (["--tokens", "5"], "--chakra needs --strategy"),
        (["--strategy", "full_shard"], "--chakra needs --tokens N, of which operations follow"),
        (["--strategy", "full_shard", "--trace", "nowhere"], "nowhere: No such file"),
    ):
        with pytest.raises(SystemExit):
            command(*model, *missing)
        assert sentence in capsys.readouterr().err
    assert command(*model, "--strategy", "full_shard", "--tokens", "5") == 0
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == ["comm_groups.json", "step.0.et", "step.1.et", "step.2.et"]
