"""The collectives of `shardcomm.jax`: their arguments are checked here, and all ranks are then bound by one order."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Literal, SupportsIndex, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shardcomm.arguments.checks import check_type
from shardcomm.interop.jax import primitives
from shardcomm.interop.jax.xla_communicator import XlaCommunicator

ReduceOp = Literal["sum", "avg", "max", "min"]

_PARTS_OF_BYTES = ("int1", "int2", "int4", "float4_e2m1fn")  # and unsigned integers
_SUMMED = ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def all_gather(x: ArrayLike, comm: XlaCommunicator) -> jax.Array:
    """All ranks' arrays, one after another in rank order.

    Its derivative is a `reduce_scatter` of the cotangents, by "sum". Those of complex numbers and of 8-bit floats are
    summed, too; 8-bit floats in 32 bits, and rounded once.

    Args:
        x: This rank's array, of shape (rows, ...); the same shape and dtype on every rank. Any dtype whose elements are
            whole bytes.
        comm: The group.

    Returns:
        An array of shape (`comm.size` * rows, ...) and the dtype of `x`, the same on every rank.

    Raises:
        TypeError: `x` is no array, or of a dtype whose elements are no whole bytes; or `comm` is no
            `shardcomm.jax.XlaCommunicator`.
        ValueError: `x` has no axes; or the program computes elsewhere than `comm` communicates.
        FloatingPointError: With `jax_debug_nans` JAX runs a jitted function again, on the ranks alone that got a NaN.
        JaxRuntimeError: When the call is executed: a rank has died, called something else or did not come. The end of a
            `with` block of `comm` makes a `CommError` of it.
    """
    array = _checked("all_gather", x, comm)
    _check_rows("all_gather", array, 1)
    return cast(jax.Array, primitives.all_gather_p.bind(array, comm=comm))


def reduce_scatter(x: ArrayLike, comm: XlaCommunicator, op: ReduceOp = "sum") -> jax.Array:
    """This rank's part of what all ranks' arrays reduce to.

    Sums of 16-bit floats are made in 32 bits, and rounded once. The derivative is an `all_gather` of the cotangents,
    divided by `comm.size` for "avg"; "max" and "min" have none.

    Args:
        x: This rank's array, of shape (`comm.size` * rows, ...); the same shape and dtype on every rank: uint8, int32,
            int64, float16, bfloat16, float32 or float64, and floats alone for "avg".
        comm: The group.
        op: "sum", "avg", "max" or "min".

    Returns:
        An array of shape (rows, ...) and the dtype of `x`: rank r has rows r * rows and on.

    Raises:
        TypeError: `x` is no array, or of another dtype; or `comm` is no `shardcomm.jax.XlaCommunicator`.
        ValueError: The first axis of `x` is no multiple of `comm.size`, or there is none; `op` is none of the accepted
            values; or the program computes elsewhere than `comm` communicates.
        NotImplementedError: A derivative of "max" or "min" is asked for.
        FloatingPointError, JaxRuntimeError: As `all_gather`.
    """
    array = _checked("reduce_scatter", x, comm)
    _check_reduce("reduce_scatter", array, op)
    _check_rows("reduce_scatter", array, comm.size)
    return cast(jax.Array, primitives.reduce_scatter_p.bind(array, comm=comm, op=op))


def all_reduce(x: ArrayLike, comm: XlaCommunicator, op: ReduceOp = "sum") -> jax.Array:
    """What all ranks' arrays reduce to, the same bits on every rank.

    It works in place where XLA lets it: an array that is donated to the jitted function, or not used afterwards, is not
    copied. The derivative is an `all_reduce` of the cotangents by the same `op`; "max" and "min" have none.

    Args:
        x: This rank's array of any shape; the same shape and dtype on every rank, and the dtypes of `reduce_scatter`.
        comm: The group.
        op: "sum", "avg", "max" or "min".

    Returns:
        An array of the shape and dtype of `x`, the same on every rank.

    Raises:
        TypeError, ValueError, NotImplementedError: As `reduce_scatter`; `x` may have any shape.
        FloatingPointError, JaxRuntimeError: As `all_gather`.
    """
    array = _checked("all_reduce", x, comm)
    _check_reduce("all_reduce", array, op)
    return cast(jax.Array, primitives.all_reduce_p.bind(array, comm=comm, op=op))


def broadcast(x: ArrayLike, comm: XlaCommunicator, root: SupportsIndex = 0) -> jax.Array:
    """The array of rank `root`, on every rank; in place as `all_reduce`.

    Its derivative is the sum of the cotangents on rank `root`, made as for `all_gather`, and zeros elsewhere.

    Args:
        x: The array of rank `root`, of any shape and of the dtypes of `all_gather`; on other ranks an array of the same
            shape and dtype, whose values do not matter.
        comm: The group.
        root: Whose array it is: a whole number, also one of NumPy's.

    Returns:
        An array of the shape and dtype of `x`, the same on every rank.

    Raises:
        TypeError: As `all_gather`.
        ValueError: `root` is no rank, or a value that the program computes; or the program computes elsewhere than
            `comm` communicates.
        FloatingPointError, JaxRuntimeError: As `all_gather`.
    """
    array = _checked("broadcast", x, comm)
    rank = _checked_root(root, comm.size)
    return cast(jax.Array, primitives.broadcast_p.bind(array, comm=comm, root=rank))


def _checked(operation: str, x: ArrayLike, comm: XlaCommunicator) -> jax.Array:
    check_type(
        operation,
        "comm",
        comm,
        XlaCommunicator,
        "a shardcomm.jax.XlaCommunicator, which shardcomm.jax.XlaCommunicator(comm) makes of a shardcomm.Communicator",
    )
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(
            f"{operation}: x is a {type(x).__name__}; it must be a JAX array, or one of NumPy's; for each array of a "
            "pytree call it by jax.tree.map"
        )
    array = jnp.asarray(x)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{operation}: x is of {array.dtype}; give jax.random.key_data(x)")
    if array.dtype.name.endswith(_PARTS_OF_BYTES):
        raise TypeError(
            f"{operation}: x is of {array.dtype}, whose elements are no whole bytes; convert it by x.astype"
        )
    return array


def _checked_root(root: SupportsIndex, ranks: int) -> int:
    with suppress(TypeError):  # also of a value that a program computes
        if not isinstance(root, bool) and 0 <= (rank := operator.index(root)) < ranks:
            return rank
    raise ValueError(
        f"broadcast: root is {root!r}; it must be a rank, 0 to {ranks - 1}, that is known while JAX traces"
    )


def _check_rows(operation: str, array: jax.Array, multiple: int) -> None:
    if array.ndim == 0:
        raise ValueError(f"{operation}: x has no axes; give x.reshape(1)")
    if array.shape[0] % multiple:
        raise ValueError(
            f"{operation}: x has shape {array.shape}; the first axis must be a multiple of {multiple}, which is "
            "how many ranks there are"
        )


def _check_reduce(operation: str, array: jax.Array, op: str) -> None:
    if not isinstance(op, str) or op not in primitives.OPS:
        raise ValueError(
            f"{operation}: op is {op!r}; accepted: {', '.join(map(repr, primitives.OPS))}"
        )
    if array.dtype.name not in _SUMMED:
        raise TypeError(
            f"{operation}: x is of {array.dtype}; accepted: {', '.join(_SUMMED)}; convert it by x.astype"
        )
    if op == "avg" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{operation}: x is of {array.dtype}, which 'avg' does not accept; give floats, or use 'sum'"
        )
