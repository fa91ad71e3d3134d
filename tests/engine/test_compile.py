"""torch.compile of a sharded model, of its blocks, and of functions that call it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from shardcomm import Communicator, fully_shard, launch
from support.parity import assert_same_params
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, Encoder, assert_same_gradients, twins, values


@pytest.mark.slow
def test_a_model_may_be_compiled_afterwards() -> None:
    """Each unit's forward is compiled by itself, and nothing of the engine."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        torch._dynamo.reset()
        counted = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counted)
        for _ in range(2):
            model.zero_grad()
            compiled(values(4, WIDTH)).sum().backward()
        plain(values(4, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)
        computes = {"linear", "tanh"}
        for graph in counted.graphs:
            calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
            assert {getattr(node.target, "__name__", node.target) for node in calls} <= computes

    run_threads(body, 1)


@pytest.mark.slow
def test_one_graph_of_all_units_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(
            Unsupported, match=r"block.compile\(fullgraph=True\) before fully_shard"
        ):
            compiled(values(4, WIDTH))
        engine.close()

    run_threads(body, 1)


@pytest.mark.slow
def test_a_gathered_model_is_one_graph_if_its_root_has_no_parameters_either() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        engine = fully_shard(model, comm, units=nn.Linear)
        torch._dynamo.reset()
        with engine.gathered(), torch.no_grad():
            x = values(4, WIDTH)
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), model(x))
        engine.close()

    run_threads(body, 1)


@pytest.mark.slow
def test_graphs_end_at_a_registered_method() -> None:
    """Else Dynamo traces the engine, too, and warns of what it does not know."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Encoder)
        engine = fully_shard(model, comm)
        engine.register_forward_method(model, "encode")
        torch._dynamo.reset()
        x = values(4, WIDTH)
        with warnings.catch_warnings(record=True) as warned:
            got = torch.compile(lambda x: 2 * model.encode(x), backend="eager")(x)
        assert not [str(each.message) for each in warned if "Dynamo" in str(each.message)]
        torch.testing.assert_close(got, 2 * plain(x))
        got.sum().backward()
        (2 * plain(x)).sum().backward()
        assert_same_gradients(engine, model, plain)
        engine.close()

    run_threads(body, 1)


@pytest.mark.slow
def test_blocks_that_are_compiled_to_one_graph_each_train() -> None:
    def compiled() -> Chain:
        model = Chain()
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        return model

    def body(comm: Communicator) -> None:
        torch._dynamo.reset()
        model, plain = compiled(), Chain()
        plain.load_state_dict(model.state_dict())
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(4, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)
        engine.close()

    run_threads(body, 1)


def train_by_a_compiled_function() -> None:
    with Communicator.from_env() as comm:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

            @torch.compile(backend="eager")
            def backward(x: torch.Tensor, net: nn.Module = net) -> None:
                net(x).square().sum().backward()

            for seed in range(2):
                backward(values(4, WIDTH, seed=seed))
                optimizer.step()
                optimizer.zero_grad()
        assert_same_params(model, plain)
        engine.close()


@pytest.mark.slow
def test_a_function_with_forward_and_backward_may_be_compiled() -> None:
    launch(train_by_a_compiled_function, 2, timeout_s=120)
