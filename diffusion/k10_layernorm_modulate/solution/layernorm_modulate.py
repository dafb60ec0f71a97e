"""LayerNorm without weights, times 1 + scale, plus shift, with the bits of PyTorch's chain: one kernel.

    n = layer_norm(x)                         over the last dimension, in float32, rounded to x's dtype
    y = n * (1 + scale) + shift               rounded to it after each of the three operations

Source of the semantics: SGLang 0.5.23, `kernels/kda_kernels/layernorm_modulate_triton.py` (Apache-2.0), and PyTorch's
LayerNorm, whose order of sums it follows; the code is our own.

Idea: upstream's kernel already gives these bits, but it moves the partial sums of a row through shared memory at each
of seven levels, reads x a second time, and computes a reciprocal for every element. Here a warp holds the row in its
registers, and the reciprocals are constants (`exact_kernel.py`).
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from kda_runtime.checks import PDL_CAPABILITY, Expect, capability, given, is_lazy
from kda_runtime.launch import Chain
from kda_runtime.op import Op
from kda_runtime.tuned_table import Table

STEP, MOST_COLUMNS = 512, 6144
"""Columns are a multiple of the first, so that all of PyTorch's threads have the same number of elements; a thread has
room for a row of the second."""
VECTOR = 8
"""Elements of a vector of 16 bytes."""
MULTIPROCESSORS = 132
"""Number of multiprocessors that is assumed for tensors on no GPU."""
LEAST_CAPABILITY = 9
"""Least major number of a compute capability that has all instructions of the kernel."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    rows: int = 4
    """Rows of a block at the same time."""
    row_warps: int = 1
    """Warps of a row: 1; or 2 or 4, which have a block of their own."""
    following: str = "once"
    """`once`: a warp has one row. Otherwise the grid is as large as what the GPU holds at once, and a warp has several:
    it loads the next `after` it has used each part of a row, or `before` it computes, into further registers."""
    held: int = 12
    """Warps of a multiprocessor at the same time, at least; the more, the fewer registers a thread has."""
    store: str = ""
    """How y is stored: `cs` marks it as not read again soon, so that more of x stays in the L2."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""


TUNED = Table(__file__, "layernorm_modulate", Config)
"""Tuned configurations, chosen by `columns` and `rows`."""


# --- plan


class Call(NamedTuple):
    """The arguments of one call, tensors first."""

    x: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None
    eps: float


def plan(call: Call) -> Chain:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    from .exact_kernel import ModulateLaunch  # the DSL takes a second to import

    batch, tokens, columns = call.x.shape
    rows, major = batch * tokens, capability(call.x)
    config = TUNED.select(major, columns=columns, rows=rows)
    strides = [0 if one is None or batch == 1 else one.stride(0) for one in (call.scale, call.shift)]
    shifts = call.shift is not None
    aligned = all(stride % VECTOR == 0 for stride in strides)
    pdl = config.pdl and major >= PDL_CAPABILITY
    cut = (config.rows, config.row_warps, config.following, config.held, config.store, pdl)
    blocks = -(-rows // config.rows)
    if config.following != "once":
        blocks = min(blocks, multiprocessors(call.x) * (config.held // (config.rows * config.row_warps)))
    launch = ModulateLaunch((columns, float(call.eps), shifts, aligned, *cut), (rows, tokens, *strides), blocks)
    return Chain((launch,), (tuple(range(3 + shifts)),), outputs=(0,))  # like x


def multiprocessors(x: torch.Tensor) -> int:
    """Number of multiprocessors of x's device."""
    if not x.is_cuda:
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


# --- what is wrong with a call, what the kernel covers, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    expect(call.x.dim() == 3, "x", "3 dimensions [B, S, D]", list(call.x.shape))
    batch, _, columns = call.x.shape
    for name in ("scale", "shift"):
        operand = getattr(call, name)
        if operand is not None:
            expect(list(operand.shape) == [batch, columns], name, f"shape {[batch, columns]}", list(operand.shape))
            expect(operand.dtype == call.x.dtype, name, f"dtype {call.x.dtype}, as x", operand.dtype)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    if find_spec("cutlass") is None:
        return "the CuTe DSL (nvidia-cutlass-dsl) is not installed"
    x = call.x
    if x.dtype != torch.bfloat16:
        return f"x has dtype {x.dtype}; the kernel takes torch.bfloat16"
    if not x.numel():
        return "x is empty"
    if x.shape[-1] % STEP or x.shape[-1] > MOST_COLUMNS:
        return f"x has {x.shape[-1]} columns; the kernel takes multiples of {STEP} up to {MOST_COLUMNS}"
    if not x.is_contiguous():
        return f"x is not contiguous, its strides are {x.stride()}"
    for name, tensor in given(call).items():
        if is_lazy(tensor):
            return f"{name} is a negated or conjugated view or a zero tensor: its memory does not hold its values"
        if tensor.stride(-1) != 1:
            return f"{name} has stride {tensor.stride(-1)} in its last dimension; the kernel takes 1"
    if x.is_cuda and capability(x) < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability(x)}; the kernel takes {LEAST_CAPABILITY} and up"
    return None


def _plain(call: Call) -> torch.Tensor:
    """The same chain in PyTorch, for whatever the kernel does not cover."""
    normed = torch.nn.functional.layer_norm(call.x, call.x.shape[-1:], eps=call.eps)
    result = normed * (1 + call.scale.unsqueeze(1))
    return (result if call.shift is None else result + call.shift.unsqueeze(1)).contiguous()


# --- public function

OP = Op(
    "fused_layernorm_modulate",
    Call,
    kernel=None,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=("x",),
    contiguous=True,
    exact=(plan, _plain),
)


@OP.public
def fused_layernorm_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm of x without weights, times 1 + scale, plus shift.

    Args:
        x: [B, S, D], bfloat16, contiguous; the kernel takes D in multiples of 512 up to 6144.
        scale: [B, D], x's dtype; rows may lie apart.
        shift: [B, D], likewise, or None for no addition.
        eps: added to the variance.

    Returns:
        A new tensor like x: bit for bit `layer_norm(x) * (1 + scale[:, None]) + shift[:, None]`, as PyTorch computes it
        of aligned tensors on a GPU.

    Other dtypes, sizes and strides, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    result: torch.Tensor = OP.call(x, scale, shift, eps)
    return result
