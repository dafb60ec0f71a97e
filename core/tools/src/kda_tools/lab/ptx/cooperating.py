"""Instructions that branch, wait for other threads or kernels, and exchange with them."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kda_tools.lab.ptx.decode import (
    PRED,
    U16,
    U32,
    U64,
    Array,
    address,
    dtype_of,
    halves,
    immediate,
    opcode,
    operand_registers,
    pack,
)
from kda_tools.lab.ptx.memory import fail
from kda_tools.lab.ptx.parse import Immediate, Instruction, Operand, PtxError, Vector
from kda_tools.lab.ptx.run import WARP
from kda_tools.lab.ptx.step import Active, Kind, Step

if TYPE_CHECKING:
    from kda_tools.lab.ptx.machine import Machine
from kda_tools.lab.ptx.synchronise import MBarrier

# --- control


@opcode(r"bra(\.uni)?")
def _branch(_machine: "Machine", _where: Instruction, _found: re.Match[str]) -> Step:
    return Step(Kind.BRANCH)


@opcode(r"ret|exit")
def _exit(_machine: "Machine", _where: Instruction, _found: re.Match[str]) -> Step:
    return Step(Kind.EXIT)


@opcode(r"griddepcontrol\.(wait|launch_dependents)")
def _grid_dependency(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    memory = machine.memory

    def blocks(threads: Array) -> set[int]:
        return set((machine.shape.first + np.unique(threads // machine.shape.threads)).tolist())

    def wait(active: Active) -> None:
        memory.waited[active] = True
        memory.traffic.holding |= blocks(machine.numbers(active))

    def launch(active: Active) -> None:
        threads = machine.numbers(active)
        memory.traffic.eager |= blocks(threads[~memory.waited[threads]])

    return Step(run=wait if found[1] == "wait" else launch)


# --- warps


def place_of(machine: "Machine", where: Instruction) -> int:
    """The instruction's number."""
    return next(i for i, other in enumerate(machine.program.instructions) if other is where)


def collective(
    machine: "Machine", where: Instruction, members: Operand | None, act: Callable[[Array], None] = lambda _: None
) -> Step:
    """An instruction that the named members of a warp execute together; they go on when all have come."""
    read = machine.source(where, members, U32)
    place = place_of(machine, where)
    named = np.zeros(machine.count, U32)

    def run(active: Active) -> None:
        named[active] = read(active)

    def ready() -> Array:
        threads = machine.waiting.warp_ready(place, named, where)
        if len(threads):
            act(threads)
        return threads

    return Step(Kind.WAIT, run, ready)


ALL = Immediate(-1)


@opcode(r"bar\.warp\.sync")
def _warp_barrier(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    def passed(threads: Array) -> None:
        machine.memory.races.warp_time[np.unique(threads // WARP)] += 1

    return collective(machine, where, where.operands[0], passed)


@opcode(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _shuffle(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    target, *operands, members = where.operands
    value, by, clamp = (machine.source(where, operand, U32) for operand in operands)
    targets = operand_registers(target, 2 if isinstance(target, Vector) else 1)
    write = machine.target(where, targets[0], U32)
    write_inside = machine.target(where, targets[1] if len(targets) > 1 else None, PRED)

    def act(threads: Array) -> None:
        lane = threads % WARP
        b, c = (np.broadcast_to(read(threads), threads.shape).astype(np.int64) & bits
                for read, bits in ((by, 31), (clamp, 0x1F1F)))  # fmt: skip
        segment = c >> 8
        first = lane & segment
        last = first | (c & 31 & ~segment)
        there = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[found[1]]
        inside = there >= last if found[1] == "up" else there <= last
        source = threads - lane + np.where(inside, there, lane)
        held = np.zeros(machine.count, bool)
        held[threads] = True
        if (absent := ~held[source]).any():
            fail(where, machine.shape, int(threads[absent][0]), "reads a register of a thread that is not there")
        values = np.zeros(machine.count, U32)
        values[threads] = value(threads)
        write(threads, values[source])
        write_inside(threads, inside)

    return collective(machine, where, members, act)


@opcode(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _matrix(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    loads, count, transposed = found[1] == "ld", int(found[2]), bool(found[3])
    vector, place = where.operands if loads else reversed(where.operands)
    at = address(machine, where, place)
    items = operand_registers(vector, count)
    writes = [machine.target(where, item, U32) for item in items] if loads else []
    reads = [] if loads else [machine.source(where, item, U32) for item in items]

    def act(threads: Array) -> None:
        rows = at(threads).reshape(-1, WARP)
        lane = np.arange(WARP)
        for i in range(count):
            own = rows[:, 8 * i : 8 * i + 8]  # [warps, 8]: eight threads name the rows of a matrix, 16 bytes each
            if (own % 16).any():
                fail(where, machine.shape, int(threads[0]), "names a row that is not aligned to 16 bytes")
            # A thread has two neighbouring elements of a row; if transposed, of a column.
            if transposed:
                places = [own[:, 2 * (lane % 4) + j] + 2 * (lane // 4) for j in (0, 1)]
            else:
                places = [own[:, lane // 4] + 4 * (lane % 4) + 2 * j for j in (0, 1)]
            places = [place.reshape(-1) for place in places]
            if loads:
                low, high = (machine.memory.load(where, "shared", threads, place, U16)[0] for place in places)
                writes[i](threads, pack(low, high))
            else:
                for place, half in zip(places, halves(reads[i](threads)), strict=True):
                    machine.memory.store(where, "shared", threads, place, [half])

    return collective(machine, where, ALL, act)


# --- blocks and clusters


@opcode(r"(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?")
def _barrier(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    number, *expected = (immediate(where, operand) for operand in where.operands)
    (threads,) = expected or (machine.shape.threads,)

    def run(active: Active) -> None:
        machine.waiting.barrier[active] = number

    return Step(Kind.WAIT, run, lambda: machine.waiting.barrier_ready(number, threads, where))


@opcode(r"barrier\.cluster\.arrive(\.release|\.relaxed)?(\.aligned)?")
def _cluster_arrive(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    return Step(run=lambda active: machine.waiting.cluster_arrive(machine.numbers(active), where))


@opcode(r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?")
def _cluster_wait(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    place = place_of(machine, where)
    return Step(Kind.WAIT, ready=lambda: machine.waiting.cluster_ready(place, where))


MBARRIER = r"(?:\.shared(?:::cta)?)?\.b64"


def mbarrier_bytes(machine: "Machine", where: Instruction, operand: Operand | None) -> Callable[[Array], Array]:
    """How to find the bytes, in the shared memory of all blocks, at which the mbarriers of threads lie."""
    at = address(machine, where, operand)
    return lambda threads: machine.memory.shared_bytes_at(where, threads, at(threads))


@opcode(rf"mbarrier\.init{MBARRIER}")
def _mbarrier_init(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    at, count = mbarrier_bytes(machine, where, where.operands[0]), machine.source(where, where.operands[1], U32)

    def run(active: Active) -> None:
        threads = machine.numbers(active)
        counts = np.broadcast_to(count(active), threads.shape)
        for byte, number in zip(at(threads), counts, strict=True):
            machine.waiting.mbarriers[int(byte)] = MBarrier(int(number), int(number))

    return Step(run=run)


@opcode(rf"mbarrier\.arrive(\.expect_tx)?{MBARRIER}")
def _mbarrier_arrive(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    state, place, *rest = where.operands
    at, write = mbarrier_bytes(machine, where, place), machine.target(where, state, U64)
    expected = machine.source(where, rest[0], U32) if found[1] else lambda _: np.uint32(0)

    def run(active: Active) -> None:
        threads = machine.numbers(active)
        transfers = np.broadcast_to(expected(active), threads.shape)
        write(active, U64.type(0))  # an opaque state, which only test_wait without .parity takes
        for thread, byte, tx in zip(threads, at(threads), transfers, strict=True):
            machine.waiting.count_down(where, int(thread), int(byte), arrived=1, transferred=int(tx))

    return Step(run=run)


@opcode(rf"mbarrier\.try_wait\.parity{MBARRIER}")
def _mbarrier_wait(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    """The ISA lets it wait as long as it likes. So here it waits until the phase is complete, and then gives true."""
    done, place, parity = where.operands[:3]
    at, write = mbarrier_bytes(machine, where, place), machine.target(where, done, PRED)
    read, wanted = machine.source(where, parity, U32), np.zeros(machine.count, np.int64)
    barriers = np.zeros(machine.count, np.int64)
    own = place_of(machine, where)

    def run(active: Active) -> None:
        threads = machine.numbers(active)
        barriers[active], wanted[active] = at(threads), read(active)

    def ready() -> Array:
        released = machine.waiting.mbarrier_ready(own, barriers, wanted, where)
        write(released, np.array(True))
        return released

    return Step(Kind.WAIT, run, ready)


@opcode(r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes\.([bsu](?:32|64))")
def _send(machine: "Machine", where: Instruction, found: re.Match[str]) -> Step:
    place, value, barrier = where.operands
    at, to = address(machine, where, place), address(machine, where, barrier)
    dtype = dtype_of(found[1])
    read = machine.source(where, value, dtype)

    def run(active: Active) -> None:
        threads = machine.numbers(active)
        values = np.array(np.broadcast_to(read(active), threads.shape))
        machine.copies.send(where, threads, at(active), values, to(active))

    return Step(run=run)


@opcode(r"cp\.async\.(?:ca|cg)\.shared\.global")
def _copy(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    target, source, *widths = where.operands
    at, of = address(machine, where, target), address(machine, where, source)
    width, *rest = (immediate(where, operand) for operand in widths)
    if any(size != width for size in rest):
        raise PtxError(f"{where}: a copy that fills up with zeros is not known")

    def run(active: Active) -> None:
        machine.copies.start(where, machine.numbers(active), np.array(at(active)), np.array(of(active)), width)

    return Step(run=run)


@opcode(r"cp\.async\.commit_group")
def _commit(machine: "Machine", _where: Instruction, _found: re.Match[str]) -> Step:
    def run(active: Active) -> None:
        machine.copies.groups[active] += 1

    return Step(run=run)


@opcode(r"cp\.async\.wait_group")
def _wait_group(machine: "Machine", where: Instruction, _found: re.Match[str]) -> Step:
    (behind,) = (immediate(where, operand) for operand in where.operands)
    return Step(run=lambda active: machine.copies.wait(machine.numbers(active), behind))
