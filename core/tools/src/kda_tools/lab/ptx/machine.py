"""The machine: the threads of whole clusters in lockstep, each with its own place in the program.

Each step picks, of the places at which threads can go on (in all blocks, or in one block), the earliest in the program,
and runs the threads there to the end of the basic block. So threads that diverged meet again where the program joins.
At an instruction that synchronises, threads stop until it lets them go. If no thread can go on and some wait, that is
a deadlock.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from kda_tools.lab.ptx.decode import decode
from kda_tools.lab.ptx.memory import SHARED_BASE, Memory
from kda_tools.lab.ptx.parse import Immediate, Instruction, Operand, Program, PtxError, Register, Special, Symbol
from kda_tools.lab.ptx.run import DEFAULT, ENDED, WARP, Ahead, Options, Region, Run, Shape, Traffic
from kda_tools.lab.ptx.step import EVERYONE, UNSIGNED, Active, Kind
from kda_tools.lab.ptx.synchronise import Copies, Waiting

Array = np.ndarray
TOGETHER = 16384
"""Most threads that run at a time (a larger cluster runs alone); it bounds the memory of the registers."""
STEPS = 2_000_000
"""Instructions after which a run counts as endless."""


class Machine:
    """The blocks of one or more whole clusters of a run; `first` is the number of the first block in the grid."""

    def __init__(self, run: Run, first: int, blocks: int) -> None:
        from kda_tools.lab.ptx import arithmetic, atomics, cooperating, moving  # noqa: F401  they know the instructions

        program, shape = run.program, replace(run.shape, first=first)
        self.program, self.shape, self.options, self.blocks = program, shape, run.options, blocks
        self.count = blocks * shape.threads
        self.everyone = np.arange(self.count)
        self.symbols, shared_bytes = _layout(program, run.dynamic_shared_bytes)
        self.memory = Memory(run, shape, shared_bytes, blocks)
        self.registers: dict[str, Array] = {}
        self.specials = _specials(shape, self.everyone)
        self.waiting = Waiting(self)
        self.copies = Copies(self)
        self.steps = [decode(self, instruction) for instruction in program.instructions]
        after = {i + 1 for i, step in enumerate(self.steps) if step.kind is not Kind.PLAIN}
        self.starts = after | set(program.targets.values()) | {len(self.steps)}
        self.places: dict[int, Array] = {0: self.everyone}
        self.executed = 0
        self.turns = None if run.options.turns is None else np.random.default_rng(run.options.turns)

    def run(self) -> None:
        """Execute until every thread has ended."""
        with np.errstate(all="ignore"):
            while True:
                self.waiting.wake_signalled()
                if self.places:
                    self._execute(*self._next())
                elif not self.copies.deliver():
                    break
        self.waiting.assert_nobody_waits()

    def resume_at(self, place: int, threads: Array) -> None:
        """Let threads go on at `place`."""
        if len(threads):
            others = self.places.get(place)
            self.places[place] = threads if others is None else np.sort(np.concatenate([others, threads]))

    def _next(self) -> tuple[int, Array]:
        """The place to execute next, and the threads that go on there."""
        if self.turns is not None:
            able = np.unique(np.concatenate(list(self.places.values())) // self.shape.threads)
            block = int(self.turns.choice(able))
        elif self.options.apart:
            block = min(threads[0] for threads in self.places.values()) // self.shape.threads
        else:
            place = min(self.places)
            return place, self.places.pop(place)
        place = min(place for place, threads in self.places.items() if (threads // self.shape.threads == block).any())
        threads = self.places.pop(place)
        own = threads // self.shape.threads == block
        self.resume_at(place, threads[~own])
        return place, threads[own]

    def _execute(self, place: int, threads: Array) -> None:
        """Execute one basic block, for threads that are at its beginning."""
        active: Active = EVERYONE if len(threads) == self.count else threads
        while True:
            if place == len(self.steps):
                raise PtxError(f"kernel {self.program.name}: threads run past its last instruction")
            instruction, step = self.program.instructions[place], self.steps[place]
            self.executed += 1
            if self.executed > STEPS:
                raise PtxError(f"{instruction}: more than {STEPS} instructions executed; the program seems endless")
            chosen = active if instruction.guard is None else self._guarded(instruction, active)
            if step.kind is Kind.PLAIN:
                if isinstance(chosen, slice) or len(chosen):
                    step.run(chosen)
                place += 1
                if place in self.starts:
                    self.resume_at(place, threads)
                    return
                continue
            chosen = self.numbers(chosen)
            if instruction.guard is not None:
                self.resume_at(place + 1, np.setdiff1d(threads, chosen, assume_unique=True))
            if step.kind is Kind.BRANCH:
                self.resume_at(self.program.targets[place], chosen)
            elif step.kind is Kind.EXIT:
                self.waiting.leave(chosen)
            elif len(chosen):
                step.run(chosen)
                self.waiting.stop(place, chosen)
            return

    def _guarded(self, instruction: Instruction, active: Active) -> Active:
        assert instruction.guard is not None
        holds = self._register(instruction, instruction.guard)[active] != instruction.negated
        if holds.all():
            return active
        return np.flatnonzero(holds) if isinstance(active, slice) else active[holds]

    def numbers(self, active: Active) -> Array:
        """The threads as an array of numbers."""
        return self.everyone if isinstance(active, slice) else active

    # --- operands

    def source(self, where: Instruction, operand: Operand | None, dtype: np.dtype) -> Callable[[Active], Array]:
        """How to read an operand as numbers of a type: an array over the active threads, or one number for all."""
        if isinstance(operand, Immediate) or (isinstance(operand, Symbol) and operand.name in self.symbols):
            number = operand.value if isinstance(operand, Immediate) else self.symbols[operand.name]
            bits = _bits(dtype)
            constant = np.array(number % (1 << bits), UNSIGNED[bits]).view(dtype)[()]
            return lambda _: constant
        if isinstance(operand, Special) and operand.name in self.specials and dtype.itemsize == 4:
            special = self.specials[operand.name]
            return lambda active: special[active].view(dtype)
        if isinstance(operand, Register) and operand.bits == _bits(dtype):
            return lambda active: self._register(where, operand)[active].view(dtype)
        if isinstance(operand, Register) and operand.bits > _bits(dtype) > 1:
            narrow = UNSIGNED[_bits(dtype)]
            return lambda active: self._register(where, operand)[active].astype(narrow).view(dtype)
        raise PtxError(f"{where}: expected an operand of {_bits(dtype)} bits, found {operand}")

    def target(self, where: Instruction, operand: Operand | None, dtype: np.dtype) -> Callable[[Active, Array], None]:
        """How to write numbers of a type to a register; a wider one is extended by the type's sign."""
        if operand is None:
            return lambda _active, _value: None
        bits = _bits(dtype)
        if not isinstance(operand, Register) or operand.bits < bits or (operand.bits == 1) != (bits == 1):
            raise PtxError(f"{where}: expected a register of {bits} bits, found {operand}")
        wide = UNSIGNED[operand.bits]
        extend = np.dtype(f"{dtype.kind}{wide.itemsize}") if operand.bits > bits else dtype

        def write(active: Active, value: Array) -> None:
            held = self.registers.get(operand.name)
            if held is None:
                held = np.zeros(self.count, bool) if operand.bits == 1 else np.invert(np.zeros(self.count, wide))
                self.registers[operand.name] = held
            held[active] = np.asarray(value, dtype).astype(extend, copy=False).view(wide)

        return write

    def _register(self, where: Instruction, register: Register) -> Array:
        try:
            return self.registers[register.name]
        except KeyError:
            raise PtxError(f"{where}: reads {register.name}, which no thread has written") from None


def _bits(dtype: np.dtype) -> int:
    return 1 if dtype.kind == "b" else dtype.itemsize * 8


def _layout(program: Program, dynamic: int) -> tuple[dict[str, int], int]:
    """Name -> address, and the bytes of shared memory: first the program's declarations, then the dynamic part."""
    symbols = {param.name: param.offset for param in program.params}
    end = 0
    for name, align, size in sorted(program.shared, key=lambda item: item[2] == 0):
        end = -(-end // align) * align
        symbols[name] = SHARED_BASE + end
        end += size
    return symbols, end + dynamic


def _specials(shape: Shape, threads: Array) -> dict[str, Array]:
    """Special registers; blocks have one dimension, because the parser checks `.reqntid`."""
    block = shape.first + threads // shape.threads
    x, y, z = shape.grid
    inside = threads % shape.threads
    values: dict[str, Array | int] = {
        "%tid.x": inside,
        "%tid.y": 0,
        "%tid.z": 0,
        "%ntid.x": shape.threads,
        "%laneid": inside % WARP,
        "%ctaid.x": block % x,
        "%ctaid.y": block // x % y,
        "%ctaid.z": block // (x * y),
        "%nctaid.x": x,
        "%nctaid.y": y,
        "%nctaid.z": z,
        "%cluster_ctarank": block % shape.cluster,
        "%cluster_nctarank": shape.cluster,
    }
    return {name: np.broadcast_to(value, threads.shape).astype(np.uint32) for name, value in values.items()}


def execute(
    program: Program,
    grid: tuple[int, int, int],
    tensors: Sequence[torch.Tensor],
    params: bytes,
    cluster: int = 1,
    dynamic_shared_bytes: int = 0,
    ahead: Ahead = ENDED,
    options: Options = DEFAULT,
) -> Traffic:
    """Run a whole grid on tensors of the CPU, some whole clusters at a time, in order; returns its accesses.

    `ahead` is the kernel ahead; this one may begin while that one runs.
    """
    blocks = grid[0] * grid[1] * grid[2]
    needed = max((param.offset + param.size for param in program.params), default=0)
    if program.threads % WARP or blocks % cluster or (cluster > 1 and grid[1:] != (1, 1)) or len(params) != needed:
        raise PtxError(
            f"kernel {program.name}: expected whole warps, a grid of whole clusters, in one dimension where there are "
            f"any, and {needed} bytes of parameters; got {program.threads} threads, grid {grid}, {len(params)} bytes"
        )
    shape, regions = Shape(grid, cluster, program.threads), tuple(map(Region.of, tensors))
    run = Run(program, shape, regions, params, dynamic_shared_bytes, ahead, Traffic(regions), options)
    together = max(TOGETHER // (cluster * program.threads), 1) * cluster
    for first in range(0, blocks, together):
        Machine(run, first, min(together, blocks - first)).run()
    if ahead.runs and not run.traffic.holding - run.traffic.eager:
        raise PtxError(
            f"kernel {program.name}: no block waits for the kernel ahead before it lets the one behind begin, "
            "so that the one behind may begin before the one ahead has ended"
        )
    return run.traffic
