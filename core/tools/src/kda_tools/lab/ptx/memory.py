"""The memory of threads: tensors in global memory, the parameters, and the shared memory of their block and cluster.

Every access has to be aligned to its width and to lie inside one tensor's storage, the parameters, or the shared
memory of a block; anything else is an error that names the instruction, the thread and the address. Accesses of shared
memory are also checked for races: two threads, one of them writing, without a barrier in between.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kda_tools.lab.ptx.parse import Instruction, PtxError
from kda_tools.lab.ptx.run import WARP, Run, Shape

Array = np.ndarray
SHARED_BASE = 1024
"""Where a block's shared memory begins in its window, as on sm_90; addresses below belong to nobody."""
WINDOW_BITS = 24
"""Above these bits, an address of shared::cluster has the block's rank in the cluster plus 1; 0 is the own block."""
POISON = 0xFF
"""Each byte of uninitialised shared memory: NaN as a number of any width."""


class Memory:
    """The memory of the blocks that run at a time."""

    def __init__(self, run: Run, shape: Shape, shared_bytes: int, blocks: int) -> None:
        unique = {region.base: region for region in run.regions if region.data.size}
        self.regions = [unique[base] for base in sorted(unique)]
        self.bases = np.array([region.base for region in self.regions], np.int64)
        self.params = np.frombuffer(run.params + bytes(-len(run.params) % 16), np.uint8)
        self.param_bytes = len(run.params)
        self.shared_bytes = shared_bytes
        self.stride = -(-shared_bytes // 16) * 16
        self.shared = np.full(blocks * self.stride, POISON, np.uint8)
        self.shape = shape
        self.ahead, self.traffic = run.ahead, run.traffic
        self.waited = np.full(blocks * shape.threads, not run.ahead.runs)
        """Per thread, whether it has waited for the kernel ahead or need not."""
        self.races = Races(blocks * self.stride, blocks, shape.threads)

    def load(
        self, where: Instruction, space: str, threads: Array, addresses: Array, dtype: np.dtype, count: int = 1
    ) -> list[Array]:
        """Load `count` neighbouring values for every thread."""
        pieces = self._pieces(where, space, threads, addresses, dtype.itemsize * count, stores=False)
        values = [np.empty(len(threads), dtype) for _ in range(count)]
        for data, chosen, offsets in pieces:
            if data is self.shared:
                self.races.read(where, threads[chosen], offsets, dtype.itemsize * count)
            items, index = _items(data, dtype), offsets // dtype.itemsize
            for i, value in enumerate(values):
                value[chosen] = items[index + i]
        return values

    def store(self, where: Instruction, space: str, threads: Array, addresses: Array, values: Sequence[Array]) -> None:
        """Store neighbouring values of every thread."""
        width = values[0].itemsize
        for data, chosen, offsets in self._pieces(where, space, threads, addresses, width * len(values), stores=True):
            if data is self.params:
                fail(where, self.shape, int(threads[0]), "stores to the parameters")
            if data is self.shared:
                self.races.write(where, threads[chosen], offsets, width * len(values))
            items, index = _items(data, values[0].dtype), offsets // width
            for i, value in enumerate(values):
                items[index + i] = value[chosen]
                if (other := items[index + i] != value[chosen]).any():
                    why = "writes where another thread writes something else at the same time"
                    fail(where, self.shape, int(threads[chosen][other][0]), why)

    def change(
        self,
        where: Instruction,
        space: str,
        threads: Array,
        addresses: Array,
        operands: Array,
        how: Callable[[Array, Array], Array],
    ) -> Array:
        """Replace a number by `how` of it and the operand, one thread after the other; returns the old numbers."""
        dtype = operands.dtype
        before = np.empty(len(threads), dtype)
        for data, chosen, offsets in self._pieces(where, space, threads, addresses, dtype.itemsize, stores=True):
            if data is self.shared:
                self.races.change(where, threads[chosen], offsets, dtype.itemsize)
            items = _items(data, dtype)
            for i, place in zip(np.arange(len(threads))[chosen], offsets // dtype.itemsize, strict=True):
                before[i] = items[place]
                items[place : place + 1] = how(items[place : place + 1], operands[i : i + 1])
        return before

    def block_of(self, where: Instruction, threads: Array, addresses: Array) -> Array:
        """The block (counted from the first one that runs) in whose shared memory each shared::cluster address lies."""
        own, rank = threads // self.shape.threads, (addresses >> WINDOW_BITS) - 1
        if (outside := rank >= self.shape.cluster).any():
            self._fail_at(where, "shared::cluster", threads, addresses, outside, "lies behind the last block's window")
        return np.where(rank < 0, own, own // self.shape.cluster * self.shape.cluster + rank)

    def shared_bytes_at(self, where: Instruction, threads: Array, addresses: Array) -> Array:
        """The offsets of shared::cluster addresses of 8 bytes each in the shared memory of all blocks."""
        ((_, _, offsets),) = self._pieces(where, "shared::cluster", threads, addresses, 8, stores=False)
        return offsets

    def _pieces(
        self, where: Instruction, space: str, threads: Array, addresses: Array, width: int, stores: bool
    ) -> list[tuple[Array, Array | slice, Array]]:
        """The accessed buffers: for each one its bytes, which of the threads access it, and their offsets in it."""
        if (crooked := addresses % width != 0).any():
            self._fail_at(where, space, threads, addresses, crooked, f"is not aligned to the {width} bytes accessed")
        if space == "param":
            if (outside := (addresses < 0) | (addresses + width > self.param_bytes)).any():
                self._fail_at(where, space, threads, addresses, outside, f"is not within {self.param_bytes} bytes")
            return [(self.params, slice(None), addresses)]
        if space == "global":
            return self._tensors(where, threads, addresses, width, stores)
        block, offsets = threads // self.shape.threads, addresses - SHARED_BASE
        if space == "shared::cluster":
            block = self.block_of(where, threads, addresses)
            offsets = (addresses & ((1 << WINDOW_BITS) - 1)) - SHARED_BASE
        if (outside := (offsets < 0) | (offsets + width > self.shared_bytes)).any():
            why = f"lies outside of the block's {self.shared_bytes} bytes from {SHARED_BASE:#x} on"
            self._fail_at(where, space, threads, addresses, outside, why)
        return [(self.shared, slice(None), block * self.stride + offsets)]

    def _tensors(
        self, where: Instruction, threads: Array, addresses: Array, width: int, stores: bool
    ) -> list[tuple[Array, Array | slice, Array]]:
        number = np.searchsorted(self.bases, addresses, side="right") - 1
        used = np.unique(number)
        pieces: list[tuple[Array, Array | slice, Array]] = []
        for region in used:
            chosen = slice(None) if len(used) == 1 else np.flatnonzero(number == region)
            data = self.regions[max(region, 0)].data
            offsets = addresses[chosen] - self.bases[max(region, 0)]
            if (outside := (offsets < 0) | (offsets + width > data.size)).any():
                tensor = f"the tensor at {self.bases[max(region, 0)]:#x} has {data.size} bytes"
                why = f"lies outside of every tensor; {tensor}"
                self._fail_at(where, "global", threads[chosen], addresses[chosen], outside, why)
            base = int(self.bases[region])
            early = ~self.waited[threads[chosen]]
            if early.any():
                if self.ahead.traffic is not None:
                    early &= self.ahead.traffic.meets(base, stores, offsets, width)
                if early.any():
                    why = "is reached before the thread has waited for the kernel ahead, which may be using it"
                    self._fail_at(where, "global", threads[chosen], addresses[chosen], early, why)
            self.traffic.add(base, stores, offsets, width)
            pieces.append((data, chosen, offsets))
        return pieces

    def _fail_at(self, where: Instruction, space: str, threads: Array, addresses: Array, bad: Array, why: str) -> None:
        first = int(np.flatnonzero(bad)[0])
        fail(where, self.shape, int(threads[first]), f"{space} address {int(addresses[first]):#x} {why}")


def fail(where: Instruction, shape: Shape, thread: int, why: str) -> None:
    """Raise the error of one thread, numbered over the blocks that run together."""
    block, inside = divmod(thread, shape.threads)
    raise PtxError(f"{where}: block {shape.first + block}, thread {inside}: {why}")


def _items(data: Array, dtype: np.dtype) -> Array:
    """The buffer as numbers. Bytes after the last whole number are left out: aligned accesses never reach them."""
    return data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)


class Races:
    """Which threads last wrote and read each byte of shared memory, and before which barrier.

    Two accesses are in order if one thread makes both, if the block passed a barrier between them, or if one warp makes
    both and passed a bar.warp.sync between them. Several readers are noted as `SEVERAL`, without their numbers. Atomic
    changes need no order among each other.
    """

    SEVERAL, ATOMIC = -2, -3

    def __init__(self, size: int, blocks: int, threads: int) -> None:
        self.block_bytes, self.threads = size // blocks, threads
        self.block_time = np.zeros(blocks, np.int64)
        self.warp_time = np.zeros(-(-blocks * threads // WARP), np.int64)
        # The four rows are thread, warp, and how many barriers the block and the warp had passed.
        self.writer = np.full((4, size), -1, np.int64)
        self.reader = np.full((4, size), -1, np.int64)

    def read(self, where: Instruction, threads: Array, offsets: Array, width: int) -> None:
        """Note the bytes that threads read; an error if another thread wrote them without a barrier since."""
        access, at = self._access(threads, offsets, width)
        self._check(where, self.writer, access, at, "reads what thread {} of the run wrote")
        before = self.reader[:, at]
        self.reader[:, at] = access
        # If several threads read a byte between two barriers, none of them may write it before the next barrier.
        again = before[2] == access[2]
        for row in (0, 1):
            other = (self.reader[row, at] != access[row]) | (again & (before[row] != access[row]))
            self.reader[row, at[other]] = self.SEVERAL

    def write(self, where: Instruction, threads: Array, offsets: Array, width: int) -> None:
        """Note the bytes that threads write; an error if another thread accessed them without a barrier since."""
        access, at = self._access(threads, offsets, width)
        self._check(where, self.writer, access, at, "overwrites what thread {} of the run wrote")
        self._check(where, self.reader, access, at, "overwrites what thread {} of the run read")
        self.writer[:, at] = access

    def change(self, where: Instruction, threads: Array, offsets: Array, width: int) -> None:
        """Note the bytes that threads change atomically; an error if a plain access of another thread races with it."""
        access, at = self._access(threads, offsets, width)
        plain = self.writer[0, at] != self.ATOMIC
        self._check(where, self.writer, access[:, plain], at[plain], "changes what thread {} of the run wrote")
        self._check(where, self.reader, access, at, "changes what thread {} of the run read")
        self.writer[:, at] = access
        self.writer[:2, at] = self.ATOMIC

    def _access(self, threads: Array, offsets: Array, width: int) -> tuple[Array, Array]:
        at = (offsets[:, None] + np.arange(width)).reshape(-1)
        thread = np.repeat(threads, width)
        warp = thread // WARP
        return np.stack([thread, warp, self.block_time[at // self.block_bytes], self.warp_time[warp]]), at

    def _check(self, where: Instruction, before: Array, access: Array, at: Array, what: str) -> None:
        thread, warp, block_time, warp_time = before[:, at]
        ordered = (thread == access[0]) | ((warp == access[1]) & (warp_time < access[3]))
        race = (thread != -1) & (block_time == access[2]) & ~ordered
        if race.any():
            first = int(np.flatnonzero(race)[0])
            other = {self.SEVERAL: "several", self.ATOMIC: "one or more"}.get(int(thread[first]), int(thread[first]))
            who = f"thread {int(access[0][first])} of the run {what.format(other)}"
            offset = int(at[first]) % self.block_bytes
            raise PtxError(f"{where}: a race: {who}, byte {offset} of shared memory, without a barrier between")
