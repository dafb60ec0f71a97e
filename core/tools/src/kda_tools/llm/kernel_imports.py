"""Import SGLang's kernels of a language model's step from a verified tree, with the few stand-ins that they need.

The kernels are files of their own. The server code that chooses between them is not loaded.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

from kda_judge.contract.errors import KdaError, UpstreamError
from kda_tools.models import standins

OPS = "sglang.kernels.ops."


class Finder(standins.Finder):
    """The finder of `kda_tools.models`, with more stand-ins for the kernels of mixtures of experts."""

    def __init__(self, tree: Path, version: str) -> None:
        super().__init__(tree, version)
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
        known = self._standins
        self._standins = {
            **known,
            "sglang.srt.utils": {
                **known["sglang.srt.utils"],
                "cpu_has_amx_support": standins.no,
                "is_sm90_supported": lambda: hopper,
            },
            "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": standins.no},
            "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda _: 0},  # of FP8, which no capture runs
            OPS + "quantization": {"sgl_per_token_quant_fp8": _no_capture_runs_fp8},
            OPS + "quantization.per_tensor_quant_fp8": {"per_tensor_quant_fp8": _no_capture_runs_fp8},
            OPS + "quantization.per_token_group_quant": {"per_token_group_quant": _no_capture_runs_fp8},
        }


def _no_capture_runs_fp8(*_: object, **__: object) -> None:
    raise UpstreamError("a quantisation to FP8 was called: expected a step in bfloat16, which has none")


def load(tree: Path, version: str, names: tuple[str, ...]) -> list[ModuleType]:
    """The modules `sglang.kernels.ops.NAME`.

    Raises:
        UpstreamError: one does not import; says which, and why.
    """
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(tree.resolve(), version))
        sys.meta_path.append(standins.Absent())
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(OPS + name))
        except (ImportError, KdaError) as error:
            raise UpstreamError(f"sglang {version}: {OPS}{name} does not import: {error}") from error
    return found
