"""Atomic instructions, which read, change and write memory at once, and reductions over a warp."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kda_tools.lab.ptx.cooperating import collective
from kda_tools.lab.ptx.decode import Array, address, dtype_of, opcode
from kda_tools.lab.ptx.parse import Instruction
from kda_tools.lab.ptx.run import WARP
from kda_tools.lab.ptx.step import Active, Step

if TYPE_CHECKING:
    from kda_tools.lab.ptx.machine import Machine

ORDER = r"(?:\.(?:relaxed|acquire|release|acq_rel))?"
SCOPE = r"(?:\.(?:cta|cluster|gpu|sys))?"
CHANGE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "exch": lambda _, new: new,
    "min": np.minimum,
    "max": np.maximum,
}


@opcode(rf"atom{ORDER}(?:\.global|(\.shared))?{SCOPE}{ORDER}\.(add|exch|min|max)\.([bsu](?:32|64))")
def _atomic(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    """The threads act one after the other, in the order of the blocks."""
    space, change, dtype = "shared" if found[1] else "global", CHANGE[found[2]], dtype_of(found[3])
    target, place, operand = where.operands
    at, read, write = (
        address(machine, where, place),
        machine.source(where, operand, dtype),
        machine.target(where, target, dtype),
    )

    def run(active: Active) -> None:
        threads = machine.numbers(active)
        places, operands = at(active), np.broadcast_to(read(active), threads.shape)
        write(active, machine.memory.change(where, space, threads, places, operands.astype(dtype), change))

    return Step(run=run)


@opcode(r"redux\.sync\.(add|min|max)\.([su]32)")
def _reduce(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    dtype = dtype_of(found[2])
    target, value, members = where.operands
    read, write = machine.source(where, value, dtype), machine.target(where, target, dtype)
    reduce = {"add": np.add, "min": np.minimum, "max": np.maximum}[found[1]]

    def act(threads: Array) -> None:
        values = np.broadcast_to(read(threads), threads.shape)
        for warp in np.unique(threads // WARP):
            own = threads // WARP == warp
            write(threads[own], np.full(own.sum(), reduce.reduce(values[own]), dtype))

    return collective(machine, where, members, act)
