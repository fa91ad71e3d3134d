"""What nobody should give, at every public door: a sentence that names it and says what is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardcomm
from shardcomm import (
    Bucket,
    Communicator,
    CopyPlan,
    Layout,
    MemoryPlan,
    MixedPrecision,
    ParamSpec,
    RowBlock,
    fully_shard,
)

F32 = torch.float32
COMM = Communicator.local_group(1)[0]
ZEROS = torch.zeros(4)
SPARSE, COMPRESSED = torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()
META = torch.zeros(4, device="meta")
QUANTISED = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
FREED, FREED_VIEW = torch.zeros(8).chunk(2)
FREED.untyped_storage().resize_(0)  # as full parameters are between their uses
FREED_FLAG = torch.zeros(1, dtype=torch.int32)
FREED_FLAG.untyped_storage().resize_(0)
LAYOUT = Layout.plan([ParamSpec("w", (4,))], 1)
PLAN = CopyPlan.pack([4], [0], F32, F32)
ENGINE = fully_shard(nn.Linear(2, 2), COMM)

Door = Callable[[], object]


def check(door: Door, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        door()
    said = str(caught.value)
    assert message in said
    assert "incompatible" not in said  # the binding's own words


@pytest.mark.parametrize("tag", [2**63, -(2**63) - 1, 1.5, "x", "", None])
@pytest.mark.parametrize("door", ["all_gather", "reduce_scatter", "barrier", "bind", "Bucket"])
def test_tags(tag: Any, door: str) -> None:
    doors: dict[str, Door] = {
        "all_gather": lambda: COMM.all_gather(ZEROS.clone(), ZEROS, tag=tag),
        "reduce_scatter": lambda: COMM.reduce_scatter(ZEROS.clone(), ZEROS, tag=tag),
        "barrier": lambda: COMM.barrier(tag=tag),
        "bind": lambda: COMM.bind_all_gather(ZEROS.clone(), ZEROS, tag=tag),
        "Bucket": lambda: Bucket(LAYOUT, COMM, tag=tag),
    }
    check(doors[door], f"tag is {tag!r}; it must be a whole number from -2**63 to 2**63 - 1")


def test_the_largest_tags_are_tags() -> None:
    for tag in (2**63 - 1, -(2**63), True):
        COMM.barrier(tag=tag)


@pytest.mark.parametrize("scale", ["2", None, 1e300, 10**400, 1j, True, np.ones(3), torch.ones(3)])
@pytest.mark.parametrize("door", ["reduce_scatter", "CopyPlan.run", "BoundCopy.run"])
def test_scales(scale: Any, door: str) -> None:
    doors: dict[str, Door] = {
        "reduce_scatter": lambda: COMM.reduce_scatter(ZEROS.clone(), ZEROS, scale=scale),
        "CopyPlan.run": lambda: PLAN.run([ZEROS], [ZEROS.clone()], scale=scale),
        "BoundCopy.run": lambda: PLAN.bind([ZEROS], [ZEROS.clone()]).run(scale=scale),
    }
    check(doors[door], f"{door}: scale is {scale!r}; it must be a number that float32")


@pytest.mark.parametrize("half", [0.5, np.float64(0.5), torch.tensor(0.5)])
def test_whatever_is_a_number_scales(half: Any) -> None:
    result = torch.zeros(4)
    COMM.reduce_scatter(result, torch.ones(4), scale=half)
    assert torch.equal(result, torch.full((4,), 0.5))


TENSORS = [
    (SPARSE, "torch.sparse_coo"),
    (COMPRESSED, "torch.sparse_csr"),
    (META, "meta"),
    (QUANTISED, "torch.qint8"),
    (FREED, "its storage was freed"),
    (FREED_VIEW, "its storage was freed"),
    (None, "NoneType"),
]


@pytest.mark.parametrize(("tensor", "kind"), TENSORS, ids=[kind for _, kind in TENSORS])
def test_tensors_without_plain_values(tensor: Any, kind: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.Parameter(tensor, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    doors: list[Door] = [
        lambda: COMM.all_gather(ZEROS.clone(), tensor),
        lambda: COMM.all_gather(tensor, ZEROS),
        lambda: COMM.reduce_scatter(ZEROS.clone(), tensor),
        lambda: COMM.all_reduce(tensor),
        lambda: COMM.broadcast(tensor),
        lambda: shardcomm.all_gather_into_tensor(ZEROS.clone(), tensor, COMM),
        lambda: shardcomm.all_gather_into_tensor(tensor, tensor, COMM),
        lambda: shardcomm.reduce_scatter_tensor(tensor, ZEROS, group=COMM),
        lambda: Bucket.from_tensors({"w": tensor}, COMM),
        lambda: Bucket(LAYOUT, COMM).load([tensor]),
        lambda: PLAN.run([ZEROS], [tensor]),
    ]
    if tensor is not None:  # counts as zeros
        doors.append(lambda: PLAN.run([tensor], [ZEROS.clone()]))
    if tensor is not None and tensor.layout is torch.strided:  # a sparse gradient is made dense
        doors.append(lambda: Bucket(LAYOUT, COMM).reduce_scatter([tensor]))
    if tensor is not None and not tensor.is_meta:  # which is materialised
        doors.append(lambda: fully_shard(Holder(), COMM))
    for door in doors:
        check(door, "None" if tensor is None else kind)


def test_tensors_that_hold_others() -> None:
    """As DTensors do, which would need a process group."""
    two = TwoTensor(torch.ones(4), torch.ones(4))
    for door in (
        lambda: COMM.all_reduce(two),
        lambda: COMM.all_gather(ZEROS.clone(), two),
        lambda: PLAN.run([two], [ZEROS.clone()]),
        lambda: Bucket.from_tensors({"w": two}, COMM),
        lambda: Bucket(LAYOUT, COMM).reduce_scatter([two]),
    ):
        check(door, "has no memory of its own: it is a TwoTensor; give a plain tensor, such as")


def one_of_a_batch(call: Callable[[torch.Tensor], object]) -> object:
    return torch.vmap(lambda x: (call(x), x)[1])(torch.ones(3, 4))


def of_a_derivative(call: Callable[[torch.Tensor], object]) -> object:
    return torch.func.grad(lambda x: (call(x), x.sum())[1])(torch.ones(4))


def functional(call: Callable[[torch.Tensor], object]) -> object:
    return torch.func.functionalize(lambda x: (call(x * 1), x)[1])(torch.ones(4))


def exported(call: Callable[[torch.Tensor], object]) -> object:
    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            call(x)
            return x

    return torch.export.export(Caller(), (torch.ones(4),), strict=False)


def of_zeros(call: Callable[[torch.Tensor], object]) -> object:
    return call(torch._efficientzerotensor(4))


@pytest.mark.parametrize(
    ("within", "reason"),
    [
        (one_of_a_batch, "it stands for other tensors inside of torch.vmap"),
        (of_a_derivative, "it stands for other tensors inside of torch.vmap"),
        (functional, "it stands for other tensors inside of torch.vmap"),
        (exported, "it has no values while torch.export or make_fx traces"),
        (of_zeros, "it is zeros that autograd has not written out"),
    ],
)
def test_tensors_of_torchs_transforms(within: Callable[..., object], reason: str) -> None:
    # Made here: inside of a transform they would be its own.
    bucket, recv = Bucket(LAYOUT, COMM), torch.zeros(4)
    calls: list[Callable[[torch.Tensor], object]] = [
        COMM.all_reduce,
        lambda x: COMM.all_gather(recv, x),
        COMM.bind_all_reduce,
        lambda x: shardcomm.all_gather_into_tensor(recv, x, COMM),
        lambda x: bucket.reduce_scatter([x]),
        lambda x: bucket.load([x]),
        lambda x: PLAN.run([x], [recv]),
        lambda x: PLAN.run([ZEROS], [x]),
    ]
    for call in calls:
        check(partial(within, call), f"has no memory of its own: {reason}")


@pytest.mark.parametrize(
    ("door", "message"),
    [
        (lambda: COMM.allocate(2**60, dtype=torch.complex128, use="gather"), "more memory than there can be"),
        (lambda: COMM.allocate(4, dtype=torch.qint8, use="gather"), "dtype is torch.qint8"),
        (lambda: COMM.allocate(True, use="gather"), "numel is True; it must be a whole number"),
        (lambda: COMM.all_reduce(ZEROS, stream=1), "all_reduce: stream is a int; it must be a shardcomm.Stream"),
        (lambda: COMM.reduce_scatter(ZEROS, ZEROS.clone(), nonfinite=True), "nonfinite is a bool"),
        (lambda: COMM.reduce_scatter(ZEROS, ZEROS.clone(), nonfinite=FREED_FLAG), "nonfinite has no memory of its own"),
        (lambda: PLAN.bind([ZEROS], [ZEROS.clone()]).run(stream=1), "stream is a int"),
        (lambda: shardcomm.reduce_scatter_tensor(ZEROS, ZEROS, [], COMM), "op is []"),
        (lambda: Communicator.local_group(1, device="gpu"), "device is gpu; accepted: 'cpu', 'cuda'"),
        (lambda: Bucket.from_tensors([ZEROS], COMM), "tensors is a list"),
        (lambda: Bucket.from_tensors({"w": ZEROS}, None), "comm is a NoneType"),
        (lambda: Bucket.from_tensors({"w": ZEROS}, COMM, param_dtype="bf16"), "param_dtype is 'bf16'"),
        (lambda: Bucket(LAYOUT, COMM, reduce_dtype=torch.int32), "reduce_dtype is torch.int32"),
        (lambda: Bucket(LAYOUT, COMM, full_buffer=torch.zeros(2)), "full_buffer has 2 elements"),
        (lambda: Bucket(LAYOUT, COMM).reduce_scatter(None), "grads is a NoneType; it must be a list"),
        (lambda: Bucket(LAYOUT, COMM).reduce_scatter([3]), "grads for w is a int"),
        (lambda: CopyPlan.pack([4], [0], "f32", F32), "src_dtype is 'f32'; it must be a torch.dtype"),
        (lambda: CopyPlan.pack([2**63], [0], F32, F32), "less than 2**63 bytes"),
        (lambda: CopyPlan.pack([2**61], [0], torch.complex128, torch.complex128), "less than 2**63"),
        (lambda: CopyPlan.pack([1.5], [0], F32, F32), "segments must be Segments of whole numbers"),
        (lambda: CopyPlan.pack([1, 2], [0], F32, F32), "there are 2 sizes and 1 offsets"),
        (lambda: CopyPlan(((1, 2),), F32, F32), "segments must be Segments, of 8 numbers"),
        (lambda: CopyPlan.copy_out(4, 2, F32, F32), "sizes is a int; it must be a list"),
        (lambda: CopyPlan.copy_out([4], 0, F32, F32), "ranks is 0, it must be at least 1"),
        (lambda: CopyPlan.chunk_cat([(4,)], 0, F32, F32), "chunks is 0, it must be at least 1"),
        (lambda: CopyPlan.chunk_cat([()], 2, F32, F32), "a scalar, which has no dim 0"),
        (lambda: PLAN.run([ZEROS], [ZEROS.clone()], threads="2"), "threads is '2', it must be at least 1"),
        (lambda: PLAN.run([ZEROS], [ZEROS.clone()], threads=2**31), "threads is 2147483648"),
        (lambda: ParamSpec("w", 4), "shape is 4; it must be a tuple"),
        (lambda: ParamSpec("w", (1.5,)), "shape is (1.5,); it must be a tuple"),
        (lambda: ParamSpec("w", (2**61,)), "sizes must be at least 0"),
        (lambda: ParamSpec("w", (4, 4), "row", True), "shard_dim is True"),
        (lambda: RowBlock("2"), "rows is '2'; it must be at least 1"),
        (lambda: RowBlock(2**70), "rows is 1180591620717411303424"),
        (lambda: Layout.plan([ParamSpec("w", (2**40, 2**40))], 2), "accepted are at most"),
        (lambda: Layout.plan([("w", (4,))], 2), "params contains a tuple; each must be a ParamSpec"),
        (lambda: Layout.plan([], "2"), "world_size is '2'; it must be at least 1"),
        (lambda: Layout.plan([], 2**40), "world_size is 1099511627776"),
        (lambda: Layout.plan([], 2, align_bytes="x"), "align_bytes is 'x'"),
        (lambda: MemoryPlan.of(None, 2), "model is a NoneType; it must be a torch.nn.Module"),
        (lambda: MemoryPlan.of(nn.Linear(2, 2), 2**80), "ranks is 1208925819614629174706176"),
        (lambda: MixedPrecision(cast_forward_inputs="no"), "cast_forward_inputs is 'no'"),
        (lambda: fully_shard(nn.Linear(2, 2), COMM, prefetch=True), "prefetch is True; it must be a whole"),
    ],
)  # fmt: skip
def test_other_arguments(door: Door, message: str) -> None:
    check(door, message)


ODD: list[Any] = [None, "x", -1, True, math.nan, []]


# The door, the argument as errors call it, what is accepted, and which of ODD is.
WALK: list[tuple[Callable[[Any], object], str, str, list[Any]]] = [
    (lambda x: COMM.reduce_scatter(ZEROS.clone(), ZEROS, accumulate=x), "scatter: accumulate", "True or", [True]),
    (lambda x: PLAN.run([ZEROS], [ZEROS.clone()], accumulate=x), "CopyPlan.run: accumulate", "True or", [True]),
    (lambda x: PLAN.bind([ZEROS], [ZEROS.clone()]).run(accumulate=x), "BoundCopy.run: accumulate", "True or", [True]),
    (lambda x: Communicator.from_env(device=x), "from_env: device", "'cpu', 'cuda', 'cuda:N'", [None]),
    (Communicator.local_group, "local_group: size", "at least 1", []),
    (lambda x: Communicator.from_process_group(x, deadline_s=5), "from_process_group: ", "group", []),
    (lambda x: CopyPlan(x, F32, F32), "CopyPlan: segments", "a list or a tuple", [[]]),
    (lambda x: CopyPlan((x,), F32, F32), "CopyPlan: segments", "must be Segments", []),
    (lambda x: CopyPlan.pack(x, [0], F32, F32), "pack: ", "", []),
    (lambda x: CopyPlan.pack([4], x, F32, F32), "pack: ", "", []),
    (lambda x: CopyPlan.chunk_cat(x, 2, F32, F32), "chunk_cat: shapes", "a list or a tuple", [[]]),
    (lambda x: CopyPlan.chunk_cat([x], 2, F32, F32), "chunk_cat: ", "", []),
    (lambda x: PLAN.run(x, [ZEROS.clone()]), "sources", "", []),
    (lambda x: PLAN.run([ZEROS], x), "destinations", "", []),
    (lambda x: Layout.plan(x, 2), "Layout.plan: params", "", [[]]),
    (lambda x: Layout(x, 1, 4, 1, ()), "Layout: placements", "a list or a tuple", [[]]),
    (lambda x: Bucket(LAYOUT, COMM).reduce_scatter(x), "reduce_scatter: grads", "", []),
    (lambda x: Bucket(LAYOUT, COMM).gathered_shards(x), "gathered_shards: flat", "a torch.Tensor", []),
    (ENGINE.load_state_dict, "load_state_dict: state_dict", "a mapping", []),
    (ENGINE.optimizer_state, "optimizer_state: optimizer", "a torch Optimizer", []),
    (shardcomm.GradScaler, "GradScaler: engine", "fully_shard", []),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize(
    ("door", "named", "accepted", "fine"),
    WALK,
    ids=[f"{i}-{case[1]}" for i, case in enumerate(WALK)],
)
def test_odd_values_at_every_door(
    door: Callable[[Any], object], named: str, accepted: str, fine: list[Any], odd: Any
) -> None:
    if any(odd is each or odd == each == [] for each in fine):
        door(odd)
        return
    check(lambda: door(odd), named)
    check(lambda: door(odd), accepted)


@pytest.mark.parametrize("device", ["tpu", [], True])
@pytest.mark.parametrize(
    ("transport", "said"), [("c10d", "; it must be a torch.device"), ("shm", "; accepted: 'cpu'")]
)
def test_devices_of_a_process_group(device: Any, transport: Any, said: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    try:
        make = partial(Communicator.from_process_group, device=device, transport=transport)
        check(make, f"from_process_group: device is {device}{said}")
    finally:
        dist.destroy_process_group()


def test_a_gpu_that_torch_does_not_see_is_refused_by_a_process_group(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 0:
        pytest.skip("there is a GPU here")
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    try:
        make = partial(Communicator.from_process_group, device="cuda", transport="c10d")
        check(make, "from_process_group: device is cuda, and torch sees no GPU here")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "seconds", [math.nan, math.inf, 1e308, 10**400, 0, -1, True, "5", None, []]
)
def test_deadlines(seconds: Any) -> None:
    message = f"deadline_s is {seconds!r}; it must be a number above 0, at most 1e9"
    check(lambda: Communicator.local_group(1, deadline_s=seconds), message)
    check(lambda: Communicator.from_env(deadline_s=seconds), message)
    if seconds is not None:
        limit = message.replace("deadline_s", "timeout_s")
        check(lambda: shardcomm.launch(abs, 1, (1,), timeout_s=seconds), limit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[((abs, ranks), f"ranks is {ranks!r}; it must be a whole number of at least 1")
          for ranks in (0, -1, "2", None, True, math.nan, [], 2.0)],
        *[((abs, 1, args), f"args is a {type(args).__name__}; it must be a list or a tuple")
          for args in ("text", None, 3, {1})],
        ((None, 1), "fn is a NoneType; it must be a function"),
        ((lambda: None, 1), "fn and args must be what pickle can send"),
        ((abs, 1, (lambda: None,)), "fn and args must be what pickle can send"),
    ],
)  # fmt: skip
def test_launches(arguments: tuple[Any, ...], message: str) -> None:
    check(lambda: shardcomm.launch(*arguments, timeout_s=30), f"launch: {message}")


@pytest.mark.parametrize("norm", ["x", None, math.nan, -1, torch.ones(2)])
def test_norms(norm: Any) -> None:
    engine = fully_shard(nn.Linear(2, 2), COMM)
    message = f"max_norm is {norm!r}; it must be a number of at least 0"
    check(lambda: engine.clip_grad_norm_(norm), message)
    for right in (0, math.inf, torch.tensor(1.0)):
        engine.clip_grad_norm_(right)


def test_calls_of_torchs_clip_grad_norm() -> None:
    engine = fully_shard(nn.Linear(2, 2), COMM)
    params = engine.model.parameters()
    check(
        lambda: engine.clip_grad_norm_(params, 1.0),
        "max_norm is a list of parameters; it must be a number",
    )
    check(
        lambda: engine.clip_grad_norm_(1.0, math.inf),
        "norm_type is inf; it must be 2. torch.nn.utils.clip_grad_norm_",
    )
    engine.clip_grad_norm_(1.0, norm_type=2)


@pytest.mark.parametrize("factor", ["x", 0, math.inf, 1e-300, 10**400, True])
def test_divide_factors(factor: Any) -> None:
    engine = fully_shard(nn.Linear(2, 2), COMM)
    check(lambda: engine.set_gradient_divide_factor(factor), "factor is ")


def test_a_conjugated_parameter_is_sharded_as_it_reads() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            view = torch.tensor([1 + 2j, 3 - 4j]).conj()
            self.held = nn.Parameter(view, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.held

    engine = fully_shard(Holder(), COMM)
    assert torch.equal(engine.full_state_dict()["held"], torch.tensor([1 - 2j, 3 + 4j]))
