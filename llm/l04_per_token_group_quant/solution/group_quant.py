"""Rows quantised to float8 with a scale for every group of columns: one Triton kernel, launched directly.

    scale = max(|x| over the group, 1e-10) / 448
    q = x / scale                               rounded to float8_e4m3fn, the nearest, ties to even

x is a row of input, or the gated SiLU of its two halves, rounded to input's dtype before it is quantised: so one call
gives the bits of SiLU and quantisation in two calls.

Quotients and exponentials use the instructions of upstream's build with `--use_fast_math`: they are few, and the bits
are upstream's.

Source of the semantics: SGLang 0.5.23, `kernels/ops/quantization/per_token_group_quant.py` (Apache-2.0); the code is
our own.

Idea: the op streams, and a few threads hold a group. A thread holds 16 elements, which it stores as one vector of 16
bytes, so three shuffles reduce a group of 128. The groups of a program divide a row, so nothing is masked at its end
and no element's index is divided. In large calls a program takes several rows: if scales lie column by column, those of
neighbouring rows are neighbours in memory.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import FLOATS, Expect, capability, expecting, pdl_works, scattered, unfit
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead, load_tile, store_tile, widen
from kda_runtime.triton_silu import silu_times
from kda_runtime.tuned_table import Table

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
LEAST = 1e-10
"""Lower bound of a group's largest element, so that a group of zeros has a scale, too."""
GROUPS = (16, 32, 64, 128, 256)
"""Sizes of groups that the kernel takes."""
FLOAT8_FROM = (8, 9)
"""Compute capability from which on a GPU converts to float8_e4m3fn."""
VECTOR = 16
"""Elements of a vector: 16 bytes of float8."""
SILU, SILU_ROUNDED = "silu", "silu rounded"
"""What is quantised of two halves: their gated SiLU, computed in float32 or with SiLU rounded to input's dtype."""
MODES = {"legacy": SILU_ROUNDED, "dense": SILU}
"""Upstream's names for them."""
Pair = tuple[torch.Tensor, torch.Tensor]


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    vectors: int = 1
    """Vectors of 16 elements for every thread."""
    beside: int = 4
    """Most groups of one row in a program; the program's other groups are of other rows."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads, or `evict_first`."""
    each: int = 16
    """Neighbours that a thread holds: 16 to store 16 bytes at once; 8 to load 16, so that a warp's loads adjoin."""


TUNED = Table(__file__, "group_quant", Config)
"""Tuned configurations, chosen by `width` (columns of output_q) and `rows`."""


# --- kernel


UPSTREAMS_SILU: tl.constexpr = tl.constexpr("""{
    .reg .f32 value;
    mul.ftz.f32 value, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 value, value;
    add.ftz.f32 value, value, 0f3F800000;
    rcp.rn.ftz.f32 value, value;
    mul.ftz.f32 $0, $1, value;
}""")
"""What nvcc 13 makes of `gate * __frcp_rn(1.0f + __expf(-gate))` with `--use_fast_math`; the first constant is
-log2(e). On Blackwell upstream has another formula."""
UPSTREAMS_QUOTIENT: tl.constexpr = tl.constexpr("div.approx.ftz.f32 $0, $1, $2;")
TWO_TO_BFLOAT16: tl.constexpr = tl.constexpr("""{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xFFFF0000;
}""")
"""Rounds two values of float32 to bfloat16, and widens them again."""


@triton.jit
def _upstreams(CODE: tl.constexpr, one, other):
    """The instructions CODE on two values of float32."""
    return tl.inline_asm_elementwise(CODE, "=f,f,f", [one, other], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(value, dtype: tl.constexpr, EXACT: tl.constexpr):
    """The value rounded to dtype, in float32.

    The unit that computes exponentials and reciprocals, which has enough to do here, also rounds single values to
    bfloat16. Another unit rounds two at once.
    """
    if EXACT and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(TWO_TO_BFLOAT16, "=f,=f,f,f", [value], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return widen(value.to(dtype))


@triton.jit
def _silu(gate, EXACT: tl.constexpr):
    """SiLU alone, before it is rounded."""
    if EXACT:
        return _upstreams(UPSTREAMS_SILU, gate, gate)
    else:
        return gate / (1 + tl.exp(-gate))


@triton.jit(do_not_specialize=["rows", "apart"])
def group_quant_kernel(
    q,  # [ROWS, N]
    s,  # [ROWS, N / GROUP]
    x,  # [ROWS, N], or with ACTIVATION [ROWS, 2 * N]
    rows,  # number of rows; None where every program is full
    apart,  # elements of s from one group to the next; None where they follow each other
    Q_STRIDE: tl.constexpr,
    S_STRIDE: tl.constexpr,  # from row to row
    X_STRIDE: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BESIDE: tl.constexpr,  # groups of a row in a program, a divisor of the row's groups
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,  # upstream's instructions
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    EACH: tl.constexpr,  # neighbours that a thread holds
):
    """One program: BESIDE groups of ROWS rows."""
    PARTS: tl.constexpr = N // (BESIDE * GROUP)
    first = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS
    group = tl.program_id(0) % PARTS * BESIDE + tl.arange(0, BESIDE)[None, :]  # [1, BESIDE]
    row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    inside = None if rows is None else first + row < rows
    whole = None if rows is None else inside[:, :, None]
    col = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]  # [1, BESIDE, GROUP]
    if EACH < GROUP:
        col = tl.max_contiguous(col, [1, 1, EACH])
    # Row offsets take 64 bits: rows of a projection's output may be far apart.
    line = first + row.to(tl.int64)

    follow_the_kernel_ahead(PDL)

    x += (line * X_STRIDE)[:, :, None]
    value = widen(load_tile(x, col, whole, N, False, LOAD))  # [ROWS, BESIDE, GROUP]
    if ACTIVATION != "":
        up = widen(load_tile(x + N, col, whole, N, False, LOAD))
        if ACTIVATION == "silu rounded":
            value = _rounded(_silu(value, EXACT), x.dtype.element_ty, EXACT) * up
        else:
            value = silu_times(value, up, EXACT)
        value = _rounded(value, x.dtype.element_ty, EXACT)

    largest = tl.maximum(tl.max(tl.abs(value), axis=2), 1e-10)  # [ROWS, BESIDE]
    if EXACT:
        factor = _upstreams(UPSTREAMS_QUOTIENT, tl.full(largest.shape, 448.0, tl.float32), largest)
    else:
        factor = 448.0 / largest
    store_tile(
        q + (line * Q_STRIDE)[:, :, None], (value * factor[:, :, None]).to(tl.float8e4nv), col, whole, N, False, ""
    )
    at = group if apart is None else group.to(tl.int64) * apart
    store_tile(s + line * S_STRIDE, largest * (1.0 / 448.0), at, inside, N, False, "")


# --- plan


class Call(NamedTuple):
    """The arguments of one call, tensors first, in the kernel's order."""

    output_q: torch.Tensor
    output_s: torch.Tensor
    input: torch.Tensor
    group_size: int
    activation: str
    """What is quantised: `SILU`, `SILU_ROUNDED`, or input itself."""

    @property
    def halves(self) -> int:
        """Columns of input for one of output_q."""
        return 2 if self.activation else 1


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, q, s = call.input, call.output_q, call.output_s
    rows, width = q.shape
    major = capability(x)
    config = TUNED.select(major, width=width, rows=rows)
    groups = width // call.group_size
    capacity = config.warps * 32 * VECTOR * config.vectors // call.group_size  # in groups
    beside = min(groups & -groups, config.beside, capacity)
    tile = min(capacity // beside, triton.next_power_of_2(rows))
    held = tile * beside * call.group_size // (32 * VECTOR)  # warps that the program's elements fill
    pdl = config.pdl and pdl_works(group_quant_kernel, major)
    return Launch.make(
        group_quant_kernel,
        (triton.cdiv(rows, tile) * (groups // beside),),
        q,
        s,
        x,
        rows if rows % tile else None,
        None if s.stride(1) == 1 or groups == 1 else s.stride(1),
        Q_STRIDE=q.stride(0),
        S_STRIDE=s.stride(0),
        X_STRIDE=x.stride(0),
        N=width,
        GROUP=call.group_size,
        BESIDE=beside,
        ROWS=tile,
        ACTIVATION=call.activation,
        EXACT=not is_interpreted(group_quant_kernel),  # the interpreter runs no machine code
        PDL=pdl,
        LOAD=config.load,
        EACH=config.each,
        num_warps=min(config.warps, max(held, 1)),
        launch_pdl=pdl,
    )


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the ops have no meaning for."""
    shape = list(call.input.shape)
    expect(len(shape) == 2, "input", "2 dimensions [rows, columns]", shape)
    expect(shape[1] > 0 and shape[1] % call.halves == 0, "input", f"a multiple of {call.halves} columns", shape)
    rows, width = shape[0], shape[1] // call.halves
    whole = call.group_size > 0 and width % call.group_size == 0
    expect(whole, "group_size", f"a divisor of the {width} columns to quantise", call.group_size)
    for name, tensor, wanted, dtype in (
        ("output_q", call.output_q, [rows, width], torch.float8_e4m3fn),
        ("output_s", call.output_s, [rows, width // call.group_size], torch.float32),
    ):
        expect(list(tensor.shape) == wanted, name, f"shape {wanted}", list(tensor.shape))
        expect(tensor.dtype == dtype, name, f"dtype {dtype}", tensor.dtype)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.group_size not in GROUPS:
        return f"group_size is {call.group_size}; the kernel takes {', '.join(map(str, GROUPS))}"
    if call.input.is_cuda and (has := torch.cuda.get_device_capability(call.input.device)) < FLOAT8_FROM:
        return f"the GPU has compute capability {has[0]}.{has[1]}; the kernel takes 8.9 and up, which have float8"
    q, s = call.output_q, call.output_s
    for name, tensor in (("output_q", q), ("output_s", s)):
        if torch._debug_has_internal_overlap(tensor) == 1:
            return f"{name} has strides {tensor.stride()}; several of its elements are one place in memory"
    reason = unfit({"input": call.input}) or unfit({"output_q": q, "output_s": s}, (*FLOATS, torch.float8_e4m3fn))
    return reason or scattered({"input": call.input, "output_q": q})


def _plain(call: Call) -> None:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    value = call.input.to(torch.promote_types(call.input.dtype, torch.float32))
    if call.activation:
        gate, up = value.chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate)
        if call.activation == SILU_ROUNDED:
            act = act.to(call.input.dtype).to(value.dtype)
        value = (act * up).to(call.input.dtype).to(value.dtype)
    groups = value.unflatten(-1, (-1, call.group_size))
    largest = groups.abs().amax(-1).clamp(min=LEAST)
    scaled = (groups * (LARGEST / largest).unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    call.output_q.copy_(scaled.flatten(-2).detach().float())
    call.output_s.copy_(largest / LARGEST)


# --- public functions

_op = partial(
    Op[Call],
    arguments=Call,
    kernel=group_quant_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    mutates=("output_q", "output_s"),
    exact=(plan, _plain),
)
QUANT = _op("per_token_group_quant")
FUSED = _op("silu_and_mul_quant")


def _call(
    input: torch.Tensor,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
    group_size: int = 128,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    expected_m: int | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
    silu_and_mul_mode: str = "legacy",
) -> Call:
    """The call for upstream's arguments, with new outputs if none are given."""
    expect = expecting("per_token_group_quant")
    expect(not scale_ue8m0, "scale_ue8m0", "False, for scales in float32", scale_ue8m0)
    expect(masked_m is None and expected_m is None, "masked_m", "None, rows of one batch", masked_m)
    unsorted = sorted_token_ids is None and num_tokens_post_padded is None and num_valid_tokens == 0
    expect(unsorted, "sorted_token_ids", "None, rows without padding", sorted_token_ids)
    expect(out_dtype in (None, torch.float8_e4m3fn), "out_dtype", "torch.float8_e4m3fn or None", out_dtype)
    expect(silu_and_mul_mode in MODES, "silu_and_mul_mode", " or ".join(MODES), silu_and_mul_mode)
    expect((output_q is None) == (output_s is None), "output_s", "as output_q: both or none", output_s)
    activation = MODES[silu_and_mul_mode] if fuse_silu_and_mul else ""
    if output_q is None or output_s is None:
        output_q, output_s = _outputs(input, group_size, 2 if activation else 1, column_major_scales)
    return Call(output_q, output_s, input, int(group_size), activation)


def _outputs(x: torch.Tensor, group_size: int, halves: int, column_major_scales: bool) -> Pair:
    """New outputs, as upstream allocates them."""
    rows, width = x.shape[0], x.shape[-1] // halves
    groups = width // max(group_size, 1)
    q = x.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    if not column_major_scales:
        return q, x.new_empty((rows, groups), dtype=torch.float32)
    # A matrix product reads the scales by TMA, which needs a multiple of 16 bytes from group to group.
    return q, x.new_empty((groups, (rows + 3) // 4 * 4), dtype=torch.float32).t()[:rows]


@QUANT.also(_call)
def per_token_group_quant(
    input: torch.Tensor,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
    group_size: int = 128,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    expected_m: int | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
    silu_and_mul_mode: str = "legacy",
) -> Pair:
    """Quantise every group of columns of every row to float8, with a scale of its own.

    Args:
        input: [T, N], with `fuse_silu_and_mul` [T, 2 * N]; float16, bfloat16 or float32, the last stride is 1.
        output_q: [T, N], float8_e4m3fn, the last stride is 1; None for a new tensor; output_s is None, too, then.
        output_s: [T, N / group_size], float32, any strides: upstream's are row by row or column by column.
        group_size: columns of a group; the kernel takes 16, 32, 64, 128 and 256.
        fuse_silu_and_mul: quantise the gated SiLU of input's halves, rounded to input's dtype.
        out_dtype: torch.float8_e4m3fn, or None for it.
        column_major_scales: whether a new output_s is stored by column, each beginning at a multiple of 16 bytes.
        silu_and_mul_mode: `dense` rounds where SGLang's activation and quantisation do, one behind the other; `legacy`
            rounds SiLU to input's dtype as well.
        scale_ue8m0: only False: scales are float32.
        masked_m: only None: rows of one batch.
        expected_m: only None, as masked_m.
        sorted_token_ids: only None: no row is padding.
        num_tokens_post_padded: only None, as sorted_token_ids.
        num_valid_tokens: only 0, as sorted_token_ids.

    Returns:
        (output_q, output_s).

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    call = _call(
        input,
        output_q,
        output_s,
        group_size,
        scale_ue8m0,
        fuse_silu_and_mul,
        masked_m,
        expected_m,
        out_dtype=out_dtype,
        column_major_scales=column_major_scales,
        sorted_token_ids=sorted_token_ids,
        num_tokens_post_padded=num_tokens_post_padded,
        num_valid_tokens=num_valid_tokens,
        silu_and_mul_mode=silu_and_mul_mode,
    )
    QUANT.call(*call)
    return call.output_q, call.output_s


def _fused(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128) -> Call:
    return Call(output_q, output_s, input, group_size, SILU)


@FUSED.also(_fused)
def silu_and_mul_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, group_size: int = 128
) -> Pair:
    """The gated SiLU of input's halves, quantised: `per_token_group_quant` in its fused mode `dense`.

    Args:
        input: [T, 2 * N], float16, bfloat16 or float32, the last stride is 1; the gate's columns first.
        output_q: [T, N], float8_e4m3fn, the last stride is 1.
        output_s: [T, N / group_size], float32, any strides.
        group_size: columns of a group; the kernel takes 16, 32, 64, 128 and 256.

    Returns:
        (output_q, output_s).

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    FUSED.call(output_q, output_s, input, group_size, SILU)
    return output_q, output_s
