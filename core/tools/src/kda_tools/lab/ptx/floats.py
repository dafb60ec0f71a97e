"""Floating-point arithmetic as the ISA rounds it, on numpy arrays.

float32 add, sub and mul are numpy's own, fma is `kda_judge.arms.fused_rounding`'s. 16-bit sums and products are rounded
twice, through float32, which gives the same result (Figueroa: p >= 2q + 2 digits suffice for one operation). Quotients
and roots are rounded twice too, through float64.

Approximate instructions (ex2, rsqrt, tanh, ...) have no exact result in the ISA, only a largest relative error. They
give the correctly rounded value, up to float64's own error, times 1 + `error` * bound, `error` being -1, 0 or 1.
"""

from collections.abc import Callable

import numpy as np

Array = np.ndarray
TINY = np.float32(2.0**-126)
"""Smallest normal float32; flushing replaces what is nearer to 0 by 0 of the same sign."""
CANONICAL_NAN = 0x7FFF
"""Bits of the NaN that results of both 16-bit types have."""
DEFAULT_BOUND = 2.0**-22
"""Largest relative error: at most 2 units in the last place. The PTX ISA allows ex2, rcp, rsqrt, sqrt, lg2 and div.full
no larger one."""
BOUNDS = {"tanh": 2.0**-11}
APPROXIMATE: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "div": np.divide,
}


def flush(x: Array) -> Array:
    """Subnormal float32 become zeros of their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def approximate(name: str, *operands: Array, error: int) -> Array:
    """An approximate float32 instruction."""
    value = APPROXIMATE[name](*(np.float64(x) for x in operands))
    return np.asarray(value * (1 + error * BOUNDS.get(name, DEFAULT_BOUND)), np.float32)


def to_bf16(x: Array) -> Array:
    """float32 to the bits of bfloat16, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(CANONICAL_NAN), rounded).astype(np.uint16)


def to_f16(x: Array) -> Array:
    """float32 to the bits of float16, to nearest even."""
    bits = np.asarray(x, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(CANONICAL_NAN), bits)


def from_bf16(bits: Array) -> Array:
    """The bits of bfloat16 as float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_f16(bits: Array) -> Array:
    """The bits of float16 as float32."""
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


NARROW = {"bf16": (from_bf16, to_bf16), "f16": (from_f16, to_f16)}
"""16-bit types: their bits to float32, and back."""
