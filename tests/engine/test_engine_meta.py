"""Models on the meta device, materialised unit by unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcomm import CommError, Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, assert_same_gradients, local


class Head(nn.Linear):
    """Has a parameter of its own beside the tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.empty(WIDTH))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            nn.init.constant_(self.scale, 3.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)  # has buffers only
        self.head = Head()
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens))) * self.head.scale


@pytest.mark.covers("meta device", "frozen and tied parameters")
@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_meta_parameters_and_buffers_are_materialised_once(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        with torch.device("meta"):
            model = Tied()
        engine = fully_shard(model, comm, units=[model.embed, model.head])
        assert model.embed.weight is model.head.weight
        for unit in engine.units:
            for bucket, params in unit.buckets:
                storage = bucket.shard.untyped_storage().data_ptr()
                assert all(local(p.shard).untyped_storage().data_ptr() == storage for p in params)
        assert model.head.scale.eq(3).all()
        assert model.norm.running_var.eq(1).all()

        plain = Tied()
        plain.load_state_dict(engine.full_state_dict())
        assert plain.embed.weight.std() > 0.7  # as nn.Embedding draws it, not nn.Linear
        for net in (model, plain):
            net(torch.arange(WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


@pytest.mark.covers("meta device")
def test_what_is_not_on_meta_keeps_its_values() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        weight = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH).float()
        model.weight = nn.Parameter(weight.clone())
        model.bias = nn.Parameter(torch.empty(WIDTH, device="meta"))
        state = fully_shard(model, comm).full_state_dict()
        assert torch.equal(state["weight"], weight)
        assert 0 < state["bias"].abs().max() < 1

    run_threads(body, 2)


class BufferOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.rope = nn.Identity()
        self.rope.register_buffer("inverse", torch.arange(2.0))


def test_meta_buffers_without_reset_parameters_are_named() -> None:
    with torch.device("meta"):
        model = BufferOnly()
    model.forward = model.linear.forward
    with pytest.raises(ValueError, match=r"Identity 'rope' has inverse on the meta device"):
        fully_shard(model, Communicator.local_group(1)[0])
    assert model.linear.weight.is_meta


@pytest.mark.covers("meta device")
def test_meta_model_is_materialised_on_rank_0_and_sharded() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5))
        engine = fully_shard(model, comm, units=nn.Linear)
        assert not any(param.is_meta for param in model.parameters())
        return engine.full_state_dict()

    first, second = run_threads(body, 2)
    for name, value in first.items():
        assert torch.equal(value, second[name])
    # As nn.Linear and nn.LayerNorm initialise themselves.
    assert 0 < first["0.weight"].abs().max() <= 5**-0.5
    assert 0 < first["2.weight"].abs().max() <= 7**-0.5
    assert torch.equal(first["1.weight"], torch.ones(7))


def test_meta_module_without_reset_parameters_is_refused() -> None:
    class Bare(nn.Identity):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(ValueError, match=r"Bare '' has weight on the meta device and no reset_"):
        fully_shard(Bare(), Communicator.local_group(1)[0])


class Forgetful(nn.Module):
    """Its `reset_parameters` gives values to the tensors that are named."""

    def __init__(self, *names: str, raises: bool = False) -> None:
        super().__init__()
        self.names, self.raises = names, raises
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.shift = nn.Parameter(torch.empty(4, dtype=torch.bfloat16))
        self.register_buffer("inverse", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("full", torch.empty(4, dtype=torch.uint8))
        self.register_buffer("unknown", torch.empty(4))

    def reset_parameters(self) -> None:
        if self.raises:
            raise KeyError("no values here")
        self.full.fill_(255)  # which may be meant, and so may NaN
        self.unknown = torch.full((4,), torch.nan)
        for name in self.names:  # by .data, which leaves a tensor's version as it was
            getattr(self, name).data.zero_()


NEEDED = ("weight", "shift", "inverse", "count")


@pytest.mark.covers("meta device")
@pytest.mark.parametrize("left", [(), *((name,) for name in NEEDED), ("shift", "inverse")])
def test_what_reset_parameters_leaves_without_values_is_named(left: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Forgetful(*(name for name in NEEDED if name not in left)))
    comm = Communicator.local_group(1)[0]
    if not left:
        state = fully_shard(model, comm).full_state_dict()
        assert all(not state[f"0.{name}"].any() for name in NEEDED if name != "inverse")
        assert model[0].inverse.eq(0).all()
        assert state["0.full"].eq(255).all()
        assert state["0.unknown"].isnan().all()
        return
    names = ", ".join(left)
    with pytest.raises(ValueError, match=f"of Forgetful has left {names} without values"):
        fully_shard(model, comm)


@pytest.mark.covers("meta device")
def test_all_ranks_hear_that_reset_parameters_of_one_has_raised() -> None:
    with torch.device("meta"):
        models = [nn.Sequential(Forgetful(*NEEDED, raises=rank == 1)) for rank in range(2)]

    def shard(comm: Communicator) -> None:
        fully_shard(models[comm.rank], comm)
        comm.barrier()  # rank 0 may have sent its last values by then

    def body(comm: Communicator) -> None:
        error = (CommError, KeyError)[comm.rank]
        with pytest.raises(error, match="no values here"):
            shard(comm)

    run_threads(body, 2)
