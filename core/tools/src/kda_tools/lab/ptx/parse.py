"""Parses PTX text into a `Program`: one kernel without functions. Anything else is refused."""

import re
import struct
from dataclasses import dataclass, replace


class PtxError(Exception):
    """The machine cannot run the program, or the program did something that is not allowed."""


@dataclass(frozen=True)
class Register:
    """A declared register."""

    name: str
    bits: int
    """Width; 1 for a predicate."""


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant: its bits as an integer, before they are cut to the operand's width."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or a name in shared memory."""

    name: str


@dataclass(frozen=True)
class Vector:
    """`{a, b}` or `a|b`; None stands for the sink `_`."""

    items: tuple["Operand | None", ...]


@dataclass(frozen=True)
class Address:
    """`[base+offset]`."""

    base: "Operand"
    offset: int


Operand = Register | Special | Immediate | Symbol | Vector | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction; `opcode` with all of its modifiers."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand | None, ...]
    guard: Register | None
    negated: bool
    """Whether it is executed if the guard is false, instead of true."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Param:
    """One parameter of the kernel: `size` bytes at `offset` of the parameter space."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Program:
    """One kernel."""

    name: str
    params: tuple[Param, ...]
    threads: int
    """Threads of a block (`.reqntid`)."""
    shared: tuple[tuple[str, int, int], ...]
    """Name, alignment and bytes of each variable in shared memory; the dynamic part has 0 bytes here."""
    instructions: tuple[Instruction, ...]
    targets: dict[int, int]
    """Index of a branch -> index of the instruction that it jumps to."""


COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)\s*([^{]*)\{", re.DOTALL)
PARAM = re.compile(r"\.param(?:\s+\.align\s+(\d+))?\s+\.[busf](\d+)(?:\s+\.ptr[\s\w.]*?)?\s+([\w$]+)(?:\[(\d+)\])?")
SHARED = re.compile(r"(?:\.extern\s+)?\.shared(?:\s+\.align\s+(\d+))?\s+\.b8\s+([\w$]+)\[(\d*)\]\s*;")
REQNTID = re.compile(r"\.reqntid\s+(\d+)((?:\s*,\s*1)*)\s*(?:\.(?:maxnreg|minnctapersm)\s+\d+\s*)?")
REG = re.compile(r"\.reg\s+\.(pred|[busf](?:8|16|32|64))\s+([^;]+);")
LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
SKIPPED = re.compile(r"\s+|\.(?:loc|file)\b[^\n]*|\.pragma[^;]*;")
STATEMENT = re.compile(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)([^;]*);")
NUMBER = re.compile(r"(-?)(?:(0[xX][0-9a-fA-F]+)U?|0[fFdD]([0-9a-fA-F]+)|(\d+)U?|(\d+\.\d+))$")


def parse(text: str) -> Program:
    """Read one kernel; a PtxError names the line that is not known."""
    # Newlines in comments are kept, so that positions still give the line.
    text = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    entries = list(ENTRY.finditer(text))
    if len(entries) != 1 or re.search(r"\.func\b", text):
        raise PtxError(f"expected one .entry and no .func, found {len(entries)} entries")
    (entry,) = entries
    name, declared, directives = entry.groups()
    threads = REQNTID.fullmatch(directives)
    if threads is None:
        raise PtxError(
            f"kernel {name}: expected the directives .reqntid N and at most one of .maxnreg and .minnctapersm, "
            f"found {directives.strip()!r}"
        )
    body = _Body(text, entry.end())
    return Program(
        name=name,
        params=_params(declared),
        threads=int(threads[1]),
        shared=tuple((found[2], int(found[1] or 1), int(found[3] or 0)) for found in SHARED.finditer(text)),
        instructions=tuple(body.instructions),
        targets=body.targets(),
    )


def _params(declared: str) -> tuple[Param, ...]:
    params, offset = [], 0
    for part in filter(str.strip, declared.split(",")):
        found = PARAM.fullmatch(part.strip())
        if found is None:
            raise PtxError(f"expected a parameter, found {part.strip()!r}")
        item = int(found[2]) // 8
        size, align = item * int(found[4] or 1), int(found[1] or item)
        offset = -(-offset // align) * align
        params.append(Param(found[3], offset, size))
        offset += size
    return tuple(params)


class _Body:
    """The instructions between a kernel's braces. Inner braces, from inline assembly, have names of their own."""

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position
        self.instructions: list[Instruction] = []
        self.scopes: list[dict[str, Register]] = [{}]
        self.path = [0]
        self.labels: dict[tuple[int, str], int] = {}
        self.paths: list[tuple[int, ...]] = []
        self.opened = 0
        while self.path:
            self._step()

    def targets(self) -> dict[int, int]:
        """Index of a branch -> index of its target; a label is searched from the branch's braces outwards."""
        found = {}
        for index, (instruction, path) in enumerate(zip(self.instructions, self.paths, strict=True)):
            if instruction.opcode in ("bra", "bra.uni"):
                (label,) = instruction.operands
                places = [self.labels.get((scope, getattr(label, "name", ""))) for scope in reversed(path)]
                known = [place for place in places if place is not None]
                if not known:
                    raise PtxError(f"{instruction}: no such label")
                found[index] = known[0]
        return found

    def _step(self) -> None:
        start = self.position
        if skipped := SKIPPED.match(self.text, start):
            self.position = skipped.end()
        elif self.text.startswith("{", start):
            self.opened += 1
            self.path.append(self.opened)
            self.scopes.append({})
            self.position += 1
        elif self.text.startswith("}", start):
            self.path.pop()
            self.scopes.pop()
            self.position += 1
        elif label := LABEL.match(self.text, start):
            self.labels[self.path[-1], label[1]] = len(self.instructions)
            self.position = label.end()
        elif registers := REG.match(self.text, start):
            self._declare(registers[1], registers[2])
            self.position = registers.end()
        elif shared := SHARED.match(self.text, start):
            self.position = shared.end()
        elif statement := STATEMENT.match(self.text, start):
            self._instruction(statement)
            self.position = statement.end()
        else:
            raise PtxError(f"line {self._line()}: expected an instruction, found {self.text[start : start + 60]!r}")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _declare(self, kind: str, names: str) -> None:
        bits = 1 if kind == "pred" else int(kind[1:])
        for name in map(str.strip, names.split(",")):
            several = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            for declared in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]:
                self.scopes[-1][declared] = Register(f"{declared}@{self.path[-1]}", bits)

    def _instruction(self, statement: re.Match[str]) -> None:
        negated, guard, opcode, rest = statement.groups()
        line, text = self._line(), " ".join(statement[0].split())
        try:
            operands = tuple(map(self._operand, _split(rest, ",")))
            guarded = None if guard is None else self._operand(guard)
            if not isinstance(guarded, Register | None):
                raise PtxError(f"expected a predicate, found {guard!r}")
        except PtxError as error:
            raise PtxError(f"line {line}: {text}: {error}") from None
        self.instructions.append(Instruction(line, text, opcode, operands, guarded, bool(negated)))
        self.paths.append(tuple(self.path))

    def _operand(self, text: str) -> Operand | None:
        if text == "_":
            return None
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(map(self._operand, _split(text[1:-1], ","))))
        if text.startswith("[") and text.endswith("]"):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            inner = self._operand(base)
            if inner is None:
                raise PtxError(f"expected an address, found {text!r}")
            return Address(inner, int(offset or "0", 0))
        if "|" in text:
            return Vector(tuple(map(self._operand, _split(text, "|"))))
        if number := NUMBER.match(text):
            sign, hexadecimal, bits, decimal, fraction = number.groups()
            if fraction:  # a float32, as in createpolicy; arithmetic uses 0f and 0d
                return Immediate(int.from_bytes(struct.pack(">f", float(sign + fraction)), "big"))
            value = int(bits, 16) if bits else int(hexadecimal or decimal, 16 if hexadecimal else 10)
            return Immediate(-value if sign else value)
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if re.fullmatch(r"%[a-z_]+(\.[xyzw])?", text):
            return Special(text)
        if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
            return Symbol(text)
        raise PtxError(f"expected an operand, found {text!r}")


def _split(text: str, by: str) -> list[str]:
    """Split the text, but not inside braces and brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == by and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    parts.append(part.strip())
    return [part for part in parts if part]


def without(program: Program, opcode: str, number: int) -> Program:
    """The program with instruction `number` (from 0) of this opcode made one without effect: a fault for tests."""
    places = [i for i, instruction in enumerate(program.instructions) if instruction.opcode == opcode]
    instructions = list(program.instructions)
    instructions[places[number]] = replace(instructions[places[number]], opcode="membar.gl", operands=())
    return replace(program, instructions=tuple(instructions))
