"""What the fork server of the tests loads before it forks the first rank. No other process imports it.

Each rank would load it again. The tests' modules, in which ranks look up their functions, import `pytest` and
`hypothesis`. FSDP2 and torch's optimizers load torch._dynamo when they are first used, and saving loads DCP. The
command `shardcomm` loads all its commands. JAX is not among them, since it has threads: ranks are forked from a process
without it (tests/interop/test_jax.py). What else a test's module wants loaded is its `PRELOADED`.
"""

import atexit
import gc

import hypothesis
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp

import shardcomm
import support.commands
import support.fsdp2_cases
import support.nets

__all__ = ["hypothesis", "pytest", "shardcomm", "support", "torch"]

# A rank that collects its garbage would otherwise copy each page of all of these.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # nanobind would report what is frozen as leaked
