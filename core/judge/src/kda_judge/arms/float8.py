"""float8_e4m3fn on numpy arrays: rounded as a GPU's `cvt.rn.satfinite` does, to the nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LARGEST = 448.0
NAN = 0x7F
LEAST_EXPONENT, BIAS, DIGITS = -6, 7, 3
"""Least exponent of normal values, bias of the exponent's field, bits of the fraction."""


def nearest_e4m3(values: Array) -> Array:
    """Bits (uint8) of the values nearest to float32 `values`; beyond the largest it is the largest, NaN is 0x7F."""
    wide = np.asarray(values, np.float64)
    size = np.minimum(np.abs(wide), LARGEST)
    known = ~np.isnan(size)
    size = np.where(known, size, 0)
    exponent = np.maximum(np.frexp(size)[1] - 1, LEAST_EXPONENT)
    exponent = np.where(size == 0, LEAST_EXPONENT, exponent)
    # Units of the fraction's last digit, 8 to 16 of a normal value; 16 carries into the exponent by itself.
    units = np.rint(np.ldexp(size, DIGITS - exponent)).astype(np.int64)
    bits = ((exponent + BIAS) << DIGITS) + units - (1 << DIGITS)
    signed = np.where(known, bits, NAN) | np.where(np.signbit(wide) & known, 0x80, 0)
    return np.asarray(signed.astype(np.uint8))


def widened_e4m3(bits: Array) -> Array:
    """The float32 values of `bits` (uint8)."""
    field, fraction = (np.asarray(bits, np.int64) >> DIGITS) & 0xF, np.asarray(bits, np.int64) & 7
    normal = np.ldexp(fraction + 8.0, field - BIAS - DIGITS)
    size = np.where(field == 0, np.ldexp(fraction * 1.0, LEAST_EXPONENT - DIGITS), normal)
    size = np.where((np.asarray(bits) & 0x7F) == NAN, np.nan, size)
    return np.asarray(np.where(np.asarray(bits) & 0x80, -size, size).astype(np.float32))
