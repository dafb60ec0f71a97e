"""The optimised arm: public callables with exactly the upstream signatures."""

from collections.abc import Mapping
from typing import Any

import torch

from kda_core.launch import Launch

from . import scale_shift, select01
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

_MODULES = {scale_shift.OP: scale_shift} | dict.fromkeys(select01.OPS, select01)


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What `op` would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    return _MODULES[op].launches(op, inputs, scalars)


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    return _MODULES[op].why_not(op, *args, **kwargs)
