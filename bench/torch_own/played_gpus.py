"""Lets the CPU stand in for the GPUs that a test of torch's asks for.

Half of torch's tests of DDP ask for a GPU for each rank, and none of them for what only a GPU can do. With the CPU in
its place they say as much of a CPU backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MOST = 8


def install() -> None:
    """From now on a device of CUDA is the CPU. Called before torch's tests are imported."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_distributed

    for decorator in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"):
        setattr(common_distributed, decorator, lambda *args, **kwargs: lambda test: test)
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.requires_nccl = lambda: lambda test: test
    for name, stand_in in {
        "device_count": lambda: _MOST,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "device": _NoContext,
        "empty_cache": lambda: None,
    }.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor.clone()
    torch.nn.Module.cuda = lambda module, *args, **kwargs: module
    to = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *args, **kwargs: to(module, *map(_cpu, args), **kwargs)
    DistributedDataParallel.__init__ = _without_devices(DistributedDataParallel.__init__)
    _OnTheCpu().__enter__()


class _NoContext:
    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


class _OnTheCpu(TorchFunctionMode):
    """Rewrites the devices in calls of torch's functions."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = (args[0], *map(_cpu, args[1:]))
        return function(*args, **kwargs)


def _cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapper(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, module, None, None, *args, **kwargs)

    return wrapper
