"""Switch SGLang's fused ops outside of the tasks to their native forms, upstream's own if there are any.

On the CPU every arm uses the native forms of `NATIVE`, since the fused ops need CUDA. In 0.5.23 a request's quality
says which fusions are mounted. Here they are those of its default, `lossless`; the eager arm has none. In the eager
arm also every `BitExactFusionGate` is off, `can_use_*` returns False, `try_*` returns None, and the functions of
`EAGER` are replaced. `FUSED` names the functions that need none of this, and says why.
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
"""As `NATIVE`, for questions that the kernels answer by the GPU's capability. On the CPU the answer is yes
for calls that all releases support, as the eager form takes them."""


def _none(*_: object, **__: object) -> None:
    return None


def _residual_gate_add(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return residual + update * gate


def _helios_qk_rope(q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> None:
    rotate = sys.modules[MODELS + "helios"].apply_rotary_emb_transposed
    for x in (q, k):
        x.copy_(rotate(x, freqs))


MODELS = "sglang.multimodal_gen.runtime.models.dits."
KERNELS = ("sglang.kernels.", "sglang.jit_kernel.")
EAGER: dict[str, Callable[..., Any]] = {
    "residual_gate_add": _residual_gate_add,
    "fused_inplace_helios_qk_rope": _helios_qk_rope,
    "rmsnorm_scale": _none,
    "rmsnorm_tanh_residual": _none,
    "can_use_qk_rmsnorm_native": _no,
    "_ltx2_try_fused_ada_values9": _none,
}
"""Function -> its form in the eager arm. A caller that gets None takes its own path."""
TASKS_GUARD = "can_use_fused_inplace_qknorm_rope"
"""A `can_use_*` function that is not replaced: it guards a task's op, which is eager in the eager arm."""
LAYER = "layers that call it run `forward_native` in the eager arm"
GATED = "a `BitExactFusionGate` is before it"
INSIDE = "it asks a guard itself, or its callers do, which says no"
RANKS = "only several GPUs call it"
QUANTISED = "only quantised weights call it"
UNMOUNTED = "only a site that is mounted calls it"
ATTENTION = "FlashAttention's, which no step here takes"
FUSED: dict[str, str] = {
    **dict.fromkeys(("rms_norm_fn", "triton_one_pass_rms_norm", "rmsnorm_hf", "flydsl_norm_scale_shift"), LAYER),
    **dict.fromkeys(("flydsl_fused_residual_norm_scale_shift", "fused_inplace_qknorm"), LAYER),
    **dict.fromkeys(("fused_layernorm_modulate", "fused_layernorm_modulate_raw", "joint_qkv_cat"), GATED),
    **dict.fromkeys(("hunyuan_qkv_rope_pack", "fused_temb_table_slices", "fused_qknorm_rope_out_of_place"), GATED),
    **dict.fromkeys(("modulate_scale_shift", "modulate_scale_shift_cuda", "zimage_qk_rmsnorm_native"), INSIDE),
    **dict.fromkeys(("copy_head_groups", "pack_qkv_destination_major", "usp_merge_heads"), RANKS),
    **dict.fromkeys(("fused_norm_scale_shift_fp8", "fused_scale_residual_norm_scale_shift_fp8"), QUANTISED),
    **dict.fromkeys(("bias_gelu_tanh", "fused_linear_gelu_tanh", "fused_ltx2_rms_norm_modulate"), UNMOUNTED),
    **dict.fromkeys(("fused_pack_qkv", "fused_pack_segmented_qkv", "fused_scatter_to_padded"), ATTENTION),
    "ltx2_ada_values9": "`_ltx2_try_fused_ada_values9` alone calls it",
}


def eager_form(name: str) -> Callable[..., Any] | None:
    """What a function of this name is in the eager arm; None: itself."""
    if name in EAGER or name == TASKS_GUARD:
        return EAGER.get(name)
    return _no if name.startswith("can_use_") else _none if name.startswith("try_") else None


class Natives:
    """Which forms the loaded modules and one model use."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = device.type == "cpu"
        self._forms: list[tuple[Any, str, Any, Any]] = []
        self._layers: list[tuple[Any, Any, Any]] = []
        self._eager: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._gates: list[Any] = []
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

    def find(self) -> None:
        """Look through all loaded modules of SGLang for functions that have an eager form; again after a first step."""
        facade = sys.modules.get(FACADE)
        for name in EAGER.keys() & set(facade._EXPORTS) if facade is not None else ():
            getattr(facade, name)  # load it now: later imports must get the replaced form
        for module, holder in list(sys.modules.items()):
            if not module.startswith("sglang."):
                continue
            for name, value in list(vars(holder).items()):
                form = eager_form(name)
                theirs = str(getattr(value, "__module__", "")).startswith(KERNELS) or name in EAGER
                if form is not None and theirs and callable(value) and value is not form:
                    self._eager.setdefault((module, name), (value, form))

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
        """Use the native forms everywhere, or the fused ones if this machine can run them."""
        for (module, name), (fused, plain) in self._eager.items():
            setattr(sys.modules[module], name, plain if native else fused)
        for holder, name, fused, plain in self._forms:
            setattr(holder, name, plain if native or self._cpu else fused)
        for layer, fused, plain in self._layers:
            layer._forward_method = plain if native else fused
        self._shut(native)
        self._mount(not native)

    def _shut(self, wanted: bool) -> None:
        """Turn off the gates of kernels that give eager's bits, or turn on again those that were turned off here."""
        kind = getattr(sys.modules.get(f"{FACADE}.sites.bitexact_gate"), "BitExactFusionGate", None)
        if not wanted:
            for gate in self._gates:
                gate.disabled = False
            self._gates = []
        elif kind is not None:
            found = [
                value
                for module, holder in list(sys.modules.items())
                if module.startswith(MODELS)
                for value in vars(holder).values()
                if isinstance(value, kind) and not value.disabled
            ]
            for gate in found:
                gate.disabled = True
            self._gates += found

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
