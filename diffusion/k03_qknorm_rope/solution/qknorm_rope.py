"""RMSNorm of every q and k head, then rotary embedding, in place: one Triton kernel, launched directly.

    x^ = x * w / sqrt(mean(x^2) + eps)                           per token and head, over head_dim, in float32
    y_a = x^_a * cos_p - x^_b * sin_p,   y_b = x^_b * cos_p + x^_a * sin_p       for each pair p = (a, b)

Pairs are (2p, 2p + 1), or (p, p + rope_dim / 2) with `is_neox`; elements from `rope_dim` on are only normalised.
cos and sin are the two halves of row `positions[token]` of the cache. Rounding to q's dtype happens once, at the end.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/qknorm_rope.py` (Apache-2.0); the code is our own.

Idea: the op only streams, every byte of q and k is read and written once, so the kernel is built to issue little
besides 16-byte loads and stores. A program takes one token and some of its q heads or k heads, or (`flat`) a tile of
the heads of all tokens. All its loads are issued before the first use. What the heads of a token share is computed
once: the weights are folded into cos and sin, and 1 / rms is applied to the rotated pair. Pairs are split and joined
inside a thread's registers, without shuffles.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import FLOATS, Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import even_share, follow_the_kernel_ahead, load_tile, store_tile, vector_width
from kda_runtime.tuned_table import Table

# --- configuration and selection

HEAD_DIMS = (64, 128, 256)
"""A head is one power-of-two block in registers; upstream's envelope."""
DTYPES = (torch.float16, torch.bfloat16)


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
    flat: bool = False
    """The q and k heads of all tokens form one sequence, cut into tiles, one a program: fewer programs, more loads."""


TUNED = Table(__file__, "qknorm_rope", Config)
"""Tuned configurations, chosen by `rows` (tokens times q heads and k heads)."""


# --- kernel


class Heads(NamedTuple):
    """The heads of q or k, a constant: what is fixed per model then costs the host nothing, instead of 20 ns each."""

    number: int
    token_stride: int
    head_stride: int
    parts: int
    """Programs that share the heads of a token."""


@triton.jit
def pairs_of(pair, DIM: tl.constexpr, ROPE: tl.constexpr, NEOX: tl.constexpr):
    """Elements (a, b) of pair p. After `rope_dim` any pairing of the rest will do, because cos is 1 and sin 0 there."""
    if NEOX:
        # Contiguous in groups of VEC, which the compiler cannot see across the jump at ROPE / 2.
        VEC: tl.constexpr = 8 if ROPE % 16 == 0 else 1
        a, b = pair + tl.where(pair < ROPE // 2, 0, ROPE // 2), pair + tl.where(pair < ROPE // 2, ROPE // 2, DIM // 2)
        a = tl.max_contiguous(tl.multiple_of(a, [1, VEC]), [1, VEC])
        b = tl.max_contiguous(tl.multiple_of(b, [1, VEC]), [1, VEC])
    else:
        a, b = 2 * pair, 2 * pair + 1
    return a, b


@triton.jit
def qknorm_rope_kernel(
    q,  # [TOKENS, Q_HEADS, DIM], also the output
    k,  # [TOKENS, K_HEADS, DIM], also the output
    q_weight,  # [DIM]
    k_weight,  # [DIM]
    cache,  # [POSITIONS, ROPE]: cos in the first half, sin in the second
    positions,  # [TOKENS]
    Q: tl.constexpr,  # the `Heads` of q
    K: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a tile
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: one token, up to HEADS * TILES of its q heads or of its k heads."""
    HALF: tl.constexpr = DIM // 2
    token = (tl.program_id(0) // (Q.parts + K.parts)).to(tl.int64)
    part = tl.program_id(0) % (Q.parts + K.parts)
    is_k = part >= Q.parts
    x = tl.where(is_k, k + token * K.token_stride, q + token * Q.token_stride)
    x_head_stride = tl.where(is_k, K.head_stride, Q.head_stride)
    weight = tl.where(is_k, k_weight, q_weight)
    heads = tl.where(is_k, K.number, Q.number)
    first = tl.where(is_k, part - Q.parts, part) * (HEADS * TILES)

    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    row = tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    a, b = pairs_of(pair, DIM, ROPE, NEOX)

    follow_the_kernel_ahead(PDL)

    # Loads of all tiles first: a thread keeps TILES of them in flight.
    loaded = ()
    for tile in tl.static_range(TILES):
        head = first + tile * HEADS + row  # [HEADS, 1]
        line = x + head * x_head_stride
        if NEOX:
            x_a = load_tile(line, a, head < heads, DIM, False, "")  # [HEADS, HALF]
            x_b = load_tile(line, b, head < heads, DIM, False, "")
            loaded += ((x_a, x_b),)
        else:
            loaded += (load_tile(line, tl.arange(0, DIM)[None, :], head < heads, DIM, False, ""),)  # [HEADS, DIM]

    angles = cache + tl.load(positions + token).to(tl.int64) * CACHE_STRIDE
    cos_a, sin_a, cos_b, sin_b = weighted_angles(weight, angles, pair, a, b, HEADS, DIM, ROPE, NEOX, EARLY)

    for tile in tl.static_range(TILES):
        head = first + tile * HEADS + row
        line = x + head * x_head_stride
        if NEOX:
            y_a, y_b = norm_and_rotate_neox(loaded[tile][0], loaded[tile][1], cos_a, sin_a, cos_b, sin_b, EPS, DIM)
            store_tile(line, y_a, a, head < heads, DIM, False, STORE)
            store_tile(line, y_b, b, head < heads, DIM, False, STORE)
        else:
            y = norm_and_rotate(loaded[tile], cos_a, sin_a, cos_b, sin_b, EPS, DIM)
            store_tile(line, y, tl.arange(0, DIM)[None, :], head < heads, DIM, False, STORE)


@triton.jit
def weighted_angles(
    weight,
    angles,
    pair,
    a,
    b,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Cos and sin of the pairs, times the weight of either element, float32: (cos_a, sin_a, cos_b, sin_b).

    `weight` and `angles` point to one line for all heads, or to one for each. They are loaded once per head,
    [HEADS, ...], so that a thread loads what its own elements need. A single line would be spread over the threads,
    which would then have to exchange it.
    """
    HALF: tl.constexpr = DIM // 2
    if NEOX:
        weight_a = tl.load(weight + tl.broadcast_to(a, HEADS, HALF)).to(tl.float32)
        weight_b = tl.load(weight + tl.broadcast_to(b, HEADS, HALF)).to(tl.float32)
    else:
        weights = tl.load(weight + tl.broadcast_to(tl.arange(0, DIM)[None, :], HEADS, DIM)).to(tl.float32)
        weight_a, weight_b = tl.split(tl.reshape(weights, HEADS, HALF, 2))
    if EARLY:
        tl.debug_barrier()
    pair = tl.broadcast_to(pair, HEADS, HALF)
    cos = tl.load(angles + pair, mask=pair < ROPE // 2, other=1.0).to(tl.float32)
    sin = tl.load(angles + pair + ROPE // 2, mask=pair < ROPE // 2, other=0.0).to(tl.float32)
    return weight_a * cos, weight_a * sin, weight_b * cos, weight_b * sin


@triton.jit
def norm_and_rotate(block, cos_a, sin_a, cos_b, sin_b, EPS: tl.constexpr, DIM: tl.constexpr):
    """Heads [HEADS, DIM] with pairs (2p, 2p + 1); cos and sin hold the weights."""
    x = block.to(tl.float32)
    squares = tl.sum(x * x, axis=1, keep_dims=True)
    x_a, x_b = tl.split(tl.reshape(x, x.shape[0], DIM // 2, 2))
    y_a, y_b = rotate(x_a, x_b, squares, cos_a, sin_a, cos_b, sin_b, EPS, DIM)
    return tl.reshape(tl.join(y_a.to(block.dtype), y_b.to(block.dtype)), x.shape[0], DIM)


@triton.jit
def norm_and_rotate_neox(first, second, cos_a, sin_a, cos_b, sin_b, EPS: tl.constexpr, DIM: tl.constexpr):
    """The same with the first and the second elements of all pairs, [HEADS, DIM / 2] each."""
    x_a, x_b = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(x_a * x_a + x_b * x_b, axis=1, keep_dims=True)
    y_a, y_b = rotate(x_a, x_b, squares, cos_a, sin_a, cos_b, sin_b, EPS, DIM)
    return y_a.to(first.dtype), y_b.to(first.dtype)


@triton.jit
def rotate(x_a, x_b, squares, cos_a, sin_a, cos_b, sin_b, EPS: tl.constexpr, DIM: tl.constexpr):
    """The pairs, rotated and then divided by their head's root mean square; `squares` is [HEADS, 1]."""
    scale = tl.rsqrt(squares / DIM + EPS)
    return (x_a * cos_a - x_b * sin_b) * scale, (x_b * cos_b + x_a * sin_a) * scale


@triton.jit
def flat_kernel(
    q,  # the tensors of `qknorm_rope_kernel`
    k,
    q_weight,
    k_weight,
    cache,
    positions,
    rows,  # TOKENS * (Q_HEADS + K_HEADS)
    Q: tl.constexpr,
    K: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: HEADS heads of the sequence of all tokens' q heads and k heads, with cos and sin for each head."""
    HALF: tl.constexpr = DIM // 2
    at = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    inside = at < rows
    token = (at // (Q.number + K.number)).to(tl.int64)
    head = at % (Q.number + K.number)
    is_k = head >= Q.number
    of_q = token * Q.token_stride + head * Q.head_stride
    of_k = token * K.token_stride + (head - Q.number) * K.head_stride
    line = tl.where(is_k, k + of_k, q + of_q)
    nothing = tl.zeros((HEADS, 1), tl.int32)
    weight = tl.where(is_k, k_weight + nothing, q_weight + nothing)
    pair = tl.arange(0, HALF)[None, :]
    a, b = pairs_of(pair, DIM, ROPE, NEOX)

    follow_the_kernel_ahead(PDL)

    col = tl.arange(0, DIM)[None, :]
    if NEOX:
        x_a, x_b = load_tile(line, a, inside, DIM, False, ""), load_tile(line, b, inside, DIM, False, "")
    else:
        block = load_tile(line, col, inside, DIM, False, "")
    angles = cache + tl.load(positions + token, mask=inside, other=0).to(tl.int64) * CACHE_STRIDE
    cos_a, sin_a, cos_b, sin_b = weighted_angles(weight, angles, pair, a, b, HEADS, DIM, ROPE, NEOX, False)
    if NEOX:
        y_a, y_b = norm_and_rotate_neox(x_a, x_b, cos_a, sin_a, cos_b, sin_b, EPS, DIM)
        store_tile(line, y_a, a, inside, DIM, False, STORE)
        store_tile(line, y_b, b, inside, DIM, False, STORE)
    else:
        y = norm_and_rotate(block, cos_a, sin_a, cos_b, sin_b, EPS, DIM)
        store_tile(line, y, col, inside, DIM, False, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    q: torch.Tensor
    k: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos_sin_cache: torch.Tensor
    positions: torch.Tensor
    is_neox: bool
    eps: float = 1e-6
    head_dim: int = 0
    rope_dim: int = 0


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    q, k, cache = call.q, call.k, call.cos_sin_cache
    tokens, q_heads, dim = q.shape
    k_heads = k.shape[1]
    config = TUNED.select(capability(q), rows=tokens * (q_heads + k_heads))
    # Neox loads the two halves of a head as separate vectors, so its tiles have twice the heads.
    heads = vector_width(config.warps, q.itemsize) * (2 if call.is_neox else 1) // dim
    pdl = config.pdl and pdl_works(qknorm_rope_kernel, capability(q))
    constants = {
        "CACHE_STRIDE": cache.stride(0),
        "EPS": float(call.eps),
        "DIM": dim,
        "ROPE": cache.shape[1],
        "NEOX": bool(call.is_neox),
        "HEADS": heads,
        "PDL": pdl,
        "STORE": config.store,
    }
    settings = {"num_warps": config.warps, "launch_pdl": pdl}
    if config.flat:
        rows = tokens * (q_heads + k_heads)
        of_q, of_k = (Heads(x.shape[1], *x.stride()[:2], parts=0) for x in (q, k))
        grid = (triton.cdiv(rows, heads),)
        return Launch.make(flat_kernel, grid, *call[:6], rows, Q=of_q, K=of_k, **constants, **settings)
    tiles = even_share(max(triton.cdiv(max(q_heads, k_heads), heads), 1), config.tiles)
    of_q, of_k = (Heads(x.shape[1], *x.stride()[:2], parts=triton.cdiv(x.shape[1], heads * tiles)) for x in (q, k))
    grid = (tokens * (of_q.parts + of_k.parts),)
    constants |= {"Q": of_q, "K": of_k, "TILES": tiles, "EARLY": config.early}
    return Launch.make(qknorm_rope_kernel, grid, *call[:6], **constants, **settings)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    q, k, cache, positions = call.q, call.k, call.cos_sin_cache, call.positions
    expect(q.dim() == 3, "q", "three dimensions [tokens, q heads, head_dim]", list(q.shape))
    expect(k.dim() == 3, "k", "three dimensions [tokens, k heads, head_dim]", list(k.shape))
    expect(cache.dim() == 2, "cos_sin_cache", "two dimensions [positions, rope_dim]", list(cache.shape))
    tokens, _, dim = q.shape
    rope = cache.shape[1]
    expect(k.shape[0] == tokens and k.shape[2] == dim, "k", f"shape [{tokens}, k heads, {dim}], as q", list(k.shape))
    expect(k.dtype == q.dtype, "k", f"dtype {q.dtype}, as q", k.dtype)
    expect(list(call.q_weight.shape) == [dim], "q_weight", f"shape [{dim}]", list(call.q_weight.shape))
    expect(list(call.k_weight.shape) == [dim], "k_weight", f"shape [{dim}]", list(call.k_weight.shape))
    expect(list(positions.shape) == [tokens], "positions", f"shape [{tokens}], one per token", list(positions.shape))
    expect(positions.dtype in (torch.int32, torch.int64), "positions", "dtype int32 or int64", positions.dtype)
    expect(call.head_dim in (0, dim), "head_dim", f"0 or q's last size {dim}", call.head_dim)
    expect(call.rope_dim in (0, rope), "rope_dim", f"0 or the width {rope} of cos_sin_cache", call.rope_dim)
    expect(0 < rope <= dim and rope % 2 == 0, "rope_dim", f"an even number from 2 to head_dim {dim}", rope)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.q.dtype not in DTYPES:
        return f"q has dtype {call.q.dtype}; the kernel takes float16 and bfloat16"
    if call.q.shape[2] not in HEAD_DIMS:
        return f"head_dim is {call.q.shape[2]}; the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    for name, x in (("q", call.q), ("k", call.k)):
        if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            return f"{name} has stride 0: several of its elements share one memory location"
    return scattered(given(call)) or unfit(given(call), (*FLOATS, torch.float64))


def _plain(call: Call) -> None:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    cache = call.cos_sin_cache
    rope = cache.shape[1]
    wide = torch.promote_types(call.q.dtype, torch.float32)
    cos, sin = cache[call.positions].to(wide)[:, None].chunk(2, dim=-1)  # [tokens, 1, rope / 2]
    for x, weight in ((call.q, call.q_weight), (call.k, call.k_weight)):
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + call.eps) * weight.to(wide)
        turned = y[..., :rope]
        a, b = turned.chunk(2, dim=-1) if call.is_neox else (turned[..., 0::2], turned[..., 1::2])
        pairs = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.cat(pairs, dim=-1) if call.is_neox else torch.stack(pairs, dim=-1).flatten(-2)
        x.copy_(torch.cat((turned, y[..., rope:]), dim=-1))


# --- public function

OP = Op(
    "fused_inplace_qknorm_rope",
    Call,
    kernel=qknorm_rope_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    mutates=("q", "k"),
    integers=("positions",),
)


@OP.public
def fused_inplace_qknorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
) -> None:
    """Normalise and rotate q and k in place.

    Args:
        q: [tokens, q heads, head_dim], float16 or bfloat16; the last stride is 1, others are free (packed qkv).
        k: [tokens, k heads, head_dim], q's dtype; it may have fewer heads than q.
        q_weight: [head_dim].
        k_weight: [head_dim].
        cos_sin_cache: [positions, rope_dim], float32: cos in the first half of a row, sin in the second.
        positions: [tokens], int32 or int64, rows of the cache; not checked against its length.
        is_neox: rotate (p, p + rope_dim / 2) instead of (2p, 2p + 1).
        eps: added to the mean square.
        head_dim: 64, 128 or 256; 0 takes q's.
        rope_dim: even, at most head_dim; 0 takes the cache's width.

    Other dtypes, head_dims and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    OP.call(q, k, q_weight, k_weight, cos_sin_cache, positions, is_neox, eps, head_dim, rope_dim)
