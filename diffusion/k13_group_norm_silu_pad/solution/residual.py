"""The sum of a convolution's output, its bias, and a residual, of clips in channels-last order.

    y = (x + bias) + (residual + residual_bias)        float32, rounded once to x's dtype

Source of the semantics: a residual block of SGLang 0.5.23, `runtime/models/vaes/hunyuanvae.py` (Apache-2.0), where the
two convolutions add their biases; the code is our own.

Idea: PyTorch adds the bias of a convolution in a kernel of its own, and then the residual in another one. Here both are
added while the output is read once.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from kda_runtime.checks import Expect, capability, given, pdl_works, unfit
from kda_runtime.launch import Launch, is_interpreted
from kda_runtime.op import Op
from kda_runtime.tuned_table import Table

from .kernels import sum_kernel
from .pixels import INTERPRETED, MOST_CHANNELS, MOST_PIXELS, options, tile


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int = 4
    vectors: int = 2
    """16-byte vectors of a thread."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    store: str = ""
    """Cache modifier of the stores."""


TUNED = Table(__file__, "bias_residual", Config)
"""Tuned configurations, chosen by `bytes` (of the output)."""


class Call(NamedTuple):
    """The arguments of one call."""

    x: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor | None
    residual_bias: torch.Tensor | None


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, major = call.x, capability(call.x)
    config = TUNED.select(major, bytes=x.numel() * x.itemsize)
    config = replace(config, pdl=config.pdl and pdl_works(sum_kernel, major))
    pixels, channels = x.shape[:4].numel(), x.shape[4]
    block, rows = tile(x, config.warps * config.vectors)
    return Launch.make(
        sum_kernel,
        (triton.cdiv(pixels, rows),),
        *(torch.empty_like(x, device="meta"), x, call.bias, call.residual, call.residual_bias, pixels),
        C=channels,
        BLOCK=block,
        ROWS=rows,
        STORE=config.store,
        **options(config.pdl, config.warps),
    )


def _check(call: Call, expect: Expect) -> None:
    x = call.x
    expect(x.dim() == 5, "x", "five dimensions [B, T, H, W, C]", list(x.shape))
    for name in ("bias", "residual_bias"):
        vector = getattr(call, name)
        if vector is not None:
            expect(vector.shape == x.shape[4:], name, f"shape {list(x.shape[4:])}", list(vector.shape))
    if call.residual is not None:
        expect(call.residual.shape == x.shape, "residual", f"shape {list(x.shape)}", list(call.residual.shape))
    else:
        expect(call.residual_bias is None, "residual_bias", "None, as there is no residual", "a tensor")


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    for name, tensor in given(call).items():
        if not tensor.is_contiguous():
            return f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; the kernel takes no gaps"
    x = call.x
    if x.is_cpu and is_interpreted(sum_kernel) and x.numel() > INTERPRETED:
        return f"x has {x.numel()} elements; Triton's interpreter is given up to {INTERPRETED}"
    if x.shape[4] > MOST_CHANNELS:
        return f"x has {x.shape[4]} channels; the kernel takes up to {MOST_CHANNELS}"
    if x.shape[:4].numel() > MOST_PIXELS:
        return f"x has {x.shape[:4].numel()} pixels; the kernel takes up to {MOST_PIXELS}"
    return unfit(given(call))


def _plain(call: Call) -> torch.Tensor:
    """The same in PyTorch, for whatever the kernel does not cover."""
    wide = torch.promote_types(call.x.dtype, torch.float32)
    y = call.x.to(wide) + call.bias.to(wide)
    if call.residual is not None:
        other = call.residual.to(wide)
        y = y + (other if call.residual_bias is None else other + call.residual_bias.to(wide))
    return y.to(call.x.dtype).contiguous()


SUM = Op(
    "bias_residual",
    Call,
    kernel=sum_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=("x",),
    contiguous=True,
)


@SUM.public
def bias_residual(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, residual_bias: torch.Tensor | None
) -> torch.Tensor:
    """The sum of a convolution's output without its bias, that bias, and a residual with its own bias.

    Args:
        x: [B, T, H, W, C], contiguous, float16, bfloat16 or float32.
        bias: [C].
        residual: [B, T, H, W, C], contiguous; or None.
        residual_bias: [C], added to the residual; or None.

    Returns:
        [B, T, H, W, C], contiguous, x's dtype.

    Other dtypes, tensors with gaps and CPU tensors take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return SUM.call(x, bias, residual, residual_bias)
