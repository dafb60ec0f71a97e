"""Instructions that compute with floats and integers."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kda_judge.arms import fused_rounding
from kda_tools.lab.ptx import floats
from kda_tools.lab.ptx.decode import F32, INTEGER, U16, U32, U64, Array, compute, dtype_of, halves, opcode, pack
from kda_tools.lab.ptx.parse import Instruction, PtxError
from kda_tools.lab.ptx.step import Step

if TYPE_CHECKING:
    from kda_tools.lab.ptx.machine import Machine

# --- floating point

FLOAT_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
}


def flushing(ftz: str | None, function: Callable[..., Array]) -> Callable[..., Array]:
    """The function; with .ftz, its subnormal operands and results become 0."""
    return (lambda *xs: floats.flush(function(*map(floats.flush, xs)))) if ftz else function


@opcode(r"(add|sub|mul|min|max)(?:\.rn)?(\.ftz)?\.f32")
def _float_binary(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    return compute(machine, where, F32, [F32, F32], flushing(found[2], FLOAT_BINARY[found[1]]))


@opcode(r"(min|max)(\.ftz)?\.NaN\.f32")
def _float_extreme(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    function = np.minimum if found[1] == "min" else np.maximum  # which pass on a NaN
    return compute(machine, where, F32, [F32, F32], flushing(found[2], function))


@opcode(r"fma\.rn(\.ftz)?\.f32")
def _fma(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    return compute(machine, where, F32, [F32] * 3, flushing(found[1], fused_rounding.fma))


@opcode(r"(neg|abs)(\.ftz)?\.f32")
def _sign(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    return compute(machine, where, F32, [F32], flushing(found[2], np.negative if found[1] == "neg" else np.abs))


@opcode(r"(div|sqrt|rcp)\.rn(\.ftz)?\.f32")
def _rounded(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    function = flushing(found[2], lambda *xs: floats.approximate(found[1], *xs, error=0))
    return compute(machine, where, F32, [F32] * (len(where.operands) - 1), function)


@opcode(r"(?:(ex2|lg2|rcp|rsqrt|sqrt|tanh)\.approx|(div)\.(?:full|approx))(\.ftz)?\.f32")
def _approximate(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    name, error = found[1] or found[2], machine.options.error
    function = flushing(found[3], lambda *xs: floats.approximate(name, *xs, error=error))
    return compute(machine, where, F32, [F32] * (len(where.operands) - 1), function)


@opcode(r"(add|sub|mul|min|max|fma)(?:\.rn)?\.(b?f16)(x2)?")
def _float_narrow(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    wide, narrow = floats.NARROW[found[2]]
    operation = fused_rounding.fma_to_odd if found[1] == "fma" else FLOAT_BINARY[found[1]]
    count = len(where.operands) - 1

    def function(*xs: Array) -> Array:
        return narrow(operation(*map(wide, xs)))

    def both(*xs: Array) -> Array:
        return pack(*(function(*half) for half in zip(*map(halves, xs), strict=True)))

    return (
        compute(machine, where, U32, [U32] * count, both)
        if found[3]
        else compute(machine, where, U16, [U16] * count, function)
    )


# --- integers and bits


def quotient(a: Array, b: Array) -> Array:
    """Integer division, towards zero."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")  # which holds the magnitude of the smallest signed number too
    magnitude = (np.abs(a).astype(unsigned) // np.abs(b).astype(unsigned)).astype(a.dtype)
    return np.asarray(np.where((a < 0) != (b < 0), np.negative(magnitude), magnitude))


INTEGER_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "div": quotient,
    "rem": lambda a, b: a - quotient(a, b) * b,
}


@opcode(r"(min|max)\.relu\.s32")
def _extreme_of_zero_or_more(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    """A result below 0 becomes 0."""
    dtype = dtype_of("s32")
    return compute(
        machine, where, dtype, [dtype, dtype], lambda a, b: np.maximum(INTEGER_BINARY[found[1]](a, b), dtype.type(0))
    )


@opcode(rf"(add|sub|mul\.lo|min|max|div|rem)\.({INTEGER})")
def _integer_binary(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype, name = dtype_of(found[2]), found[1]

    def function(a: Array, b: Array) -> Array:
        if name in ("div", "rem") and np.any(b == 0):
            raise PtxError(f"{where}: divides by 0")
        return INTEGER_BINARY[name](a, b)

    return compute(machine, where, dtype, [dtype, dtype], function)


@opcode(r"(mul|mad)\.(wide|hi|lo)\.([su])(16|32|64)")
def _product(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    part, bits = found[2], int(found[4])
    narrow = dtype_of(f"{found[3]}{bits}")
    wide = dtype_of(f"{found[3]}{2 * bits if part == 'wide' else bits}")
    if part == "hi" and bits == 64:
        raise PtxError(f"{where}: the upper half is known of 16 and 32 bits")
    longer = np.dtype(f"{narrow.kind}8") if part == "hi" else wide

    def function(a: Array, b: Array, c: Array | int = 0) -> Array:
        product = np.asarray(a).astype(longer) * np.asarray(b).astype(longer)
        product = (product >> longer.type(bits) if part == "hi" else product).astype(wide)
        return np.asarray(product + np.asarray(c).astype(wide))

    operands = [narrow, narrow] + ([wide] if found[1] == "mad" else [])
    return compute(machine, where, wide, operands, function)


@opcode(r"(neg|abs)\.s(16|32|64)")
def _integer_sign(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype = dtype_of(f"s{found[2]}")
    return compute(machine, where, dtype, [dtype], np.negative if found[1] == "neg" else np.abs)


@opcode(r"(and|or|xor|not)\.(pred|b16|b32|b64)")
def _bits(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype = dtype_of(found[2])
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[found[1]]
    return compute(machine, where, dtype, [dtype] * (len(where.operands) - 1), function)


@opcode(r"(shl|shr)\.([bsu])(16|32|64)")
def _shift(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype, bits = dtype_of(found[2] + found[3]), int(found[3])

    def function(x: Array, by: Array) -> Array:
        # Shifts by more than the width give 0, or copies of the sign.
        by = np.minimum(by, bits - 1 if dtype.kind == "i" else bits).astype(dtype)
        shifted = np.left_shift(x, by) if found[1] == "shl" else np.right_shift(x, by)
        return np.asarray(np.where(by == bits, dtype.type(0), shifted))

    return compute(machine, where, dtype, [dtype, U32], function)


@opcode(r"bfe\.([su])32")
def _extract(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype = dtype_of(f"{found[1]}32")

    def function(x: Array, position: Array, length: Array) -> Array:
        position, length = (np.asarray(n & U32.type(255)).astype(np.int64) for n in (position, length))
        # A field that reaches beyond the number goes on with its sign.
        field = x.astype(np.int64) >> np.minimum(position, 32)
        width = np.minimum(length, 32)
        cut = field & ((1 << width) - 1)
        top = np.where(length == 0, 0, cut >> np.maximum(width - 1, 0)) if dtype.kind == "i" else 0
        return (cut - (top << width)).astype(dtype)

    return compute(machine, where, dtype, [dtype, U32, U32], function)


@opcode(r"prmt\.b32")
def _permute(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    def function(a: Array, b: Array, selectors: Array) -> Array:
        both, result = a.astype(U64) | (b.astype(U64) << U64.type(32)), np.zeros((), U64)
        for i in range(4):
            selector = (np.asarray(selectors).astype(U64) >> U64.type(4 * i)) & U64.type(15)
            byte = (both >> (selector % U64.type(8) * U64.type(8))) & U64.type(255)
            sign = np.where(byte > 127, U64.type(255), U64.type(0))
            result = result | (np.where(selector > 7, sign, byte) << U64.type(8 * i))
        return result.astype(U32)

    return compute(machine, where, U32, [U32] * 3, function)
