"""What modules return, share and change in place, against plain autograd."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardcomm import Communicator, fully_shard
from support.thread_ranks import run_threads
from support.twins import WIDTH, Block, Chain, assert_same_gradients, twins, values


@dataclass(frozen=True)
class Hidden:
    state: torch.Tensor
    note: str = ""


class InDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Hidden) -> Hidden:
        return Hidden(torch.tanh(self.second(torch.tanh(self.first(x.state)))), note="out")


class DataclassChain(Chain):
    def __init__(self) -> None:
        super().__init__(InDataclass)

    def forward(self, x: torch.Tensor) -> Hidden:
        hidden = Hidden(self.stem(x))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("ranks", [1, 2])
def test_dataclasses_are_opened(ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(DataclassChain)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).state.square().sum().backward()
        # Each was reduced in turn, as soon as backward had left it.
        assert not any(unit.gradients.awaited for unit in engine.units)
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


class Opaque:
    """What no pytree opens."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state


class InOpaque(Block):
    def forward(self, x: torch.Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class OpaqueChain(Chain):
    def __init__(self) -> None:
        super().__init__(InOpaque)

    def forward(self, x: torch.Tensor) -> Opaque:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).state
        return Opaque(x)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_opaque_output_raises_or_trains_but_never_loses_gradients(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(OpaqueChain)
        engine = fully_shard(model, comm, strategy=strategy)
        loss = model(values(3, WIDTH)).state.square().sum()
        if strategy == "full_shard":  # its slots are overwritten
            with pytest.raises(TypeError, match=r"unit 'blocks.3' .* returned Opaque"):
                loss.backward()
            return
        loss.backward()
        plain(values(3, WIDTH)).state.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_opaque_output_of_the_model_alone_loses_no_gradients() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(InOpaque)
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).state.square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class WithLoss(Block):
    """Keeps an auxiliary loss in an attribute, as a mixture of experts does."""

    loss: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.loss = self.router(output).softmax(-1).square().mean()
        return output


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_loss_kept_in_a_unit_raises_or_trains_but_is_never_wrong(
    strategy: str, alone: bool
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(WithLoss))
        engine = fully_shard(model, comm, strategy=strategy)

        def backward(net: Any) -> None:
            main = net(values(3, WIDTH)).square().mean()
            loss = sum(block.loss for block in net.blocks)
            (loss if alone else main + loss).backward()

        if strategy == "full_shard":  # its slots are overwritten
            with pytest.raises(TypeError, match=r"unit 'blocks.3' .* an auxiliary loss too"):
                backward(model)
            return
        for net in (model, plain):
            backward(net)
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("inputs_require_grad", [False, True])
@pytest.mark.parametrize("of", ["stem", "blocks.0", "blocks.2"])
def test_a_loss_of_features_that_a_hook_took_trains_what_is_before_them(
    of: str, inputs_require_grad: bool, strategy: str
) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, comm, strategy=strategy)
        for net in (model, plain):
            features: list[torch.Tensor] = []
            net.get_submodule(of).register_forward_hook(
                lambda module, args, output, to=features: to.append(output)  # type: ignore[misc]
            )
            for seed in range(2):
                net.zero_grad()
                net(values(3, WIDTH, seed=seed).requires_grad_(inputs_require_grad))
                features.pop().square().mean().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class WithPenalty(Block):
    """Keeps a loss of its weight alone, to which no input or output leads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.linear.weight.square().mean()
        return super().forward(x)


def test_a_penalty_kept_in_a_unit_beside_a_loss_of_features_is_trained() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(WithPenalty))
        engine = fully_shard(model, comm, strategy="shard_grad_op")
        for net in (model, plain):
            features: list[torch.Tensor] = []
            net.get_submodule("blocks.0").register_forward_hook(
                lambda module, args, output, to=features: to.append(output)  # type: ignore[misc]
            )
            net(values(3, WIDTH))
            penalty = net.get_submodule("blocks.2").penalty
            (features[0].square().mean() + penalty).backward()  # type: ignore[operator]
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Position() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = [table(len(x)) for table in self.tables]
        return sum((x * 10**i * table for i, table in enumerate(tables)), x)


def test_view_of_a_parameter_outlives_its_slot() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Positions)
        engine = fully_shard(model, comm)
        x = values(3, WIDTH)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        for net in (model, plain):
            net(x).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x += super().forward(x.clone())
        return x


class Residual(Chain):
    """The caller goes on with what a block has changed in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.sin(block(x))
        return x


@pytest.mark.parametrize("make", [Chain, Residual])
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_place_on_an_input_is_as_without_sharding(make: type[Chain], ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: make(InPlace))
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, ranks)


def test_in_place_relu_as_first_module() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(
            lambda: Chain(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
        )
        engine = fully_shard(model, comm)
        for net in (model, plain):
            net(values(3, WIDTH)).square().sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


def test_in_place_on_a_leaf_raises_as_without_sharding() -> None:
    model, plain = twins(InPlace)
    fully_shard(model, Communicator.local_group(1)[0])
    for net in (plain, model):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            net(values(3, WIDTH).requires_grad_())


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"block": Block()}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["block"](x)
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_parameters_in_containers_are_trained(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Containers)
        engine = fully_shard(model, comm, strategy=strategy)
        model(values(3, WIDTH, seed=comm.rank)).square().sum().backward()
        (sum(plain(values(3, WIDTH, seed=r)).square().sum() for r in range(2)) / 2).backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, 2)


class Marked(nn.Module):
    """Its forward, and whoever makes an optimizer, read what the parameter was marked with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.weight.scale = 3.0  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.weight.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_attributes_of_parameters_are_kept(strategy: str, device: str) -> None:
    def body(comm: Communicator) -> None:
        with torch.device(device):
            model = Marked()
        fully_shard(model, comm, strategy=strategy)
        assert model.weight.scale == 3.0
        assert torch.equal(model(torch.ones(WIDTH)), torch.full((WIDTH,), 3.0))
        assert model.weight.scale == 3.0

    run_threads(body, 2)


class Scaled(nn.Parameter):
    """A class of the user's own."""


class AsksForClass(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if isinstance(self.weight, Scaled) else 1)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_forward_sees_the_class_of_a_parameter(strategy: str) -> None:
    plain = AsksForClass(WIDTH, WIDTH)
    plain.weight = Scaled(plain.weight.detach())
    x = torch.randn(2, WIDTH)

    def body(comm: Communicator) -> None:
        model = copy.deepcopy(plain)
        fully_shard(model, comm, strategy=strategy)
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
            model(x).sum().backward()

    run_threads(body, 2)


class Slotted(nn.Parameter):
    __slots__ = ("mark",)


def test_a_class_that_a_parameter_cannot_become_is_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = Slotted(model.weight.detach())
    with pytest.raises(TypeError, match=r"'weight' is a Slotted, .* ignored_params="):
        fully_shard(model, Communicator.local_group(1)[0])


class Tracked(torch.Tensor):
    """As torchao's quantised tensors: a parameter of it is one itself."""


def test_a_parameter_of_another_tensor_class_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        model.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).as_subclass(Tracked))
        with pytest.raises(ValueError, match=r"'weight' is a Tracked, .* ignored_params="):
            fully_shard(model, comm)

    run_threads(body, 2)


def test_a_lazy_module_is_called_before_it_is_sharded() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet"):
            fully_shard(nn.Sequential(nn.LazyLinear(WIDTH)), comm)

    run_threads(body, 2)


def test_a_model_on_a_gpu_is_refused_where_the_ranks_compute_on_cpus() -> None:
    """It would train on the CPU, and nobody would be told."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with FakeTensorMode():
        model[1].bias = nn.Parameter(torch.empty(2, device="cuda"))
    with pytest.raises(
        ValueError,
        match=r"fully_shard: parameter '1.bias' is on cuda:0, and the ranks compute on cpu",
    ):
        fully_shard(model, Communicator.local_group(1)[0])


def test_embedding_with_max_norm_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(ValueError, match=r"Embedding '0' has max_norm=1.0"):
        fully_shard(model, Communicator.local_group(1)[0])
