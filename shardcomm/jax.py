"""Collectives of JAX arrays, inside `jax.jit` and outside. `shardcomm.interop.jax` has the details."""

import warnings as _warnings

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"shardcomm.jax needs JAX ({error}): pip install 'shardcomm[jax]'", name=error.name
    ) from None
from shardcomm.interop.jax import (
    XlaCommunicator,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)

__all__ = ["XlaCommunicator", "all_gather", "all_reduce", "broadcast", "reduce_scatter"]


def __getattr__(name: str) -> object:
    if name != "Communicator":  # the name in 0.1; it goes with the next version
        raise AttributeError(f"module 'shardcomm.jax' has no attribute {name!r}")
    _warnings.warn(
        "shardcomm.jax.Communicator is called shardcomm.jax.XlaCommunicator now",
        DeprecationWarning,
        stacklevel=2,
    )
    return XlaCommunicator
