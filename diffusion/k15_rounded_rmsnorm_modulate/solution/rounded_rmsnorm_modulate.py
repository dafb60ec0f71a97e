"""RMSNorm without weights and its modulations, of x or of a gated residual, with the bits of PyTorch's chain.

With r() for rounding to x's dtype, and all else in float32:

    h = x,   or   h = r(residual + r(x * gate)),   or   h = r(residual + x)
    n = r(h * (1 / sqrt(mean(h^2) + eps)))                                         over the last dimension
    y = r(r(n * r(1 + scale)) + shift)                                             for each pair of scale and shift

Upstream's bits are the contract, so the order of the sum is part of the op: see `mean_of_squares`.

Source of the semantics: SGLang 0.5.23, `runtime/models/dits/ltx_2.py` and its `residual_gate_add` (Apache-2.0), and
PyTorch's RMSNorm, whose order of sums it follows; the code is our own.

Idea: the op only streams. Upstream writes the sum and reads it for the norm, writes the norm and reads it for each
modulation. Here a program holds one row in registers: each input is read once, each result is written once. A thread
holds the elements of one, two or four of PyTorch's threads, so the long part of the sum happens in its registers.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead
from kda_runtime.tuned_table import Table

# --- configuration and selection

STEP, MOST_COLUMNS = 512, 8192
"""Columns are a multiple of the first, which PyTorch's 128 threads read at a time, four each."""
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    """Warps of a row: 1, 2 or 4, whose threads stand for four, two or one of PyTorch's."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""


TUNED = Table(__file__, "rounded_rmsnorm_modulate", Config)
"""Tuned configurations, chosen by `bytes` of x."""


# --- kernel


@triton.jit
def rounded_rmsnorm_modulate_kernel(
    y,  # [B, TOKENS, N], as all tensors up to x
    other,  # the second modulation, or None
    h,  # the sum; None without a residual
    residual,
    x,
    gate,  # one row for each batch, as the four below; any may be None
    scale,
    shift,
    other_scale,
    other_shift,
    tokens,
    GATE: tl.constexpr,  # elements from one batch's row to the next; 0 if there is one batch alone
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    OTHER_SCALE: tl.constexpr,
    OTHER_SHIFT: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row."""
    CHUNKS: tl.constexpr = N // 512
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    batch = row // tokens
    line = row * N + tl.arange(0, 512)  # offsets of the row's first chunk

    follow_the_kernel_ahead(PDL)

    # The operands come before the row, so that none is waited for after the norm.
    gates, shifts = load_row(gate, batch * GATE, N), load_row(shift, batch * SHIFT, N)
    other_shifts = load_row(other_shift, batch * OTHER_SHIFT, N)
    factors, other_factors = load_factors(scale, batch * SCALE, N), load_factors(other_scale, batch * OTHER_SCALE, N)
    values, residuals = load_row(x, row * N, N), load_row(residual, row * N, N)

    sums = ()
    for chunk in tl.static_range(CHUNKS):
        value = values[chunk]
        if residual is not None:
            if gate is not None:
                value = (value.to(tl.float32) * gates[chunk].to(tl.float32)).to(dtype)
            value = (residuals[chunk].to(tl.float32) + value.to(tl.float32)).to(dtype)
            tl.store(h + line + chunk * 512, value)
        sums += (value,)
    inverse = tl.rsqrt(mean_of_squares(sums, N) + EPS)

    for chunk in tl.static_range(CHUNKS):
        n = (inverse * sums[chunk].to(tl.float32)).to(dtype)
        tl.store(y + line + chunk * 512, modulated(n, factors, shifts, chunk))
        if other is not None:
            tl.store(other + line + chunk * 512, modulated(n, other_factors, other_shifts, chunk))


@triton.jit
def load_row(start, offset, N: tl.constexpr):
    """All chunks of the row at `start + offset`, as a tuple; empty where `start` is None."""
    chunks = ()
    if start is not None:
        for chunk in tl.static_range(N // 512):
            chunks += (tl.load(start + offset + chunk * 512 + tl.arange(0, 512)),)
    return chunks


@triton.jit
def load_factors(start, offset, N: tl.constexpr):
    """The same of 1 + scale, rounded."""
    chunks = ()
    if start is not None:
        for chunk in tl.static_range(N // 512):
            scale = tl.load(start + offset + chunk * 512 + tl.arange(0, 512))
            chunks += ((1.0 + scale.to(tl.float32)).to(scale.dtype),)
    return chunks


@triton.jit
def modulated(n, factors, shifts, chunk: tl.constexpr):
    """A chunk of n, times its factor, plus its shift, each rounded; n itself if there are no factors."""
    if len(factors) > 0:
        product = (n.to(tl.float32) * factors[chunk].to(tl.float32)).to(n.dtype)
        n = (product.to(tl.float32) + shifts[chunk].to(tl.float32)).to(n.dtype)
    return n


@triton.jit
def mean_of_squares(chunks, N: tl.constexpr):
    """The mean of the squares of a row, in the order of PyTorch's sum.

    Thread t of 128 adds the squares of the elements 4t to 4t + 3 of each chunk, one after another; the square of a
    16-bit number is exact. Its threads are then added in pairs: within a warp t with t + 16, then + 8, + 4, + 2, + 1,
    then warps 0 and 2, 1 and 3, and these two.
    """
    total = tl.zeros([128], tl.float32)
    for chunk in tl.static_range(N // 512):
        value = chunks[chunk].to(tl.float32)
        even, odd = tl.split(tl.reshape(value, 128, 2, 2))
        first, third = tl.split(even)  # [128]
        second, fourth = tl.split(odd)
        total = tl.fma(first, first, total)
        total = tl.fma(second, second, total)
        total = tl.fma(third, third, total)
        total = tl.fma(fourth, fourth, total)
    # One sum of two at a time: a single sum of 128 may have another order, as it has in the interpreter.
    total = tl.sum(tl.reshape(total, 4, 2, 16), axis=1)
    total = tl.sum(tl.reshape(total, 4, 2, 8), axis=1)
    total = tl.sum(tl.reshape(total, 4, 2, 4), axis=1)
    total = tl.sum(tl.reshape(total, 4, 2, 2), axis=1)
    total = tl.sum(total, axis=1)  # [4], one for each of PyTorch's warps
    total = tl.sum(tl.sum(tl.reshape(total, 2, 2), axis=0), axis=0)
    if N & (N - 1) == 0:
        return total * (1.0 / N)  # exact
    else:
        return tl.div_rn(total, 1.0 * N)


# --- plan


class Call(NamedTuple):
    """The arguments of one call of any of the ops, in the order of the one with two modulations."""

    residual: torch.Tensor | None
    x: torch.Tensor
    gate: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    other_scale: torch.Tensor | None
    other_shift: torch.Tensor | None
    eps: float


OPERANDS = ("gate", "scale", "shift", "other_scale", "other_shift")
"""Arguments of one row for each batch."""


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x = call.x
    batch, tokens, columns = x.shape
    major = capability(x)
    config = TUNED.select(major, bytes=x.nbytes)
    pdl = config.pdl and pdl_works(rounded_rmsnorm_modulate_kernel, major)
    return Launch.make(
        rounded_rmsnorm_modulate_kernel,
        (batch * tokens,),
        x,  # of the outputs a launch only wants the dtype
        None if call.other_scale is None else x,
        None if call.residual is None else x,
        *call[:-1],
        tokens,
        **{name.upper(): _step(getattr(call, name), batch) for name in OPERANDS},
        EPS=float(call.eps),
        N=columns,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,  # ptxas would make one rounding of a rounded product and a sum
    )


def _step(operand: torch.Tensor | None, batch: int) -> int:
    """Elements from one batch's row to the next."""
    return 0 if operand is None or batch == 1 else operand.stride(0)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the ops have no meaning for."""
    x = call.x
    expect(x.dim() == 3, "x", "3 dimensions [B, S, D]", list(x.shape))
    batch, _, columns = x.shape
    shapes = {"residual": list(x.shape)} | {name: [batch, 1, columns] for name in OPERANDS}
    for name, shape in shapes.items():
        tensor = getattr(call, name)
        if tensor is not None:
            expect(list(tensor.shape) == shape, name, f"shape {shape}", list(tensor.shape))
            expect(tensor.dtype == x.dtype, name, f"dtype {x.dtype}, as x", tensor.dtype)
    if call.scale is None or call.shift is None:
        expect(call.scale is call.shift, "shift", "a tensor with scale, None without", _kind(call.shift))


def _kind(value: object) -> str:
    return "None" if value is None else "a tensor"


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    x = call.x
    if x.dtype not in DTYPES:
        return f"x has dtype {x.dtype}; the kernel takes float16 and bfloat16"
    if x.shape[-1] % STEP or x.shape[-1] > MOST_COLUMNS:
        return f"x has {x.shape[-1]} columns; the kernel takes multiples of {STEP} up to {MOST_COLUMNS}"
    for name in ("x", "residual"):
        tensor = getattr(call, name)
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} is not contiguous, its strides are {tensor.stride()}"
    return scattered(given(call)) or unfit(given(call))


def _plain(call: Call) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same chain of PyTorch's operators, which round each, for whatever the kernel does not cover."""
    h = call.x
    if call.residual is not None:
        h = call.residual + (h if call.gate is None else h * call.gate)
    n = torch.nn.functional.rms_norm(h, h.shape[-1:], eps=call.eps)
    pairs = [(call.scale, call.shift)] + [(call.other_scale, call.other_shift)] * (call.other_scale is not None)
    y = [n if scale is None or shift is None else n * (1 + scale) + shift for scale, shift in pairs]
    results = tuple(one.contiguous() for one in (*y, *[h] * (call.residual is not None)))
    return results if len(results) > 1 else results[0]


# --- public functions

_op = partial(
    Op,
    arguments=Call,
    kernel=rounded_rmsnorm_modulate_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    contiguous=True,
    exact=(plan, _plain),
)
SINGLE = _op("rounded_rmsnorm_modulate", outputs=("x",), required=("scale", "shift"))
WITH_RESIDUAL = _op("rounded_residual_rmsnorm_modulate", outputs=("x", "x"), required=("residual",))
WITH_TWO = _op(
    "rounded_residual_rmsnorm_modulate2",
    outputs=("x", "x", "x"),
    required=("residual", "scale", "shift", "other_scale", "other_shift"),
)


@SINGLE.public
def rounded_rmsnorm_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x without weights, times 1 + scale, plus shift, rounded after each of them.

    Args:
        x: [B, S, D], float16 or bfloat16, contiguous; the kernel takes D in multiples of 512 up to 8192.
        scale: [B, 1, D], x's dtype; rows may lie apart.
        shift: likewise.
        eps: added to the mean square.

    Returns:
        A new tensor like x: bit for bit `rms_norm(x, (D,), eps=eps) * (1 + scale) + shift`, as PyTorch computes it of
        aligned tensors on a GPU.

    Other dtypes, sizes and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    result: torch.Tensor = SINGLE.call(None, x, None, scale, shift, None, None, eps)
    return result


@WITH_RESIDUAL.public
def rounded_residual_rmsnorm_modulate(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for h = residual + x * gate instead of x; the product is rounded, and so is the sum.

    `residual` is as x. `gate` is as `scale`, or None for 1. With scale and shift None the norm is not modulated. The
    others are as above, and so are errors.

    Returns:
        y and h, new tensors like x.
    """
    result: tuple[torch.Tensor, torch.Tensor] = WITH_RESIDUAL.call(residual, x, gate, scale, shift, None, None, eps)
    return result


@WITH_TWO.public
def rounded_residual_rmsnorm_modulate2(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    other_scale: torch.Tensor,
    other_shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with a second modulation of the same norm, by `other_scale` and `other_shift`.

    Returns:
        y, the other modulation, and h, new tensors like x.
    """
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = WITH_TWO.call(
        residual, x, gate, scale, shift, other_scale, other_shift, eps
    )
    return result
