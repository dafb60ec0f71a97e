"""Reads a kernel's machine code: accesses to memory by width, instructions, bytes that its loads have in flight.

The code comes from `cuobjdump`, which Triton brings. Nothing is run, so an instruction counts once, whether it is in a
loop or skipped. Bytes in flight and round trips follow the hardware's own bookkeeping: a load names one of six
scoreboards, and an instruction that needs its value waits until that scoreboard is empty. Both are in the upper half of
the 128 bits of an instruction, on Volta as on its successors (control information in Jia et al., "Dissecting the NVIDIA
Volta GPU Architecture via Microbenchmarking", arXiv:1804.06826).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import MissingRequirement
from kda_tools.lab.inspect.occupancy import RESERVED_BYTES

LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@\S+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
    r"\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/"
)
NEVER = "@!PT"
"""The predicate of an instruction that is only there for its effect on the bookkeeping."""
BULK = ("UBLKCP", "UTMALDG", "UTMASTG")
"""Copies between global and shared memory by the TMA unit; how many bytes is in a register."""
SETS_SHIFT, WAITS_SHIFT = 46, 52
"""Bits of an instruction's upper half: 3 for the scoreboard that it keeps busy, 6 for those that it waits for."""
NO_SCOREBOARD = 7
WORD_BYTES = 4
"""Bytes of an access whose opcode names no width."""
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}

Widths = tuple[tuple[int, int], ...]
"""(bytes a thread, how many such accesses), widest first."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, as far as it matters here."""

    address: int
    predicate: str
    parts: tuple[str, ...]
    """Parts of the opcode, such as LDG, E, 128."""
    operands: str
    sets: int | None
    """Scoreboard that is busy until the instruction has written its registers."""
    waits: frozenset[int]
    """Scoreboards that have to be free before it."""

    @property
    def width(self) -> int:
        """Bytes per thread of an access to memory."""
        return next((WIDTHS[part] for part in self.parts if part in WIDTHS), WORD_BYTES)

    @property
    def jumps_back_to(self) -> int | None:
        """Target of a jump backwards; None for the rest, and for the trap after the code, which jumps to itself."""
        target = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        if self.parts[0] != "BRA" or target is None:
            return None
        place = int(target[1], 16)
        return place if place < self.address else None


@dataclass(frozen=True)
class Code:
    """Counts from the machine code of one kernel."""

    instructions: int
    """Number without the padding after the end."""
    loops: int
    """Number of jumps backwards."""
    loads: Widths
    """From global memory to registers."""
    stores: Widths
    """To global memory."""
    copies: Widths
    """From global to shared memory without registers between (cp.async)."""
    bulk: int
    """Bulk copies."""
    atomics: int
    """On global memory, with or without a result."""
    local: int
    """Accesses to local memory, where spilled registers go."""
    in_flight: int | None
    """Most bytes of global loads that a thread has on the way, in the order of the code; None if memory is also read
    by asynchronous copies, which this does not count."""
    trips: int | None
    """Round trips to memory, one after the other: how often the code waits for a load that was issued after the
    previous such wait. None as above."""


@dataclass(frozen=True)
class Contents:
    """Resources and code of a one-kernel cubin."""

    registers: int
    """Per thread."""
    shared_bytes: int
    """Static, per block."""
    local_bytes: int
    """Per thread."""
    threads: int | None
    """Per block; None if they were not fixed when it was compiled."""
    code: Code


def contents(cubin: bytes) -> Contents:
    """The contents of a one-kernel cubin."""
    text = dump(cubin, "-res-usage", "-elf", "-sass")
    threads = re.search(r"EIATTR_(?:REQNTID|MAX_THREADS)\s+Format:\s*\w+\s+Value:\s+0x(\w+)\s+0x(\w+)\s+0x(\w+)", text)
    x, y, z = (int(size, 16) for size in threads.groups()) if threads else (0, 0, 0)
    return Contents(*resource_usage(cubin, text), x * y * z or None, summary(instructions(text)))


def resource_usage(cubin: bytes, text: str) -> tuple[int, int, int]:
    """Registers per thread, static shared bytes per block and local bytes per thread, from cuobjdump's output."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise MissingRequirement(f"cuobjdump cannot read the cubin: {text.strip()}")
    registers, stack, shared, local = map(int, found.groups())
    # From Hopper on the section of shared memory begins with bytes reserved by the system; ptxas does not count them.
    if b".nv.shared.reserved.0" in cubin:
        shared = max(0, shared - RESERVED_BYTES)
    return registers, shared, stack + local


def dump(cubin: bytes, *options: str) -> str:
    """What cuobjdump prints about a cubin."""
    from triton import knobs

    path = Path(knobs.nvidia.cuobjdump.path)
    if not path.is_file():
        raise MissingRequirement(f"cuobjdump, which triton brings, is missing: {path}; reinstall triton")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(path), *options, file.name], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr * (done.returncode != 0)


def instructions(text: str) -> list[Instruction]:
    """The instructions in the output of `cuobjdump -sass`, in the order of the code."""
    found = []
    for line in LINE.finditer(text):
        control = int(line["control"], 16)
        sets = control >> SETS_SHIFT & 7
        found.append(
            Instruction(
                address=int(line["address"], 16),
                predicate=(line["predicate"] or "").strip(),
                parts=tuple(line["opcode"].split(".")),
                operands=line["operands"].strip(),
                sets=None if sets == NO_SCOREBOARD else sets,
                waits=frozenset(board for board in range(6) if control >> WAITS_SHIFT + board & 1),
            )
        )
    return found


def summary(code: Sequence[Instruction]) -> Code:
    """Count what is in the code."""
    real = [one for one in code if one.parts[0] != "NOP" and one.predicate != NEVER]
    kinds = Counter(one.parts[0] for one in real)
    copies, bulk = _widths(real, "LDGSTS"), sum(kinds[kind] for kind in BULK)
    return Code(
        instructions=len(real),
        loops=sum(one.jumps_back_to is not None for one in real),
        loads=_widths(real, "LDG"),
        stores=_widths(real, "STG"),
        copies=copies,
        bulk=bulk,
        atomics=sum(kinds[kind] for kind in ("ATOM", "ATOMG", "RED", "REDG")),
        local=kinds["LDL"] + kinds["STL"],
        in_flight=None if copies or bulk else most_in_flight(code),
        trips=None if copies or bulk else round_trips(code),
    )


def most_in_flight(code: Iterable[Instruction]) -> int:
    """Most bytes that a thread's loads from global memory have on the way, if the code runs from top to bottom."""
    under_way: Counter[int] = Counter()
    most = 0
    for one in code:
        for board in one.waits:
            under_way.pop(board, None)
        if _is_load(one) and one.sets is not None:
            under_way[one.sets] += one.width
            most = max(most, under_way.total())
    return most


def round_trips(code: Iterable[Instruction]) -> int:
    """How often the code, run from top to bottom, waits for a global load issued after the previous such wait."""
    issued: dict[int, int] = {}  # scoreboard -> trips so far when its last load was issued
    trips = 0
    for one in code:
        if any(issued.get(board) == trips for board in one.waits):
            trips += 1
        if _is_load(one) and one.sets is not None:
            issued[one.sets] = trips
    return trips


def _is_load(one: Instruction) -> bool:
    return one.parts[0] == "LDG" and one.predicate != NEVER


def _widths(code: Iterable[Instruction], kind: str) -> Widths:
    found = Counter(one.width for one in code if one.parts[0] == kind)
    return tuple(sorted(found.items(), reverse=True))
