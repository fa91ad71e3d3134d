"""Collectives of JAX arrays, inside `jax.jit` and outside. `shardcomm.interop.jax` has the details."""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"shardcomm.jax needs JAX ({error}): pip install 'shardcomm[jax]'", name=error.name
    ) from None
from shardcomm.interop.jax import (
    Communicator,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)

__all__ = ["Communicator", "all_gather", "all_reduce", "broadcast", "reduce_scatter"]
