"""What the fork server of the tests loads before it forks the first rank. No other process imports it.

Each rank would load it again. The server is a fork of the process that has collected the tests (`support.forking`), and
has their modules, in which ranks look up their functions; also JAX, which has no threads before its first array. FSDP2
and torch's optimizers load torch._dynamo when they are first used, saving loads DCP and fsspec, and a group of torch's
loads the backend. The command `shardcomm` loads its parser. What else a test's module wants loaded is its `PRELOADED`.
"""

import atexit
import contextlib
import gc
import weakref

import hypothesis
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.fsdp

import shardcomm.cli.parser
import shardcomm.cli.train.job
import support.commands
import support.fsdp2_cases
import support.nets
from shardcomm.interop import backend

__all__ = ["hypothesis", "pytest", "shardcomm", "support", "torch"]

# The sample takes longer than the few steps of a test's training.
shardcomm.cli.train.job.SAMPLE_BYTES = 8

# Without a compiler there is no backend; tests of it say so themselves.
with contextlib.suppress(RuntimeError):
    backend.load()

# A rank that collects its garbage would otherwise copy each page of all of these.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # nanobind would report what is frozen as leaked
# As in the fork server of `launch`.
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
