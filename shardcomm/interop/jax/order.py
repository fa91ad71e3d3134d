"""The order of a rank's calls: the same in every program as in Python, whatever XLA would like to start first.

Every rank must make its calls in the same order, and XLA starts what is independent in any order. So all collectives
have one ordered effect. For such effects JAX threads a token through the program in the order in which Python called
(`jax._src.interpreters.mlir.jaxpr_subcomp`; also through `scan`, `while`, `cond` and inner `jit`s), and from each
compiled program to the thread's next (`jax._src.dispatch.runtime_tokens`)::

    program    x ── all_gather ── y      g ── reduce_scatter ── h      (independent for XLA)
    token      t0 ─────┴─── t1 ──────────────────┴─── t2               (so it is not)

Each call has an effect without an order, too. JAX runs a program that was compiled by `lower(...).compile()` past its
tokens unless it has one (`jax._src.interpreters.pxla.MeshExecutable.create_cpp_call`).

There is one token for gathers and reduces, and for all communicators: a call on a CPU blocks the thread on which XLA
runs it. With two chains one rank could be in a gather while another one is in a reduce, each with its last thread.

JAX has no public names for ordered effects, so this file uses JAX's own.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax._src import api_util, dispatch, effects
from jax.interpreters import mlir


class _Order(effects.Effect):
    # In JAX's errors: "... effects are not supported for more than 1 device: [...]".
    def __repr__(self) -> str:
        return "shardcomm's collectives"


class _Call(effects.Effect):
    def __repr__(self) -> str:
        return "a call of shardcomm"


_RUN_AGAIN = api_util.InternalFloatingPointError

ORDER = _Order()
EFFECTS = {ORDER, _Call()}
"""The effects of every collective."""

effects.ordered_effects.add_type(_Order)
for _kind in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kind.add_type(_Order)
    _kind.add_type(_Call)


def token_of(ctx: Any) -> Any:
    """The token that the next call takes, while JAX translates a program."""
    return ctx.tokens_in.get(ORDER)


def set_token(ctx: Any, token: Any) -> None:
    """Hands on the token that a call has returned."""
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDER: token})))


def check_all_ranks_call(operation: str) -> None:
    """FloatingPointError where JAX looks for a NaN: it runs the jitted function again, and only on ranks that got one.

    Other ranks' next calls would meet those of that run. JAX makes it while it handles an exception of its own
    (`jax._src.api_util.maybe_recursive_nan_check`). When that is over, a FloatingPointError has come of it.
    """
    handled: BaseException | None = sys.exception()
    while handled is not None and not isinstance(handled, _RUN_AGAIN | FloatingPointError):
        handled = handled.__context__
    if isinstance(handled, _RUN_AGAIN):
        raise FloatingPointError(
            f"{operation}: a jitted function that calls it has returned a value that is {handled.ty}, and "
            f"jax_debug_{handled.ty}s would run it again, on this rank alone; run it on every rank under "
            "jax.disable_jit(), which says where the value comes from without another run"
        )


def finish() -> bool:
    """Waits for the programs that this thread has started; returns whether all went well.

    The token of a program that failed is dropped. With it, every later program of the thread would fail.
    """
    tokens = dispatch.runtime_tokens.current_tokens
    try:
        if ORDER in tokens:
            tokens[ORDER].block_until_ready()
    except jax.errors.JaxRuntimeError:
        del tokens[ORDER]
        return False
    return True
