"""FSDP2 with shardcomm's communication: `shardcomm.fsdp2.attach(model)`. `shardcomm.interop.fsdp2` has the details."""

from shardcomm.interop.fsdp2 import Attached, Level, ModuleReceipt, attach

__all__ = ["Attached", "Level", "ModuleReceipt", "attach"]
