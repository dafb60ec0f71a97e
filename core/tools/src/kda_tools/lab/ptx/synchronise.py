"""Lets threads wait for each other: warps, barriers of a block and of a cluster, mbarriers, asynchronous copies."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kda_tools.lab.ptx.memory import fail
from kda_tools.lab.ptx.parse import Instruction, PtxError
from kda_tools.lab.ptx.run import WARP

if TYPE_CHECKING:
    from kda_tools.lab.ptx.machine import Machine

Array = np.ndarray
RUNS, LEFT = -1, -2
"""Values of `Waiting.stopped` for a thread that has not stopped at an instruction: it runs, or has ended."""


class Waiting:
    """The threads that have stopped, with the places at which they wait, and when they go on."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        count, shape = machine.count, machine.shape
        self.stopped = np.full(count, RUNS)
        self.block = machine.everyone // shape.threads
        self.cluster = self.block // shape.cluster
        self.warp, self.lane = machine.everyone // WARP, machine.everyone % WARP
        self.barrier = np.full(count, -1)
        """Per thread, the number of its block's barrier at which it waits."""
        self.arrivals = np.zeros(count, np.int64)
        """How often a thread has arrived at its cluster's barrier."""
        self.waits = np.zeros(count, np.int64)
        self.phases = np.zeros(machine.blocks // shape.cluster, np.int64)
        """Phases of each cluster's barrier that are complete."""
        self.mbarriers: dict[int, MBarrier] = {}
        """Byte in the shared memory of all blocks -> the mbarrier there."""
        self.signalled = False

    def stop(self, place: int, threads: Array) -> None:
        """Note that threads have stopped at an instruction; let those go on that have nothing to wait for."""
        self.stopped[threads] = place
        self._wake(place)

    def leave(self, threads: Array) -> None:
        """Note that threads have ended; others may have waited for them."""
        self.stopped[threads] = LEFT
        self.signalled = True
        self._complete_clusters()

    def wake_signalled(self) -> None:
        """Check all waiting threads again, if something happened that they may wait for."""
        if self.signalled:
            self.signalled = False
            for place in np.unique(self.stopped[self.stopped >= 0]):
                self._wake(int(place))

    def _wake(self, place: int) -> None:
        threads = self.machine.steps[place].ready()
        places = self.stopped[threads]
        self.stopped[threads] = RUNS
        for stopped in np.unique(places):
            self.machine.resume_at(int(stopped) + 1, threads[places == stopped])

    def assert_nobody_waits(self) -> None:
        """Raise a PtxError if threads wait for ever; it names the places and one thread at each."""
        stuck = np.flatnonzero(self.stopped >= 0)
        if len(stuck):
            places, counts = np.unique(self.stopped[stuck], return_counts=True)
            lines = [
                f"{count} threads, among them thread {inside} of block {self.machine.shape.first + block}, wait at "
                f"{self.machine.program.instructions[place]}"
                for place, count in zip(places, counts, strict=True)
                for block, inside in [divmod(int(stuck[self.stopped[stuck] == place][0]), self.machine.shape.threads)]
            ]
            raise PtxError(f"deadlock in {self.machine.program.name}: " + "; ".join(lines))

    # --- warps

    def warp_ready(self, place: int, members: Array, where: Instruction) -> Array:
        """Threads at `place` whose named members (a bit mask per thread of the run) are all there or have ended."""
        threads = np.flatnonzero(self.stopped == place)
        warps = len(self.stopped) // WARP
        here = self._lanes(threads, warps)
        left = self._lanes(np.flatnonzero(self.stopped == LEFT), warps)
        mask, warp = members[threads].astype(np.int64), self.warp[threads]
        if (foreign := (mask >> self.lane[threads]) & 1 == 0).any():
            fail(where, self.machine.shape, int(threads[foreign][0]), "is not among the members that it names")
        released: Array = threads[mask & ~left[warp] & ~here[warp] == 0]
        return released

    def _lanes(self, threads: Array, warps: int) -> Array:
        """The lanes of these threads, as a bit mask per warp; sums of 32 powers of two are exact in float64."""
        return np.bincount(self.warp[threads], 2.0 ** self.lane[threads], warps).astype(np.int64)

    # --- a block

    def barrier_ready(self, number: int, expected: int, where: Instruction) -> Array:
        """Threads at a block's barrier, in blocks in which the expected number of threads is there."""
        threads = np.flatnonzero(self.barrier == number)
        present = np.bincount(self.block[threads], minlength=self.machine.blocks)
        if (present > expected).any():
            raise PtxError(f"{where}: more threads came than the {expected} that barrier {number} expects")
        full = present == expected
        self.machine.memory.races.block_time[full] += 1
        released: Array = threads[full[self.block[threads]]]
        self.barrier[released] = -1
        return released

    # --- a cluster

    def cluster_arrive(self, threads: Array, where: Instruction) -> None:
        """Note that threads have arrived at their cluster's barrier; they wait at it later."""
        if (twice := self.arrivals[threads] > self.waits[threads]).any():
            fail(where, self.machine.shape, int(threads[twice][0]), "arrives a second time without a wait between")
        self.arrivals[threads] += 1
        self._complete_clusters()

    def cluster_ready(self, place: int, where: Instruction) -> Array:
        """Threads at `place` in clusters whose threads have all arrived or ended."""
        threads = np.flatnonzero(self.stopped == place)
        if (absent := self.arrivals[threads] == self.waits[threads]).any():
            fail(where, self.machine.shape, int(threads[absent][0]), "waits without having arrived")
        released = threads[self.phases[self.cluster[threads]] >= self.arrivals[threads]]
        self.waits[released] += 1
        return released

    def _complete_clusters(self) -> None:
        arrivals = np.where(self.stopped == LEFT, np.iinfo(np.int64).max, self.arrivals)
        phases = arrivals.reshape(len(self.phases), -1).min(axis=1)
        advanced = np.repeat(phases > self.phases, self.machine.shape.cluster)
        self.machine.memory.races.block_time[advanced] += 1
        self.phases = phases
        self.signalled = True

    # --- mbarriers

    def mbarrier(self, where: Instruction, thread: int, byte: int) -> "MBarrier":
        """The mbarrier at a byte of shared memory."""
        if byte not in self.mbarriers:
            fail(where, self.machine.shape, thread, "uses an mbarrier that nobody has initialised")
        return self.mbarriers[byte]

    def mbarrier_ready(self, place: int, bytes_of: Array, parity: Array, where: Instruction) -> Array:
        """Threads at `place` that wait for a complete phase of their mbarrier, which is at the byte in `bytes_of`."""
        released = []
        for thread in np.flatnonzero(self.stopped == place):
            byte = int(bytes_of[thread])
            barrier = self.mbarrier(where, int(thread), byte)
            if barrier.phase % 2 != parity[thread]:
                released.append(thread)
                if barrier.seen != barrier.phase:  # from now on the block is in order with what has arrived
                    barrier.seen = barrier.phase
                    self.machine.memory.races.block_time[byte // self.machine.memory.stride] += 1
        return np.array(released, np.int64)

    def count_down(self, where: Instruction, thread: int, byte: int, arrived: int, transferred: int) -> None:
        """Arrive `arrived` times at an mbarrier, and add `transferred` (it may be negative) to its expected bytes."""
        barrier = self.mbarrier(where, thread, byte)
        barrier.pending -= arrived
        barrier.transfers += transferred
        if barrier.pending < 0:
            fail(where, self.machine.shape, thread, f"arrives at an mbarrier that expects {barrier.count} arrivals")
        if barrier.pending == 0 and barrier.transfers == 0:
            barrier.pending, barrier.phase = barrier.count, barrier.phase + 1
            self.signalled = True


@dataclass
class MBarrier:
    """One mbarrier object."""

    count: int
    pending: int
    transfers: int = 0
    """Bytes that are expected and have not come yet."""
    phase: int = 0
    """Number of complete phases."""
    seen: int = 0
    """The last phase whose completion a thread has waited for."""


@dataclass
class Copy:
    """One cp.async of some threads: for each thread a global source, a shared target, and the number of its group."""

    where: Instruction
    threads: Array
    target: Array
    source: Array
    width: int
    group: Array


class Copies:
    """Asynchronous copies on their way. `Options.late` decides whether they arrive at once or when a thread waits."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.copies: list[Copy] = []
        self.groups = np.zeros(machine.count, np.int64)
        """Per thread, the number of groups that it has closed."""
        self.stores: deque[tuple[Instruction, Array, Array, Array, Array]] = deque()

    def start(self, where: Instruction, threads: Array, target: Array, source: Array, width: int) -> None:
        """cp.async from global to shared memory."""
        copy = Copy(where, threads, target, source, width, self.groups[threads])
        if self.machine.options.late:
            self.copies.append(copy)
        else:
            self._arrive(copy)

    def wait(self, threads: Array, behind: int) -> None:
        """Let the copies of these threads arrive, except those of their last `behind` groups."""
        waits = np.zeros(self.machine.count, bool)
        waits[threads] = True
        kept: list[Copy] = []
        for copy in self.copies:
            due = waits[copy.threads] & (copy.group < self.groups[copy.threads] - behind)
            for chosen, take in ((due, self._arrive), (~due, kept.append)):
                if chosen.any():
                    by, to, of = (part[chosen] for part in (copy.threads, copy.target, copy.source))
                    take(Copy(copy.where, by, to, of, copy.width, copy.group[chosen]))
        self.copies = kept

    def _arrive(self, copy: Copy) -> None:
        memory, words = self.machine.memory, np.dtype(np.uint32)
        count = copy.width // words.itemsize
        values = memory.load(copy.where, "global", copy.threads, copy.source, words, count)
        memory.store(copy.where, "shared", copy.threads, copy.target, values)

    def send(self, where: Instruction, threads: Array, target: Array, value: Array, barrier: Array) -> None:
        """st.async to shared memory of the cluster, which counts down an mbarrier there."""
        self.stores.append((where, threads, target, value, barrier))
        if not self.machine.options.late:
            self.deliver()

    def deliver(self) -> bool:
        """Let everything that was sent arrive; False if there was nothing."""
        delivered = bool(self.stores)
        memory, waiting = self.machine.memory, self.machine.waiting
        while self.stores:
            where, threads, target, value, barrier = self.stores.popleft()
            block = memory.block_of(where, threads, target)
            if (other := memory.block_of(where, threads, barrier) != block).any():
                fail(where, self.machine.shape, int(threads[other][0]), "names an mbarrier of another block")
            ended = (waiting.stopped.reshape(self.machine.blocks, -1) == LEFT).all(axis=1)
            if ended[block].any():
                fail(where, self.machine.shape, int(threads[ended[block]][0]), "stores to a block that has ended")
            memory.store(where, "shared::cluster", threads, target, [value])
            for thread, byte in zip(threads, memory.shared_bytes_at(where, threads, barrier), strict=True):
                waiting.count_down(where, int(thread), int(byte), arrived=0, transferred=-value.itemsize)
        return delivered
