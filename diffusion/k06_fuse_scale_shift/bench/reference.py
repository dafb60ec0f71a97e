"""The float64 oracles and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload

FLOATS = ("float16", "bfloat16", "float32")
MOST_BYTES = 65536
"""Upstream normalises a row of x in one block of at most this size."""
MODULATION = ("scale0", "shift0", "gate0", "scale1", "shift1", "gate1")


def fuse_scale_shift_kernel(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    scale_constant: float = 1.0,
    block_l: int = 128,  # noqa: ARG001
    block_c: int = 128,  # noqa: ARG001
) -> tuple[torch.Tensor]:
    """[B, L, C] float64. Scalars (0-D or one element in 1-D) that are both zero leave x as it is."""
    scalars = [operand for operand in (scale, shift) if operand.dim() < 2 and operand.numel() == 1]
    if len(scalars) == 2 and not any(bool(operand.any()) for operand in scalars):
        return (x.double(),)
    return (x.double() * (scale_constant + _broadcast(scale, x)) + _broadcast(shift, x),)


def fuse_layernorm_scale_shift_gate_select01_kernel(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale0: torch.Tensor,
    shift0: torch.Tensor,
    gate0: torch.Tensor,
    scale1: torch.Tensor,
    shift1: torch.Tensor,
    gate1: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modulated LayerNorm of x and the chosen gates, [B, L, C] float64 each."""
    scale = _choose(index, scale0, scale1)
    shift = _choose(index, shift0, shift1)
    return _layer_norm(x.double(), weight, bias, eps) * (1 + scale) + shift, _choose(index, gate0, gate1)


def fuse_residual_layernorm_scale_shift_gate_select01_kernel(
    x: torch.Tensor,
    residual: torch.Tensor,
    residual_gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale0: torch.Tensor,
    shift0: torch.Tensor,
    gate0: torch.Tensor,
    scale1: torch.Tensor,
    shift1: torch.Tensor,
    gate1: torch.Tensor,
    index: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for total = residual + residual_gate * x, which is the second output, [B, L, C] float64 each."""
    total = residual.double() + residual_gate.double() * x.double()
    y, gate = fuse_layernorm_scale_shift_gate_select01_kernel(
        total, weight, bias, scale0, shift0, gate0, scale1, shift1, gate1, index, eps
    )
    return y, total, gate


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    x = workload.inputs.get("x")
    _expect(x is not None, "x", "given", "nothing")
    assert x is not None
    _expect(len(x.shape) == 3, "x", "three dimensions [B, L, C]", list(x.shape))
    _expect(x.stride is None, "x", "contiguous", f"stride {x.stride}")
    for name, spec in workload.inputs.items():
        if name != "index":
            _expect(spec.dtype in FLOATS, name, f"dtype {' or '.join(FLOATS)}", spec.dtype)
    if workload.op == "fuse_scale_shift_kernel":
        _check_scale_shift(workload, x)
    else:
        _check_select01(workload, x)


def _broadcast(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The operand in float64 for every token, or in a form that broadcasts to it."""
    wide = operand.double()
    if wide.dim() == 4:  # [B, F, 1, C]: frame f is the tokens f * L/F to (f + 1) * L/F - 1
        tokens = torch.arange(x.shape[1], device=x.device)
        return wide[:, tokens * wide.shape[1] // x.shape[1], 0]
    return wide.unsqueeze(1) if wide.dim() == 2 else wide


def _layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed *= weight.double()
    if bias is not None:
        normed += bias.double()
    return normed


def _choose(index: torch.Tensor, zero: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """[B, L, C] float64: `one` where index is not 0."""
    return torch.where((index != 0)[..., None], one.double()[:, None], zero.double()[:, None])


_expect = expecting()


def _check_scale_shift(workload: Workload, x: TensorSpec) -> None:
    """The forms that upstream takes too: no scale of [C], and beside a scale of frames a shift of x's shape."""
    batch, tokens, channels = x.shape
    _expect(set(workload.inputs) == {"x", "scale", "shift"}, "inputs", "scale, shift, x", sorted(workload.inputs))
    scale, shift = (workload.inputs[name].shape for name in ("scale", "shift"))
    if len(scale) == 4:
        frames = scale[1]
        _expect(scale == (batch, frames, 1, channels), "scale", f"shape [{batch}, F, 1, {channels}]", list(scale))
        _expect(frames > 0 and tokens % frames == 0, "scale", f"frames that divide {tokens} tokens", frames)
        _expect(shift == x.shape, "shift", f"shape {list(x.shape)} beside a scale of frames", list(shift))
        return
    for name, shape, line in (("scale", scale, 1), ("shift", shift, channels)):
        _expect(len(shape) < 4, name, "at most three dimensions", list(shape))
        whole = ((), (line,), (batch, channels), (batch, tokens, channels))[len(shape)]
        fits = all(n in (1, most) for n, most in zip(shape, whole, strict=True))
        _expect(fits, name, f"a shape that broadcasts to {list(whole)}", list(shape))


def _check_select01(workload: Workload, x: TensorSpec) -> None:
    batch, tokens, channels = x.shape
    shapes = {"x": x.shape, "index": (batch, tokens)} | dict.fromkeys(MODULATION, (batch, channels))
    if "residual" in workload.op:
        shapes |= {"residual": x.shape, "residual_gate": x.shape}
    shapes |= {name: (channels,) for name in ("weight", "bias") if name in workload.inputs}
    _expect(set(workload.inputs) == set(shapes), "inputs", str(sorted(shapes)), sorted(workload.inputs))
    for name, shape in shapes.items():
        _expect(workload.inputs[name].shape == shape, name, f"shape {list(shape)}", list(workload.inputs[name].shape))
    index = workload.inputs["index"].dtype
    _expect(index in ("int32", "int64", "bool"), "index", "dtype int32, int64 or bool", index)
    most = MOST_BYTES // (4 if x.dtype == "float32" else 2)
    _expect(channels <= most, "x", f"at most {most} channels ({MOST_BYTES} bytes)", channels)
    _expect("eps" in workload.scalars, "eps", "a number", None)
