"""Floating-point numbers whose conversion may go wrong."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from support.random_plans import FLOATS


def every_16_bit_pattern() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16)


def awkward_floats() -> Tensor:
    """Random bit patterns, every half and bfloat16, and what lies around and halfway between."""
    generator = torch.Generator().manual_seed(20)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    narrow = torch.cat(
        [every_16_bit_pattern().view(dtype).float().view(torch.int32) for dtype in FLOATS[1:]]
    )
    steps = [-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001]
    return torch.cat([random] + [narrow + step for step in steps]).view(torch.float32)


@functools.cache
def shuffled_floats() -> Tensor:
    awkward = awkward_floats()
    return awkward[torch.randperm(len(awkward), generator=torch.Generator().manual_seed(5))]


def mixed(count: int, dtype: torch.dtype, seed: int, misalignment: int = 0) -> Tensor:
    """Awkward numbers among plain ones, of which a sum is not as large as its largest."""
    generator = torch.Generator().manual_seed(seed)
    room = count + misalignment
    if not dtype.is_floating_point:
        low, high = max(torch.iinfo(dtype).min, -(2**62)), min(torch.iinfo(dtype).max, 2**62)
        return torch.randint(low, high, (room,), generator=generator, dtype=dtype)[misalignment:]
    awkward = shuffled_floats()[10_000 * seed :][:room].to(dtype)
    plain = torch.randn(room, generator=generator, dtype=torch.float64).to(dtype)
    is_awkward = torch.rand(room, generator=generator) < 0.1
    return torch.where(is_awkward, awkward, plain)[misalignment:]
