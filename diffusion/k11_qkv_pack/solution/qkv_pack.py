"""RMSNorm of q and k, rotary embedding, and q, k and v side by side: one Triton kernel, launched directly.

    x^ = x * w / sqrt(mean(x^2) + eps)                      per token and head of q and k, over head_dim, in float32
    y_2p = x^_2p * cos_p - x^_2p+1 * sin_p,   y_2p+1 = x^_2p+1 * cos_p + x^_2p * sin_p           for each pair p

Row t of cos and sin belongs to token t; tokens beyond their last row are only normalised. v is copied. Rounding to q's
dtype happens once, at the end.

Source of the semantics: SGLang 0.5.23, `runtime/models/dits/hunyuanvideo.py` and `flux.py` (Apache-2.0); the code is
our own.

Idea: the op only streams, so every byte is read and written once. Upstream writes q and k after the norm and reads them
again, for the rotation (HunyuanVideo) or for the concatenation (FLUX). A program takes one token and some heads of its
q, its k or its v. All its loads are issued before the first use. What the heads of a token share is computed once: the
weights are folded into cos and sin, and 1 / rms is applied to the rotated pair. Pairs are split and joined inside a
thread's registers, without shuffles.
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

HEAD_DIMS = (64, 128, 256)
"""A head is one power-of-two block in registers."""
DTYPES = (torch.float16, torch.bfloat16)
PLANES = 3
"""Planes of the output: q, k and v."""


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


TUNED = Table(__file__, "qkv_pack", Config)
"""Tuned configurations, chosen by `bytes` of the output."""


# --- kernel


class Lines(NamedTuple):
    """Elements from one batch, token and head of a tensor [B, S, H, D] to the next, constants of the kernel.

    `batch` is 0 if there is one batch alone: it would change with the tokens.
    """

    batch: int
    token: int
    head: int


@triton.jit
def qkv_rope_pack_kernel(
    y,  # [3, B, TOKENS, NUMBER, DIM]
    q,  # [B, TOKENS, NUMBER, DIM], as k and v
    k,
    v,
    q_weight,  # [DIM], as k_weight
    k_weight,
    cos,  # [ROTATED, DIM / 2]; with sin None [ROTATED, DIM], sin in the second half; None: no token is rotated
    sin,
    plane,  # elements from one plane of y to the next
    tokens,
    rotated,  # rows of cos
    Y: tl.constexpr,  # the `Lines` of a plane of y
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    NUMBER: tl.constexpr,  # heads of a token
    DIM: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a tile
    TILES: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the heads of a token
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: up to HEADS * TILES heads of one token's q, k or v."""
    line = (tl.program_id(0) // (3 * PARTS)).to(tl.int64)
    part = tl.program_id(0) % (3 * PARTS)
    batch, token = line // tokens, line % tokens
    head = (part % PARTS) * (HEADS * TILES) + tl.arange(0, HEADS)[:, None]  # [HEADS, 1], of the first tile
    target = y + batch * Y.batch + token * Y.token

    follow_the_kernel_ahead(PDL)

    if part < PARTS:
        source = q + batch * Q.batch + token * Q.token
        norm_and_rotate_heads(
            *(target, source, q_weight, cos, sin, token, rotated, head, Y.head, Q.head),
            *(COS_STRIDE, SIN_STRIDE, EPS, NUMBER, DIM, HEADS, TILES, EARLY, STORE),
        )
    elif part < 2 * PARTS:
        source = k + batch * K.batch + token * K.token
        norm_and_rotate_heads(
            *(target + plane, source, k_weight, cos, sin, token, rotated, head, Y.head, K.head),
            *(COS_STRIDE, SIN_STRIDE, EPS, NUMBER, DIM, HEADS, TILES, EARLY, STORE),
        )
    else:
        source = v + batch * V.batch + token * V.token
        col = tl.arange(0, DIM)[None, :]
        loaded = ()
        for tile in tl.static_range(TILES):
            at = head + tile * HEADS
            loaded += (load_tile(source + at * V.head, col, at < NUMBER, DIM, False, ""),)
        for tile in tl.static_range(TILES):
            at = head + tile * HEADS
            store_tile(target + 2 * plane + at * Y.head, loaded[tile], col, at < NUMBER, DIM, False, STORE)


@triton.jit
def norm_and_rotate_heads(
    target,
    source,
    weight,
    cos,
    sin,
    token,
    rotated,
    head,
    TARGET_STEP: tl.constexpr,  # elements from one head to the next
    SOURCE_STEP: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    NUMBER: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
    STORE: tl.constexpr,
):
    """The program's heads of one token: loads of all tiles, then norm, rotation and store of each."""
    HALF: tl.constexpr = DIM // 2
    col = tl.arange(0, DIM)[None, :]
    loaded = ()
    for tile in tl.static_range(TILES):
        at = head + tile * HEADS
        loaded += (load_tile(source + at * SOURCE_STEP, col, at < NUMBER, DIM, False, ""),)  # [HEADS, DIM]

    # Weights, cos and sin are loaded once per head, so that a thread loads what its own elements need. A single line
    # would be spread over the threads, which would then have to exchange it.
    weights = tl.load(weight + tl.broadcast_to(col, HEADS, DIM)).to(tl.float32)
    weight_a, weight_b = tl.split(tl.reshape(weights, HEADS, HALF, 2))
    if EARLY:
        tl.debug_barrier()
    if cos is not None:
        pair = tl.broadcast_to(tl.arange(0, HALF)[None, :], HEADS, HALF)
        angles = cos + token * COS_STRIDE
        c = tl.load(angles + pair, mask=token < rotated, other=1.0).to(tl.float32)
        if sin is None:
            s = tl.load(angles + HALF + pair, mask=token < rotated, other=0.0).to(tl.float32)
        else:
            s = tl.load(sin + token * SIN_STRIDE + pair, mask=token < rotated, other=0.0).to(tl.float32)
        cos_a, sin_a, cos_b, sin_b = weight_a * c, weight_a * s, weight_b * c, weight_b * s

    for tile in tl.static_range(TILES):
        at = head + tile * HEADS
        x = loaded[tile].to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + EPS)
        x_a, x_b = tl.split(tl.reshape(x, HEADS, HALF, 2))
        if cos is not None:
            y_a, y_b = (x_a * cos_a - x_b * sin_b) * scale, (x_b * cos_b + x_a * sin_a) * scale
        else:
            y_a, y_b = x_a * weight_a * scale, x_b * weight_b * scale
        y = tl.reshape(tl.join(y_a.to(loaded[tile].dtype), y_b.to(loaded[tile].dtype)), HEADS, DIM)
        store_tile(target + at * TARGET_STEP, y, col, at < NUMBER, DIM, False, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call."""

    out: torch.Tensor | None  # first, as the kernel has it
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None = None
    eps: float = 1e-6


def output_of(call: Call) -> torch.Tensor:
    """A tensor of the output's shape and dtype, with one element of memory."""
    return call.q.new_empty(()).expand(PLANES, *call.q.shape)


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    batch, tokens, number, dim = call.q.shape
    major = capability(call.q)
    config = TUNED.select(major, bytes=PLANES * call.q.numel() * call.q.itemsize)
    heads = vector_width(config.warps, call.q.itemsize) // dim
    tiles = even_share(triton.cdiv(number, heads), config.tiles)
    parts = triton.cdiv(number, heads * tiles)
    pdl = config.pdl and pdl_works(qkv_rope_pack_kernel, major)
    y = call.out
    if y is None:
        y, plane, of_y = output_of(call), call.q.numel(), Lines(tokens * number * dim, number * dim, dim)
    else:
        plane, of_y = y.stride(0), Lines(*y.stride()[1:4])
    return Launch.make(
        qkv_rope_pack_kernel,
        (batch * tokens * PLANES * parts,),
        y,
        *call[1:8],
        plane,
        tokens,
        0 if call.cos is None else call.cos.shape[0],
        Y=of_y._replace(batch=of_y.batch if batch > 1 else 0),
        Q=lines(call.q),
        K=lines(call.k),
        V=lines(call.v),
        COS_STRIDE=0 if call.cos is None else call.cos.stride(0),
        SIN_STRIDE=0 if call.sin is None else call.sin.stride(0),
        EPS=float(call.eps),
        NUMBER=number,
        DIM=dim,
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
    q, cos, sin = call.q, call.cos, call.sin
    expect(q.dim() == 4, "q", "four dimensions [B, tokens, heads, head_dim]", list(q.shape))
    dim = q.shape[-1]
    for name, x in (("k", call.k), ("v", call.v)):
        expect(x.shape == q.shape, name, f"shape {list(q.shape)}, as q", list(x.shape))
        expect(x.dtype == q.dtype, name, f"dtype {q.dtype}, as q", x.dtype)
    for name, x in (("q_weight", call.q_weight), ("k_weight", call.k_weight)):
        expect(list(x.shape) == [dim], name, f"shape [{dim}]", list(x.shape))
    expect(dim % 2 == 0, "q", "an even head_dim", dim)
    expect(sin is None or cos is not None, "cos", "a tensor, since sin is one", cos)
    if cos is not None:
        width = dim if sin is None else dim // 2
        expect(cos.dim() == 2 and cos.shape[1] == width, "cos", f"shape [rows, {width}]", list(cos.shape))
    if cos is not None and sin is not None:
        expect(sin.shape == cos.shape, "sin", f"shape {list(cos.shape)}, as cos", list(sin.shape))
    if call.out is not None:
        shape = [PLANES, *q.shape]
        expect(list(call.out.shape) == shape, "out", f"shape {shape}", list(call.out.shape))
        expect(call.out.dtype == q.dtype, "out", f"dtype {q.dtype}, as q", call.out.dtype)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.q.dtype not in DTYPES:
        return f"q has dtype {call.q.dtype}; the kernel takes float16 and bfloat16"
    if call.q.shape[-1] not in HEAD_DIMS:
        return f"head_dim is {call.q.shape[-1]}; the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    out = call.out
    if out is not None and any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)):
        return "out has stride 0: several of its elements share one memory location"
    return scattered(given(call)) or unfit(given(call))


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    planes = []
    for x, weight in ((call.q, call.q_weight), (call.k, call.k_weight)):
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + call.eps) * weight.to(wide)
        if call.cos is not None:
            cos, sin = call.cos.chunk(2, dim=-1) if call.sin is None else (call.cos, call.sin)
            cos, sin = (table[: x.shape[1], None].to(wide) for table in (cos, sin))  # [rows, 1, head_dim / 2]
            a, b = y[:, : len(cos), :, 0::2], y[:, : len(cos), :, 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
            y = torch.cat((turned, y[:, len(cos) :]), dim=1)
        planes.append(y.to(x.dtype))
    result = torch.stack((*planes, call.v))
    return result if call.out is None else call.out.copy_(result)


# --- public function

OP = Op(
    "qkv_norm_rope_pack",
    Call,
    kernel=qkv_rope_pack_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=(output_of,),
    contiguous=True,
    into="out",
)


@OP.public
def qkv_norm_rope_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Normalise and rotate q and k, and write q, k and v side by side.

    Args:
        q: [B, tokens, heads, head_dim], float16 or bfloat16; the last stride is 1, others are free (packed qkv).
        k: as q.
        v: as q; it is only copied.
        q_weight: [head_dim].
        k_weight: [head_dim].
        cos: [rows, head_dim / 2]: row t belongs to token t. Tokens beyond the last row are not rotated, rows beyond the
            last token are not read. None: no token is rotated.
        sin: as cos. None: cos is [rows, head_dim] and has sin in its second half.
        out: [3, B, tokens, heads, head_dim], written and returned; its strides are free, so that two streams of tokens
            can be written into one tensor.
        eps: added to the mean square.

    Returns:
        [3, B, tokens, heads, head_dim], q's dtype, contiguous unless `out` is given: q, k and v.

    Other dtypes, head_dims and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    y = OP.call(out, q, k, v, q_weight, k_weight, cos, sin, eps)
    return out if y is None else y
