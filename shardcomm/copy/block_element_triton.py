"""The arithmetic of elements that share a scale, in Triton: from a block's largest element to its scale, and back.

It is `csrc/copy/block_element.h` to the bit, step by step; the reasons stand there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(counter, key_low, key_high):
    """Philox4x32-10: four random words of a counter and a key, as `csrc/copy/philox.h`."""
    c0 = counter.to(tl.uint64) & 0xFFFFFFFF
    c1 = counter.to(tl.uint64) >> 32
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = c2 + key_low.to(tl.uint32).to(tl.uint64)
    k1 = c2 + key_high.to(tl.uint32).to(tl.uint64)
    for _ in tl.static_range(10):
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0 = (b >> 32) ^ c1 ^ k0
        c1 = b & 0xFFFFFFFF
        c2 = (a >> 32) ^ c3 ^ k1
        c3 = a & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@triton.jit
def _float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest, IS_INT: tl.constexpr):
    """The scale of a block whose largest element has these bits."""
    if IS_INT:
        scale = (largest + 0x1FFFF) >> 23
        scale = tl.where(largest <= 0x7F0000, 0, scale)
    else:
        scale = ((largest + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(scale, 0), 254)


@triton.jit
def in_units(x, scale, FRACTION: tl.constexpr):
    """`x` in units of its scale, times 2^FRACTION."""
    plain = x * _float_of((254 + FRACTION - tl.maximum(scale, 40)) << 23)
    tiny_scale = tl.minimum(scale, 39)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    size = _float_of(magnitude)
    normal = (size * 18446744073709551616.0) * _float_of((190 + FRACTION - tiny_scale) << 23)
    subnormal = magnitude.to(tl.float32) * _float_of((105 + FRACTION - tiny_scale) << 23)
    tiny = tl.where(magnitude < 0x800000, subnormal, normal).to(tl.uint32, bitcast=True)
    return tl.where(scale >= 40, plain, _float_of(tiny | (bits & 0x80000000)))


@triton.jit
def _rounds_up(fraction, random):
    return ((fraction * 16777216.0).to(tl.int32) > random).to(tl.int32)


@triton.jit
def round_int(y, random, STOCHASTIC: tl.constexpr):
    """The code of `y` in mxint8, and how far it is from `y`."""
    if STOCHASTIC:
        toward_zero = y.to(tl.int32)
        away = _rounds_up(tl.abs(y - toward_zero.to(tl.float32)), random)
        code = tl.where(y < 0, toward_zero - away, toward_zero + away)
    else:
        code = (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.minimum(tl.maximum(code, -127), 127)
    return code, y - code.to(tl.float32)


@triton.jit
def round_float(y, random, STOCHASTIC: tl.constexpr):
    """The code of `y` in mxfp8, and how far it is from `y`."""
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    exponent = tl.maximum(magnitude >> 23, 121)
    steps = _float_of(magnitude) * _float_of((257 - exponent) << 23)
    if STOCHASTIC:
        down = steps.to(tl.int32)
        whole = down + _rounds_up(steps - down.to(tl.float32), random)
    else:
        whole = (steps + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = ((exponent - 121) << 3) + whole
    error = (steps - whole.to(tl.float32)) * _float_of((exponent - 3) << 23)
    return code | ((bits >> 31) << 7).to(tl.int32), error


@triton.jit
def value_of_code(code, IS_INT: tl.constexpr):
    """The value of a code, in the units in which it was rounded."""
    if IS_INT:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    magnitude = (code & 0x7F).to(tl.int32)
    normal = (magnitude << 20) + 0x3C000000
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    finite = tl.where(magnitude < 8, subnormal, normal)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, finite).to(tl.uint32)
    return _float_of(bits | ((code & 0x80).to(tl.uint32) << 24))


@triton.jit
def from_units(y, scale, FRACTION: tl.constexpr):
    """What `in_units` came from: `y` times its scale, times 2^-FRACTION."""
    factor = tl.where(scale == 255, 0x7FC00000, (tl.maximum(scale, 40) - FRACTION) << 23)
    plain = y * _float_of(factor)
    tiny_scale = tl.minimum(scale, 39)
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = _float_of(bits & 0x7FFFFFFF)
    steps = magnitude * _float_of((tiny_scale + 149 - FRACTION) << 23)
    is_subnormal = steps < 16777216.0
    subnormal = tl.where(is_subnormal, steps, 0.0).to(tl.int32)
    normal = (magnitude * _float_of((tiny_scale + 64 - FRACTION) << 23)) * 5.421010862427522e-20
    tiny = tl.where(is_subnormal, subnormal, normal.to(tl.int32, bitcast=True)).to(tl.uint32)
    return tl.where(scale >= 40, plain, _float_of(tiny | (bits & 0x80000000)))


@triton.jit
def _power_bits(exponent):
    normal = tl.maximum(exponent + 127, 0) << 23
    subnormal = 1 << tl.minimum(tl.maximum(exponent + 149, 0), 22)
    return tl.where(exponent >= -126, normal, subnormal)


@triton.jit
def bound_of(largest, scale, IS_INT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The bits of the largest error that a block may have."""
    if IS_INT:
        saturates = largest > 0x7F7E0000
        return _power_bits(scale - tl.where(saturates, 133, 133 if STOCHASTIC else 134))
    SHIFT: tl.constexpr = 3 if STOCHASTIC else 4
    exponent = largest >> 23
    full = ((largest & 0x7FFFFF) | 0x800000) << tl.minimum(tl.maximum(exponent - 1, 0), 3)
    in_steps = tl.where(exponent == 0, largest, full)
    relative = tl.where(
        exponent <= SHIFT, (in_steps + ((1 << SHIFT) - 1)) >> SHIFT, largest - (SHIFT << 23)
    )
    return tl.maximum(relative, _power_bits(scale - (133 + SHIFT)))
