"""RMSNorm over each head of q and k, rounded after each step as PyTorch does it, then rotary embedding: one kernel.

With r() for rounding to q's dtype, and all else in float32:

    s = r(mean(r(x^2))),   f = r(1 / sqrt(r(s + eps))),   n = r(r(x * f) * w)          per token and head, over head_dim
    y_2p = r(n_2p * cos_p - n_2p+1 * sin_p),   y_2p+1 = r(n_2p+1 * cos_p + n_2p * sin_p)              for each pair p

Upstream's bits are the contract, so the order of the sum and the fused multiply-adds are part of the op: see `mean` and
`rotated_even`.

Source of the semantics: SGLang 0.5.23, `kernels/ops/diffusion/norm/zimage_qk_rmsnorm_triton.py` (Apache-2.0), which has
the order of PyTorch's reduction, and FlashInfer 0.7.2, `pos_enc.cuh` (Apache-2.0); the code is our own.

Idea: the op only streams, so every byte is read and written once. Upstream norms q and k in a kernel each, and rotates
both in place in a third: what it writes after the norm it reads and writes again. Here a program takes one token and
some heads of its q or of its k, and issues all its loads before the first use. A thread holds eight neighbouring
elements of a head. These are what one lane of PyTorch's reduction adds, and they are four whole pairs of the rotation:
both happen in the thread's registers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import even_share, follow_the_kernel_ahead, load_tile, store_tile, vector_width
from kda_runtime.tuned_table import Table

# --- configuration and selection

HEAD_DIM = 128
"""The kernel's only head_dim: the order of the sum is that of PyTorch's reduction over 128 elements."""
DTYPES = (torch.float16, torch.bfloat16)
RESULTS = 2
"""Tensors that are written: q's and k's."""


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many heads as the program's threads hold in one 16-byte vector each."""

    warps: int
    tiles: int
    """Most tiles per program: the loads a thread has in flight."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    early: bool = False
    """A barrier makes the compiler issue the loads of all tiles before the first use; else it saves registers."""


TUNED = Table(__file__, "rounded_qknorm_rope", Config)
"""Tuned configurations, chosen by `bytes` of the outputs."""


# --- kernel


class Lines(NamedTuple):
    """Elements from one batch, token and head of a tensor [B, T, H, D] to the next, constants of the kernel.

    `batch` is 0 if there is one batch alone: it would change with the tokens.
    """

    batch: int
    token: int
    head: int


@triton.jit
def rounded_qknorm_rope_kernel(
    q_out,  # [B, TOKENS, NUMBER, 128], contiguous, as k_out
    k_out,
    q,  # [B, TOKENS, NUMBER, 128], as k
    k,
    q_weight,  # [128], as k_weight
    k_weight,
    cos_sin,  # [rows, 128], float32: cosines, then sines
    tokens,
    Q: tl.constexpr,  # the `Lines` of q
    K: tl.constexpr,
    COS_SIN_STRIDE: tl.constexpr,
    SHARED: tl.constexpr,  # row t of cos_sin belongs to token t of every batch; else each batch has rows of its own
    EPS: tl.constexpr,
    NUMBER: tl.constexpr,  # heads of a token
    HEADS: tl.constexpr,  # heads of a tile
    TILES: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the heads of a token
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to HEADS * TILES heads of one token's q or k."""
    line = (tl.program_id(0) // (2 * PARTS)).to(tl.int64)
    part = tl.program_id(0) % (2 * PARTS)
    batch, token = line // tokens, line % tokens
    head = (part % PARTS) * (HEADS * TILES) + tl.arange(0, HEADS)[:, None]  # [HEADS, 1], of the first tile
    angles = cos_sin + (token if SHARED else line) * COS_SIN_STRIDE
    target = line * (NUMBER * 128)

    follow_the_kernel_ahead(PDL)

    if part < PARTS:
        source = q + batch * Q.batch + token * Q.token
        norm_and_rotate_heads(
            *(q_out + target, source, q_weight, angles, head, Q.head, EPS, NUMBER, HEADS, TILES, EARLY, STORE)
        )
    else:
        source = k + batch * K.batch + token * K.token
        norm_and_rotate_heads(
            *(k_out + target, source, k_weight, angles, head, K.head, EPS, NUMBER, HEADS, TILES, EARLY, STORE)
        )


@triton.jit
def norm_and_rotate_heads(
    target,
    source,
    weight,
    angles,
    head,
    STEP: tl.constexpr,  # elements of the source from one head to the next
    EPS: tl.constexpr,
    NUMBER: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
    STORE: tl.constexpr,
):
    """The program's heads of one token: loads of all tiles, then norm, rotation and store of each."""
    dtype: tl.constexpr = source.dtype.element_ty
    col = tl.arange(0, 128)[None, :]
    loaded = ()
    for tile in tl.static_range(TILES):
        at = head + tile * HEADS
        loaded += (load_tile(source + at * STEP, col, at < NUMBER, 128, False, ""),)  # [HEADS, 128]

    # Weights, cos and sin are loaded once per head, so that a thread loads what its own elements need. A single line
    # would be spread over the threads, which would then have to exchange it.
    weights = tl.load(weight + tl.broadcast_to(col, HEADS, 128))
    pair = tl.broadcast_to(tl.arange(0, 64)[None, :], HEADS, 64)
    cos, sin = tl.load(angles + pair), tl.load(angles + 64 + pair)
    if EARLY:
        tl.debug_barrier()
    w_even, w_odd = tl.split(tl.reshape(weights.to(tl.float32), HEADS, 64, 2))  # [HEADS, 64], one of each pair

    for tile in tl.static_range(TILES):
        at = head + tile * HEADS
        even, odd = tl.split(tl.reshape(loaded[tile].to(tl.float32), HEADS, 64, 2))
        square = rounded(mean(rounded(even * even, dtype), rounded(odd * odd, dtype), HEADS), dtype)
        factor = rounded(tl.rsqrt(rounded(square + EPS, dtype)), dtype)[:, None]  # [HEADS, 1]
        n_even = rounded(rounded(even * factor, dtype) * w_even, dtype)
        n_odd = rounded(rounded(odd * factor, dtype) * w_odd, dtype)
        y_even, y_odd = rotated_even(n_even, n_odd, cos, sin), rotated_odd(n_even, n_odd, cos, sin)
        y = tl.reshape(tl.join(y_even.to(dtype), y_odd.to(dtype)), HEADS, 128)
        store_tile(target + at * 128, y, col, at < NUMBER, 128, False, STORE)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """X, float32, rounded to `dtype`: to the nearest, ties to even. The product of two such numbers is exact before."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def mean(even, odd, HEADS: tl.constexpr):
    """The mean over each head, [HEADS], of elements [HEADS, 64] of even and odd place, in the order of PyTorch's sum.

    A lane adds eight neighbours one after another. The 16 lanes are then added in halves: i and i + 8, then + 4, 2, 1.
    """
    e02, e13 = tl.split(tl.reshape(even, HEADS, 16, 2, 2))
    o02, o13 = tl.split(tl.reshape(odd, HEADS, 16, 2, 2))
    e0, e2 = tl.split(e02)  # [HEADS, 16]
    e1, e3 = tl.split(e13)
    o0, o2 = tl.split(o02)
    o1, o3 = tl.split(o13)
    total = e0 + o0
    total = total + e1
    total = total + o1
    total = total + e2
    total = total + o2
    total = total + e3
    total = total + o3
    # One sum of two at a time: a single sum of 16 may have another order, as it has in the interpreter.
    total = tl.sum(tl.reshape(total, HEADS, 2, 8), axis=1)
    total = tl.sum(tl.reshape(total, HEADS, 2, 4), axis=1)
    total = tl.sum(tl.reshape(total, HEADS, 2, 2), axis=1)
    return tl.sum(total, axis=1) * (1.0 / 128)  # exact


@triton.jit
def rotated_even(even, odd, cos, sin):
    """The rotated pair's first element: one product is rounded to float32, the other one is not."""
    return tl.fma(even, cos, (odd * -1.0) * sin)  # in Triton -x is 0 - x, which loses the sign of zero


@triton.jit
def rotated_odd(even, odd, cos, sin):
    """The rotated pair's second element, likewise."""
    return tl.fma(odd, cos, even * sin)


# --- plan


class Call(NamedTuple):
    """The arguments of one call."""

    q: torch.Tensor
    k: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos_sin: torch.Tensor
    eps: float


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    batch, tokens, number, _ = call.q.shape
    major = capability(call.q)
    config = TUNED.select(major, bytes=RESULTS * call.q.numel() * call.q.itemsize)
    heads = vector_width(config.warps, call.q.itemsize) // HEAD_DIM
    tiles = even_share(triton.cdiv(number, heads), config.tiles)
    parts = triton.cdiv(number, heads * tiles)
    pdl = config.pdl and pdl_works(rounded_qknorm_rope_kernel, major)
    return Launch.make(
        rounded_qknorm_rope_kernel,
        (batch * tokens * 2 * parts,),
        call.q,  # of the outputs a launch only wants the dtype
        call.k,
        *call[:5],
        tokens,
        Q=lines(call.q),
        K=lines(call.k),
        COS_SIN_STRIDE=call.cos_sin.stride(0),
        SHARED=call.cos_sin.shape[0] == tokens,
        EPS=float(call.eps),
        NUMBER=number,
        HEADS=heads,
        TILES=tiles,
        PARTS=parts,
        EARLY=config.early,
        PDL=pdl,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def lines(x: torch.Tensor) -> Lines:
    """Where x's heads lie."""
    return Lines(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2))


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    q, k, cos_sin = call.q, call.k, call.cos_sin
    expect(q.dim() == 4, "q", "four dimensions [B, tokens, heads, head_dim]", list(q.shape))
    batch, tokens, _, dim = q.shape
    expect(dim % 2 == 0, "q", "an even head_dim", dim)
    expect(k.shape == q.shape, "k", f"shape {list(q.shape)}, as q", list(k.shape))
    for name, x in (("k", k), ("q_weight", call.q_weight), ("k_weight", call.k_weight)):
        expect(x.dtype == q.dtype, name, f"dtype {q.dtype}, as q", x.dtype)
    for name, x in (("q_weight", call.q_weight), ("k_weight", call.k_weight)):
        expect(list(x.shape) == [dim], name, f"shape [{dim}]", list(x.shape))
    fits = cos_sin.dim() == 2 and cos_sin.shape[1] == dim
    expect(fits, "cos_sin", f"shape [rows, {dim}]", list(cos_sin.shape))
    rows = cos_sin.shape[0]
    expect(rows in (tokens, batch * tokens), "cos_sin", f"{tokens} or {batch * tokens} rows: T or B*T rows", rows)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.q.dtype not in DTYPES:
        return f"q has dtype {call.q.dtype}; the kernel takes float16 and bfloat16"
    if call.q.shape[-1] != HEAD_DIM:
        return f"head_dim is {call.q.shape[-1]}; the kernel takes {HEAD_DIM}"
    if call.cos_sin.dtype != torch.float32:
        return f"cos_sin has dtype {call.cos_sin.dtype}; the kernel takes float32"
    return scattered(given(call)) or unfit(given(call))


def _plain(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The same steps as PyTorch's own operators, which round each, for whatever the kernel does not cover."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    tokens = call.q.shape[1]
    rows = call.cos_sin.to(wide).unflatten(0, (-1, tokens)) if tokens else call.cos_sin.to(wide)[None]
    cos, sin = rows[:, :, None].chunk(2, dim=-1)  # [1 or B, tokens, 1, head_dim / 2]

    def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """The sum a * b + c, rounded to `wide` once: float64 holds the product of two float32."""
        return (a.double() * b.double() + c.double()).to(wide)

    results = []
    for x, weight in ((call.q, call.q_weight), (call.k, call.k_weight)):
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + call.eps) * weight
        even, odd = normed[..., 0::2].to(wide), normed[..., 1::2].to(wide)
        turned = torch.stack((fused(even, cos, -odd * sin), fused(odd, cos, even * sin)), dim=-1).flatten(-2)
        results.append(turned.to(x.dtype).contiguous())
    return results[0], results[1]


# --- public function

OP = Op(
    "rounded_qknorm_rope",
    Call,
    kernel=rounded_qknorm_rope_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=("q", "k"),
    contiguous=True,
    exact=(plan, _plain),
)


@OP.public
def rounded_qknorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head of q and k, rounding after each step, then rotate it.

    Args:
        q: [B, tokens, heads, head_dim], float16 or bfloat16; the last stride is 1, others are free (packed qkv). The
            kernel takes head_dim 128.
        k: as q.
        q_weight: [head_dim], q's dtype.
        k_weight: as q_weight.
        cos_sin: [rows, head_dim], float32, cosines in the first half and sines in the second. Row t belongs to token t
            of every batch, or, with B * tokens rows, row b * tokens + t to token t of batch b.
        eps: added to the mean square.

    Returns:
        q and k, normalised and rotated: two new contiguous tensors with the bits of SGLang 0.5.23 and FlashInfer 0.7.2.

    Other dtypes, head_dims and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    result: tuple[torch.Tensor, torch.Tensor] = OP.call(q, k, q_weight, k_weight, cos_sin, eps)
    return result
