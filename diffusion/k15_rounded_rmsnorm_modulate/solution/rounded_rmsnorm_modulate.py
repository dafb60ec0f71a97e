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
    rows: int = 1
    """Rows of a program, one after another, which share what it loads of gate, scale and shift. With several batches a
    program takes one."""
    ahead: bool = False
    """Gate, scale and shift are loaded before the row; else each where it is used. Several rows always have them so."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x and residual: with `.cg` they leave the L1 to what programs share."""
    store: str = ""
    """Cache modifier of the stores."""
    early: bool = False
    """A barrier makes the compiler issue all loads of the row before the first use; else it saves registers."""


TUNED = Table(__file__, "rounded_rmsnorm_modulate", Config)
"""Tuned configurations, chosen by `bytes` of x."""


# --- kernel


@triton.jit(do_not_specialize=["rows"])
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
    rows,  # B * TOKENS, None where the programs' rows divide it
    GATE: tl.constexpr,  # elements from one batch's row to the next; 0 if there is one batch alone
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    OTHER_SCALE: tl.constexpr,
    OTHER_SHIFT: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,  # 1 if there are several batches
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to ROWS rows."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // tokens if ROWS == 1 else 0
    col = tl.arange(0, 512)
    gates = None if gate is None else gate + batch * GATE + col
    scales = None if scale is None else scale + batch * SCALE + col
    shifts = None if shift is None else shift + batch * SHIFT + col
    other_scales = None if other_scale is None else other_scale + batch * OTHER_SCALE + col
    other_shifts = None if other_shift is None else other_shift + batch * OTHER_SHIFT + col

    follow_the_kernel_ahead(PDL)

    if AHEAD:
        gates, shifts = load_row(gates, N, ""), load_row(shifts, N, "")
        other_shifts = load_row(other_shifts, N, "")
        scales, other_scales = load_factors(scales, N), load_factors(other_scales, N)
    for number in range(ROWS):
        row = program * ROWS + number
        if rows is None or row < rows:
            line = row * N + col
            write_row(
                y, other, h, residual, x, gates, scales, shifts, other_scales, other_shifts, line,
                EPS, N, AHEAD, EARLY, LOAD, STORE,
            )  # fmt: skip


@triton.jit
def write_row(
    y,
    other,
    h,
    residual,
    x,
    gates,  # as the four below: if HELD the chunks of the row, else where it begins
    factors,  # 1 + scale if HELD, else scale
    shifts,
    other_factors,
    other_shifts,
    line,  # offsets of the row's first chunk
    EPS: tl.constexpr,
    N: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One row of every output."""
    CHUNKS: tl.constexpr = N // 512
    dtype: tl.constexpr = y.dtype.element_ty
    values = load_row(x + line, N, LOAD)
    if residual is not None:
        residuals = load_row(residual + line, N, LOAD)
        if not HELD:
            gates = load_row(gates, N, "")
    if EARLY:
        tl.debug_barrier()

    sums = ()
    for chunk in tl.static_range(CHUNKS):
        value = values[chunk]
        if residual is not None:
            if len(gates) > 0:
                value = (value.to(tl.float32) * gates[chunk].to(tl.float32)).to(dtype)
            value = (residuals[chunk].to(tl.float32) + value.to(tl.float32)).to(dtype)
            tl.store(h + line + chunk * 512, value, cache_modifier=STORE)
        sums += (value,)
    inverse = tl.rsqrt(mean_of_squares(sums, N) + EPS)

    for chunk in tl.static_range(CHUNKS):
        n = (inverse * sums[chunk].to(tl.float32)).to(dtype)
        store_modulated(y + line, n, factors, shifts, chunk, HELD, STORE)
        if other is not None:
            store_modulated(other + line, n, other_factors, other_shifts, chunk, HELD, STORE)


@triton.jit
def load_row(line, N: tl.constexpr, CACHE: tl.constexpr):
    """All chunks of a row, as a tuple; empty where `line` is None."""
    chunks = ()
    if line is not None:
        for chunk in tl.static_range(N // 512):
            chunks += (tl.load(line + chunk * 512, cache_modifier=CACHE),)
    return chunks


@triton.jit
def load_factors(line, N: tl.constexpr):
    """The same of 1 + scale, rounded."""
    chunks = ()
    if line is not None:
        for chunk in tl.static_range(N // 512):
            chunks += (load_factor(line, chunk),)
    return chunks


@triton.jit
def load_factor(line, chunk: tl.constexpr):
    """A chunk of 1 + scale, rounded."""
    scale = tl.load(line + chunk * 512)
    return (1.0 + scale.to(tl.float32)).to(scale.dtype)


@triton.jit
def store_modulated(target, n, factors, shifts, chunk: tl.constexpr, HELD: tl.constexpr, STORE: tl.constexpr):
    """Store a chunk of n, modulated if there is a scale; each of the operations rounds."""
    if HELD:
        if len(factors) > 0:
            n = modulated(n, factors[chunk], shifts[chunk])
    elif factors is not None:
        n = modulated(n, load_factor(factors, chunk), tl.load(shifts + chunk * 512))
    tl.store(target + chunk * 512, n, cache_modifier=STORE)


@triton.jit
def modulated(n, factor, shift):
    """Times factor, plus shift, each rounded."""
    product = (n.to(tl.float32) * factor.to(tl.float32)).to(n.dtype)
    return (product.to(tl.float32) + shift.to(tl.float32)).to(n.dtype)


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
    rows = config.rows if batch == 1 else 1  # those of a program share their operands
    pdl = config.pdl and pdl_works(rounded_rmsnorm_modulate_kernel, major)
    return Launch.make(
        rounded_rmsnorm_modulate_kernel,
        (triton.cdiv(batch * tokens, rows),),
        x,  # of the outputs a launch only wants the dtype
        None if call.other_scale is None else x,
        None if call.residual is None else x,
        *call[:-1],
        tokens,
        batch * tokens if batch * tokens % rows else None,
        **{name.upper(): _step(getattr(call, name), batch) for name in OPERANDS},
        EPS=float(call.eps),
        N=columns,
        ROWS=rows,
        AHEAD=config.ahead or rows > 1,
        EARLY=config.early,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
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
