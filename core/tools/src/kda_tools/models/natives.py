"""SGLang's fused ops outside of the tasks, and their native forms: upstream's own where it has one.

On the CPU the native forms stand in every arm, since the fused ones are CUDA. Fusions that a request's quality mounts
(0.5.23) are mounted as for its default, `lossless`, and not at all in the eager arm.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

LAYERS = "sglang.multimodal_gen.runtime.layers."
QUALITY = "lossless"
"""Default of the release's `SamplingParams`."""
NO_QUALITY = "exact"
FACADE = "sglang.kernels.ops.diffusion"
SITES = (
    "FUSED_LINEAR_GELU",
    "QWEN_IMAGE_ADDED_QKV",
    "FUSED_LN_MODULATE",
    "LTX2_QKNORM_SPLIT_ROPE",
    "LTX2_RMS_NORM_MODULATE",
    "HUNYUAN_QKNORM",
    "HELIOS_GATED_RESIDUAL",
    "NVFP4_BIAS_GELU",
)
"""The fusions of 0.5.23 whose tier is `lossless` and that a model of the known models can have."""


def _silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    y = torch.nn.functional.silu(first) * second
    return y if out is None else out.copy_(y)


def _timestep_embedding(t: torch.Tensor, dim: int, **settings: Any) -> torch.Tensor:
    embeddings = importlib.import_module("diffusers.models.embeddings")

    known = ("flip_sin_to_cos", "downscale_freq_shift", "scale", "max_period")
    kept = {name: value for name, value in settings.items() if name in known}
    embedded: torch.Tensor = embeddings.get_timestep_embedding(t, dim, **kept)
    return embedded.float()


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,  # noqa: ARG001
) -> torch.Tensor:
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return y if out is None else out.copy_(y)


def _as_in_the_first_release(*_: object, **asked: object) -> bool:
    return not any(asked.get(name) for name in ("round_norm_before_rope", "pack_kv", "cache_has_full_width"))


def _no(*_: object, **__: object) -> bool:
    return False


NATIVE: dict[str, dict[str, Callable[..., Any]]] = {
    "layernorm": {"can_use_fused_inplace_qknorm": _no, "rmsnorm": _rms_norm},
    "visual_embedding": {"timestep_embedding_cuda": _timestep_embedding},
    "activation": {"silu_and_mul": _silu_and_mul},
}
"""Module of the layers -> name there -> native form."""
ON_CPU: dict[str, dict[str, Callable[..., Any]]] = {
    "layernorm": {"can_use_fused_inplace_qknorm_rope": _as_in_the_first_release},
}
"""Questions that the kernels answer by the GPU's capability: on the CPU the eager form takes what all releases have."""


class Natives:
    """Which forms the loaded modules and one model use."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = device.type == "cpu"
        self._forms: list[tuple[Any, str, Any, Any]] = []
        self._layers: list[tuple[Any, Any, Any]] = []
        self._model: torch.nn.Module | None = None
        self.mounted: tuple[str, ...] = ()
        for module, forms in NATIVE.items():
            holder = importlib.import_module(LAYERS + module)
            for name, native in forms.items():
                if hasattr(holder, name):
                    self._forms.append((holder, name, getattr(holder, name), native))
        if self._cpu:
            for module, forms in ON_CPU.items():
                for name, native in forms.items():
                    setattr(importlib.import_module(LAYERS + module), name, native)

    def attach(self, model: torch.nn.Module) -> None:
        """Look at this model's layers from now on."""
        base = importlib.import_module(f"{LAYERS}custom_op").CustomOp
        self._model = model
        self._layers = [
            (layer, layer._forward_method, layer.forward_native)
            for layer in model.modules()
            if isinstance(layer, base) and type(layer).forward_native is not base.forward_native
        ]

    def use(self, *, native: bool) -> None:
        """Native forms everywhere, or the fused ones where this machine has them."""
        for holder, name, fused, plain in self._forms:
            setattr(holder, name, plain if native or self._cpu else fused)
        for layer, fused, plain in self._layers:
            layer._forward_method = plain if native else fused
        self._mount(not native)

    def _mount(self, wanted: bool) -> None:
        facade = sys.modules.get(FACADE)
        if facade is None or self._model is None:
            return
        mounted = []
        for name in SITES:
            fusion = getattr(facade, name)
            if not any(True for _ in fusion.iter_sites(self._model)):
                continue
            if not wanted:
                fusion.unmount(self._model)
            elif fusion.mount(self._model):
                mounted.append(name)
        self.mounted = tuple(mounted) if wanted else self.mounted
