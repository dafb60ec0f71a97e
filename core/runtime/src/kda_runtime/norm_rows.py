"""Host code that is shared by ops which normalise and modulate rows of x [B, S, D]; `triton_rows` has the device code.

Their calls are named tuples with `norm_type` ("layer" or "rms"), `eps`, and tensors whose names say what they are: x
and residual [B, S, D], weight, bias, weight2 and bias2 [D]. All others are operands that broadcast to x.
"""

from __future__ import annotations

from typing import Any

import torch

from kda_runtime.broadcast import Form, Placed, check_operands, formless, per_token, placed, row_stride
from kda_runtime.checks import FLOATS, Expect, given, unfit

COLUMNS_STEP, MAX_COLUMNS = 256, 8192
"""Upstream's envelope: the number of columns is a multiple of the first and at most the second."""
WHOLE = ("residual", "x")
PARAMETERS = ("weight", "bias", "weight2", "bias2")
ROOM = 128
"""Bytes of a thread's registers to leave free of loaded data: register limits that left less made variants spill."""


def operands(call: Any) -> dict[str, torch.Tensor]:
    """The operands of a call that broadcast to x, by name."""
    return {name: tensor for name, tensor in given(call).items() if name not in WHOLE + PARAMETERS}


def used(call: Any) -> dict[str, torch.Tensor]:
    """The tensors that are used. The norms ignore a bias of RMSNorm, and weight or bias of LayerNorm given alone."""
    tensors = given(call)
    for weight, bias in (PARAMETERS[:2], PARAMETERS[2:]):
        if call.norm_type == "layer" and bias not in tensors:
            tensors.pop(weight, None)
        if call.norm_type == "rms" or weight not in tensors:
            tensors.pop(bias, None)
    return tensors


def check(call: Any, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    x = call.x
    expect(x.dim() == 3, "x", "three dimensions [B, S, D]", list(x.shape))
    columns, step, most = x.shape[2], COLUMNS_STEP, MAX_COLUMNS
    expect(columns % step == 0 and 0 < columns <= most, "x", f"D a multiple of {step} up to {most}", columns)
    expect(call.norm_type in ("layer", "rms"), "norm_type", "'layer' or 'rms'", repr(call.norm_type))
    check_operands(expect, operands(call), x.shape)
    for name, tensor in given(call).items():
        expect(tensor.dtype in FLOATS, name, "dtype float16, bfloat16 or float32", tensor.dtype)
        if name in WHOLE + PARAMETERS:
            shape = x.shape if name in WHOLE else x.shape[2:]
            expect(tensor.shape == shape, name, f"shape {list(shape)}", list(tensor.shape))
        last = tensor.stride(-1) if tensor.dim() and tensor.shape[-1] > 1 else 1
        expect(last == 1, name, "stride 1 in its last dimension", last)


def uncovered(call: Any) -> str | None:
    """Why a kernel that steps from row to row cannot take this call on any device, or None."""
    x, tensors = call.x, given(call)
    for name in WHOLE:
        if name in tensors and row_stride(tensors[name]) is None:
            where = f"shape {list(x.shape)} and strides {tensors[name].stride()}"
            return f"{name} has {where}; the kernel steps evenly from row to row"
    if row_stride(torch.empty_like(x, device="meta")) != x.shape[2]:
        return f"x has strides {x.stride()}; an output like it is not written row after row"
    return unfit(tensors) or formless(operands(call), *x.shape[:2])


def places(call: Any) -> dict[str, Placed]:
    """Where the lines of the `used` tensors lie, for a call that is not `uncovered`."""
    found: dict[str, Any] = {name: placed(tensor, *call.x.shape[:2]) for name, tensor in used(call).items()}
    # Rows of x and residual are evenly spaced, whatever batches and tokens are.
    strides: dict[str, Any] = {name: row_stride(getattr(call, name)) for name in WHOLE if name in found}
    return found | {name: Placed(Form("rows", stride)) for name, stride in strides.items()}


def column_bytes(call: Any, places: dict[str, Placed], rows: int) -> dict[str, int]:
    """For each tensor that has columns, the bytes of one column that a program of `rows` rows loads."""
    lines = {name: 1 if form.name == "one" else rows for name, (form, _) in places.items() if form.across}
    return {name: getattr(call, name).itemsize * number for name, number in lines.items()}


def register_limit(maxnreg: int, held: int) -> dict[str, int]:
    """The launch option for `maxnreg` registers a thread; none if these do not hold `held` bytes and `ROOM`."""
    return {"maxnreg": maxnreg} if held + ROOM <= 4 * maxnreg else {}


# --- for plain paths


def wide(call: Any) -> dict[str, torch.Tensor]:
    """The operands in float32, as they broadcast with x."""
    return {name: per_token(operand, call.x.shape[1]).float() for name, operand in operands(call).items()}


def plain_norm(
    value: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, rms: bool
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension, in value's dtype."""
    if not rms:
        value = value - value.mean(dim=-1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    value = value if weight is None else value * weight.to(value.dtype)
    return value if bias is None else value + bias.to(value.dtype)


def like(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A new tensor like x with this value."""
    return torch.empty_like(x, requires_grad=False).copy_(value)
