"""RMSNorm of every row, with the residual added first or alone: one Triton kernel, launched directly.

    fused_add_rmsnorm:  residual <- input + residual,  input <- residual / sqrt(mean(residual^2) + eps) * weight
    rmsnorm:            out <- input / sqrt(mean(input^2) + eps) * weight

Over a row, in float32; what is normalised is the sum before it is rounded to be stored.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/norm.py` (Apache-2.0); the code is our own.

Idea: a decoded batch has a few rows and is bound by latency: a row is one load, one reduction, one store. So a row is
spread over as many warps as give each thread one or a few 16-byte vectors; all loads, also those of weight, are issued
before the first use; and the grid is set up while the kernel ahead drains. A prefill streams: there the threads of a
program may hold several rows, which are reduced together and share the weight; or each of several warps may hold a row
of its own, which needs no barrier. The table says which, by width and rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.broadcast import row_stride
from kda_runtime.checks import Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead, load_chunk, load_row, store_chunk, vector_width, widen
from kda_runtime.tuned_table import Table

MAX_COLUMNS = 16384
"""The widest row that upstream takes; 32 warps hold it in 16 registers of float32 a thread."""
MAX_WARPS = 32
PREFETCHING = 16
"""Largest grid whose programs prefetch weight. Behind matrix products that evict weight from the L2, a prefetch hides
its latency in calls of one to sixteen rows with a residual. In larger grids, and without a residual, the requests cost
more than they hide (dispatch.md)."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. A row is spread over as few warps, a power of two, as hold it in `vectors` per thread."""

    vectors: int
    """Most 16-byte vectors of a row that a thread holds."""
    rows: int = 1
    """Rows that the same threads hold and reduce together."""
    beside: int = 1
    """Groups of warps in a program, each with rows of its own."""
    early: bool = True
    """Multiply by weight before the reduction, not after it."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x and residual, or `evict_first`."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "rmsnorm", Config)
"""Tuned configurations, chosen by `width` (columns) and `rows`."""


# --- kernel


@triton.jit
def prefetch(line, N: tl.constexpr, EACH: tl.constexpr):
    """Ask the L2 for N elements from `line` on, EACH of them a thread."""
    pieces = tl.arange(0, triton.next_power_of_2((N + EACH - 1) // EACH))
    place = line + tl.minimum(pieces * EACH, N - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    out,  # [ROWS, N]; None for x
    residual,  # [ROWS, N], also an output; or None
    x,  # [ROWS, N]
    weight,  # [N]
    rows,  # number of rows; None where every program is full
    # Strides and eps are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    OUT_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a chunk
    ROWS: tl.constexpr,
    REPEAT: tl.constexpr,  # load weight for every row of the tile
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,  # elements of weight that a thread asks the L2 for, or 0
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: ROWS whole rows, each in ceil(N / BLOCK) chunks."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    FAR: tl.constexpr = max(OUT_STRIDE, RESIDUAL_STRIDE, X_STRIDE) * ROWS >= 2**31
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    inside = None if rows is None else first + row < rows
    # The offset of a program's first row takes 64 bits; from there 32 are enough, unless rows are very far apart.
    if FAR:
        row = row.to(tl.int64)
    x += first * X_STRIDE
    if out is None:
        out = x
    else:
        out += first * OUT_STRIDE
    col = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    # Where the threads hold several rows side by side, weight is loaded for each row: every thread loads the vector
    # that it needs. A single row of weight would be loaded value by value and spread through shared memory.
    across = col + 0 * row if REPEAT else col

    if PREFETCH:
        # If the kernel ahead, a matrix product, has filled the L2, weight comes from memory. A prefetch reads no value,
        # so it need not wait for that kernel.
        prefetch(weight, N, PREFETCH)
    follow_the_kernel_ahead(PDL)

    # All loads first: they are in flight together.
    loaded = load_row(x + row * X_STRIDE, col, inside, N, BLOCK, LOAD)
    if residual is not None:
        residual += first * RESIDUAL_STRIDE
        added = load_row(residual + row * RESIDUAL_STRIDE, col, inside, N, BLOCK, LOAD)
    if EARLY:
        weights = load_row(weight, across, None, N, BLOCK, "")

    # The residual is stored before the reduction, whose latency hides the stores.
    held = ()
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        value = widen(loaded[chunk])  # [ROWS, BLOCK]
        if residual is not None:
            value += widen(added[chunk])
            store_chunk(residual + row * RESIDUAL_STRIDE, value, col, inside, chunk, N, BLOCK, STORE)
        # Chunks are added element by element first: one reduction across threads, and short sums.
        squares += value * value
        # Through the reduction registers hold one product, instead of a value and its weight.
        if EARLY:
            value *= widen(weights[chunk])
        held += (value,)
    scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) * (1.0 / N) + EPS)  # [ROWS, 1]

    for chunk in tl.static_range(CHUNKS):
        value = held[chunk] * scale
        if not EARLY:
            value *= widen(load_chunk(weight, across, None, chunk, N, BLOCK, ""))
        store_chunk(out + row * OUT_STRIDE, value, col, inside, chunk, N, BLOCK, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call of any of the ops, in the kernel's order."""

    out: torch.Tensor | None
    residual: torch.Tensor | None
    input: torch.Tensor
    weight: torch.Tensor
    eps: float


def warps_of_a_row(width: int, warp: int, vectors: int) -> int:
    """Warps that hold a row in at most `vectors` per thread; with one vector per thread a warp holds `warp` columns."""
    return min(triton.next_power_of_2(triton.cdiv(triton.cdiv(width, warp), vectors)), MAX_WARPS)


def prefetched(width: int, item_size: int, warps: int) -> int:
    """Elements of a row that each thread prefetches: 16 to 128 bytes, so that every thread has a part of its own.

    With a line of 128 bytes for each, threads beyond the lines would repeat the others' requests, a warp 32 of them.
    """
    share = triton.next_power_of_2(triton.cdiv(width * item_size, 32 * warps))
    return min(max(share, 16), 128) // item_size


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, residual = call.input, call.residual
    out = x if call.out is None else call.out
    width = x.shape[-1]
    rows = x.numel() // width
    major = capability(x)
    config = TUNED.select(major, width=width, rows=rows)
    warp = vector_width(1, x.itemsize)  # columns that a warp holds in one vector per thread
    spread = warps_of_a_row(width, warp, config.vectors)
    warps = min(spread * config.beside, MAX_WARPS)
    block = min(triton.next_power_of_2(width), spread * warp)
    tile = warps // spread * config.rows * (spread * warp // block)
    programs = triton.cdiv(rows, tile)
    pdl = config.pdl and pdl_works(rmsnorm_kernel, major)
    prefetches = pdl and residual is not None and programs <= PREFETCHING
    return Launch.make(
        rmsnorm_kernel,
        (programs,),
        call.out,
        residual,
        x,
        call.weight,
        rows if rows % tile else None,
        OUT_STRIDE=row_stride(out),
        RESIDUAL_STRIDE=0 if residual is None else row_stride(residual),
        X_STRIDE=row_stride(x),
        EPS=float(call.eps),
        N=width,
        BLOCK=block,
        ROWS=tile,
        REPEAT=block < warps * warp,
        EARLY=config.early,
        PREFETCH=prefetched(width, x.itemsize, warps) if prefetches else 0,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=warps,
        launch_pdl=pdl,
    )


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the ops have no meaning for."""
    shape = list(call.input.shape)
    expect(len(shape) > 0 and shape[-1] > 0, "input", "one dimension or more [..., columns], with columns", shape)
    for name, tensor in given(call).items():
        wanted, why = (shape[-1:], "") if name == "weight" else (shape, ", as input")
        expect(list(tensor.shape) == wanted, name, f"shape {wanted}{why}", list(tensor.shape))
        expect(name == "weight" or tensor.dtype == call.input.dtype, name, f"dtype {call.input.dtype}", tensor.dtype)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    width = call.input.shape[-1]
    if width > MAX_COLUMNS:
        return f"a row has {width} columns; the kernel takes up to {MAX_COLUMNS}"
    for name, tensor in given(call).items():
        if name == "weight":
            continue
        step = row_stride(tensor)
        if step is None or (tensor.numel() > width and step < width):
            where = f"shape {list(tensor.shape)} and strides {tensor.stride()}"
            return f"{name} has {where}; the kernel steps evenly from row to row"
    return unfit(given(call)) or scattered(given(call))


def _plain(call: Call) -> None:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x = call.input
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide)
    if call.residual is not None:
        total = total + call.residual.to(wide)
        call.residual.copy_(total)
    y = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + call.eps) * call.weight.to(wide)
    (x if call.out is None else call.out).copy_(y)


# --- public functions

_op = partial(
    Op[Call], arguments=Call, kernel=rmsnorm_kernel, plan=plan, plain=_plain, check=_check, uncovered=_uncovered
)
FUSED = _op("fused_add_rmsnorm", mutates=("input", "residual"), required=("residual",))
INTO = _op("rmsnorm", mutates=("out",), required=("out",))
INPLACE = _op("rmsnorm_inplace", mutates=("input",))
"""`rmsnorm` over its input. Tracers need a tensor that is both read and written to be one argument."""


@FUSED.public
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """Add input to residual in place, and write the RMSNorm of the sum over input.

    Args:
        input: [..., columns], float16, bfloat16 or float32; the last stride is 1, rows are evenly spaced.
        residual: likewise, of input's shape and dtype.
        weight: [columns].
        eps: added to the mean square.

    Other dtypes, wider rows than 16384 columns, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    FUSED.call(None, residual, input, weight, eps)


def _rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, eps: float = 1e-6
) -> Call | str:
    return Call(input if out is None else out, None, input, weight, eps)


@INTO.also(_rmsnorm)
def rmsnorm(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, eps: float = 1e-6) -> None:
    """Write the RMSNorm of input's rows into out, or over input.

    Args:
        input: [..., columns], float16, bfloat16 or float32; the last stride is 1, rows are evenly spaced.
        weight: [columns].
        out: likewise, of input's shape and dtype; None for input.
        eps: added to the mean square.

    Other dtypes, wider rows than 16384 columns, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if out is None or out is input:
        INPLACE.call(None, None, input, weight, eps)
    else:
        INTO.call(out, None, input, weight, eps)
