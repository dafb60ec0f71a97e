"""The sum of a token's expert outputs: one Triton kernel, launched directly.

    out[t] = sum of x[t, j] over the k experts j            in float32, rounded once to x's dtype

Source of the semantics: SGLang 0.5.23, `kernels/ops/moe/moe_topk_sum.py` (Apache-2.0); the code is our own.

Idea: the op only streams. k is a constant of the kernel, so a thread has a 16-byte vector of each expert in flight
before it adds the first two; upstream's loop over a run-time k waits for each.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead, load_tile, store_tile, vector_width
from kda_runtime.tuned_table import Table

MOST_EXPERTS = 32
"""Most experts of a token: a thread has a vector of each in registers."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut: a program sums as many columns of a token as its threads hold in one 16-byte vector each."""

    warps: int
    rows: int = 1
    """Tokens of a program."""
    load: str = ""
    """Cache modifier of the loads, or `evict_first`: `.cg` keeps them out of the L1 cache."""
    store: str = ""
    """Cache modifier of the stores."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""


TUNED = Table(__file__, "moe_topk_sum", Config)
"""Tuned configurations, chosen by `bytes` (of x)."""


# --- kernel


@triton.jit(do_not_specialize=["tokens"])
def topk_sum_kernel(
    out,  # [tokens, N]
    x,  # [tokens, K, N]
    tokens,  # number of tokens; None where every program is full
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: up to ROWS tokens, up to COLS of their columns."""
    PARTS: tl.constexpr = (N + COLS - 1) // COLS
    PARTIAL: tl.constexpr = N % COLS != 0
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]
    inside = None if tokens is None else row < tokens
    line = x + row.to(tl.int64) * (K * N)

    follow_the_kernel_ahead(PDL)

    parts = ()
    for expert in tl.static_range(K):
        parts += (load_tile(line + expert * N, col, inside, N, PARTIAL, LOAD),)
    total = parts[0].to(tl.float32)
    for expert in tl.static_range(1, K):
        total += parts[expert].to(tl.float32)
    store_tile(out + row.to(tl.int64) * N, total, col, inside, N, PARTIAL, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call, in the kernel's order."""

    out: torch.Tensor
    x: torch.Tensor


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    tokens, k, width = call.x.shape
    major = capability(call.x)
    config = TUNED.select(major, bytes=call.x.nbytes)
    tile = vector_width(config.warps, call.x.itemsize)
    cols = min(tile, triton.next_power_of_2(width))
    rows = config.rows * tile // cols
    pdl = config.pdl and pdl_works(topk_sum_kernel, major)
    return Launch.make(
        topk_sum_kernel,
        (triton.cdiv(tokens, rows) * triton.cdiv(width, cols),),
        *call,
        tokens if tokens % rows else None,
        K=k,
        N=width,
        ROWS=rows,
        COLS=cols,
        LOAD=config.load,
        STORE=config.store,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    expect(call.x.dim() == 3, "x", "three dimensions [tokens, k, width]", list(call.x.shape))
    wanted, shape = [call.x.shape[0], call.x.shape[2]], list(call.out.shape)
    expect(shape == wanted, "out", f"shape {wanted}", shape)
    expect(call.out.dtype == call.x.dtype, "out", f"dtype {call.x.dtype}, as x", call.out.dtype)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    for name, tensor in given(call).items():
        if not tensor.is_contiguous():
            return f"{name} is not contiguous, its strides are {tensor.stride()}"
    if not 0 < call.x.shape[1] <= MOST_EXPERTS:
        return f"{call.x.shape[1]} experts a token; the kernel takes 1 to {MOST_EXPERTS}"
    return unfit(given(call))


def _plain(call: Call) -> None:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    call.out.copy_(call.x.to(torch.promote_types(call.x.dtype, torch.float32)).sum(dim=1))


# --- public function

OP = Op(
    "moe_topk_sum",
    Call,
    kernel=topk_sum_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    mutates=("out",),
)


@OP.public
def moe_topk_sum(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of x over its second dimension into `out`.

    Args:
        x: [tokens, k, width], float16, bfloat16 or float32.
        out: [tokens, width], x's dtype, written.

    Returns:
        `out`.

    Other dtypes, strides and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    OP.call(out, x)
    return out
