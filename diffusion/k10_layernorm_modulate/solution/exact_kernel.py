"""LayerNorm and modulation with the bits of PyTorch's chain: a CuTe DSL kernel.

PyTorch's LayerNorm of 16-bit rows runs 128 threads a row. Thread t takes the vectors t, t + 128, ... of four elements,
and adds element by element to a mean and a sum of squares (Welford). The threads are then merged in pairs: within a
warp t with t + 16, then + 8, + 4, + 2 and + 1; then warps 0 and 2, 1 and 3, and these two. The order of the sums
decides the bits, so this kernel keeps it. What it is free to choose is where the 128 threads run:

    one warp has a row: lane l plays the threads 2 l, 2 l + 1, 64 + 2 l and 65 + 2 l
    two warps have it:  lane l of warp w plays the threads 64 w + 2 l and 64 w + 2 l + 1
    four warps have it: lane l of warp w plays the thread 32 w + l

The fewer warps, the more independent chains of sums a lane has, and the more levels of the merge need no exchange. One
warp needs neither a barrier nor shared memory; two and four need one barrier. The more warps, the sooner a row is done.
All threads have the same number of elements, so counts and their reciprocals are constants of the code: upstream's
kernel computes a reciprocal for each element.

The grid may be as small as what the GPU holds at once. Then a warp takes row after row, and loads the next one while
it computes, so that memory waits less for the sums.
"""

import functools
from dataclasses import dataclass, replace
from struct import pack
from typing import Any, NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Float32, Int32, Int64, Uint16, Uint32, const_expr

from kda_runtime.cubin import Address, Bindable, CubinLaunch
from kda_runtime.cute_compile import cute_cubin
from kda_runtime.launch import Binary, Run

WARP = 32
THREADS = 128
"""Threads with which PyTorch's kernel takes a row."""
STEP = 512
"""Columns that these read at a time, four each."""
AHEAD = 2
"""Loads of scale and shift before the first use."""
VECTOR_BYTES = 8
"""Bytes of one of PyTorch's vectors."""
ONE = 0x3F803F80
"""Two ones in bfloat16."""


class Numbers(NamedTuple):
    """A call's sizes, as the kernel gets them."""

    rows: Int32
    tokens: Int32
    """Rows of a batch, which share scale and shift."""
    scale_stride: Int32
    """Elements from one batch's scale to the next."""
    shift_stride: Int32


@dataclass(frozen=True)
class Cut:
    """Constants of the kernel."""

    columns: int
    """A multiple of `STEP`."""
    eps: float
    shifts: bool
    """Whether there is a shift."""
    aligned: bool
    """Whether tensors and rows begin at multiples of 16 bytes."""
    rows: int
    """Rows of a block at the same time."""
    row_warps: int
    """Warps of a row: 1; or 2 or 4, which are then a block."""
    following: str
    """When a warp loads its next row: `once` (it has only one), `after` each part of this one is used up, or `before`
    this one is computed."""
    held: int
    """Warps of a multiprocessor at the same time, at least."""
    store: str
    """How y is stored: empty, or `cs`, for data that is not read again soon."""
    pdl: bool

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.rows * self.row_warps

    @property
    def neighbours(self) -> int:
        """PyTorch's threads that a load of a lane is for."""
        return min(4 // self.row_warps, 2)

    @property
    def words(self) -> int:
        """32-bit words that a lane loads at once."""
        return self.neighbours * VECTOR_BYTES // 4

    @property
    def groups(self) -> int:
        """Loads of a lane per `STEP` columns."""
        return 4 // (self.row_warps * self.neighbours)

    @property
    def loads(self) -> int:
        """Loads of a lane for a row."""
        return self.columns // STEP * self.groups

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: twice four states of two numbers if several warps have a row."""
        return 64 if self.row_warps > 1 else 0


@cute.kernel
def layernorm_modulate_kernel(addresses: tuple, numbers: Numbers, cut: cutlass.Constexpr):
    """One block: `rows` rows, and then those that lie as many rows further as all blocks have."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    place, part = cute.arch.warp_idx() // cut.row_warps, cute.arch.warp_idx() % cut.row_warps
    row, step = block * cut.rows + place, blocks * cut.rows
    lane_bytes = 4 * cut.words * (WARP * Int64(part) + Int64(lane))
    shared = None
    if const_expr(cut.row_warps > 1):
        smem = cutlass.memory.SmemAllocator()
        states = smem.allocate_tensor(Float32, cute.make_layout((2, 4, 2)))  # two halves, used in turn
        shared = states, part, lane
    if const_expr(cut.pdl):
        cute.arch.griddepcontrol_wait()
    rX = [cute.make_rmem_tensor(cute.make_layout(cut.words), Uint32) for _ in range(cut.loads)]
    if const_expr(cut.following == "once"):
        if row < numbers.rows:
            _load_row(rX, addresses, row, lane_bytes, cut)
            _row(addresses, numbers, rX, row, row, lane_bytes, shared, Int32(0), cut)
    else:
        rNext = rX
        if const_expr(cut.following == "before"):
            rNext = [cute.make_rmem_tensor(cute.make_layout(cut.words), Uint32) for _ in range(cut.loads)]
        if row < numbers.rows:
            _load_row(rNext, addresses, row, lane_bytes, cut)
        turn = Int32(0)
        for _ in cutlass.range((numbers.rows - row + step - 1) // step, unroll=1):
            following = row + step
            if const_expr(cut.following == "before"):
                _copy(rNext, rX)
                if following < numbers.rows:
                    _load_row(rNext, addresses, following, lane_bytes, cut)
            _row(addresses, numbers, rX, row, following, lane_bytes, shared, turn, cut)
            row, turn = following, 1 - turn


def _copy(source, target):
    """Copy words from registers to registers."""
    for own, to in zip(source, target, strict=True):
        to.store(own.load())


def _load_row(rX, addresses, row, lane_bytes, cut):
    """Load a lane's words of a row of x."""
    for place, words in enumerate(rX):
        _fill(words, addresses[1] + Int64(row) * (2 * cut.columns) + lane_bytes, place, cut)


def _row(addresses, numbers, rX, row, following, lane_bytes, shared, turn, cut):
    """One row, from rX to y. Where they are to be loaded afterwards, rX then has the words of row `following`."""
    batch = Int64(row // numbers.tokens)
    scale = addresses[2] + 2 * (batch * Int64(numbers.scale_stride)) + lane_bytes
    shift = addresses[3] + 2 * (batch * Int64(numbers.shift_stride)) + lane_bytes if cut.shifts else None
    y = addresses[0] + Int64(row) * (2 * cut.columns) + lane_bytes
    # No branch within the parts: a load of the last row again is cheaper, and its words are not used.
    x = addresses[1] + Int64(cutlass.min(following, numbers.rows - 1)) * (2 * cut.columns) + lane_bytes
    ahead = [(_load(scale, place, cut), _load(shift, place, cut)) for place in range(min(AHEAD, cut.loads))]

    mean, squares = _statistics(rX, shared, turn, cut)
    inverse = cute.math.rsqrt(squares / Float32(float(cut.columns)) + Float32(cut.eps))
    ones = cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {ONE};", write_only_types=[Uint32])  # no immediate is allowed
    for place in range(cut.loads):
        # The next operands are on their way while these are used.
        if place + AHEAD < cut.loads:
            ahead.append((_load(scale, place + AHEAD, cut), _load(shift, place + AHEAD, cut)))
        rScale, rShift = ahead[place]
        rY = cute.make_rmem_tensor(cute.make_layout(cut.words), Uint32)
        for word in range(cut.words):
            low, high = ((one - mean) * inverse for one in _pair(rX[place][word]))
            value = _two(_MULTIPLY, _two(_ROUND, low, high), _two(_ADD, rScale[word], ones))
            rY[word] = _two(_ADD, value, rShift[word]) if cut.shifts else value
        if cut.following == "after":
            _fill(rX[place], x, place, cut)
        _store(rY, y, place, cut)


def _load(line, place, cut):
    """The words of a lane's load number `place` of a line; None of no line."""
    if line is None:
        return None
    words = cute.make_rmem_tensor(cute.make_layout(cut.words), Uint32)
    _fill(words, line, place, cut)
    return words


def _fill(words, line, place, cut):
    """Load these words from a line."""
    cute.autovec_copy(*_places(line + 4 * cut.words * WARP * cut.row_warps * place, words, cut))


def _store(words, line, place, cut):
    """The counterpart of `_fill`."""
    to, own = _places(line + 4 * cut.words * WARP * cut.row_warps * place, words, cut)
    if cut.store and cut.aligned:
        cute.arch.store(to.iterator, own.load().ir_value(), cop=cut.store)
    else:
        cute.autovec_copy(own, to)


def _places(address, words, cut):
    """The words at an address, and those in registers, as equal types: elements if the address may be uneven."""
    if cut.aligned:
        return _at(Uint32, address, 4 * cut.words, cut.words), words
    return _at(Uint16, address, 2, 2 * cut.words), cute.recast_tensor(words, Uint16)


def _at(dtype, address, align, count):
    """So many elements at an address."""
    return cute.make_tensor(
        cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align), cute.make_layout(count)
    )


def _statistics(rX, shared, turn, cut):
    """Mean and sum of the squares of the differences from it, the same in every lane of the row."""
    states = []  # of the lane's threads, [groups][neighbours]
    for group in range(cut.groups):
        for vector in range(cut.neighbours):
            mean, squares, count = Float32(0.0), Float32(0.0), 0
            for words in rX[group :: cut.groups]:
                for word in (2 * vector, 2 * vector + 1):
                    for value in _pair(words[word]):
                        count += 1
                        delta = value - mean
                        mean = cute.math.fma(delta, _reciprocal(count), mean)
                        squares = cute.math.fma(delta, value - mean, squares)
            states.append((mean, squares))
    for apart in (16, 8, 4, 2, 1):  # threads
        if apart >= cut.neighbours:
            others = [[cute.arch.shuffle_sync_down(one, apart // cut.neighbours) for one in state] for state in states]
            states = [_merged(own, other, count) for own, other in zip(states, others, strict=True)]
        else:
            states = [_merged(*states[2 * group : 2 * group + 2], count) for group in range(cut.groups)]
        count *= 2
    # Every WARP // neighbours lanes have one of PyTorch's warps now, the first of them its state.
    if cut.row_warps > 1:
        return _merged_in_shared_memory(*states[0], shared, turn, count, cut.neighbours)
    own = _merged(*states, count)  # of its warps 0 and 2, or 1 and 3
    other = [cute.arch.shuffle_sync_down(one, WARP // 2) for one in own]
    return tuple(cute.arch.shuffle_sync(one, 0) for one in _merged(own, other, 2 * count))


@cute.jit
def _merged_in_shared_memory(
    mean, squares, shared: tuple, turn, count: cutlass.Constexpr, neighbours: cutlass.Constexpr
):
    """The state of a row that several warps have, from those of PyTorch's four, of which a warp has `neighbours`."""
    states, part, lane = shared
    if lane % (WARP // neighbours) == 0:
        own = neighbours * part + lane // (WARP // neighbours)
        states[0, own, turn], states[1, own, turn] = mean, squares
    cute.arch.sync_threads()
    of_warps = [(states[0, warp, turn], states[1, warp, turn]) for warp in range(4)]
    pairs = [_merged(of_warps[warp], of_warps[warp + 2], count) for warp in range(2)]
    return _merged(*pairs, 2 * count)


def _merged(own, other, count):
    """The states of two threads with `count` elements each; PyTorch's lower thread comes first."""
    share = _rounded(_reciprocal_of(2 * count) * _rounded(float(count)))
    delta = own[0] - other[0]
    mean = cute.math.fma(other[0], Float32(share), Float32(share) * own[0])
    return mean, cute.math.fma(Float32(share), Float32(float(count)) * (delta * delta), other[1] + own[1])


def _rounded(number):
    """The nearest float32."""
    return torch.tensor(number, dtype=torch.float32).item()


def _reciprocal_of(count):
    """1 / count as PyTorch's kernel gets it: the nearest float32."""
    return _rounded(1.0 / count)


def _reciprocal(count):
    return Float32(_reciprocal_of(count))


_ROUND = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"
_MULTIPLY = "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};"
_ADD = "add.rn.bf16x2 {$w0}, {$r0}, {$r1};"


def _two(code, one, other):
    """An instruction for two elements at once, each rounded to bfloat16."""
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[one, other])


def _pair(word):
    """Two neighbours in float32."""
    return (word << Uint32(16)).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


@cute.jit
def launch(addresses: tuple, numbers: tuple, constants: cutlass.Constexpr, blocks: Int32, stream: driver.CUstream):
    """Launch `blocks` blocks."""
    cut = Cut(*constants)
    layernorm_modulate_kernel(addresses, Numbers(*numbers), cut).launch(
        grid=[blocks, 1, 1],
        block=[cut.warps * WARP, 1, 1],
        stream=stream,
        use_pdl=cut.pdl,
        smem=cut.shared,
        min_blocks_per_mp=cut.held // cut.warps,
        preferred_smem_carveout=0,  # does not reach the machine code; without it the DSL would ask the device
    )


@dataclass(frozen=True)
class ModulateLaunch(Bindable):
    """One launch of the kernel, on y, x, scale and shift, if any; in the manner of `launch.Launch`."""

    constants: tuple[Any, ...]
    """As `Cut`."""
    numbers: tuple[int, ...]
    """As `Numbers`."""
    blocks: int

    name, function = "layernorm_modulate_kernel", staticmethod(launch)

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `function` is compiled with; of the numbers, also that of blocks, only the types matter."""
        addresses, numbers = (Int64(0),) * (3 + constants[2]), (Int32(0),) * len(Numbers._fields)
        return addresses, numbers, constants, Int32(0), driver.CUstream(0)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return Cut(*self.constants).shared

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        cut = Cut(*self.constants)
        kind, uneven = Address.ALIGNED if cut.aligned else Address.ANY, replace(cut, aligned=False)
        return CubinLaunch(
            name=self.name,
            cubin=cubin,
            grid=(self.blocks, 1, 1),
            threads=cut.warps * WARP,
            params=(*[kind] * (3 + cut.shifts), *(pack("<I", number) for number in self.numbers)),
            dynamic_shared_bytes=cut.shared,
            dependent=cut.pdl,
            otherwise=replace(self, constants=tuple(vars(uneven).values())).run_at if cut.aligned else None,
        )

    @property
    def variant(self) -> str:
        """The name of this compilation: all constants, and no numbers."""
        return " ".join(f"{name}={value}" for name, value in vars(Cut(*self.constants)).items())

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""
        return Binary(code(self.constants, target), self.shared)

    def bind(self, device: int | None = None) -> Run:
        """Compile for a CUDA device (default: the current one): a function of the addresses."""
        major, minor = torch.cuda.get_device_capability(device)
        return self.with_code(code(self.constants, f"sm_{major}{minor}a")).bind(device)


@functools.cache
def code(constants: tuple[Any, ...], target: str) -> bytes:
    """The kernel for a target; sizes are arguments."""
    return cute_cubin(launch, *ModulateLaunch.arguments(constants), target=target)
