"""RMSNorm of every q and k head, rotary embedding in place, and k and v stored into their cache: one Triton kernel.

    x^ = x * w / sqrt(mean(x^2) + eps)                           per token and head, over head_dim, in float32
    y_a = x^_a * cos_p - x^_b * sin_p,   y_b = x^_b * cos_p + x^_a * sin_p       for each pair p = (a, b)
    k_cache[out_loc[token]] = y of k,    v_cache[out_loc[token]] = v

Pairs are (p, p + rope_dim / 2) with `is_neox`, else (2p, 2p + 1); elements from `rope_dim` on are only normalised.
cos and sin are the two halves of row `positions[token]` of their table. Rounding to q's dtype happens once, at the end.

Source of the semantics: `fused_inplace_qknorm` and `apply_rope_inplace_with_kvcache` of SGLang 0.5.12.post1 and 0.5.23
(Apache-2.0), one after the other; the code is our own.

Idea: the op only streams, and one pass moves what two passes move twice. A program takes one token, and either some of
its q heads, or some of its k heads with the v heads beside them. The position is loaded first, since the loads of cos
and sin wait for it; then come all loads of heads, before the first use. The weights are folded into cos and sin, and
1 / rms is applied to the rotated pair. Pairs are split and joined inside a thread's registers, without shuffles.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import FLOATS, Expect, capability, given, pdl_works, scattered, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op
from kda_runtime.triton_rows import even_share, follow_the_kernel_ahead, vector_width
from kda_runtime.tuned_table import Table

# --- configuration and selection

HEAD_DIMS = (64, 128, 256)
"""A head is one power-of-two block in registers."""
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Config:
    """How the work is cut. A tile is as many heads as the threads hold at one 16-byte vector each (neox: two)."""

    warps: int
    tiles: int
    """Most tiles per program: the loads that a thread has in flight, for k and v twice as many."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""
    early: bool = True
    """A barrier makes the compiler issue all loads but those of cos and sin before it waits for the first: two round
    trips to memory, and more registers."""


TUNED = Table(__file__, "qknorm_rope_kv_store", Config)
"""Tuned configurations, chosen by `rows` (tokens times heads of q, k and v)."""


# --- kernel


class Heads(NamedTuple):
    """The heads of q, k or v. As a constant they cost the host nothing at launch (an argument costs 20 ns)."""

    number: int
    token_stride: int
    head_stride: int
    tiles: int
    """Tiles of a program."""
    parts: int
    """Programs that share the heads of a token."""


@triton.jit
def load_heads(line, head, col, X: tl.constexpr, HEADS: tl.constexpr):
    """Columns `col` of the heads `head`, [HEADS, 1], of X; 0 for heads that do not exist."""
    place = line + head * X.head_stride + col
    if X.number % (HEADS * X.tiles) == 0:
        return tl.load(place)
    else:
        return tl.load(place, mask=head < X.number, other=0.0)


@triton.jit
def store_heads(line, stride, value, head, col, X: tl.constexpr, HEADS: tl.constexpr, STORE: tl.constexpr):
    """The counterpart of `load_heads`, where heads are `stride` apart."""
    place = line + head * stride + col
    if X.number % (HEADS * X.tiles) == 0:
        tl.store(place, value, cache_modifier=STORE)
    else:
        tl.store(place, value, mask=head < X.number, cache_modifier=STORE)


@triton.jit
def norm_and_turn(
    line,  # a token's heads, in place
    cached,  # the row of the cache that they are also stored into, or None
    weight,
    angles,  # the token's row of cos_sin_cache
    first,  # the program's first head
    X: tl.constexpr,  # the `Heads` of q or k
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    EPS: tl.constexpr,
    NEOX: tl.constexpr,
    EARLY: tl.constexpr,
    STORE: tl.constexpr,
):
    """Normalise and rotate a program's heads of q or k."""
    TILES: tl.constexpr = X.tiles
    HALF: tl.constexpr = DIM // 2
    row = tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    whole = tl.arange(0, DIM)[None, :]  # [1, DIM]
    # Pair p is elements (a, b). Pairs beyond `rope_dim` are any pairs of the rest: their cos is 1 and their sin 0.
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    if NEOX:
        # Contiguous in groups of VEC, which the compiler cannot see across the jump at ROPE / 2.
        VEC: tl.constexpr = 8 if ROPE % 16 == 0 else 1
        a = tl.max_contiguous(tl.multiple_of(pair + tl.where(pair < ROPE // 2, 0, ROPE // 2), [1, VEC]), [1, VEC])
        b = tl.max_contiguous(tl.multiple_of(pair + tl.where(pair < ROPE // 2, ROPE // 2, HALF), [1, VEC]), [1, VEC])
    else:
        a, b = 2 * pair, 2 * pair + 1

    # Loads of all tiles first: they are in flight together.
    loaded = ()
    for tile in tl.static_range(TILES):
        head = first + tile * HEADS + row
        if NEOX:
            loaded += ((load_heads(line, head, a, X, HEADS), load_heads(line, head, b, X, HEADS)),)  # [HEADS, HALF]
        else:
            loaded += (load_heads(line, head, whole, X, HEADS),)  # [HEADS, DIM]

    # All heads share cos and sin times the weights, in float32. The loads are [HEADS, HALF], so that a thread loads
    # what its own elements need. The compiler would spread loads of [1, HALF] over a warp, and then exchange them, or
    # the heads, through shared memory.
    weight_a = tl.load(weight + tl.broadcast_to(a, HEADS, HALF)).to(tl.float32)
    weight_b = tl.load(weight + tl.broadcast_to(b, HEADS, HALF)).to(tl.float32)
    pair = tl.broadcast_to(pair, HEADS, HALF)
    if EARLY:
        tl.debug_barrier()  # else the compiler loads heads after the position arrives, and v just before its store
    if ROPE == DIM:
        cos = tl.load(angles + pair).to(tl.float32)
        sin = tl.load(angles + ROPE // 2 + pair).to(tl.float32)
    else:
        cos = tl.load(angles + pair, mask=pair < ROPE // 2, other=1.0).to(tl.float32)
        sin = tl.load(angles + ROPE // 2 + pair, mask=pair < ROPE // 2, other=0.0).to(tl.float32)
    cos_a, sin_a = weight_a * cos, weight_a * sin
    cos_b, sin_b = weight_b * cos, weight_b * sin

    for tile in tl.static_range(TILES):
        if NEOX:
            x_a, x_b = loaded[tile][0].to(tl.float32), loaded[tile][1].to(tl.float32)
            squares = tl.sum(x_a * x_a + x_b * x_b, axis=1, keep_dims=True)
        else:
            block = loaded[tile].to(tl.float32)  # [HEADS, DIM]
            squares = tl.sum(block * block, axis=1, keep_dims=True)
            x_a, x_b = tl.split(tl.reshape(block, HEADS, HALF, 2))
        scale = tl.rsqrt(squares / DIM + EPS)  # [HEADS, 1]
        y_a = ((x_a * cos_a - x_b * sin_b) * scale).to(line.dtype.element_ty)
        y_b = ((x_b * cos_b + x_a * sin_a) * scale).to(line.dtype.element_ty)
        head = first + tile * HEADS + row
        if NEOX:
            store_heads(line, X.head_stride, y_a, head, a, X, HEADS, STORE)
            store_heads(line, X.head_stride, y_b, head, b, X, HEADS, STORE)
            if cached is not None:
                store_heads(cached, DIM, y_a, head, a, X, HEADS, STORE)
                store_heads(cached, DIM, y_b, head, b, X, HEADS, STORE)
        else:
            y = tl.reshape(tl.join(y_a, y_b), HEADS, DIM)
            store_heads(line, X.head_stride, y, head, whole, X, HEADS, STORE)
            if cached is not None:
                store_heads(cached, DIM, y, head, whole, X, HEADS, STORE)


@triton.jit
def qknorm_rope_kv_store_kernel(
    q,  # [TOKENS, Q.number, DIM], also the output
    k,  # [TOKENS, K.number, DIM], also the output
    v,  # [TOKENS, K.number, DIM]
    k_cache,  # [SLOTS, K.number * DIM], the output in rows `out_loc`
    v_cache,  # the same
    q_weight,  # [DIM]
    k_weight,  # [DIM]
    cos_sin_cache,  # [POSITIONS, ROPE]: cos in the first half, sin in the second
    positions,  # [TOKENS]
    out_loc,  # [TOKENS]
    Q: tl.constexpr,  # the `Heads` of q
    K: tl.constexpr,
    V: tl.constexpr,
    K_CACHE_STRIDE: tl.constexpr,
    V_CACHE_STRIDE: tl.constexpr,
    ANGLE_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a tile
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: one token, and up to HEADS * tiles of its q heads, or of its k and v heads."""
    token = (tl.program_id(0) // (K.parts + Q.parts)).to(tl.int64)
    part = tl.program_id(0) % (K.parts + Q.parts)
    follow_the_kernel_ahead(PDL)

    angles = cos_sin_cache + tl.load(positions + token).to(tl.int64) * ANGLE_STRIDE
    if part < K.parts:
        first = part * (HEADS * K.tiles)
        slot = tl.load(out_loc + token).to(tl.int64)
        row, whole = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
        V_TILES: tl.constexpr = V.tiles
        values = ()
        for tile in tl.static_range(V_TILES):
            values += (load_heads(v + token * V.token_stride, first + tile * HEADS + row, whole, V, HEADS),)
        line, cached = k + token * K.token_stride, k_cache + slot * K_CACHE_STRIDE
        norm_and_turn(line, cached, k_weight, angles, first, K, HEADS, DIM, ROPE, EPS, NEOX, EARLY, STORE)
        for tile in tl.static_range(V_TILES):
            head = first + tile * HEADS + row
            store_heads(v_cache + slot * V_CACHE_STRIDE, DIM, values[tile], head, whole, V, HEADS, STORE)
    else:
        first = (part - K.parts) * (HEADS * Q.tiles)
        line = q + token * Q.token_stride
        norm_and_turn(line, None, q_weight, angles, first, Q, HEADS, DIM, ROPE, EPS, NEOX, EARLY, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call, named and ordered as those of the public function."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos_sin_cache: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    is_neox: bool
    eps: float = 1e-6
    head_dim: int = 0
    rope_dim: int = 0


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    q, k = call.q, call.k
    tokens, q_heads, dim = q.shape
    k_heads = k.shape[1]
    config = TUNED.select(capability(q), rows=tokens * (q_heads + 2 * k_heads))
    # Neox loads the two halves of a head as separate vectors, so its tiles have twice the heads.
    heads = vector_width(config.warps, q.itemsize) * (2 if call.is_neox else 1) // dim
    pdl = config.pdl and pdl_works(qknorm_rope_kv_store_kernel, capability(q))

    def cut(x: torch.Tensor) -> Heads:
        tiles = even_share(max(triton.cdiv(x.shape[1], heads), 1), config.tiles)
        return Heads(x.shape[1], *x.stride()[:2], tiles, parts=triton.cdiv(x.shape[1], heads * tiles))

    of_q, of_k = cut(q), cut(k)
    return Launch.make(
        qknorm_rope_kv_store_kernel,
        (tokens * (of_k.parts + of_q.parts),),
        *call[:10],
        Q=of_q,
        K=of_k,
        V=cut(_by_heads(call)),
        K_CACHE_STRIDE=call.k_cache.stride(0),
        V_CACHE_STRIDE=call.v_cache.stride(0),
        ANGLE_STRIDE=call.cos_sin_cache.stride(0),
        EPS=float(call.eps),
        DIM=dim,
        ROPE=call.cos_sin_cache.shape[1],
        NEOX=bool(call.is_neox),
        HEADS=heads,
        EARLY=config.early,
        PDL=pdl,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def _by_heads(call: Call) -> torch.Tensor:
    """The values as [tokens, k heads, head_dim]: servers pass them as [tokens, k heads * head_dim]."""
    return call.v.view_as(call.k) if call.v.dim() == 2 else call.v


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    q, k, v, table = call.q, call.k, call.v, call.cos_sin_cache
    expect(q.dim() == 3, "q", "three dimensions [tokens, q heads, head_dim]", list(q.shape))
    expect(k.dim() == 3, "k", "three dimensions [tokens, k heads, head_dim]", list(k.shape))
    expect(table.dim() == 2, "cos_sin_cache", "two dimensions [positions, rope_dim]", list(table.shape))
    tokens, _, dim = q.shape
    heads, rope = k.shape[1], table.shape[1]
    expect(k.shape[0] == tokens and k.shape[2] == dim, "k", f"shape [{tokens}, k heads, {dim}], as q", list(k.shape))
    flat = [tokens, heads * dim]
    expect(list(v.shape) in (list(k.shape), flat), "v", f"shape {list(k.shape)}, as k, or {flat}", list(v.shape))
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        fits = cache.dim() == 2 and cache.shape[1] == heads * dim
        expect(fits, name, f"shape [slots, {heads * dim}], the heads of k side by side", list(cache.shape))
    for name, x in (("k", k), ("v", v), ("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        expect(x.dtype == q.dtype, name, f"dtype {q.dtype}, as q", x.dtype)
    for name, weight in (("q_weight", call.q_weight), ("k_weight", call.k_weight)):
        expect(list(weight.shape) == [dim], name, f"shape [{dim}]", list(weight.shape))
    for name, places in (("positions", call.positions), ("out_loc", call.out_loc)):
        expect(list(places.shape) == [tokens], name, f"shape [{tokens}], one per token", list(places.shape))
        expect(places.dtype in (torch.int32, torch.int64), name, "dtype int32 or int64", places.dtype)
    expect(call.head_dim in (0, dim), "head_dim", f"0 or q's last size {dim}", call.head_dim)
    expect(call.rope_dim in (0, rope), "rope_dim", f"0 or the width {rope} of cos_sin_cache", call.rope_dim)
    expect(0 < rope <= dim and rope % 2 == 0, "rope_dim", f"an even number from 2 to head_dim {dim}", rope)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.q.dtype not in DTYPES:
        return f"q has dtype {call.q.dtype}; the kernel takes float16 and bfloat16"
    if call.q.shape[2] not in HEAD_DIMS:
        return f"head_dim is {call.q.shape[2]}; the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    for name, x in (("q", call.q), ("k", call.k), ("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            return f"{name} has stride 0: several of its elements share one memory location"
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.dim() == 3 and (x.shape[1] - 1) * x.stride(1) >= 2**31:
            return (
                f"the heads of {name} are {x.stride(1)} elements apart; the last begins 2^31 or more behind the first"
            )
    return scattered(given(call)) or unfit(given(call), (*FLOATS, torch.float64))


def _plain(call: Call) -> None:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    table = call.cos_sin_cache
    rope = table.shape[1]
    wide = torch.promote_types(call.q.dtype, torch.float32)
    cos, sin = table[call.positions].to(wide)[:, None].chunk(2, dim=-1)  # [tokens, 1, rope / 2]
    for x, weight in ((call.q, call.q_weight), (call.k, call.k_weight)):
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + call.eps) * weight.to(wide)
        turned = y[..., :rope]
        a, b = turned.chunk(2, dim=-1) if call.is_neox else (turned[..., 0::2], turned[..., 1::2])
        pairs = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.cat(pairs, dim=-1) if call.is_neox else torch.stack(pairs, dim=-1).flatten(-2)
        x.copy_(torch.cat((turned, y[..., rope:]), dim=-1))
    for cache, x in ((call.k_cache, call.k), (call.v_cache, call.v)):
        cache[call.out_loc] = x.flatten(1)


# --- public function

OP = Op(
    "fused_inplace_qknorm_rope_kv_store",
    Call,
    kernel=qknorm_rope_kv_store_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    mutates=("q", "k", "k_cache", "v_cache"),
    integers=("positions", "out_loc"),
)


@OP.public
def fused_inplace_qknorm_rope_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
) -> None:
    """Normalise and rotate q and k in place, and store k and v into rows `out_loc` of their caches.

    Args:
        q: [tokens, q heads, head_dim], float16 or bfloat16; the last stride is 1, others are free (packed qkv).
        k: [tokens, k heads, head_dim], q's dtype; it may have fewer heads than q.
        v: as k, or [tokens, k heads * head_dim]; it stays as it is.
        k_cache: [slots, k heads * head_dim], q's dtype; rows may lie apart.
        v_cache: the same.
        q_weight: [head_dim].
        k_weight: [head_dim].
        cos_sin_cache: [positions, rope_dim], float32: cos in the first half of a row, sin in the second.
        positions: [tokens], int32 or int64, rows of cos_sin_cache; not checked against its length.
        out_loc: [tokens], int32 or int64, rows of the caches; not checked against their length. A row that comes twice,
            as that of padding does, then holds values of either token, or of both.
        is_neox: rotate (p, p + rope_dim / 2) instead of (2p, 2p + 1).
        eps: added to the mean square.
        head_dim: 64, 128 or 256; 0 takes q's.
        rope_dim: even, at most head_dim; 0 takes the width of cos_sin_cache.

    Other dtypes, head_dims and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    OP.call(
        *(q, k, v, k_cache, v_cache, q_weight, k_weight, cos_sin_cache, positions, out_loc),
        *(is_neox, eps, head_dim, rope_dim),
    )
