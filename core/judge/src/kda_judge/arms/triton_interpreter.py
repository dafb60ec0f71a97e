"""Triton's interpreter, made to convert bfloat16 and to multiply and add as a GPU does.

A GPU rounds float32 to the nearest bfloat16, ties to even. The interpreter of Triton 3.6 to 3.9 cuts the lower half
off: errors of bfloat16 outputs are twice as large, and an op that rounds inside computes something else. It also
widens subnormal bfloat16 to wrong float32 values. It cuts off the digits that float8_e4m3fn lacks, and does not
saturate. Its float16 is NumPy's and right. Its `tl.fma` rounds twice, and treats the bits of bfloat16 as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton import knobs

from kda_judge.arms import fused_rounding
from kda_judge.arms.float8 import nearest_e4m3, widened_e4m3
from kda_judge.contract.errors import MissingRequirement

Array = np.ndarray[Any, Any]
PROBE = (0x3F80_0001, 0x3F80_8000, 0x3F81_8000, 0xBF80_8001, 0x3FFF_8000, 0x7F7F_FFFF, 0x0000_8001, 0xFF80_0000)
"""Bits of float32 values: below, at (twice) and above a tie, two that carry into the exponent (one up to infinity), a
subnormal one, and an infinity."""
NEAREST = (0x3F80, 0x3F80, 0x3F82, 0xBF81, 0x4000, 0x7F80, 0x0001, 0xFF80)
"""Bits of the nearest bfloat16 values, as `cvt.rn.bf16.f32` of PTX gives them."""


@triton.jit  # type: ignore[untyped-decorator]
def _probe(nearest, wide, values, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    rounded = tl.load(values + at).to(tl.bfloat16)
    tl.store(nearest + at, rounded)
    tl.store(wide + at, rounded.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _float8_probe(out, values, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(values + at).to(tl.float8e4nv))


@triton.jit  # type: ignore[untyped-decorator]
def _fused_probe(out, values, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    value = tl.load(values + at)
    tl.store(out + at, tl.fma(value, value, 1.0 - 2.0 * value))


def convert_as_a_gpu_does() -> None:
    """Replace conversions and `tl.fma` of this process's interpreter; do nothing unless TRITON_INTERPRET=1 is set.

    Raises:
        MissingRequirement: this Triton's interpreter is built otherwise, and still does not convert as a GPU does.
    """
    if not knobs.runtime.interpret:
        return
    try:
        if not _fuses_rightly():
            _replace_fma()
        if not _narrows_rightly():
            _replace_float8()
        if _converts_rightly():
            return
        _replace_cast()
        found = "" if _converts_rightly() else "a kernel still converts as before"
    except Exception as error:  # noqa: BLE001  # whatever a changed private interface raises
        found = f"{type(error).__name__}: {error}"
    if found:
        raise MissingRequirement(
            f"triton {triton.__version__}: its interpreter does not convert bfloat16 as a GPU does, and its conversion "
            f"cannot be replaced ({found}): use triton 3.6 to 3.9"
        )


def nearest_bfloat16(values: Array) -> Array:
    """Bits (uint16) of the bfloat16 values nearest to float32 `values`, ties to even; NaN is 0x7FFF, as from PTX."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(bits.view(np.float32)), 0x7FFF, halves).astype(np.uint16).reshape(values.shape)


def widened(bits: Array) -> Array:
    """The float32 values of bfloat16 `bits` (uint16)."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def _replace_cast() -> None:
    """Make the interpreter's conversions use the two functions above, but not those that ask for a rounding mode."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        one, other = src.dtype.scalar, dst_type.scalar
        if one == tl.float32 and other == tl.bfloat16:
            return TensorHandle(nearest_bfloat16(src.data), other)
        if one == tl.bfloat16 and other == tl.float32:
            return TensorHandle(widened(src.data), other)
        return cast(self, src, dst_type)

    InterpreterBuilder.cast_impl = cast_impl


def _replace_fma() -> None:
    """Make the interpreter's fused multiply-add round once."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    before = InterpreterBuilder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        kind = z.dtype.scalar
        if kind == tl.bfloat16:
            wide = fused_rounding.fma_to_odd(*(widened(one.data) for one in (x, y, z)))
            return TensorHandle(nearest_bfloat16(wide), kind)
        if kind == tl.float16:
            wide = fused_rounding.fma_to_odd(*(one.data.astype(np.float32) for one in (x, y, z)))
            return TensorHandle(wide.astype(np.float16), kind)
        if kind == tl.float32:
            return TensorHandle(fused_rounding.fma(x.data, y.data, z.data), kind)
        return before(self, x, y, z)

    InterpreterBuilder.create_fma = create_fma


def _replace_float8() -> None:
    """Make the interpreter convert to and from float8_e4m3fn as a GPU does, but where a rounding mode is asked for."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    before = InterpreterBuilder.create_fp_to_fp
    wide: dict[Any, Callable[[Array], Array]] = {
        tl.float32: np.asarray,
        tl.bfloat16: widened,
        tl.float16: lambda data: data.astype(np.float32),
    }
    narrow: dict[Any, Callable[[Array], Array]] = {
        tl.float32: np.asarray,
        tl.bfloat16: nearest_bfloat16,
        tl.float16: lambda data: data.astype(np.float16),
    }

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        one, other = src.dtype.scalar, dst_type.scalar
        if other == tl.float8e4nv and one in wide and "RTZ" not in str(rounding_mode):
            return TensorHandle(nearest_e4m3(wide[one](src.data)), other)
        if one == tl.float8e4nv and other in narrow:
            return TensorHandle(narrow[other](widened_e4m3(src.data)), other)
        return before(self, src, dst_type, rounding_mode)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _fuses_rightly() -> bool:
    value, out = torch.tensor([1 + 2.0**-12] * 2), torch.zeros(2)
    _fused_probe[(1,)](out, value, COUNT=2)
    return out[0].item() == 2.0**-24


def _narrows_rightly() -> bool:
    values = torch.tensor([1 + 2.0**-4, 1 + 3 * 2.0**-4, 500.0, -(2.0**-10) * 1.5])
    out = torch.zeros(4, dtype=torch.float8_e4m3fn)
    _float8_probe[(1,)](out, values, COUNT=4)
    return out.float().tolist() == [1.0, 1.25, 448.0, -(2.0**-9)]


def _converts_rightly() -> bool:
    values = torch.from_numpy(np.array(PROBE, dtype=np.uint32).view(np.float32))
    nearest = torch.zeros(len(NEAREST), dtype=torch.bfloat16)
    wide = torch.zeros(len(NEAREST))
    _probe[(1,)](nearest, wide, values, COUNT=len(NEAREST))
    bits = tuple(nearest.view(torch.uint16).tolist())
    return bits == NEAREST and torch.equal(wide.view(torch.int32) >> 16, nearest.view(torch.int16).to(torch.int32))
