"""`shardcomm.jax`: results against NumPy, derivatives against differences, one order of calls, and refusals.

On GPUs, one launch has all that ranks compute: JAX and NCCL take long to start.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="shardcomm.jax needs JAX: pip install jax")
import jax
import jax.numpy as jnp
from jax.test_util import check_grads

import shardcomm
from shardcomm import launch
from shardcomm.interop import c_library
from shardcomm.interop.jax import library
from shardcomm.jax import XlaCommunicator, all_gather, all_reduce, broadcast, reduce_scatter
from support import interpreters
from support.nccl_ranks import connect, take_gpu

SUMMED = ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOVED = (*SUMMED, "bool", "int8", "uint16", "uint32", "uint64", "complex64", "complex128")
REDUCED: dict[str, Callable[..., np.ndarray]] = {"sum": np.sum, "max": np.max, "min": np.min}


@contextmanager
def group(transport: str = "shm") -> Iterator[XlaCommunicator]:
    if transport == "shm":
        ranks = shardcomm.Communicator.from_env(deadline_s=30)
    else:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # ranks may share a GPU
        alone = os.environ["WORLD_SIZE"] == "1"
        local_group = shardcomm.Communicator.local_group
        ranks = local_group(1, device=take_gpu())[0] if alone else connect()
        here = jax.local_devices(backend="cuda")[ranks.device.index]
        jax.config.update("jax_default_device", here)
    with ranks, XlaCommunicator(ranks, deadline_s=30.0) as comm:
        yield comm


def in_group(check: Callable[..., None], *args: object, transport: str = "shm") -> None:
    """A rank of `launch` that calls `check(comm, *args)`."""
    with group(transport) as comm:
        check(comm, *args)


def of_ranks(seed: int, ranks: int, *shape: int, dtype: str = "float64") -> np.ndarray:
    """Whole numbers, one array for each rank: their sums are exact in any order and dtype."""
    values = np.random.default_rng(seed).integers(0, 30, (ranks, *shape))
    return values.astype(jnp.dtype(dtype))


def collectives_against_numpy(comm: XlaCommunicator, seed: int) -> None:
    jax.config.update("jax_enable_x64", True)
    for turn, dtype in enumerate(MOVED):
        everybody = of_ranks(seed + turn, comm.size, comm.size * 3, 2, dtype=dtype)
        mine = everybody[comm.rank]
        gathered = jax.jit(all_gather, static_argnums=1)(mine, comm)
        assert gathered.dtype == mine.dtype
        assert np.array_equal(gathered, everybody.reshape(-1, 2)), dtype
        last = np.int64(comm.size - 1)  # as NumPy computes a rank
        assert np.array_equal(broadcast(mine, comm, root=last), everybody[-1]), dtype
        if dtype not in SUMMED:
            continue
        part = slice(comm.rank * 3, comm.rank * 3 + 3)
        for op, reduce in REDUCED.items():
            expected = reduce(everybody.astype(np.float64), axis=0).astype(mine.dtype)
            summed = jax.jit(all_reduce, static_argnums=(1, 2))(mine, comm, op)
            assert np.array_equal(summed, expected)
            scattered = jax.jit(reduce_scatter, static_argnums=(1, 2))(mine, comm, op)
            assert np.array_equal(scattered, expected[part])
    mean = of_ranks(seed, comm.size, 6).mean(0)
    assert np.allclose(all_reduce(of_ranks(seed, comm.size, 6)[comm.rank], comm, "avg"), mean)
    assert all_gather(jnp.zeros((0, 3)), comm).shape == (0, 3)
    assert all_gather(7 * np.ones(1, np.float32), comm).tolist() == [7.0] * comm.size


@pytest.mark.slow
def test_results_are_numpys_in_every_dtype(seed: int) -> None:
    launch(in_group, 3, (collectives_against_numpy, seed), timeout_s=60)


def many_at_once(comm: XlaCommunicator, seed: int, runs: int) -> None:
    """Collectives of which none needs another's result, in programs that differ between ranks in what is around them.

    Without an order, XLA begins with what the first result needs.
    """

    @jax.jit
    def many(x: Any) -> list[Any]:
        results = []
        for turn in range(16):
            y = x + turn
            for _ in range(turn * (comm.rank + 1) % 5):
                y = y + 0 * jnp.sin(y).sum()
            match turn % 4:
                case 0 | 1:
                    results.append(all_gather(y, comm))
                case 2:
                    results.append(reduce_scatter(jnp.tile(y, comm.size), comm))
                case 3:
                    results.append(all_reduce(y, comm, "max"))
        return results if comm.rank % 2 == 0 else results[::-1]

    everybody = of_ranks(seed, comm.size, 16, dtype="float32")
    for run in range(runs):
        results = many(everybody[comm.rank] + run)
    for turn, result in enumerate(results if comm.rank % 2 == 0 else results[::-1]):
        last = everybody + (run + turn)
        expected = (last.reshape(-1), last.reshape(-1), last.sum(0), last.max(0))[turn % 4]
        assert np.array_equal(result, expected), turn


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_call_in_one_order_whatever_xla_starts_first(ranks: int, seed: int) -> None:
    launch(in_group, ranks, (many_at_once, seed, 1000), timeout_s=120)


def order_through_programs_and_control_flow(comm: XlaCommunicator) -> None:

    def turn(carry: Any, x: Any) -> tuple[Any, Any]:
        both = all_gather(x, comm).sum() + all_reduce(x, comm).sum()
        return carry + 1, jax.lax.cond(
            carry % 2 == 0, lambda: both, lambda: broadcast(both, comm, 1)
        )

    inner = jax.jit(lambda x: all_reduce(2 * x, comm))
    program = jax.jit(lambda xs: (jax.lax.scan(turn, 0, xs)[1], inner(xs), all_gather(xs, comm)))
    xs = jnp.arange(4.0).reshape(4, 1) + comm.rank
    started = [program(xs * n) for n in range(20)]  # nobody waits in between
    for n, (sums, doubled, whole) in enumerate(started):
        assert sums.tolist() == [2 * n * (2 * k + 1) for k in range(4)]
        assert doubled.ravel().tolist() == [2 * n * (2 * k + 1) for k in range(4)]
        assert whole.shape == (8, 1)


def test_the_order_holds_through_control_flow_and_between_programs() -> None:
    launch(in_group, 2, (order_through_programs_and_control_flow,), timeout_s=60)


def derivatives(comm: XlaCommunicator, seed: int) -> None:
    """A function of x whose input and output are the same on all ranks, as `check_grads` has to see it.

    The average at its begin makes the derivative by x, which JAX takes on each rank, that of all ranks together.
    """
    jax.config.update("jax_enable_x64", True)
    weights = jnp.asarray(np.random.default_rng(seed).normal(size=(comm.size, 6, 2)))[comm.rank]
    x = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(6, 2)))

    def entered(x: Any) -> Any:
        return jnp.sin(all_reduce(x, comm, "avg"))

    def of_gather(x: Any) -> Any:
        return jnp.cos(all_gather(entered(x)[comm.rank :][:2] * weights[:2], comm))

    def of_reduce_scatter(x: Any) -> Any:
        parts = [reduce_scatter(entered(x) * weights, comm, op) for op in ("sum", "avg")]
        return all_gather(jnp.sin(parts[0] * parts[1]), comm)

    def of_all_reduce(x: Any) -> Any:
        return jnp.sin(all_reduce(jnp.exp(entered(x)) * weights, comm))

    def of_broadcast(x: Any) -> Any:
        return jnp.sin(broadcast(entered(x) * weights, comm, root=1))

    def layered(x: Any) -> Any:
        return jax.lax.scan(
            jax.checkpoint(lambda carry, w: (jnp.sin(of_gather(x * w).sum() * carry), None)),
            1.0,
            jnp.arange(1.0, 4.0),
        )[0]

    for function in (of_gather, of_reduce_scatter, of_all_reduce, of_broadcast, layered):
        order = 2 if function in (of_gather, of_broadcast) else 1
        # Where the derivative is steep, differences are off by some 1e-5 of it.
        check_grads(jax.jit(function), (x,), order, ["fwd", "rev"], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_derivatives_are_those_that_differences_show(seed: int) -> None:
    launch(in_group, 2, (derivatives, seed), timeout_s=120)


def derivatives_of_complex_numbers(comm: XlaCommunicator, seed: int) -> None:
    """All ranks' losses are sums of |weight * z|**2. By z that is, as JAX defines it, 2 * weight**2 * conj(z)."""
    real, imaginary = of_ranks(seed, comm.size, 6, dtype="complex64"), of_ranks(seed + 1, 2, 6)
    everybody = (real + 1j * imaginary).astype("complex64")
    mine = jnp.asarray(everybody[comm.rank])
    weights = of_ranks(seed + 2, comm.size, comm.size * 6, dtype="float32")
    total = (weights**2).sum(0)

    def squares(z: Any) -> Any:
        return (z.real**2 + z.imag**2).sum()

    def of_gather(z: Any) -> Any:
        return squares(weights[comm.rank] * all_gather(z, comm))

    def of_broadcast(z: Any) -> Any:
        return squares(weights[comm.rank, :6] * broadcast(z, comm, 1))

    own = slice(comm.rank * 6, comm.rank * 6 + 6)
    by_gathered = jax.jit(jax.grad(of_gather))(mine)
    assert by_gathered.dtype == mine.dtype
    assert np.array_equal(by_gathered, 2 * total[own] * mine.conj())
    by_broadcast = 2 * total[:6] * mine.conj() if comm.rank == 1 else np.zeros(6)
    assert np.array_equal(jax.jit(jax.grad(of_broadcast))(mine), by_broadcast)
    tangents = jax.jvp(lambda z: all_gather(z, comm), (mine,), (2j * mine,))[1]
    assert np.array_equal(tangents, 2j * everybody.reshape(-1))


def test_complex_numbers_have_derivatives(seed: int) -> None:
    launch(in_group, 2, (derivatives_of_complex_numbers, seed), timeout_s=60)


def derivatives_of_eight_bits(comm: XlaCommunicator) -> None:
    """16 + 1 is 16 with four significant bits, and 16 + 1 + 1 is 18."""
    for dtype in ("float8_e4m3fn", "float8_e4m3"):
        mine = jnp.ones(2, dtype)
        cotangent = 16 if comm.rank == 0 else 1
        (by_gathered,) = jax.vjp(lambda x: all_gather(x, comm), mine)[1](
            jnp.full(2 * comm.size, cotangent, dtype)
        )
        assert by_gathered.dtype == mine.dtype
        assert by_gathered.astype(float).tolist() == [18.0, 18.0]
        (by_broadcast,) = jax.vjp(lambda x: broadcast(x, comm, 1), mine)[1](
            jnp.full(2, cotangent, dtype)
        )
        assert by_broadcast.astype(float).tolist() == [18.0 if comm.rank == 1 else 0.0] * 2


def test_cotangents_of_eight_bits_are_rounded_once() -> None:
    launch(in_group, 3, (derivatives_of_eight_bits,), timeout_s=60)


def batched(comm: XlaCommunicator, seed: int) -> None:
    jax.config.update("jax_enable_x64", True)
    of_all = of_ranks(seed, comm.size, 2, 3)  # a batch of 2
    whole = of_all.swapaxes(0, 1)
    mine = of_all[comm.rank]

    def collectives(x: Any) -> Any:
        parts = jnp.repeat(x, comm.size, axis=0)
        return (
            all_gather(x, comm),
            all_reduce(x, comm, "max"),
            broadcast(x, comm, 1),
            reduce_scatter(parts, comm),
        )

    for dim in (0, 1):
        results = jax.jit(jax.vmap(collectives, dim))(mine if dim == 0 else mine.T)
        assert np.array_equal(results[0], whole.reshape(2, -1))
        assert np.array_equal(results[1], whole.max(1))
        assert np.array_equal(results[2], whole[:, 1])
        rows = np.repeat(whole.sum(1), comm.size, axis=1).reshape(2, comm.size, 3)
        assert np.array_equal(results[3], rows[:, comm.rank])

    # The sum over ranks of (weights of all ranks * x).sum(), where x is the same on all ranks.
    examples = of_ranks(seed + 1, 4, 3 * comm.size)
    loss = jax.grad(lambda shard, x: (all_gather(shard, comm) * x).sum())
    of_each = jax.jit(jax.vmap(loss, (None, 0)))(mine[0], examples)
    own = slice(3 * comm.rank, 3 * comm.rank + 3)
    assert np.array_equal(of_each, comm.size * examples[:, own])

    squares = jax.hessian(lambda x: (all_reduce(x, comm, "avg") ** 3).sum())(jnp.ones(2))
    assert np.array_equal(squares, np.diag([6.0, 6.0]))


def test_vmap_makes_one_call_of_the_batch(seed: int) -> None:
    launch(in_group, 2, (batched, seed), timeout_s=60)


def compiled_ahead(comm: XlaCommunicator) -> None:
    x = jnp.arange(3.0) * (comm.rank + 1)
    compiled = jax.jit(lambda x: all_reduce(x, comm)).lower(x).compile()
    for n in range(1, 4):
        assert compiled(n * x).tolist() == [0, 3 * n, 6 * n]


def test_a_program_compiled_ahead_of_time_runs() -> None:
    launch(in_group, 2, (compiled_ahead,), timeout_s=60)


def gathers_of(jaxpr: Any) -> int:
    return str(jaxpr).count("all_gather[")


def checkpointed_layers(comm: XlaCommunicator) -> None:
    x = jnp.arange(4.0)

    def layer(w: Any) -> Any:
        return jnp.sin(all_gather(w, comm)).sum()

    saving = jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)
    programs = [jax.grad(each) for each in (layer, jax.checkpoint(layer), saving)]
    counts = [gathers_of(jax.make_jaxpr(program)(x)) for program in programs]
    assert counts == [1, 2, 1]
    first, *others = [jax.jit(program)(x) for program in programs]
    assert all(np.array_equal(first, other) for other in others)


def test_a_checkpointed_layer_is_gathered_again_in_backward() -> None:
    launch(in_group, 2, (checkpointed_layers,), timeout_s=60)


def donated(comm: XlaCommunicator) -> None:
    for collective in (all_reduce, broadcast):
        x = jnp.ones(1024) * (comm.rank + 1)
        kept = jax.jit(lambda x: collective(x, comm))(x)  # noqa: B023
        assert x.tolist() == [comm.rank + 1.0] * 1024
        address = x.unsafe_buffer_pointer()
        result = jax.jit(lambda x: collective(x, comm), donate_argnums=0)(x)  # noqa: B023
        assert result.unsafe_buffer_pointer() == address
        assert np.array_equal(result, kept)


def test_a_donated_array_is_reduced_in_place_and_another_is_not_touched() -> None:
    launch(in_group, 2, (donated,), timeout_s=60)


def on_another_gpu(comm: XlaCommunicator) -> None:
    """As where all ranks let JAX compute on the first GPU."""
    ours, own = comm.number, jax.config.jax_default_device.local_hardware_id
    alone = shardcomm.Communicator.local_group(1)[0]
    handle = comm._library.connect(alone, c_library.SHM, 0, 30.0, [0])
    comm.number = comm._library.add(handle, comm.size, own + 1)
    refused = rf"runs on GPU {own}, and the communicator is on GPU {own + 1}; let JAX"
    with pytest.raises(jax.errors.JaxRuntimeError, match=refused):
        jax.jit(lambda x: all_reduce(x, comm))(jnp.ones(2)).block_until_ready()
    comm._library.close(comm.number)
    comm.number = ours


def all_on_gpus(comm: XlaCommunicator, seed: int) -> None:
    collectives_against_numpy(comm, seed)
    donated(comm)
    if comm.size > 1:
        many_at_once(comm, seed, 100)
        order_through_programs_and_control_flow(comm)
        derivatives(comm, seed)
        batched(comm, seed)
        compiled_ahead(comm)
        checkpointed_layers(comm)
    on_another_gpu(comm)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_on_gpus_over_nccl(ranks: int, seed: int) -> None:
    launch(partial(in_group, transport="nccl"), ranks, (all_on_gpus, seed), timeout_s=50)


@pytest.fixture(scope="module")
def alone() -> Iterator[XlaCommunicator]:
    """The only rank of a group, in this process."""
    with XlaCommunicator(shardcomm.Communicator.local_group(1)[0]) as comm:
        yield comm


COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_gather": (all_gather, lambda x: jax.lax.all_gather(x, "ranks", tiled=True)),
    "reduce_scatter": (reduce_scatter, lambda x: jax.lax.psum_scatter(x, "ranks", tiled=True)),
    "all_reduce": (all_reduce, lambda x: jax.lax.psum(x, "ranks")),
    "broadcast": (broadcast, lambda x: x),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_python_number_takes_the_dtype_of_an_array_as_in_jax(
    name: str, alone: XlaCommunicator
) -> None:
    collective, jaxs = COLLECTIVES[name]
    weak = jnp.broadcast_to(jnp.asarray(2.0), 3)
    assert weak.weak_type
    expected = jax.vmap(jaxs, axis_name="ranks")(weak[None])[0]
    result = jax.jit(collective, static_argnums=1)(weak, alone)
    assert result.weak_type == expected.weak_type
    product = result * jnp.ones(3, "bfloat16")
    assert product.dtype == (expected * jnp.ones(3, "bfloat16")).dtype == "bfloat16"
    assert not collective(np.full(3, 2.0, np.float32), alone).weak_type


REFUSALS: dict[str, tuple[Callable[[XlaCommunicator], object], type[Exception], str]] = {
    "scalar": (lambda c: all_gather(1.0, c), ValueError, r"all_gather: x has no axes; give x.resh"),
    "pytree": (
        lambda c: all_gather({"w": jnp.ones(2)}, c),
        TypeError,
        "x is a dict; .*jax.tree.map",
    ),
    "torch": (
        lambda c: all_reduce(torch.ones(2), c),
        TypeError,
        "x is a Tensor; it must be a JAX array",
    ),
    "key": (lambda c: broadcast(jax.random.key(0), c), TypeError, r"jax.random.key_data\(x\)"),
    "int4": (
        lambda c: all_gather(jnp.ones(2, "int4"), c),
        TypeError,
        "x is of int4, whose elements",
    ),
    "int8": (
        lambda c: all_reduce(jnp.ones(2, "int8"), c),
        TypeError,
        "x is of int8; accepted: uint8",
    ),
    "avg of int": (
        lambda c: all_reduce(jnp.ones(2, int), c, "avg"),
        TypeError,
        "'avg' does not acc",
    ),
    "op": (lambda c: all_reduce(jnp.ones(2), c, "mul"), ValueError, "op is 'mul'; accepted: 'sum'"),
    "root": (
        lambda c: broadcast(jnp.ones(2), c, 1),
        ValueError,
        "root is 1; it must be a rank, 0 to",
    ),
    "root is True": (
        lambda c: broadcast(jnp.ones(2), c, True),
        ValueError,
        "root is True; it must be a rank, 0 to 0",
    ),
    "root is a float": (
        lambda c: broadcast(jnp.ones(2), c, 0.0),
        ValueError,
        r"root is 0.0; it must be a rank, 0 to 0",
    ),
    "root is computed": (
        lambda c: jax.jit(lambda root: broadcast(jnp.ones(2), c, root))(0),
        ValueError,
        "root is JitTracer.*; it must be a rank, 0 to 0, that is known while JAX traces",
    ),
    "int1": (
        lambda c: all_gather(jnp.ones(2, "int1"), c),
        TypeError,
        "x is of int1, whose elements",
    ),
    "list of ops": (
        lambda c: all_reduce(jnp.ones(2), c, ["sum"]),
        ValueError,
        r"op is \['sum'\]; accepted: 'sum'",
    ),
    "no group": (
        lambda c: all_gather(jnp.ones(2), 2),
        TypeError,
        "comm is a int; it must be a shard",
    ),
    "local": (
        lambda c: XlaCommunicator(shardcomm.Communicator.local_group(2)[0]),
        ValueError,
        "comm is over 'local'; accepted: 'shm'",
    ),
    "no ranks": (
        lambda c: XlaCommunicator(None),
        TypeError,
        "comm is a NoneType; it must be a Comm",
    ),
    "deadline": (
        lambda c: XlaCommunicator(shardcomm.Communicator.local_group(1)[0], deadline_s=0),
        ValueError,
        "deadline_s is 0",
    ),
    "pickled": (pickle.dumps, TypeError, "XlaCommunicator cannot be copied or pickled: it is this"),
    "copied": (copy.deepcopy, TypeError, "XlaCommunicator cannot be copied or pickled: it is this"),
    "max": (
        lambda c: jax.grad(lambda x: all_reduce(x, c, "max").sum())(jnp.ones(2)),
        NotImplementedError,
        "a reduce by 'max' has no derivative",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_by_a_sentence(case: str, alone: XlaCommunicator) -> None:
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind, match=text):
        call(alone)


def test_the_first_axis_of_a_reduce_scatter_is_a_multiple_of_the_ranks() -> None:
    launch(in_group, 2, (refused_parts,), timeout_s=60)


def refused_parts(comm: XlaCommunicator) -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\); the first axis must be a"):
        reduce_scatter(jnp.ones(3), comm)


def test_without_a_compiler_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(RuntimeError, match="there is no no-such-compiler; install a C"):
        library._compiled()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"could not be compiled: false .*ended with 1"):
        library._compiled()


WITHOUT_JAX = """
import sys
from support.forking import start_servers_by_forks
sys.path.insert(0, {folder!r})
from without_jax import main
start_servers_by_forks()  # this process has loaded torch and shardcomm
print(shardcomm.launch(main, 2, timeout_s=60))
"""


def test_ranks_are_forked_from_a_process_without_jax(tmp_path: Path) -> None:
    (tmp_path / "without_jax.py").write_text(
        "import sys\nimport shardcomm\ndef main():\n    return 'jax' in sys.modules\n"
    )
    ended = interpreters.run("import shardcomm" + WITHOUT_JAX.format(folder=str(tmp_path)))
    assert (ended.returncode, ended.stdout) == (0, "[False, False]\n"), ended.stderr


def test_the_old_name_of_the_communicator_warns() -> None:
    with pytest.warns(DeprecationWarning, match="is called shardcomm.jax.XlaCommunicator now"):
        assert shardcomm.jax.Communicator is XlaCommunicator
