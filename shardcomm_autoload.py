"""What torch calls when it is imported, by the entry point "torch.backends" in pyproject.toml: it names the backend.

So a program that never imports shardcomm can name the backend in its configuration: in `init_process_group`, or in a
framework's option. This is no module of the package shardcomm, whose import needs torch itself. Torch does not call it
with TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment; `import shardcomm` registers the backend as well.
"""

import atexit
import sys
from typing import Any

import torch.distributed as dist


def register() -> None:
    """Registers the backend "shardcomm" with torch.distributed. The first group of it imports shardcomm."""
    if dist.is_available() and "shardcomm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shardcomm", _group, devices=["cpu"])
        # So early that what a program registers comes before it, and may still use its groups.
        atexit.register(_leave)


def _group(*args: Any) -> Any:
    from shardcomm.interop.backend import make_group  # noqa: PLC0415

    return make_group(*args)


def _leave() -> None:
    backend = sys.modules.get("shardcomm.interop.backend")
    if backend is not None:
        backend.leave_all()
