"""The attention's columns, then the tanh GELU of the MLP's, as one tensor: one Triton kernel, launched directly.

    y = [attn, gelu(mlp)]                                                                   [..., A + M]
    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))        in float32, rounded to x's dtype once

Source of the semantics: `nn.GELU(approximate="tanh")` and `torch.cat` in the single-stream blocks of SGLang's
hunyuanvideo.py and flux.py, and the signature of SGLang 0.5.23's
`kernels/ops/diffusion/activation/gelu_tanh_cat_jit.py` (Apache-2.0); the code is our own.

Idea: the op only streams, so every byte is read once and written once, and mlp is read where it lies: it may be a
stretch of columns of a wider projection. A program takes either columns of attn, which it copies, or columns of mlp.

The bits are those of PyTorch's two kernels. So tanh has to equal CUDA's `tanhf` to the last bit. The library function
branches for every element, so that a thread's elements wait for each other. Here both of its formulas are computed and
one is chosen, so that the elements of a thread run side by side.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from kda_runtime.broadcast import row_stride
from kda_runtime.checks import Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import even_share, follow_the_kernel_ahead, load_tile, store_tile, vector_width, widen
from kda_runtime.tuned_table import Table

# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many columns as the program's threads hold in one 16-byte vector each."""

    warps: int
    tiles: int = 1
    """Most tiles of a row in a program."""
    rows: int = 1
    """Rows of a program. A thread has at most rows * tiles loads in flight."""
    library: bool = False
    """tanh by the library function, with its branches, instead of both formulas and a choice; the bits are the same."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "gelu_cat", Config)
"""Tuned configurations, chosen by `bytes` (of the output)."""


# --- kernel


@triton.jit
def half_tanh(x, MANNER: tl.constexpr):
    """tanh(2 x) / 2 of float32 values, with the bits of CUDA's `tanhf`.

    The factors 2 and 1 / 2 change no rounding, and save the caller a product. MANNER `library` calls the library
    function, `chosen` computes both of its formulas, and `interpreted` is `chosen` without machine instructions: good
    to a few units in the last place.
    """
    if MANNER == "library":
        return 0.5 * libdevice.tanh(2.0 * x)
    # tanh(u) of |u| from 0.6 on: 1 - 2 / (e^(2|u|) + 1), with the sign of u.
    more = tl.exp2(tl.abs(x) * (2 * 2.885390043258667)) + 1.0
    if MANNER == "chosen":
        share = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [more], tl.float32, is_pure=True, pack=1
        )
    else:
        share = 1.0 / more
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    large = ((0.5 - share).to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    # tanh(u) of smaller |u|: u + u^3 * polynomial(u^2). The coefficients contain the factors that u = 2 x gives.
    square = x * x
    series = tl.fma(square, 256 * 0.01573968306183815, 64 * -0.05230396240949631)
    series = tl.fma(series, square, 16 * 0.13315297663211823)
    series = tl.fma(series, square, 4 * -0.33332768082618713) * square
    return tl.where(tl.abs(x) >= 0.6000000238418579 / 2, large, tl.fma(series, x, x))  # NaN takes the second


@triton.jit
def gelu_tanh(value, MANNER: tl.constexpr):
    """Tanh GELU in float32: every operation rounds like its counterpart in PyTorch's kernel."""
    x = widen(value)
    half = 0.7978845834732056 / 2 * tl.fma(x * x * x, 0.044714998453855515, x)
    return x * (0.5 + half_tanh(half, MANNER))


class Part(NamedTuple):
    """The columns of one input, a constant of the kernel: what is fixed per model then costs the host nothing."""

    width: int
    stride: int
    """Elements from row to row."""
    tiles: int
    """Tiles of a row in a program."""
    programs: int
    """Programs that share a row."""


@triton.jit(do_not_specialize=["rows"])
def gelu_tanh_cat_kernel(
    y,  # [ROWS, ATTN.width + MLP.width]
    attn,  # [ROWS, ATTN.width]
    mlp,  # [ROWS, MLP.width]
    rows,  # None where the programs' rows divide it
    ATTN: tl.constexpr,  # a `Part`
    MLP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,  # columns of a tile
    MANNER: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to ROWS rows of up to `tiles` tiles, all of attn or all of mlp."""
    PARTS: tl.constexpr = ATTN.programs + MLP.programs
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    inside = None if rows is None else row < rows
    row = row.to(tl.int64)
    line = y + row * (ATTN.width + MLP.width)  # [ROWS, 1]

    follow_the_kernel_ahead(PDL)

    if part < ATTN.programs:
        stream(line, attn + row * ATTN.stride, part, inside, ATTN, COLS, "", STORE)
    else:
        part -= ATTN.programs
        stream(line + ATTN.width, mlp + row * MLP.stride, part, inside, MLP, COLS, MANNER, STORE)


@triton.jit
def stream(
    target,  # where rows of the output begin, [ROWS, 1]
    source,  # the same of the input
    part,  # which of the programs that share a row
    inside,
    PART: tl.constexpr,
    COLS: tl.constexpr,
    MANNER: tl.constexpr,
    STORE: tl.constexpr,
):
    """Copy the program's tiles, or their GELU if MANNER is not empty."""
    TILES: tl.constexpr = PART.tiles
    PARTIAL: tl.constexpr = PART.width % (TILES * COLS) != 0
    first = part * (TILES * COLS) + tl.arange(0, COLS)[None, :]  # [1, COLS]
    # Loads of all tiles first: as many are in flight as the assembler leaves there (docs/dispatch.md).
    loaded = ()
    for tile in tl.static_range(TILES):
        loaded += (load_tile(source, first + tile * COLS, inside, PART.width, PARTIAL, ""),)  # [ROWS, COLS]
    for tile in tl.static_range(TILES):
        value = loaded[tile]
        if MANNER != "":
            value = gelu_tanh(value, MANNER).to(target.dtype.element_ty)
        store_tile(target, value, first + tile * COLS, inside, PART.width, PARTIAL, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call."""

    attn: torch.Tensor
    mlp: torch.Tensor


def output_of(call: Call) -> torch.Tensor:
    """A tensor of the output's shape and dtype, with one element of memory."""
    columns = call.attn.shape[-1] + call.mlp.shape[-1]
    return call.attn.new_empty(()).expand(*call.attn.shape[:-1], columns)


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    attn, mlp = call
    rows, y = attn.shape[:-1].numel(), output_of(call)
    major = capability(attn)
    config = TUNED.select(major, bytes=y.numel() * y.itemsize)
    cols = vector_width(config.warps, attn.itemsize)
    parts = cut(attn, cols, config.tiles), cut(mlp, cols, config.tiles)
    manner = "library" if config.library else "chosen"
    pdl = config.pdl and pdl_works(gelu_tanh_cat_kernel, major)
    return Launch.make(
        gelu_tanh_cat_kernel,
        (triton.cdiv(rows, config.rows) * sum(part.programs for part in parts),),
        y,
        attn,
        mlp,
        rows if rows % config.rows else None,
        ATTN=parts[0],
        MLP=parts[1],
        ROWS=config.rows,
        COLS=cols,
        MANNER="interpreted" if is_interpreted(gelu_tanh_cat_kernel) else manner,
        PDL=pdl,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def cut(x: torch.Tensor, cols: int, most: int) -> Part:
    """How programs share a row of x, in tiles of `cols` columns, at most `most` a program."""
    width, stride = x.shape[-1], row_stride(x)
    assert stride is not None
    tiles = even_share(triton.cdiv(width, cols), most)
    return Part(width, stride, tiles, triton.cdiv(width, cols * tiles))


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    attn, mlp = call
    expect(attn.dim() > 0, "attn", "one dimension [..., A] or more", list(attn.shape))
    leading = list(attn.shape[:-1])
    fits = mlp.dim() == attn.dim() and list(mlp.shape[:-1]) == leading
    expect(fits, "mlp", f"shape [{', '.join(map(str, [*leading, 'M']))}], as attn", list(mlp.shape))
    expect(mlp.dtype == attn.dtype, "mlp", f"dtype {attn.dtype}, as attn", mlp.dtype)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    for name, x in given(call).items():
        if not x.numel():
            return f"{name} has no elements; there is nothing to compute, or nothing to put together"
        if row_stride(x) is None:
            return f"{name} has strides {x.stride()}: its rows are not evenly spaced"
    return scattered(given(call)) or unfit(given(call))


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    wide = call.mlp.to(torch.promote_types(call.mlp.dtype, torch.float32))
    activated = torch.nn.functional.gelu(wide, approximate="tanh").to(call.mlp.dtype)
    return torch.cat((call.attn, activated), dim=-1).contiguous()


# --- public function

OP = Op(
    "fused_gelu_tanh_cat",
    Call,
    kernel=gelu_tanh_cat_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=(output_of,),
    contiguous=True,
    exact=(plan, _plain),
)


@OP.public
def fused_gelu_tanh_cat(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """The columns of attn, then the tanh GELU of the columns of mlp.

    Args:
        attn: [..., A], float16, bfloat16 or float32; the last stride is 1, and the rows are evenly spaced.
        mlp: [..., M], likewise, with attn's dtype and leading sizes; it may be a stretch of columns of a wider tensor.

    Returns:
        [..., A + M], contiguous, attn's dtype: bit for bit `torch.cat((attn, gelu(mlp, approximate="tanh")), dim=-1)`.

    Other dtypes and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return OP.call(attn, mlp)
