"""`with plain():` sharded parameters are as any tensor, for the engine's own code; see `sharded_parameter.py`."""

from torch._C import DisableTorchFunctionSubclass as plain

__all__ = ["plain"]
