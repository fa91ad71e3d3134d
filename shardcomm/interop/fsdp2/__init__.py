"""Gives a model that torch's `fully_shard` (FSDP2) has sharded shardcomm's communication by one line, and torch's own
again by another::

    attached = shardcomm.fsdp2.attach(model)    # after fully_shard, before or between steps; every rank
    ...                                         # the loop stays as it is
    attached.detach()

There are three levels. Each has what the one before it has, and adds::

    hooks    the all-gather and the reduce-scatter, through FSDP2's public hooks      hooks.py
    copies   its copies into and out of communication memory                          copies.py
    full     the whole gather: shards are cast straight into a window that all        full.py
             ranks share, and the full parameters are views of it

Communication for which FSDP2 has no hook stays torch's: HSDP's all-reduce between replicas, and modules with several
parameter groups. If a module cannot have the level that was asked for, it takes the next lower one, and its receipt
says why.
"""

from shardcomm.interop.fsdp2.attach import Attached, Level, ModuleReceipt, attach

__all__ = ["Attached", "Level", "ModuleReceipt", "attach"]
