"""Softmax over the experts' logits and its k largest: one Triton kernel, launched directly.

    p = softmax(cap(logits) + correction_bias)            over the experts of a token, in float32
    weights, ids = the k largest p and their experts, the largest first; of equal ones the lower id first
    weights /= sum(weights)                               with `renormalize`

cap(x) is tanh(x / moe_softcapping) * moe_softcapping, and x itself for 0.

Source of the semantics: SGLang 0.5.23, `kernels/ops/moe/moe_topk_softmax.py` (Apache-2.0); the code is our own.

Idea: softmax keeps the order, so the kernel searches for the k largest logits; with `renormalize` only these need an
exponential. A logit and its expert are packed into one integer, ordered by logit, then by expert: one instruction
compares two of them. A few lanes share a token. Each sorts its experts by a network of minimum and maximum in
registers; then sorted lists of the best 8 (or 4) are merged from lane to lane, in log2(lanes) steps. Upstream goes
through all experts and through all lanes once for each of the k.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import FLOATS, Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import VECTOR_BYTES, follow_the_kernel_ahead
from kda_runtime.tuned_table import Table

WARP = 32
MOST_EXPERTS = 1024
"""Most experts: 64 keys of a lane, at 16 lanes."""
INTERPRETED = 5
"""Most tokens for Triton's interpreter: it merges lists one after the other, in a tenth of a second per token."""
LISTS = (4, 8)
"""Lengths of sorted lists. For a larger k the kernel finds one maximum after the other."""
LOG2_E = tl.constexpr(1.4426950408889634)


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    lanes: int
    """Threads of a token, a power of two; a lane has 8 experts or more, so few experts get fewer lanes."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""


TUNED = Table(__file__, "topk_softmax", Config)
"""Tuned configurations, chosen by `tokens` and `experts`."""


# --- kernel


@triton.jit
def _swap(a, b):
    """The larger, then the smaller."""
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def _fall4(a, b, c, d):
    """Four that rise and then fall (or the reverse), sorted in falling order."""
    a, c = _swap(a, c)
    b, d = _swap(b, d)
    a, b = _swap(a, b)
    c, d = _swap(c, d)
    return a, b, c, d


@triton.jit
def _sort4(a, b, c, d):
    """Any four, sorted in falling order."""
    a, b = _swap(a, b)
    c, d = _swap(c, d)
    return _fall4(a, b, d, c)


@triton.jit
def _fall8(a, b, c, d, e, f, g, h):
    a, e = _swap(a, e)
    b, f = _swap(b, f)
    c, g = _swap(c, g)
    d, h = _swap(d, h)
    a, b, c, d = _fall4(a, b, c, d)
    e, f, g, h = _fall4(e, f, g, h)
    return a, b, c, d, e, f, g, h


@triton.jit
def _sort8(a, b, c, d, e, f, g, h):
    a, b, c, d = _sort4(a, b, c, d)
    e, f, g, h = _sort4(e, f, g, h)
    return _fall8(a, b, c, d, h, g, f, e)


@triton.jit
def _best4(a, b, c, d, e, f, g, h):
    """The four largest of two falling lists, in falling order."""
    return _fall4(tl.maximum(a, h), tl.maximum(b, g), tl.maximum(c, f), tl.maximum(d, e))


@triton.jit
def _best8(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):  # noqa: E741
    """The eight largest of two falling lists, in falling order."""
    low = (tl.maximum(a, p), tl.maximum(b, o), tl.maximum(c, n), tl.maximum(d, m))
    high = (tl.maximum(e, l), tl.maximum(f, k), tl.maximum(g, j), tl.maximum(h, i))
    return _fall8(low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3])


@triton.jit
def _apart(x, ROWS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, LANES * WIDTH] as WIDTH tensors of one element a lane, in any order."""
    if WIDTH == 1:
        return (tl.reshape(x, [ROWS, LANES]),)
    else:
        a, b = tl.split(tl.reshape(x, [ROWS, LANES * (WIDTH // 2), 2]))
        return _apart(a, ROWS, LANES, WIDTH // 2) + _apart(b, ROWS, LANES, WIDTH // 2)


@triton.jit
def _keys(x, number, WIDE: tl.constexpr):
    """Logits as integers of the same order, `number` in the low half: 32 bits wide for 16-bit logits, else 64."""
    if WIDE:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | number.to(tl.int64)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | number


@triton.jit
def _logit(key, dtype: tl.constexpr, WIDE: tl.constexpr):
    """The logit of a key, in float32."""
    if WIDE:
        bits = (key >> 32).to(tl.int32)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        bits = key >> 16
        return (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def topk_softmax_kernel(  # noqa: C901  constants decide
    weights,  # [rows, K]
    ids,  # [rows, K]
    logits,  # [rows, E]
    bias,  # [E] or None
    rows,
    CAP: tl.constexpr,  # bound of the logits, or 0
    RENORMALIZE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EP: tl.constexpr,  # a power of two, at least E and LANES * LIST
    KP: tl.constexpr,  # a power of two, at least K
    LIST: tl.constexpr,  # length of sorted lists: 4, 8, or 0 for a larger K
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,  # experts of a lane that are next to each other
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS tokens, LANES threads each."""
    WIDE: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 32 or CAP != 0 or bias is not None
    LOWEST: tl.constexpr = -(2**63) if WIDE else -(2**31)
    MASK: tl.constexpr = 0xFFFF
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    inside = row < rows
    first = row.to(tl.int64) * E
    lane = tl.arange(0, LANES * WIDTH)[None, :]

    follow_the_kernel_ahead(PDL)

    # All loads first, so that they are in flight together.
    loaded = ()
    for part in tl.static_range(EP // (LANES * WIDTH)):
        col = part * LANES * WIDTH + lane
        loaded += (tl.load(logits + first + col, mask=inside & (col < E), other=0.0),)

    keys = ()
    for part in tl.static_range(EP // (LANES * WIDTH)):
        col = part * LANES * WIDTH + lane  # [1, LANES * WIDTH]
        x = loaded[part]  # [ROWS, LANES * WIDTH]
        if CAP != 0:
            # tanh(z) = 1 - 2 / (e^2z + 1)
            x = CAP - 2 * CAP / (tl.exp2(x.to(tl.float32) * (2 * LOG2_E / CAP)) + 1)
        if bias is not None:
            x = x.to(tl.float32) + tl.load(bias + col, mask=col < E, other=0.0)
        key = _keys(x, tl.broadcast_to(EP - 1 - col, [ROWS, LANES * WIDTH]), WIDE)
        if E < EP:
            key = tl.where(col < E, key, LOWEST)
        keys += _apart(key, ROWS, LANES, WIDTH)

    place = tl.arange(0, KP)[None, :]  # [1, KP]
    if LIST == 8:
        best = _sort8(keys[0], keys[1], keys[2], keys[3], keys[4], keys[5], keys[6], keys[7])
        for i in tl.static_range(8, EP // LANES, 8):
            more = _sort8(
                keys[i], keys[i + 1], keys[i + 2], keys[i + 3], keys[i + 4], keys[i + 5], keys[i + 6], keys[i + 7]
            )
            best = _best8(*best, *more)
        a, b, c, d, e, f, g, h = tl.reduce(best, 1, _best8)  # [ROWS] each
        greatest = a
        even = tl.join(tl.join(a, e), tl.join(c, g))
        found = tl.reshape(tl.join(even, tl.join(tl.join(b, f), tl.join(d, h))), [ROWS, KP])
    elif LIST == 4:
        best = _sort4(keys[0], keys[1], keys[2], keys[3])
        for i in tl.static_range(4, EP // LANES, 4):
            best = _best4(*best, *_sort4(keys[i], keys[i + 1], keys[i + 2], keys[i + 3]))
        a, b, c, d = tl.reduce(best, 1, _best4)
        greatest = a
        found = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, KP])
    else:
        rest = keys
        found = tl.full([ROWS, KP], LOWEST, keys[0].dtype)
        for i in tl.static_range(K):
            most = rest[0]
            for j in tl.static_range(1, EP // LANES):
                most = tl.maximum(most, rest[j])
            most = tl.max(most, 1)  # [ROWS]
            if i == 0:
                greatest = most
            found = tl.where(place == i, most[:, None], found)
            left = ()
            for j in tl.static_range(EP // LANES):
                left += (tl.where(rest[j] == most[:, None], LOWEST, rest[j]),)
            rest = left

    # Places from K on may hold any number; the masks remove it.
    dtype: tl.constexpr = logits.dtype.element_ty
    top = _logit(greatest, dtype, WIDE)[:, None]  # [ROWS, 1]
    power = tl.where(place < K, tl.exp2((_logit(found, dtype, WIDE) - top) * LOG2_E), 0.0)  # [ROWS, KP]
    if RENORMALIZE:
        total = tl.sum(power, 1)
    else:
        every = tl.zeros([ROWS, LANES], tl.float32)
        for j in tl.static_range(EP // LANES):
            one = tl.exp2((_logit(keys[j], dtype, WIDE) - top) * LOG2_E)
            every += tl.where(keys[j] == LOWEST, 0.0, one) if E < EP else one
        total = tl.sum(every, 1)  # [ROWS]
    at = row * K + place
    tl.store(weights + at, power / total[:, None], mask=inside & (place < K))
    tl.store(ids + at, (EP - 1 - (found & MASK)).to(tl.int32), mask=inside & (place < K))


# --- plan


class Call(NamedTuple):
    """The arguments of one call."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gating_output: torch.Tensor
    correction_bias: torch.Tensor | None
    renormalize: bool
    moe_softcapping: float


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    tokens, experts = call.gating_output.shape
    k = call.topk_ids.shape[1]
    major = capability(call.gating_output)
    config = TUNED.select(major, tokens=tokens, experts=experts)
    padded, lanes, width = cut(experts, config.lanes, call.gating_output.itemsize)
    rows = config.warps * WARP // lanes
    pdl = config.pdl and pdl_works(topk_softmax_kernel, major)
    return Launch.make(
        topk_softmax_kernel,
        (triton.cdiv(tokens, rows),),
        *call[:4],
        tokens,
        CAP=float(call.moe_softcapping),
        RENORMALIZE=call.renormalize,
        E=experts,
        K=k,
        EP=padded,
        KP=next((size for size in LISTS if k <= size), triton.next_power_of_2(k)),
        LIST=next((size for size in LISTS if k <= size), 0),
        LANES=lanes,
        WIDTH=width,
        ROWS=rows,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def cut(experts: int, lanes: int, item_size: int) -> tuple[int, int, int]:
    """Experts as a power of two, lanes of a token, and how many experts of a lane are next to each other."""
    padded = max(triton.next_power_of_2(experts), LISTS[-1])
    return padded, min(lanes, padded // LISTS[-1]), min(VECTOR_BYTES // item_size, LISTS[-1])


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    logits = call.gating_output
    expect(logits.dim() == 2, "gating_output", "two dimensions [tokens, experts]", list(logits.shape))
    tokens, experts = logits.shape
    ids = call.topk_ids
    fits = ids.dim() == 2 and len(ids) == tokens and 0 < ids.shape[1] <= experts
    expect(fits, "topk_ids", f"shape [{tokens}, k], k from 1 to {experts}", list(ids.shape))
    shape = list(call.topk_weights.shape)
    expect(shape == list(ids.shape), "topk_weights", f"shape {list(ids.shape)}, as topk_ids", shape)
    expect(ids.dtype == torch.int32, "topk_ids", "dtype torch.int32", ids.dtype)
    expect(call.topk_weights.dtype == torch.float32, "topk_weights", "dtype torch.float32", call.topk_weights.dtype)
    if call.correction_bias is not None:
        shape = list(call.correction_bias.shape)
        expect(shape == [experts], "correction_bias", f"shape [{experts}]", shape)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    for name, tensor in given(call).items():
        if not tensor.is_contiguous():
            return f"{name} is not contiguous, its strides are {tensor.stride()}"
    tokens = len(call.gating_output)
    if call.gating_output.is_cpu and is_interpreted(topk_softmax_kernel) and tokens > INTERPRETED:
        return f"gating_output has {tokens} tokens; Triton's interpreter is given up to {INTERPRETED}"
    if call.gating_output.shape[1] > MOST_EXPERTS:
        return f"{call.gating_output.shape[1]} experts; the kernel takes up to {MOST_EXPERTS}"
    return unfit(given(call), FLOATS)


def _plain(call: Call) -> None:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    wide = torch.promote_types(call.gating_output.dtype, torch.float32)
    logits = call.gating_output.to(wide)
    if call.moe_softcapping:
        logits = torch.tanh(logits / call.moe_softcapping) * call.moe_softcapping
    if call.correction_bias is not None:
        logits = logits + call.correction_bias
    # Stable: of equal probabilities the lower id comes first.
    weights, ids = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = (part[:, : call.topk_ids.shape[1]] for part in (weights, ids))
    call.topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if call.renormalize else weights)
    call.topk_ids.copy_(ids)


# --- public function

OP = Op(
    "topk_softmax",
    Call,
    kernel=topk_softmax_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    mutates=("topk_weights", "topk_ids"),
    integers=("topk_ids",),
)


@OP.public
def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: torch.Tensor | None = None,
) -> None:
    """Write the k most probable experts of every token, and their probabilities.

    Args:
        topk_weights: [tokens, k] float32, written.
        topk_ids: [tokens, k] int32, written.
        gating_output: [tokens, experts], float16, bfloat16 or float32.
        renormalize: whether the weights of a token are divided by their sum.
        moe_softcapping: bound of the logits, by a tanh; 0 for none.
        correction_bias: [experts] float32, added to the logits.

    Other dtypes, strides and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    OP.call(topk_weights, topk_ids, gating_output, correction_bias, renormalize, moe_softcapping)
