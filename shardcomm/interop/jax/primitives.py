"""JAX's view of the collectives: shapes, derivatives, and the call that XLA makes.

The derivatives are those of the function from all ranks' inputs to all ranks' outputs. With that, the gradient of the
sum of all ranks' losses comes out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from shardcomm.interop.jax.library import TARGET
from shardcomm.interop.jax.order import EFFECTS, check_all_ranks_call, set_token, token_of
from shardcomm.interop.jax.xla_communicator import XlaCommunicator

OPS = {"sum": 0, "avg": 1, "max": 2, "min": 3}  # of shc_op


def _primitive(name: str, *, in_place: bool = False) -> Primitive:
    """A primitive of one array; its parameters are `comm` and, for some, `op` or `root`."""
    primitive = Primitive(name)
    primitive.def_impl(partial(_call, primitive))
    batching.primitive_batchers[primitive] = partial(_batched, primitive)
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _checkpoint
    for platform in ("cpu", "cuda"):
        rule = partial(_lower, name=name, in_place=in_place, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _call(primitive: Primitive, x: Any, **params: Any) -> Any:
    """A call outside of `jax.jit`."""
    check_all_ranks_call(primitive.name)
    return xla.apply_primitive(primitive, x, **params)


def _lower(
    ctx: Any,
    x: Any,
    *,
    name: str,
    in_place: bool,
    platform: str,
    comm: XlaCommunicator,
    op: str = "sum",
    root: int | None = None,
) -> Any:
    comm.check_platform(name, platform)
    check_all_ranks_call(name)
    call = jax.ffi.ffi_lowering(
        TARGET, has_side_effect=True, operand_output_aliases={1: 1} if in_place else None
    )
    with_token = ctx.replace(
        avals_in=[core.abstract_token, *ctx.avals_in],
        avals_out=[core.abstract_token, *ctx.avals_out],
    )
    token, result = call(
        with_token,
        token_of(ctx),
        x,
        comm=np.int64(comm.number),
        operation=name,
        argument=np.int32(OPS[op] if root is None else root),
        dtype=ctx.avals_in[0].dtype.name,
    )
    set_token(ctx, token)
    return [result]


def _batched(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """How `jax.vmap` makes a call: once, of all elements of the batch, which lie along the last axis.

    So ranks batch alike, as they give the same shapes: one that does not, or does not batch, gets a mismatch.
    """
    (x,), (dim,) = args, dims
    return primitive.bind(jnp.moveaxis(x, dim, -1), **params), x.ndim - 1


def _checkpoint(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
    """How `jax.checkpoint` treats a call: as any other operation. JAX would keep the result of one that has effects.

    So a gather in a checkpointed layer is made again in backward, unless the policy says otherwise.
    """
    (x,) = eqn.invars
    residuals = [] if instantiated[0] or isinstance(x, core.Literal) else [x]
    if unknown[0]:
        return None, eqn, [True], [True], residuals
    kept = partial_eval.ensure_enum(saveable(eqn.primitive, x.aval, **eqn.params))
    if isinstance(kept, partial_eval.SaveableType):
        return eqn, None, [False], [False], []
    return eqn, eqn, [False], [True], residuals


def _with_rows(x: Any, rows: int) -> Any:
    return x.update(shape=(rows, *x.shape[1:]))


all_gather_p = _primitive("all_gather")
reduce_scatter_p = _primitive("reduce_scatter")
all_reduce_p = _primitive("all_reduce", in_place=True)
broadcast_p = _primitive("broadcast", in_place=True)


@all_gather_p.def_effectful_abstract_eval
def _(x: Any, *, comm: XlaCommunicator) -> Any:
    return _with_rows(x, x.shape[0] * comm.size), EFFECTS


@reduce_scatter_p.def_effectful_abstract_eval
def _(x: Any, *, comm: XlaCommunicator, op: str) -> Any:
    return _with_rows(x, x.shape[0] // comm.size), EFFECTS


@all_reduce_p.def_effectful_abstract_eval
def _(x: Any, *, comm: XlaCommunicator, op: str) -> Any:
    return x, EFFECTS


@broadcast_p.def_effectful_abstract_eval
def _(x: Any, *, comm: XlaCommunicator, root: int) -> Any:
    return x, EFFECTS


def _summed(primitive: Primitive, grad: Any, comm: XlaCommunicator) -> Any:
    """A sum of cotangents, which have every dtype that is gathered and has derivatives.

    A complex number is a pair of reals, and eight bits are summed in 32 and rounded once.
    """
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        pairs = jnp.stack([grad.real, grad.imag], axis=-1)
        total = primitive.bind(pairs, comm=comm, op="sum")
        return jax.lax.complex(total[..., 0], total[..., 1])
    dtype = jnp.float32 if grad.dtype.itemsize == 1 else grad.dtype
    return primitive.bind(grad.astype(dtype), comm=comm, op="sum").astype(grad.dtype)


def _transposed_gather(grad: Any, x: Any, *, comm: XlaCommunicator) -> Any:
    return [_summed(reduce_scatter_p, grad, comm)]


def _transposed_reduce(grad: Any, x: Any, *, comm: XlaCommunicator, op: str) -> Any:
    full = all_gather_p.bind(grad, comm=comm)
    return [full / comm.size if op == "avg" else full]


def _transposed_all_reduce(grad: Any, x: Any, *, comm: XlaCommunicator, op: str) -> Any:
    return [all_reduce_p.bind(grad, comm=comm, op=op)]


def _transposed_broadcast(grad: Any, x: Any, *, comm: XlaCommunicator, root: int) -> Any:
    total = _summed(all_reduce_p, grad, comm)
    # By a choice in the program, which is then the same on all ranks, as are its derivatives.
    return [jnp.where(comm.rank == root, total, 0)]


def _jvp_of_reduce(
    linear: Any, primals: Any, tangents: Any, *, comm: XlaCommunicator, op: str
) -> Any:
    if op not in ("sum", "avg"):
        raise NotImplementedError(
            f"a reduce by {op!r} has no derivative here; 'sum' and 'avg' have"
        )
    return linear(primals, tangents, comm=comm, op=op)


ad.deflinear2(all_gather_p, _transposed_gather)
ad.deflinear2(broadcast_p, _transposed_broadcast)
ad.deflinear2(reduce_scatter_p, _transposed_reduce)
ad.deflinear2(all_reduce_p, _transposed_all_reduce)
for _reduce in (reduce_scatter_p, all_reduce_p):
    ad.primitive_jvps[_reduce] = partial(_jvp_of_reduce, ad.primitive_jvps[_reduce])
