"""Decodes instructions: finds the decoder of an opcode by its pattern, and reads and writes operands."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kda_tools.lab.ptx.parse import Address, Immediate, Instruction, Operand, PtxError, Register, Symbol, Vector
from kda_tools.lab.ptx.step import Active, Step

if TYPE_CHECKING:
    from kda_tools.lab.ptx.machine import Machine

Array = np.ndarray
Decoder = Callable[["Machine", Instruction, re.Match[str]], Step]
DECODERS: list[tuple[re.Pattern[str], Decoder]] = []
WITHOUT_EFFECT = re.compile(
    # Order of memory, and hints to caches.
    r"fence\.[\w.:]+|membar\.\w+|prefetch[\w.:]*"
)
F32, U8, U16, U32, U64, PRED = (np.dtype(name) for name in ("f4", "u1", "u2", "u4", "u8", "?"))
INTEGER = r"[su](?:16|32|64)"
CACHE = r"(?:\.nc)?(?:\.(?:ca|cg|cs|lu|cv|wb|wt))?(?:\.L1::\w+)?(?:\.L2::\d+B)?(\.L2::cache_hint)?"


def decode(machine: "Machine", instruction: Instruction) -> Step:
    """Turn an instruction into a `Step`; a PtxError if the instruction or its operands are not known."""
    if WITHOUT_EFFECT.fullmatch(instruction.opcode):
        return Step()
    for pattern, decoder in DECODERS:
        if found := pattern.fullmatch(instruction.opcode):
            try:
                return decoder(machine, instruction, found)
            except (ValueError, AttributeError, KeyError):
                raise PtxError(f"{instruction}: operands that are not known") from None
    raise PtxError(f"{instruction}: an instruction, or a modifier of it, that is not known")


def opcode(pattern: str) -> Callable[[Decoder], Decoder]:
    """Register a decoder for the opcodes that match."""

    def register(decoder: Decoder) -> Decoder:
        DECODERS.append((re.compile(pattern), decoder))
        return decoder

    return register


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a PTX type; untyped bits and 16-bit floats become unsigned integers."""
    if name == "pred":
        return PRED
    bits = int(re.sub(r"\D", "", name.removeprefix("b")))
    kind = {"s": "i", "f": "f" if bits > 16 else "u"}.get(name[0], "u")
    return np.dtype(f"{kind}{bits // 8}")


def compute(
    machine: "Machine", where: Instruction, result: np.dtype, operands: list[np.dtype], function: Callable[..., Array]
) -> Step:
    """An instruction that computes one register from others."""
    target, *sources = where.operands
    read = [machine.source(where, operand, dtype) for operand, dtype in zip(sources, operands, strict=True)]
    write = machine.target(where, target, result)
    return Step(run=lambda active: write(active, function(*(one(active) for one in read))))


def address(machine: "Machine", where: Instruction, operand: Operand | None) -> Callable[[Active], Array]:
    """How to read `[base+offset]`, one address per active thread."""
    if not isinstance(operand, Address) or not isinstance(operand.base, Register | Symbol):
        raise PtxError(f"{where}: expected an address, found {operand}")
    wide = isinstance(operand.base, Register) and operand.base.bits == 64
    base = machine.source(where, operand.base, U64 if wide else U32)

    def read(active: Active) -> Array:
        numbers = machine.numbers(active)
        return np.broadcast_to(base(active).astype(np.int64) + operand.offset, numbers.shape)

    return read


def immediate(where: Instruction, operand: Operand | None) -> int:
    """The value of an operand, which must be a number."""
    if not isinstance(operand, Immediate):
        raise PtxError(f"{where}: expected a number, found {operand}")
    return operand.value


def operand_registers(operand: Operand | None, count: int) -> tuple[Operand | None, ...]:
    """The registers of a vector operand, or the one register of another."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise ValueError(items)
    return items


def halves(x: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits."""
    return (x & U32.type(0xFFFF)).astype(U16), (x >> U32.type(16)).astype(U16)


def pack(low: Array, high: Array) -> Array:
    """Join two values of 16 bits into one of 32 bits."""
    return np.asarray(low.astype(U32) | (high.astype(U32) << U32.type(16)))
