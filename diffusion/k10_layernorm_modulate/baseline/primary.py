"""Upstream's kernel as its models call it, SGLang 0.5.23; import after `kda_judge.arms.upstream.activate`.

The kernel's file also has a variant that stores float8, for which it imports three constants from a module that needs
half of the framework. That module is not pinned. These constants stand in for it; this op does not use them. In an
installed SGLang nothing is replaced. The imports also look for the folders of CUDA sources, so the list of pinned files
has a source of another kernel.
"""

import sys
from types import ModuleType

import torch

FLOAT8 = "sglang.kernels.ops.quantization.fp8_kernel"
try:
    __import__(FLOAT8)
except ModuleNotFoundError:
    _largest = torch.finfo(torch.float8_e4m3fn).max
    sys.modules[FLOAT8] = ModuleType(FLOAT8)
    vars(sys.modules[FLOAT8]).update(fp8_dtype=torch.float8_e4m3fn, fp8_min=-_largest, fp8_max=_largest)

from sglang.kernels.kda_kernels.layernorm_modulate_triton import fused_layernorm_modulate  # noqa: E402

__all__ = ["fused_layernorm_modulate"]
