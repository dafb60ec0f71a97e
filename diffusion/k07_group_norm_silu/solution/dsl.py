"""What the CuTe DSL kernels share: vectors in registers, SiLU of their elements, and how machine code is launched.

A special function (exp2, reciprocal) takes eight cycles where a sum takes one, so special functions bound the output.
In 16 bits four elements share a reciprocal: 1.25 special functions an element instead of 2, exp2 and a reciprocal.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from struct import pack
from typing import Any, ClassVar

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32, Uint64

from kda_runtime.cubin import Address, Bindable, CubinLaunch
from kda_runtime.cute_compile import cute_cubin
from kda_runtime.launch import Binary, Chain, Run

from .plans import Config

WARP = 32
WORDS = 4
"""32-bit words of a vector."""
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
KEPT_TILES = 4
"""A thread that has at most so many vectors also keeps them as floats, where the registers allow it."""
MOST_POWER = 31.0
"""Largest exponent of two under the reciprocal: the product of four 1 + 2^31 and its reciprocal are normal numbers.
Inputs below -21.5 would need a larger one: their SiLU is about -1e-8 instead of a number between that and 0."""
DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16, torch.float32: Float32}


def pointer(dtype, address, align=None):
    """A pointer into global memory."""
    return cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def words_at(address):
    """The 16 bytes at an address."""
    return cute.make_tensor(pointer(Uint32, address, 16), cute.make_layout(WORDS))


def read(rX, x, group, first, stride, vectors):
    """Load a thread's vectors of a group, `stride` apart; past the group's end its last vector is loaded instead.

    So there is no branch between one load and the next.
    """
    for tile in range(cute.size(rX, mode=[1])):
        at = cutlass.min(first + tile * stride, vectors - 1)
        cute.autovec_copy(words_at(x + 16 * (Int64(group) * Int64(vectors)) + 16 * Int64(at)), rX[None, tile])


def afresh(rX):
    """A copy of the words that the compiler takes for new ones: it converts them again instead of keeping floats."""
    if cute.size(rX, mode=[1]) <= KEPT_TILES:
        return rX
    rZ = cute.make_rmem_tensor(rX.layout, Uint32)
    for i in range(cute.size(rX)):
        rZ[i] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[rX[i]])
    return rZ


def element(rX, dtype, i, tile):
    """Element i of a vector as float32, by one instruction; extracting 16 bits and converting them takes more."""
    if dtype is Float32:
        return rX[i, tile].bitcast(Float32)
    word, upper = rX[i // 2, tile], i % 2
    if dtype is BFloat16:
        return (word & Uint32(0xFFFF0000) if upper else word << Uint32(16)).bitcast(Float32)
    return Uint16(word >> Uint32(16) if upper else word).bitcast(Float16).to(Float32)


def channels_of(group, dtype, address, numbers):
    """Weight or bias (given by its address) of a group's channels, (group_channels)."""
    first = Int32(Uint32(group) % Uint32(numbers.groups)) * numbers.group_channels
    return cute.make_tensor(pointer(dtype, address) + first, cute.make_layout(numbers.group_channels))


def scaled(number, dtype):
    """Weight or bias in float32; in 16 bits times -log2(e), which makes the norm n SiLU's exponent, -n log2(e)."""
    return number.to(Float32) * (1.0 if dtype is Float32 else -LOG2_E)


def tree(values):
    """The sum of a power of two of values, in pairs."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def quotient(a, b):
    """Quotient a / b to the last bit but one, without a division's special cases: a is finite, b is not subnormal."""
    inverse = cute.arch.rcp_approx(b)
    near = a * inverse
    return near + (a - near * b) * inverse


def total_of(rX, dtype, left, stride):
    """The sum of a thread's elements. Its vectors are `stride` apart, and only those before `left` count."""
    total = Float32(0.0)
    for tile in range(cute.size(rX, mode=[1])):
        part = tree([element(rX, dtype, i, tile) for i in range(128 // dtype.width)])
        total += cutlass.select_(tile * stride < left, part, Float32(0.0))
    return total


def squares_of(rX, dtype, mean, left, stride):
    """The same for the squares of the elements' differences from `mean`."""
    squares = Float32(0.0)
    for tile in range(cute.size(rX, mode=[1])):
        centred = [element(rX, dtype, i, tile) - mean for i in range(128 // dtype.width)]
        parts = [centred[0] * centred[0], centred[1] * centred[1]]
        for i in range(2, len(centred)):
            parts[i % 2] = parts[i % 2] + centred[i] * centred[i]
        squares += cutlass.select_(tile * stride < left, parts[0] + parts[1], Float32(0.0))
    return squares


def affine(weight, bias, mean, scale, dtype):
    """Factor and offset that normalise an element; weight and bias are `scaled`.

    In 16 bits the factor is for the element itself, in float32 for its difference from the mean.
    """
    slope = weight * scale
    return slope, bias if dtype is Float32 else bias - mean * slope


def output(rX, dtype, tile, mean, slope, shift, rY):
    """The words of a vector's output, made in rY: normalised by slope and shift, which `affine` gives, then SiLU."""
    if dtype is Float32:
        values = [_silu((element(rX, dtype, i, tile) - mean) * slope + shift) for i in range(WORDS)]
    else:
        exponents = [element(rX, dtype, i, tile) * slope + shift for i in range(2 * WORDS)]
        values = [*_silu_of_four(*exponents[:4]), *_silu_of_four(*exponents[4:])]
    for i, value in enumerate(values):
        rY[i] = value.to(dtype)
    return cute.recast_tensor(rY, Uint32)


def ratio(number, by, shift):
    """A natural number divided by the factor and shift that `divisor` gives."""
    twice = Uint64(Uint32(2 * number))
    return Int32(Uint32(twice * Uint64(Uint32(by)) >> Uint64(32)) >> Uint32(shift))


def _silu(n):
    """SiLU, n / (1 + exp(-n))."""
    return n / (1.0 + cute.math.exp2(n * -LOG2_E, fastmath=True))


def _silu_of_four(*exponents):
    """SiLU of -ln(2) z for four z: -ln(2) z / (1 + 2^z). As 1 / a = b / (a b), one reciprocal is enough."""
    z = [cute.arch.fmin(one, MOST_POWER, nan=True) for one in exponents]
    p = [cute.math.exp2(one, fastmath=True) for one in z]
    # Of two denominators 1 + p only one is formed; the other is a factor of multiply-adds: (1 + p) b = p b + b.
    b = [p[1] + 1.0, p[3] + 1.0]
    pairs = [p[0] * b[0] + b[0], p[2] * b[1] + b[1]]
    inverse = cute.arch.rcp_approx(pairs[0] * pairs[1]) * -LN_2
    halves = [inverse * pairs[1], inverse * pairs[0]]
    sigmas = [halves[0] * b[0], halves[0] * p[0] + halves[0], halves[1] * b[1], halves[1] * p[2] + halves[1]]
    return [one * sigma for one, sigma in zip(z, sigmas, strict=True)]


def divisor(vectors: int) -> tuple[int, int]:
    """Factor and shift to divide a < 2^31 by `vectors`: the upper 32 bits of 2 * a * factor, shifted right by shift.

    Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994), theorem 4.2.
    """
    shift = (vectors - 1).bit_length()
    return (1 << 31 + shift) // vectors + 1, shift


@dataclass(frozen=True)
class Cut:
    """Constants of a kernel: dtypes, then fields of `plans.Config` or of the kernel's launch."""

    dtype: Any
    weight_dtype: Any
    bias_dtype: Any
    warps: int
    tiles: int
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def share(self) -> int:
        """Vectors of a group, or of a part, that a block has."""
        return self.tiles * self.threads


@dataclass(frozen=True)
class CuteLaunch(Bindable):
    """One launch of a CuTe DSL kernel, in the manner of `kda_runtime.launch.Launch`.

    The kernel takes addresses, numbers, eps and constants. `function`, which launches it, takes them as plain tuples.
    """

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Dtypes of x, weight and bias."""
    sizes: tuple[int, int, int, int, int]
    """Vectors of a group and of a channel; groups of all batches and of one, channels of a group."""
    eps: float
    config: Config
    otherwise: Chain = field(compare=False, repr=False)
    """The chain for an x that is not aligned to 16 bytes; its output is y, its arguments are x, weight and bias."""

    name: ClassVar[str]
    """The kernel's function name."""
    function: ClassVar[Callable[..., Any]]
    cut: ClassVar[type[Cut]]
    numbers: ClassVar[type[tuple[Any, ...]]]
    """The named tuple of the kernel's numbers."""
    scratch: ClassVar[int] = 0
    """Number of addresses that the kernel takes after those of y, x, weight and bias."""

    @classmethod
    def arguments(cls, constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that `function` is compiled with; of numbers and of `blocks` only the types matter."""
        addresses, numbers = (Int64(0),) * (4 + cls.scratch), (Int32(0),) * len(cls.numbers._fields)
        return addresses, numbers, Float32(0.0), constants, Int32(0), driver.CUstream(0)

    def shape(self) -> tuple[int, int, tuple[int, ...], int]:
        """Blocks of the grid and of a cluster, the kernel's numbers, and bytes of shared memory of a block."""
        raise NotImplementedError

    def with_code(self, cubin: bytes) -> CubinLaunch:
        """The launch of this machine code."""
        blocks, cluster, numbers, shared_bytes = self.shape()
        addresses = [Address.ALIGNED] * 2 + [Address.ANY] * (2 + self.scratch)
        other = self.otherwise  # a name of its own, because what is bound must not refer to this object
        return CubinLaunch(
            name=self.name,
            cubin=cubin,
            grid=(blocks, 1, 1),
            threads=self.config.warps * WARP,
            params=(*addresses, *(pack("<I", number) for number in numbers), pack("<f", self.eps)),
            cluster=cluster,
            dynamic_shared_bytes=shared_bytes,
            dependent=self.config.pdl,
            otherwise=lambda *addresses: other.run_at(*addresses[:4]),  # without scratch
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """The kernel's constants: dtypes, then fields of `config`, or of the launch."""
        names = [constant.name for constant in fields(self.cut)[3:]]
        cuts = [getattr(self.config if hasattr(self.config, name) else self, name) for name in names]
        return *(DTYPES[dtype] for dtype in self.dtypes), *cuts

    @property
    def variant(self) -> str:
        """What tells this compilation from others: all but numbers."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        named = zip(fields(self.cut)[3:], self.constants[3:], strict=True)
        return " ".join([*dtypes, *(f"{constant.name}={value}" for constant, value in named)])

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, without needing that GPU."""
        return Binary(code(type(self), self.constants, target), self.shape()[-1])

    def bind(self, device: int | None = None) -> Run:
        """Compile for a CUDA device (default: the current one): a function of the addresses."""
        major, minor = torch.cuda.get_device_capability(device)
        return self.with_code(code(type(self), self.constants, f"sm_{major}{minor}a")).bind(device)


@functools.cache
def code(kind: type[CuteLaunch], constants: tuple[Any, ...], target: str) -> bytes:
    """The kernel for a target; sizes are arguments."""
    return cute_cubin(kind.function, *kind.arguments(constants), target=target)
