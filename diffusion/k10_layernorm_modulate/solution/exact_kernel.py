"""LayerNorm and modulation with the bits of PyTorch's chain: a CuTe DSL kernel.

PyTorch's LayerNorm of 16-bit rows runs 128 threads a row. Thread t takes the vectors t, t + 128, ... of four elements,
and adds element by element to a mean and a sum of squares (Welford). The threads are then merged in pairs: within a
warp t with t + 16, then + 8, + 4, + 2 and + 1; then warps 0 and 2, 1 and 3, and these two. The order of the sums
decides the bits, so this kernel keeps it. What it is free to choose is where the 128 threads run:

    one warp has a row; lane l plays the threads 2 l, 2 l + 1, 64 + 2 l and 65 + 2 l

So a lane loads 16 bytes at once, has four independent chains of sums, and merges half of the pairs without a barrier or
shared memory. All threads have the same number of elements, so counts and their reciprocals are constants of the code:
upstream's kernel computes a reciprocal for each element.
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
LOAD_BYTES = 512
"""Bytes of a warp's load."""
WORDS = 4
"""32-bit words that a lane loads at once: two of PyTorch's vectors."""
GROUPS = 2
"""Loads of a lane per `STEP` columns."""
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
    warps: int
    """Warps of a block, a row each."""
    held: int
    """Warps of a multiprocessor at the same time, at least."""
    pdl: bool

    @property
    def loads(self) -> int:
        """Loads of a lane for a row."""
        return self.columns // STEP * GROUPS


@cute.kernel
def layernorm_modulate_kernel(addresses: tuple, numbers: Numbers, cut: cutlass.Constexpr):
    """One block: a row for every warp."""
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    row = block * cut.warps + warp
    if const_expr(cut.pdl):
        cute.arch.griddepcontrol_wait()
    if row < numbers.rows:
        _row(addresses, numbers, row, lane, cut)


def _row(addresses, numbers, row, lane, cut):
    """One row, from x to y."""
    lane_bytes = Int64(lane) * (4 * WORDS)
    own = Int64(row) * (2 * cut.columns) + lane_bytes
    batch = Int64(row // numbers.tokens)
    scale = addresses[2] + 2 * (batch * Int64(numbers.scale_stride)) + lane_bytes
    shift = addresses[3] + 2 * (batch * Int64(numbers.shift_stride)) + lane_bytes if cut.shifts else None
    rX = [_load(addresses[1] + own, place, cut) for place in range(cut.loads)]
    ahead = [(_load(scale, place, cut), _load(shift, place, cut)) for place in range(AHEAD)]

    mean, squares = _statistics(rX)
    inverse = cute.math.rsqrt(squares / Float32(float(cut.columns)) + Float32(cut.eps))
    ones = cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {ONE};", write_only_types=[Uint32])  # no immediate is allowed
    for place in range(cut.loads):
        # The next operands are on their way while these are used.
        if place + AHEAD < cut.loads:
            ahead.append((_load(scale, place + AHEAD, cut), _load(shift, place + AHEAD, cut)))
        rScale, rShift = ahead[place]
        rY = cute.make_rmem_tensor(cute.make_layout(WORDS), Uint32)
        for word in range(WORDS):
            low, high = ((one - mean) * inverse for one in _pair(rX[place][word]))
            value = _two(_MULTIPLY, _two(_ROUND, low, high), _two(_ADD, rScale[word], ones))
            if cut.shifts:
                value = _two(_ADD, value, rShift[word])
            rY[word] = value
        _store(rY, addresses[0] + own, place, cut)


def _load(line, place, cut):
    """The words of a lane's load number `place` of a line; None of no line."""
    if line is None:
        return None
    words = cute.make_rmem_tensor(cute.make_layout(WORDS), Uint32)
    cute.autovec_copy(*_places(line + LOAD_BYTES * place, words, cut))
    return words


def _store(words, line, place, cut):
    """The counterpart of `_load`."""
    to, own = _places(line + LOAD_BYTES * place, words, cut)
    cute.autovec_copy(own, to)


def _places(address, words, cut):
    """The 16 bytes at an address, and those in registers, as equal types: elements if the address may be uneven."""
    if cut.aligned:
        return _at(Uint32, address, 4 * WORDS, WORDS), words
    return _at(Uint16, address, 2, 2 * WORDS), cute.recast_tensor(words, Uint16)


def _at(dtype, address, align, count):
    """So many elements at an address."""
    return cute.make_tensor(
        cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align), cute.make_layout(count)
    )


def _statistics(rX):
    """Mean and sum of the squares of the differences from it, the same in every lane."""
    states = []  # of the lane's threads, [GROUPS][2]
    for group in range(GROUPS):
        for half in range(2):
            mean, squares, count = Float32(0.0), Float32(0.0), 0
            for words in rX[group::GROUPS]:
                for word in (2 * half, 2 * half + 1):
                    for value in _pair(words[word]):
                        count += 1
                        delta = value - mean
                        mean = cute.math.fma(delta, _reciprocal(count), mean)
                        squares = cute.math.fma(delta, value - mean, squares)
            states.append((mean, squares))
    for apart in (8, 4, 2, 1):  # lanes, which are two threads
        others = [[cute.arch.shuffle_sync_down(one, apart) for one in state] for state in states]
        states = [_merged(own, other, count) for own, other in zip(states, others, strict=True)]
        count *= 2
    warps = [_merged(states[2 * group], states[2 * group + 1], count) for group in range(GROUPS)]
    # Lane 0 has PyTorch's warps 0 and 2 now, lane 16 has 1 and 3.
    own = _merged(*warps, 2 * count)
    other = [cute.arch.shuffle_sync_down(one, WARP // 2) for one in own]
    return tuple(cute.arch.shuffle_sync(one, 0) for one in _merged(own, other, 4 * count))


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

    name, function, shared = "layernorm_modulate_kernel", staticmethod(launch), 0

    @staticmethod
    def arguments(constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `function` is compiled with; of the numbers, also that of blocks, only the types matter."""
        addresses, numbers = (Int64(0),) * (3 + constants[2]), (Int32(0),) * len(Numbers._fields)
        return addresses, numbers, constants, Int32(0), driver.CUstream(0)

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        cut = Cut(*self.constants)
        kind, uneven = Address.ALIGNED if cut.aligned else Address.ANY, replace(cut, aligned=False)
        return CubinLaunch(
            name=self.name,
            cubin=cubin,
            grid=(-(-self.numbers[0] // cut.warps), 1, 1),
            threads=cut.warps * WARP,
            params=(*[kind] * (3 + cut.shifts), *(pack("<I", number) for number in self.numbers)),
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
