"""`shardcomm.jax` when ranks die, are late, disagree or leave: a CommError in time, and the next group works."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="shardcomm.jax needs JAX: pip install jax")
import jax
import jax.numpy as jnp

import shardcomm
from shardcomm import CommError, launch
from shardcomm.cli.ps import groups
from shardcomm.jax import XlaCommunicator, all_gather, all_reduce, broadcast
from support.gates import until


def total(x: jax.Array, comm: XlaCommunicator) -> jax.Array:
    return jax.jit(all_reduce, static_argnums=1)(x, comm)


def in_another_collective(comm: XlaCommunicator) -> None:
    if comm.rank == 1:
        all_gather(jnp.ones(2), comm).block_until_ready()


def with_another_shape(comm: XlaCommunicator) -> None:
    if comm.rank == 1:
        total(jnp.ones(4), comm).block_until_ready()


def after_it_was_closed(comm: XlaCommunicator) -> None:
    if comm.rank == 1:
        comm.close()


def in_a_program_that_nobody_waits_for(comm: XlaCommunicator) -> None:
    """JAX starts it in the background, where the failure stays until somebody waits."""
    slow = jax.jit(lambda x: (x @ x @ x @ x)[0, :3])(jnp.ones((1500, 1500)))
    total(slow if comm.rank else slow[:2], comm)
    total(slow, comm)


@pytest.mark.parametrize(
    ("disagree", "kind"),
    [
        (in_another_collective, "mismatch"),
        (with_another_shape, "mismatch"),
        (after_it_was_closed, "closed"),
        (in_a_program_that_nobody_waits_for, "mismatch"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_failed_group_raises_on_every_rank_and_the_next_one_works(
    disagree: Callable[[XlaCommunicator], None], kind: str
) -> None:
    assert launch(fails_and_goes_on, 2, (disagree,), timeout_s=60) == [kind, kind]


def fails_and_goes_on(disagree: Callable[[XlaCommunicator], None]) -> str:
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        with pytest.raises(CommError) as failed:
            disagree_in_a_group(ranks, disagree)
        with XlaCommunicator(ranks, deadline_s=20) as comm:
            assert total(jnp.ones(3), comm).tolist() == [2.0] * 3
    return failed.value.kind


def disagree_in_a_group(
    ranks: shardcomm.Communicator, disagree: Callable[[XlaCommunicator], None]
) -> None:
    with XlaCommunicator(ranks, deadline_s=2) as comm:
        assert total(jnp.ones(3), comm).tolist() == [2.0] * 3
        disagree(comm)
        total(jnp.ones(3), comm).block_until_ready()


def call_twice(call: Callable[..., jax.Array], x: jax.Array, comm: XlaCommunicator) -> None:
    jax.jit(call, static_argnums=1)(x, comm).block_until_ready()
    total(jnp.ones(3), comm).block_until_ready()  # in which a broadcast's root may hear of it


def with_dtypes_of_one_size() -> None:
    """Dtypes with which the core does not compute, so that it moves their bytes."""
    pairs = [
        ("float8_e4m3fn", "float8_e5m2"),
        ("bool", "int8"),
        ("complex64", "complex64"),
        ("complex64", "uint8"),
        ("uint16", "int16"),
        ("uint32", "float32"),
        ("float32", "uint32"),
    ]
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        for call in (all_gather, broadcast):
            for pair in pairs:
                own = jnp.dtype(pair[ranks.rank])
                x = jnp.full(48 // own.itemsize, 1 + ranks.rank, own)
                if len({*pair}) == 1:
                    wanted = [1] * x.size + [2] * x.size * (call is all_gather)
                    with XlaCommunicator(ranks, deadline_s=20) as comm:
                        assert jax.jit(call, static_argnums=1)(x, comm).tolist() == wanted
                    continue
                with (
                    pytest.raises(CommError) as failed,
                    XlaCommunicator(ranks, deadline_s=20) as comm,
                ):
                    call_twice(call, x, comm)
                assert failed.value.kind == "mismatch"
                for rank, dtype in enumerate(pair):
                    short = {"uint8": "u8", "float32": "f32"}.get(dtype, f" of {dtype}")
                    of_rank = str(failed.value).split("; ")[rank]
                    assert short in of_rank, (pair, call.__name__, failed.value)


def test_ranks_with_dtypes_of_one_size_are_told_both() -> None:
    launch(with_dtypes_of_one_size, 2, timeout_s=60)


def survives(fate: str) -> None:
    """Rank 0's error reaches the launcher, whatever becomes of rank 1."""
    ranks = shardcomm.Communicator.from_env(deadline_s=30)
    with XlaCommunicator(ranks, deadline_s=2) as comm:
        total(jnp.ones(3), comm)
        if comm.rank == 0:
            with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1"):
                total(jnp.ones(3), comm).block_until_ready()
            with pytest.raises(CommError) as failed:
                comm.check()
            assert failed.value.rank == 1
            assert failed.value.kind == fate
            os._exit(7)  # which the launcher reports first
        if fate == "died":
            os._exit(0)
        ranks.barrier()  # where it waits until rank 0 has seen that it does not come


@pytest.mark.parametrize("fate", ["died", "late"])
def test_a_rank_that_is_missing_is_named(fate: str) -> None:
    with pytest.raises(shardcomm.RankError, match="rank 0 ended with exit status 7"):
        launch(survives, 2, (fate,), timeout_s=60)


def program_of_a_closed_group() -> None:
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        with XlaCommunicator(ranks) as comm:
            program = jax.jit(lambda x: all_reduce(x, comm))
            program(jnp.ones(3))
        refused = (
            "all_reduce: this program was compiled for a communicator that this rank has closed"
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match=refused):
            program(jnp.ones(3)).block_until_ready()
        with pytest.raises(CommError, match=f"rank {comm.rank} has closed this") as closed:
            comm.check()
        assert (closed.value.kind, closed.value.rank) == ("closed", comm.rank)
        comm.close()  # a second time


def test_a_compiled_program_outlives_its_group_and_raises() -> None:
    launch(program_of_a_closed_group, 2, timeout_s=60)


def logarithm(x: jax.Array, comm: XlaCommunicator) -> jax.Array:
    """-Inf on rank 0, and NaN on rank 1."""
    return jnp.log(0 * all_reduce(x, comm) - comm.rank)


def logarithm_after_a_loop(x: jax.Array, comm: XlaCommunicator) -> jax.Array:
    looped, _ = jax.lax.scan(lambda y, _: (all_reduce(y, comm), None), x, None, length=2)
    return jnp.log(0 * looped - comm.rank)


def nan_on_rank_1(function: Callable[..., jax.Array], with_jit: bool) -> str:
    jax.config.update("jax_debug_nans", True)
    ranks = shardcomm.Communicator.from_env(deadline_s=30)
    with ranks, pytest.raises((CommError, FloatingPointError)) as failed:
        call_and_go_on(ranks, function, with_jit)
    error = failed.value
    return error.kind if isinstance(error, CommError) else str(error)


def call_and_go_on(
    ranks: shardcomm.Communicator, function: Callable[..., jax.Array], with_jit: bool
) -> None:
    with XlaCommunicator(ranks, deadline_s=20) as comm:
        with jax.disable_jit(not with_jit):
            jax.jit(function, static_argnums=1)(jnp.ones(3), comm)
        for _ in range(2):  # which would pair with the calls of a second run on rank 1
            total(jnp.ones(3), comm).block_until_ready()


@pytest.mark.parametrize("function", [logarithm, logarithm_after_a_loop])
@pytest.mark.parametrize(
    ("with_jit", "expected"),
    [
        (True, "all_reduce: a jitted function that calls it has returned a value that is nan"),
        (False, "invalid value (nan) encountered in log"),
    ],
    ids=["jit", "disable_jit"],
)
def test_jax_looks_for_a_nan_of_one_rank_without_a_call_that_others_do_not_make(
    function: Callable[..., jax.Array], with_jit: bool, expected: str
) -> None:
    of_rank_0, of_rank_1 = launch(nan_on_rank_1, 2, (function, with_jit), timeout_s=60)
    assert of_rank_0 == "closed"
    assert of_rank_1.startswith(expected)


def held() -> tuple[int, int]:
    """File descriptors and shared mappings of this process."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum(line.split()[1][3] == "s" for line in mappings)


def many_groups() -> None:
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        counts = []
        for _ in range(20):
            with XlaCommunicator(ranks, deadline_s=20) as comm:
                assert total(jnp.ones(3), comm).tolist() == [2.0] * 3
            counts.append(held())
    assert counts[-1] == counts[0]


def test_a_closed_group_gives_back_all_that_it_held() -> None:
    launch(many_groups, 2, timeout_s=60)


def close_in_its_call(comm: XlaCommunicator) -> None:
    until(
        lambda: any(
            rank.calls
            for group in groups.find().groups
            for rank in group.ranks
            if rank.pid == os.getpid()
        ),
        "a call waits",
    )
    comm.close()


def closed_by_another_thread() -> None:
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        counts = []
        for _ in range(2):
            comm = XlaCommunicator(ranks, deadline_s=20)
            if ranks.rank == 0:  # waits for rank 1, which does not come
                closing = threading.Thread(target=close_in_its_call, args=(comm,))
                closing.start()
                with pytest.raises(
                    jax.errors.JaxRuntimeError, match=r"rank 0 .*closed the communicator"
                ):
                    total(jnp.ones(3), comm).block_until_ready()
                closing.join()
            ranks.barrier()
            comm.close()
            counts.append(held())
    assert counts[1] == counts[0]


def test_a_group_may_be_closed_while_it_is_in_a_call() -> None:
    launch(closed_by_another_thread, 2, timeout_s=60)


def cannot_load_on_rank_1(folder: str) -> None:
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        if ranks.rank == 1:
            os.environ |= {"XDG_CACHE_HOME": folder, "CXX": "no-such-compiler"}
        with pytest.raises(RuntimeError, match=r"rank 1: .* there is no no-such-compiler"):
            XlaCommunicator(ranks)


def test_a_rank_that_cannot_load_the_library_tells_the_others(tmp_path: object) -> None:
    launch(cannot_load_on_rank_1, 2, (str(tmp_path),), timeout_s=60)


def programs_that_run_on() -> None:
    with shardcomm.Communicator.from_env(deadline_s=30) as ranks:
        with XlaCommunicator(ranks, deadline_s=20) as comm:
            total(jnp.ones(3), comm)
            slow = jax.jit(lambda x: (x @ x @ x @ x)[0, :3] * 0 + 1)(jnp.ones((1500, 1500)))
            result = total(slow, comm)
        assert result.tolist() == [2.0] * 3


def test_programs_that_nobody_waited_for_end_before_the_group_does() -> None:
    launch(programs_that_run_on, 2, timeout_s=60)
