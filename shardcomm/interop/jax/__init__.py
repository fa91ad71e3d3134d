"""Collectives inside `jax.jit`: XLA calls shardcomm's C library by its foreign function interface (FFI)."""

from shardcomm.interop.jax.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from shardcomm.interop.jax.xla_communicator import XlaCommunicator

__all__ = ["XlaCommunicator", "all_gather", "all_reduce", "broadcast", "reduce_scatter"]
