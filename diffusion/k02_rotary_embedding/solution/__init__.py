"""The optimised arm: public callables with exactly the upstream signatures."""

from collections.abc import Mapping
from typing import Any

import torch

from kda_core.launch import Launch

from . import ltx2_rotary, rotary
from .ltx2_rotary import apply_ltx2_split_rotary_emb
from .rotary import apply_rotary_embedding

__all__ = ["apply_ltx2_split_rotary_emb", "apply_rotary_embedding", "launches", "why_not"]

_MODULES = {module.OP: module for module in (rotary, ltx2_rotary)}


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What `op` would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    return _MODULES[op].launches(op, inputs, scalars)


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    return _MODULES[op].why_not(op, *args, **kwargs)
