"""A fused multiply-add on numpy arrays: one rounding, as a GPU's `fma.rn` has it.

A product of two float32 is exact in float64, its sum with a third is not. So that sum is rounded to odd: a value
between two numbers becomes the one whose last bit is 1. A later rounding to fewer digits (at least two fewer) then
gives the same as a rounding of the exact sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def fma(x: Array, y: Array, z: Array) -> Array:
    """`x * y + z` of float32 values, rounded to the nearest float32, ties to even."""
    return np.asarray(_in_float64(x, y, z).astype(np.float32))


def fma_to_odd(x: Array, y: Array, z: Array) -> Array:
    """`x * y + z`, rounded to odd. Of float16 or bfloat16 values, a rounding to their type then gives `fma.rn`."""
    exact = _in_float64(x, y, z)
    near = exact.astype(np.float32)
    finite = np.isfinite(exact)
    return _odd(near, np.subtract(exact, near, where=finite, out=np.zeros_like(exact)))


def _in_float64(x: Array, y: Array, z: Array) -> Array:
    """The sum in float64, rounded to odd."""
    with np.errstate(invalid="ignore"):
        product, addend = np.float64(x) * np.float64(y), np.float64(z)
        total = np.asarray(product + addend)
        # What the sum lost (Knuth's two-sum); it is exact, since nothing overflows float64 here.
        part = total - product
        lost = (product - (total - part)) + (addend - part)
    return _odd(total, np.where(np.isfinite(total), lost, 0))


def _odd(near: Array, rest: Array) -> Array:
    """`near`, or where it is even and the exact value differs by `rest`, its neighbour towards the exact value."""
    even = near.view(np.dtype(f"i{near.itemsize}")) & 1 == 0
    beyond = np.nextafter(near, np.copysign(np.array(np.inf, near.dtype), rest).astype(near.dtype))
    return np.where((rest != 0) & even, beyond, near)
