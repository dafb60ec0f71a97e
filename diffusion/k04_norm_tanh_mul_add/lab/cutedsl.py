"""The other design, in the CuTe DSL: blocks that stay, with their next rows on the way through shared memory.

Covers the frozen rows and their like: RMSNorm with weights, contiguous x and shift, one-line scale and scale2, all of
one 16-bit dtype. Else a ValueError. To time it: `kda bench norm_tanh_mul_add --arm cutedsl --against solution`.

The Triton kernel has a program per row, which loads weight and scale once more and computes its tanh once more. Here a
block takes every n-th row and keeps weight, tanh(scale), weight2 and 1 + scale2 in registers, as products. Each thread
copies its own vectors of x and shift asynchronously into a ring of `STAGES` rows, and is the only one to read them: the
copies need no barrier, and a row's memory latency passes while earlier rows are computed. A sum over a row costs one
barrier. Names follow the CuTe DSL's habit: m for global memory, s shared, t a thread's part, r registers.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.memory import SmemAllocator

from kda_runtime.cute_compile import compile_cute, environment_stream

DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
COLUMNS_STEP, MAX_COLUMNS = 256, 8192
WARP = 32
VECTOR = 8
"""Elements of a 16-byte vector."""
MOST_WARPS = 8
STAGES = 3
"""Rows of x and shift in shared memory: 45 KiB of 3840 columns."""
BLOCKS_PER_SM = 4
"""Blocks that the grid has for every multiprocessor: 180 of 227 KiB of its shared memory at 3840 columns."""


class Kernel:
    """The kernel for rows of so many columns, with or without the second norm."""

    def __init__(self, columns: int, double: bool) -> None:
        self.columns = columns
        self.double = double
        # The largest number of warps that divides the row into whole vectors: no thread idles, nothing is masked.
        pieces = columns // (WARP * VECTOR)
        self.warps = max(warps for warps in range(1, MOST_WARPS + 1) if pieces % warps == 0)
        self.threads = self.warps * WARP

    @cute.jit
    def __call__(
        self,
        mY: cute.Tensor,  # (B, S, D)
        mY2: cute.Tensor | None,  # (B, S, D)
        mX: cute.Tensor,  # (B, S, D)
        mWeight: cute.Tensor,  # (D)
        mScale: cute.Tensor,  # (1, 1, D)
        mShift: cute.Tensor,  # (B, S, D)
        mWeight2: cute.Tensor | None,  # (D)
        mScale2: cute.Tensor | None,  # (1, 1, D)
        eps: cutlass.Float32,
        blocks: cutlass.Int32,
        stream: driver.CUstream,
    ) -> None:
        """Launch `blocks` blocks."""
        rows = mX.shape[0] * mX.shape[1]
        whole = cute.make_layout((rows, self.columns), stride=(self.columns, 1))
        line = cute.make_layout(self.columns)
        mY, mX, mShift = (cute.make_tensor(mV.iterator, whole) for mV in (mY, mX, mShift))  # (B * S, D)
        mScale = cute.make_tensor(mScale.iterator, line)  # (D)
        if cutlass.const_expr(self.double):
            mY2 = cute.make_tensor(mY2.iterator, whole)
            mScale2 = cute.make_tensor(mScale2.iterator, line)
        self.kernel(mY, mY2, mX, mWeight, mScale, mShift, mWeight2, mScale2, eps).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mY: cute.Tensor,
        mY2: cute.Tensor | None,
        mX: cute.Tensor,
        mWeight: cute.Tensor,
        mScale: cute.Tensor,
        mShift: cute.Tensor,
        mWeight2: cute.Tensor | None,
        mScale2: cute.Tensor | None,
        eps: cutlass.Float32,
    ) -> None:
        """Every `blocks`-th row, beginning with the block's own number."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rows = mX.shape[0]
        dtype = mX.element_type

        # Threads and values: thread t has the vectors t, t + threads, ... of a row.
        threads, values = cute.make_layout(self.threads), cute.make_layout(VECTOR)
        direct = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=128)
        behind = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=128)
        copy = cute.make_tiled_copy_tv(direct, threads, values).get_slice(thread)
        load = cute.make_tiled_copy_tv(behind, threads, values)

        shared = SmemAllocator()
        ring = cute.make_layout((2 * STAGES, self.columns), stride=(self.columns, 1))
        sRing = shared.allocate_tensor(dtype, ring, byte_alignment=128)  # (x and shift of every stage, D)
        sums = cute.make_layout((2, self.warps), stride=(self.warps, 1))
        sSums = shared.allocate_tensor(cutlass.Float32, sums, byte_alignment=16)  # (2, warps), used in turn

        # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for stage in cutlass.range_constexpr(STAGES - 1):
            self.prefetch(load, thread, mX, mShift, sRing, block + stage * blocks, stage, rows)
        tGate = self.gate(copy, mWeight, mScale)
        if cutlass.const_expr(self.double):
            tGate2 = self.gate2(copy, mWeight2, mScale2)

        stage = cutlass.Int32(0)
        half = cutlass.Int32(0)
        for row in cutlass.range(block, rows, blocks):
            free = stage + (STAGES - 1)
            if free >= STAGES:
                free -= STAGES
            self.prefetch(load, thread, mX, mShift, sRing, row + (STAGES - 1) * blocks, free, rows)
            cute.arch.cp_async_wait_group(STAGES - 1)
            tX = self.read(copy, sRing[2 * stage, None])
            tShift = self.read(copy, sRing[2 * stage + 1, None])
            inverse = self.inverse(self.total(self.squares(tX), sSums, half, thread), eps)
            tY = self.write(copy, mY[row, None], tX * inverse * tGate + tShift)
            if cutlass.const_expr(self.double):
                # y as it is stored: the second norm is of what the caller gets.
                inverse = self.inverse(self.total(self.squares(tY), sSums, half + 1, thread), eps)
                self.write(copy, mY2[row, None], tY * inverse * tGate2)
            else:
                half = 1 - half
            stage += 1
            if stage == STAGES:
                stage = cutlass.Int32(0)

    @cute.jit
    def prefetch(self, load, thread, mX, mShift, sRing, row, stage, rows):
        """Set this thread's vectors of a row on their way; an empty group where there is no such row."""
        if row < rows:
            copy = load.get_slice(thread)
            cute.copy(load, copy.partition_S(mX[row, None]), copy.partition_D(sRing[2 * stage, None]))
            cute.copy(load, copy.partition_S(mShift[row, None]), copy.partition_D(sRing[2 * stage + 1, None]))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def read(self, copy, mV):
        """This thread's vectors of a line, float32."""
        tV = copy.partition_S(mV)
        rV = cute.make_fragment_like(tV)
        cute.autovec_copy(tV, rV)
        return rV.load().to(cutlass.Float32)

    @cute.jit
    def write(self, copy, mV, value):
        """Store this thread's vectors of a line; returns them as they are stored, in float32."""
        tV = copy.partition_D(mV)
        rV = cute.make_fragment_like(tV)
        rV.store(value.to(mV.element_type))
        cute.autovec_copy(rV, tV)
        return rV.load().to(cutlass.Float32)

    @cute.jit
    def gate(self, copy, mWeight, mScale):
        """What the first norm is multiplied by."""
        return self.read(copy, mWeight) * cute.math.tanh(self.read(copy, mScale))

    @cute.jit
    def gate2(self, copy, mWeight2, mScale2):
        """What the second norm is multiplied by."""
        return self.read(copy, mWeight2) * (self.read(copy, mScale2) + 1.0)

    @cute.jit
    def squares(self, values):
        """Sum of this thread's squares."""
        return (values * values).reduce(cute.ReductionOp.ADD, init_val=cutlass.Float32(0.0), reduction_profile=0)

    @cute.jit
    def total(self, value, sSums, half, thread):
        """Sum over the block's threads; `half` is the half of sSums that the last call did not use."""
        value = cute.arch.warp_reduction_sum(value)
        if thread % WARP == 0:
            sSums[half, thread // WARP] = value
        cute.arch.sync_threads()
        value = cutlass.Float32(0.0)
        for warp in cutlass.range_constexpr(self.warps):
            value += sSums[half, warp]
        return value

    @cute.jit
    def inverse(self, squares, eps):
        """1 / sqrt(mean square + eps), of the row's sum of squares."""
        return cute.math.rsqrt(squares * (1.0 / self.columns) + eps)


@cache
def compiled(dtype: torch.dtype, columns: int, double: bool, options: str = "") -> Callable[..., Any]:
    """The kernel as a function of tensors, eps and the number of blocks."""
    item = DTYPES[dtype]

    def fake(*shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(item, shape, stride_order=order, assumed_align=16)

    batch, tokens = cute.sym_int(), cute.sym_int()
    whole, line, one = fake(batch, tokens, columns), fake(columns), fake(1, 1, columns)
    second = (whole, line, one) if double else (None, None, None)
    y2, weight2, scale2 = second
    eps, blocks = cutlass.Float32(0.0), cutlass.Int32(1)
    arguments = (whole, y2, whole, line, one, whole, weight2, scale2, eps, blocks, environment_stream())
    return compile_cute(Kernel(columns, double), *arguments, options=options)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def fused_norm_tanh_mul_add(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Norm x, times the tanh of scale, plus shift, where the module covers the call; ValueError elsewhere."""
    check(norm_type, bias, x=(x, shift), weight=(weight,), scale=(scale,))
    y = torch.empty_like(x)
    if x.numel():
        blocks = min(x.shape[0] * x.shape[1], BLOCKS_PER_SM * multiprocessors(x.device))
        compiled(x.dtype, x.shape[2], False)(y, None, x, weight, scale, shift, None, None, eps, blocks)
    return y


def fused_norm_tanh_mul_add_norm_scale(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight2: torch.Tensor | None,
    bias2: torch.Tensor | None,
    scale2: torch.Tensor,
    norm_type: str,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as y, and norm(y) * (1 + scale2)."""
    check(norm_type, bias, bias2, x=(x, shift), weight=(weight, weight2), scale=(scale, scale2))
    y, y2 = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        blocks = min(x.shape[0] * x.shape[1], BLOCKS_PER_SM * multiprocessors(x.device))
        kernel = compiled(x.dtype, x.shape[2], True)
        kernel(y, y2, x, weight, scale, shift, weight2, scale2, eps, blocks)
    return y, y2


def check(norm_type: str, *biases: torch.Tensor | None, **tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Raise ValueError for what the module does not cover; `tensors` are like x, a weight or a one-line scale."""
    (x, _) = tensors["x"]
    shapes = {"x": x.shape, "weight": x.shape[-1:], "scale": (1, 1, *x.shape[-1:])}
    fits = norm_type == "rms" and x.dim() == 3 and x.dtype in DTYPES and all(bias is None for bias in biases)
    fits = fits and x.shape[-1] % COLUMNS_STEP == 0 and 0 < x.shape[-1] <= MAX_COLUMNS
    fits = fits and x.numel() < 2**31  # offsets have 32 bits
    for name, group in tensors.items():
        for tensor in group:
            fits = fits and tensor is not None and tensor.shape == shapes[name]
            fits = fits and tensor.dtype == x.dtype and tensor.is_contiguous()
    if not fits:
        raise ValueError(
            "lab.cutedsl: expected a call like the frozen rows (norm_type 'rms', x and shift [B, S, D], weights [D], "
            "scales [1, 1, D], contiguous, one 16-bit dtype, no bias), got another; use the arm `solution`"
        )
