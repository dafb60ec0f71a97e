"""Instructions that compare, choose, move, convert, load and store."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kda_judge.arms.float8 import nearest_e4m3
from kda_tools.lab.ptx import floats
from kda_tools.lab.ptx.decode import (
    CACHE,
    F32,
    INTEGER,
    PRED,
    U16,
    U32,
    U64,
    Array,
    address,
    compute,
    dtype_of,
    halves,
    opcode,
    operand_registers,
    pack,
)
from kda_tools.lab.ptx.parse import Instruction, PtxError, Vector
from kda_tools.lab.ptx.step import UNSIGNED, Active, Step

if TYPE_CHECKING:
    from kda_tools.lab.ptx.machine import Machine

# --- comparing, choosing, moving, converting

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@opcode(rf"setp\.(eq|ne|lt|le|gt|ge)(u?)(\.ftz)?\.(f32|b?f16|b16|b32|b64|{INTEGER})")
def _compare(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    name, unordered, ftz, kind = found.groups()
    if kind not in ("f32", "f16", "bf16"):
        if unordered:
            raise PtxError(f"{where}: integers are always ordered")
        return compute(machine, where, PRED, [dtype_of(kind)] * 2, COMPARE[name])
    widen = floats.NARROW[kind][0] if kind in floats.NARROW else floats.flush if ftz else np.asarray
    dtype = U16 if kind in floats.NARROW else F32
    return compute(machine, where, PRED, [dtype] * 2, lambda a, b: _ordered(name, unordered, widen(a), widen(b)))


def _ordered(name: str, unordered: str, a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), bool(unordered), COMPARE[name](a, b))


@opcode(r"setp\.(eq|ne|lt|le|gt|ge)(u?)\.(b?f16)x2")
def _compare_pair(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    both, *operands = where.operands
    a, b = (machine.source(where, operand, U32) for operand in operands)
    targets = [machine.target(where, item, PRED) for item in operand_registers(both, 2)]
    widen = floats.NARROW[found[3]][0]

    def run(active: Active) -> None:
        for write, x, y in zip(targets, halves(a(active)), halves(b(active)), strict=True):
            write(active, _ordered(found[1], found[2], widen(x), widen(y)))

    return Step(run=run)


@opcode(rf"selp\.(f32|b16|b32|b64|{INTEGER})")
def _choose(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype = dtype_of(found[1])

    def function(a: Array, b: Array, first: Array) -> Array:
        return np.where(first, a, b)

    return compute(machine, where, dtype, [dtype, dtype, PRED], function)


@opcode(rf"mov\.(pred|f32|b16|b32|b64|{INTEGER})")
def _move(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype = dtype_of(found[1])
    target, source = where.operands
    if isinstance(target, Vector):
        part = UNSIGNED[dtype.itemsize * 8 // len(target.items)]
        read = machine.source(where, source, UNSIGNED[dtype.itemsize * 8])
        writes = [machine.target(where, item, part) for item in target.items]

        def unpack(active: Active) -> None:
            value = read(active)
            for i, write in enumerate(writes):
                write(active, (value >> value.dtype.type(i * part.itemsize * 8)).astype(part))

        return Step(run=unpack)
    if isinstance(source, Vector):
        part, whole = UNSIGNED[dtype.itemsize * 8 // len(source.items)], UNSIGNED[dtype.itemsize * 8]
        reads = [machine.source(where, item, part) for item in source.items]
        write = machine.target(where, target, whole)

        def join(active: Active) -> None:
            value = reads[0](active).astype(whole)
            for i, read in enumerate(reads[1:], 1):
                value = value | (read(active).astype(whole) << whole.type(i * part.itemsize * 8))
            write(active, value)

        return Step(run=join)
    return compute(machine, where, dtype, [dtype], lambda x: x)


@opcode(r"cvt\.rn\.(b?f16)(x2)?\.f32")
def _narrow(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    narrow = floats.NARROW[found[1]][1]
    if found[2]:  # the first operand becomes the upper half
        return compute(machine, where, U32, [F32, F32], lambda high, low: pack(narrow(low), narrow(high)))
    return compute(machine, where, U16, [F32], narrow)


@opcode(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def _narrow_to_float8(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    def two(high: Array, low: Array) -> Array:  # the first operand becomes the upper byte
        return np.asarray(nearest_e4m3(high).astype(U16) << U16.type(8) | nearest_e4m3(low))

    return compute(machine, where, U16, [F32, F32], two)


@opcode(r"cvt(?:\.ftz)?\.f32\.(b?f16)")
def _widen(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    return compute(machine, where, F32, [U16], floats.NARROW[found[1]][0])


@opcode(r"cvt(\.rn)?\.(f32|[su](?:8|16|32|64))\.([su](?:8|16|32|64))")
def _convert(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    rounded, to, source = found.groups()
    if bool(rounded) != (to == "f32"):
        raise PtxError(f"{where}: expected a rounding where a float results, and there alone")
    return compute(machine, where, dtype_of(to), [dtype_of(source)], lambda x: np.asarray(x).astype(dtype_of(to)))


# --- memory


def space_of(name: str | None) -> str:
    """A state space as `Memory` names it."""
    return {"shared::cta": "shared"}.get(name, name) if name else "global"


@opcode(
    rf"ld(?:\.volatile|\.relaxed\.gpu)?\.(param|global|shared|shared::cta|shared::cluster){CACHE}(?:\.v([248]))?\.([bsuf](?:8|16|32|64))"
)
def _load(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    space, hint, count, dtype = space_of(found[1]), found[2], int(found[3] or 1), dtype_of(found[4])
    target, place = where.operands[:2]
    if len(where.operands) != 2 + bool(hint):
        raise ValueError(where.operands)
    at = address(machine, where, place)
    writes = [machine.target(where, item, dtype) for item in operand_registers(target, count)]

    def run(active: Active) -> None:
        values = machine.memory.load(where, space, machine.numbers(active), at(active), dtype, count)
        for write, value in zip(writes, values, strict=True):
            write(active, value)

    return Step(run=run)


@opcode(
    rf"st(?:\.relaxed\.gpu)?\.(global|shared|shared::cta|shared::cluster){CACHE}(?:\.v([248]))?\.([bsuf](?:8|16|32|64))"
)
def _store(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    space, hint, count, dtype = space_of(found[1]), found[2], int(found[3] or 1), dtype_of(found[4])
    place, source = where.operands[:2]
    if len(where.operands) != 2 + bool(hint):
        raise ValueError(where.operands)
    at = address(machine, where, place)
    reads = [machine.source(where, item, dtype) for item in operand_registers(source, count)]

    def run(active: Active) -> None:
        threads = machine.numbers(active)
        values = [np.broadcast_to(read(active), threads.shape) for read in reads]
        machine.memory.store(where, space, threads, at(active), values)

    return Step(run=run)


@opcode(r"createpolicy\.fractional\.L2::evict_\w+\.b64")
def _policy(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    write = machine.target(where, where.operands[0], U64)
    return Step(run=lambda active: write(active, U64.type(0)))  # a hint, which nothing but loads and stores takes


@opcode(r"mapa\.shared::cluster\.u32")
def _map(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    def function(own: Array, rank: Array) -> Array:
        if np.any(rank >= machine.shape.cluster):
            raise PtxError(f"{where}: names a block behind the cluster's {machine.shape.cluster}")
        return np.asarray((own & U32.type(0xFFFFFF)) | ((rank + U32.type(1)) << U32.type(24)))

    return compute(machine, where, U32, [U32, U32], function)
