"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .scale_shift import fuse_scale_shift_kernel
from .select01 import (
    fuse_layernorm_scale_shift_gate_select01_kernel,
    fuse_residual_layernorm_scale_shift_gate_select01_kernel,
)

__all__ = [
    "fuse_layernorm_scale_shift_gate_select01_kernel",
    "fuse_residual_layernorm_scale_shift_gate_select01_kernel",
    "fuse_scale_shift_kernel",
    "launches",
    "why_not",
]

launches, why_not = hooks(
    fuse_scale_shift_kernel,
    fuse_layernorm_scale_shift_gate_select01_kernel,
    fuse_residual_layernorm_scale_shift_gate_select01_kernel,
)
