"""SiLU of the first half of every row, times the second half: one Triton kernel, launched directly.

    y = gate / (1 + exp(-gate)) * up        gate and up are the halves of a row of input; in float32, rounded once

Rows that nobody reads are left out: rows of an expert -1, and in the block-padded layout padding and rows behind its
end.

The kernel uses the instructions of upstream's build with `--use_fast_math`: they are few, and the bits are upstream's.

Source of the semantics: SGLang 0.5.23, `kernels/ops/activation/activation.py` (Apache-2.0); the code is our own.

Idea: the op only streams, so each thread just loads one or a few 16-byte vectors of each half, all before the first
use, and stores as many. Rows are cut into blocks that divide them, so that nothing is masked at their ends. Narrow
rows, as experts have, lie side by side in a program: no thread idles, and no index is divided. Small calls are cut into
many small programs, because they wait for one load's latency only.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.triton_rows import follow_the_kernel_ahead, load_tile, store_tile, vector_width, widen
from kda_runtime.triton_silu import silu_times
from kda_runtime.tuned_table import Table

LINE_BYTES = 128
"""Smallest block that divides a row: one memory transaction."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    vectors: int
    """16-byte vectors of y for every thread."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads, or `evict_first`."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "silu_and_mul", Config)
"""Tuned configurations, chosen by `width` (columns of y) and `bytes` (of input)."""


# --- kernel


@triton.jit(do_not_specialize=["rows", "valid"])
def silu_and_mul_kernel(
    y,  # [ROWS, N]
    x,  # [ROWS, 2 * N]
    experts,  # one for every STEP rows, or None
    slots,  # one for every row, or None
    end,  # [1], where there are slots: rows from there on are left out
    rows,  # number of rows; None where every program is full and has nothing to leave out
    valid,  # slots with this number or a higher one are padding
    STEP: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a program
    ROWS: tl.constexpr,  # rows of a program
    EXACT: tl.constexpr,  # upstream's instructions
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: BLOCK columns of ROWS rows of y."""
    PARTS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    first = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    inside = None if rows is None else first + row < rows
    x += first * (2 * N)
    y += first * N

    follow_the_kernel_ahead(PDL)

    if experts is not None:
        inside &= tl.load(experts + (first + row) // STEP, mask=inside, other=-1) != -1
    if slots is not None:
        slot = tl.load(slots + first + row, mask=inside, other=-1)
        inside &= (slot >= 0) & (slot < valid) & (first + row < tl.load(end))

    gate = widen(load_tile(x + row * (2 * N), col, inside, N, PARTS * BLOCK > N, LOAD))  # [ROWS, BLOCK]
    up = widen(load_tile(x + row * (2 * N) + N, col, inside, N, PARTS * BLOCK > N, LOAD))

    store_tile(y + row * N, silu_times(gate, up, EXACT), col, inside, N, PARTS * BLOCK > N, STORE)


# --- plan


class Call(NamedTuple):
    """The arguments of one call, tensors first, in the kernel's order."""

    out: torch.Tensor | None
    input: torch.Tensor
    expert_ids: torch.Tensor | None
    sorted_token_ids: torch.Tensor | None
    num_tokens_post_padded: torch.Tensor | None
    expert_step: int
    num_valid_tokens: int


def gate_of(call: Call) -> torch.Tensor:
    """The first half of every row; y has its shape and dtype."""
    return call.input[..., : call.input.shape[-1] // 2]


def block_of(width: int, item_size: int, most: int) -> int:
    """Columns of a program, a power of two up to `most`: a divisor of the width, if that is `LINE_BYTES` or more."""
    divisor = min(width & -width, most)
    return divisor if divisor * item_size >= LINE_BYTES else min(triton.next_power_of_2(width), most)


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, y = call.input, gate_of(call)
    width = y.shape[-1]
    rows = y.numel() // width
    major = capability(x)
    config = TUNED.select(major, width=width, bytes=x.nbytes)
    capacity = config.vectors * vector_width(config.warps, x.itemsize)
    block = block_of(width, x.itemsize, capacity)
    tile = min(capacity // block, triton.next_power_of_2(rows))
    filtered = call.expert_ids is not None
    pdl = config.pdl and pdl_works(silu_and_mul_kernel, major)
    return Launch.make(
        silu_and_mul_kernel,
        (triton.cdiv(rows, tile) * triton.cdiv(width, block),),
        y if call.out is None else call.out,
        x,
        call.expert_ids,
        call.sorted_token_ids,
        call.num_tokens_post_padded,
        rows if filtered or rows % tile else None,
        call.num_valid_tokens,
        STEP=call.expert_step,
        N=width,
        BLOCK=block,
        ROWS=tile,
        EXACT=not is_interpreted(silu_and_mul_kernel),  # the interpreter runs no machine code
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def _ready(call: Call) -> Call:
    """The call with contiguous copies of inputs that have gaps."""
    gaps = {
        name: tensor.contiguous()
        for name, tensor in given(call).items()
        if name != "out" and not tensor.is_contiguous()
    }
    return call._replace(**gaps) if gaps else call


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    shape = list(call.input.shape)
    even = len(shape) > 0 and shape[-1] > 0 and shape[-1] % 2 == 0
    expect(even, "input", "an even number of columns", shape)
    if call.out is not None:
        wanted = list(gate_of(call).shape)
        fits = list(call.out.shape) == wanted and call.out.dtype == call.input.dtype
        expect(fits, "out", f"shape {wanted} and dtype {call.input.dtype}", [list(call.out.shape), call.out.dtype])
    rows = gate_of(call)[..., :1].numel()
    if call.expert_ids is not None:
        expect(call.expert_step > 0, "expert_step", "a positive number", call.expert_step)
        enough = call.expert_ids.numel() * call.expert_step >= rows
        expect(enough, "expert_ids", f"one for every {call.expert_step} of {rows} rows", call.expert_ids.numel())
    slots, end = call.sorted_token_ids, call.num_tokens_post_padded
    if slots is not None:
        expect(slots.numel() >= rows, "sorted_token_ids", f"one for each of {rows} rows", slots.numel())
        expect(end is not None and end.numel() == 1, "num_tokens_post_padded", "one number", end)
        expect(call.num_valid_tokens >= 0, "num_valid_tokens", "0 or more", call.num_valid_tokens)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if call.out is not None and not call.out.is_contiguous():
        return "out has gaps; the kernel writes rows that follow each other"
    return unfit(given(call))


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    wide = call.input.to(torch.promote_types(call.input.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    y = (torch.nn.functional.silu(gate) * up).to(call.input.dtype)
    if call.expert_ids is not None:
        row = torch.arange(y[..., :1].numel(), device=y.device)
        idle = call.expert_ids.flatten()[row // call.expert_step] == -1
        if call.sorted_token_ids is not None:
            slot = call.sorted_token_ids.flatten()[row]
            idle |= (slot < 0) | (slot >= call.num_valid_tokens) | (row >= call.num_tokens_post_padded)
        y = torch.where(idle.view(*y.shape[:-1], 1), torch.zeros_like(y) if call.out is None else call.out, y)
    return y if call.out is None else call.out.copy_(y)


# --- public function

OP = Op(
    "silu_and_mul",
    Call,
    kernel=silu_and_mul_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    ready=_ready,
    outputs=(gate_of,),
    contiguous=True,
    into="out",
    integers=("expert_ids", "sorted_token_ids", "num_tokens_post_padded"),
    exact=(plan, _plain),
)


@OP.public
def silu_and_mul(
    input: torch.Tensor,
    out: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    expert_step: int = 1,
    *,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
) -> torch.Tensor:
    """SiLU of the first half of every row, times the second half.

    Args:
        input: [..., 2 * D], float16, bfloat16 or float32.
        out: [..., D], written, if given.
        expert_ids: one for every `expert_step` rows; rows of -1 keep what `out` holds; without it they have any value.
        expert_step: rows of an expert.
        sorted_token_ids: with `expert_ids`, one for every row; rows whose number is not below `num_valid_tokens` are
            padding and left out, too.
        num_tokens_post_padded: [1], with `sorted_token_ids`; rows from there on are left out, too.
        num_valid_tokens: numbers below it are rows, not padding.

    Returns:
        `out` where it is given, else a new contiguous tensor [..., D].

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if expert_ids is None:  # without it upstream ignores the other two
        sorted_token_ids = num_tokens_post_padded = None
    elif sorted_token_ids is None:
        num_tokens_post_padded = None
    y = OP.call(
        out, input, expert_ids, sorted_token_ids, num_tokens_post_padded, int(expert_step), int(num_valid_tokens)
    )
    return out if y is None else y
