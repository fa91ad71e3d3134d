"""FSDP2 with shardcomm's communication: `shardcomm.fsdp2.attach(model)`. See `shardcomm.interop.fsdp2`."""

from shardcomm.interop.fsdp2 import Attached, Level, ModuleReceipt, attach

__all__ = ["Attached", "Level", "ModuleReceipt", "attach"]
