"""What PTX instructions compute: those that Triton and nvcc make of shardcomm's kernels, by their whole names.

The names of sections are those of NVIDIA's "PTX ISA" document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.ptx_memory import Lanes

TYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Operation:
    """A function of each thread's operands."""

    function: Callable[..., Lanes]
    result: str
    operands: tuple[str, ...]


def _integers(found: dict[str, Operation]) -> None:
    for bits in (16, 32, 64):
        for type in (f"s{bits}", f"u{bits}"):
            for name, function in _ARITHMETIC.items():
                found[f"{name}.{type}"] = Operation(function, type, (type, type))
            found[f"mad.lo.{type}"] = Operation(lambda a, b, c: a * b + c, type, (type,) * 3)
            found[f"shr.{type}"] = Operation(_shift_right, type, (type, "u32"))
            for name, function in _COMPARISONS.items():
                found[f"setp.{name}.{type}"] = Operation(function, "pred", (type, type))
        found[f"neg.s{bits}"] = Operation(np.negative, f"s{bits}", (f"s{bits}",))
        found[f"abs.s{bits}"] = Operation(np.abs, f"s{bits}", (f"s{bits}",))
    for type, wide in (("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        product = _product_in(TYPES[wide])
        found[f"mul.wide.{type}"] = Operation(product, wide, (type, type))
        found[f"mad.wide.{type}"] = Operation(
            lambda a, b, c, product=product: product(a, b) + c, wide, (type, type, wide)
        )
        found[f"mul.hi.{type}"] = Operation(
            lambda a, b, product=product, type=type: (product(a, b) >> 8 * a.itemsize).astype(
                TYPES[type]
            ),
            type,
            (type, type),
        )
    for type in ("s32", "u32", "s64", "u64"):
        found[f"bfe.{type}"] = Operation(_bit_field, type, (type, "u32", "u32"))
    found["prmt.b32"] = Operation(_permuted_bytes, "b32", ("b32", "b32", "b32"))


def _bits(found: dict[str, Operation]) -> None:
    for type in ("pred", "b16", "b32", "b64"):
        for name in ("and", "or", "xor"):
            function = getattr(np, f"bitwise_{name}")
            found[f"{name}.{type}"] = Operation(function, type, (type, type))
        found[f"not.{type}"] = Operation(np.invert, type, (type,))
        found[f"setp.eq.{type}"] = Operation(np.equal, "pred", (type, type))
        found[f"setp.ne.{type}"] = Operation(np.not_equal, "pred", (type, type))
    for type in ("b16", "b32", "b64"):
        found[f"shl.{type}"] = Operation(_shift_left, type, (type, "u32"))
    for type in TYPES:
        found[f"mov.{type}"] = Operation(lambda a: a, type, (type,))
        found[f"selp.{type}"] = Operation(_selected, type, (type, type, "pred"))
    # Generic addresses are those of global memory, and of parameters.
    for name in ("cvta.to.global.u64", "cvta.param.u64"):
        found[name] = found["mov.u64"]


def _floats(found: dict[str, Operation]) -> None:
    # There is no ".ftz" here: subnormal numbers are kept.
    arithmetic: dict[str, Callable[..., Lanes]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "fma": _fused,
    }
    for name, function in arithmetic.items():
        operands = 3 if name == "fma" else 2
        one = _canonical(function)
        found[f"{name}.rn.f32"] = Operation(one, "f32", ("f32",) * operands)
        if name != "fma":
            found[f"{name}.rn.f64"] = Operation(one, "f64", ("f64",) * operands)
        found[f"{name}.rn.f32x2"] = Operation(_of_pairs(one), "b64", ("b64",) * operands)
    found["abs.f32"] = Operation(lambda a: a & 0x7FFFFFFF, "b32", ("b32",))
    found["abs.f64"] = Operation(lambda a: a & 0x7FFFFFFFFFFFFFFF, "b64", ("b64",))
    found["abs.f16x2"] = Operation(lambda a: a & 0x7FFF7FFF, "b32", ("b32",))
    found["neg.f32"] = Operation(lambda a: a ^ 0x80000000, "b32", ("b32",))
    for type in ("f16", "f32", "f64"):
        for name, function in _COMPARISONS.items():
            # "Comparison and Selection Instructions: setp": a NaN makes these false, and those with a "u" true.
            found[f"setp.{name}.{type}"] = Operation(
                lambda a, b, function=function: function(a, b) & ~_unordered(a, b),
                "pred",
                (type, type),
            )
            found[f"setp.{name}u.{type}"] = Operation(
                lambda a, b, function=function: function(a, b) | _unordered(a, b),
                "pred",
                (type, type),
            )
        found[f"setp.nan.{type}"] = Operation(_unordered, "pred", (type, type))


def _conversions(found: dict[str, Operation]) -> None:
    integers = [f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64)]
    for src in integers:
        for dst in integers:
            to = _cast_to(TYPES[dst])
            found[f"cvt.{dst}.{src}"] = Operation(to, dst, (src,))
        # To nearest even, as numpy converts.
        found[f"cvt.rn.f32.{src}"] = Operation(_cast_to(TYPES["f32"]), "f32", (src,))
    for dst in ("s32", "u32"):
        found[f"cvt.rzi.{dst}.f32"] = Operation(_truncation_to(TYPES[dst]), dst, ("f32",))
    to_half = _canonical(_cast_to(TYPES["f16"]))
    found["cvt.f32.f16"] = Operation(_canonical(_cast_to(TYPES["f32"])), "f32", ("f16",))
    found["cvt.rn.f16.f32"] = Operation(to_half, "f16", ("f32",))
    found["cvt.rn.bf16.f32"] = Operation(_to_bfloat16, "b16", ("b32",))
    found["cvt.rn.f32.f64"] = Operation(_canonical(_cast_to(TYPES["f32"])), "f32", ("f64",))
    found["cvt.f64.f32"] = Operation(_canonical(_cast_to(TYPES["f64"])), "f64", ("f32",))
    # "Data Movement and Conversion Instructions: cvt": the first operand is the upper half.
    found["cvt.rn.f16x2.f32"] = Operation(
        lambda a, b: np.stack([to_half(b), to_half(a)], axis=1).view(np.uint32)[:, 0],
        "b32",
        ("f32", "f32"),
    )


def _selected(a: Lanes, b: Lanes, chosen: Lanes) -> Lanes:
    return np.where(chosen, a, b)


def _cast_to(dtype: np.dtype[Any]) -> Callable[[Lanes], Lanes]:
    return lambda a: a.astype(dtype)


def _product_in(dtype: np.dtype[Any]) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda a, b: a.astype(dtype) * b.astype(dtype)


def _quotient(a: Lanes, b: Lanes) -> Lanes:
    """Toward zero. "Integer Arithmetic Instructions: div": by zero it yields anything, and no trap; here all ones."""
    divisor = np.where(b == 0, b.dtype.type(1), b)
    floor = a // divisor
    below = (floor * divisor != a) & ((a < 0) != (divisor < 0))
    return np.where(b == 0, np.invert(np.zeros_like(a)), floor + below.astype(a.dtype))


def _shift_left(a: Lanes, n: Lanes) -> Lanes:
    """ "Logic and Shift Instructions: shl": by the register's width at most."""
    bits = a.itemsize * 8
    return np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Lanes, n: Lanes) -> Lanes:
    """The same of "shr", which fills with the sign of a signed integer."""
    bits = a.itemsize * 8
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))


def _bit_field(a: Lanes, begin: Lanes, length: Lanes) -> Lanes:
    """ "Integer Arithmetic Instructions: bfe": past the register's end, and past the field's, are zeros or the sign."""
    bits = a.itemsize * 8
    begin, length = begin & 0xFF, length & 0xFF
    field = _shift_right(a, begin)
    above = bits - np.minimum(length, bits)
    kept = _shift_right(_shift_left(field, above), above)
    return np.where(length == 0, a.dtype.type(0), kept)


def _permuted_bytes(a: Lanes, b: Lanes, selectors: Lanes) -> Lanes:
    """ "Data Movement and Conversion Instructions: prmt": a selector's top bit asks for a byte's sign, eight times."""
    source = np.stack([a, b], axis=1).astype("<u4").view(np.uint8)  # byte 0 is the lowest of a
    selector = selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    chosen = np.take_along_axis(source, (selector & 7).astype(np.int64), axis=1)
    sign = np.where(chosen & 0x80, 0xFF, 0).astype(np.uint8)
    chosen = np.where(selector & 8, sign, chosen)
    return np.ascontiguousarray(chosen).view("<u4")[:, 0]


def _truncation_to(dtype: np.dtype[Any]) -> Callable[[Lanes], Lanes]:
    """ "Data Movement and Conversion Instructions: cvt": to the nearest integer that there is; of a NaN, 0."""
    limits = np.iinfo(dtype)
    return lambda a: (
        np.clip(np.trunc(np.nan_to_num(a.astype(np.float64), nan=0.0)), limits.min, limits.max)
    ).astype(dtype)


def _to_bfloat16(bits: Lanes) -> Lanes:
    """To nearest even: half a step less than one, or half a step where that makes an odd number even, is added."""
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, 0x7FFF, rounded >> 16).astype(np.uint16)


def _canonical(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    """NaNs that are computed have no payload ("Floating Point Instructions"), and CPUs give other ones."""

    def computed(*operands: Lanes) -> Lanes:
        result = function(*operands)
        ones = (1 << 8 * result.itemsize - 1) - 1
        result.view(f"u{result.itemsize}")[np.isnan(result)] = ones
        return result

    return computed


def _of_pairs(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    return lambda *pairs: function(*[pair.view(np.float32) for pair in pairs]).view(np.uint64)


def _fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Rounded once: in float64 the product is exact, and the sum is rounded to odd before it is rounded to float32."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    total.view(np.int64)[inexact] += step[inexact]
    return total.astype(np.float32)


def _unordered(a: Lanes, b: Lanes) -> Lanes:
    return np.isnan(a) | np.isnan(b)


_ARITHMETIC: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
}
_COMPARISONS: dict[str, Callable[..., Lanes]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

OPERATIONS: dict[str, Operation] = {}
for _define in (_integers, _bits, _floats, _conversions):
    _define(OPERATIONS)
