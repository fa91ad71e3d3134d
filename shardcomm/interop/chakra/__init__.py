"""Steps as Chakra execution traces, which network simulators such as ASTRA-sim replay (MLCommons, arXiv 2305.14516)."""

from shardcomm.interop.chakra.files import write_step

__all__ = ["write_step"]
