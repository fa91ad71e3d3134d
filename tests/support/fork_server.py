"""What the fork server of the tests loads before it forks the first rank. No other process imports it.

Each rank would load it again. The tests' modules, in which ranks look up their functions, import `pytest` and
`hypothesis`. FSDP2 and torch's optimizers load torch._dynamo when they are first used, and saving loads DCP. JAX is not
among them, since it has threads: ranks are forked from a process without it (tests/interop/test_jax.py).
"""

import atexit
import gc
import importlib
import importlib.util

import hypothesis
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp

import shardcomm
import support.fsdp2_cases
import support.nets

__all__ = ["hypothesis", "pytest", "shardcomm", "support", "torch"]

for name in ("lightning.fabric", "lightning.pytorch", "accelerate"):
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)

# A rank that collects its garbage would otherwise copy each page of all of these.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # nanobind would report what is frozen as leaked
