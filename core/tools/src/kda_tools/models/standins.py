"""Stand-ins for what SGLang's model classes import from the framework around them, for one process on a GPU or CPU.

A name that a step really calls is implemented in full here. A name that is only imported gets a placeholder. Calling a
placeholder raises an error with its name; `TOUCHED` lists all placeholders for the record.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kda_judge.arms import sglang_standins as judge
from kda_judge.contract.errors import MissingRequirement

TOUCHED: set[str] = set()
"""Placeholders that a class imported."""
HALF_OF_SGLANG = "sglang.srt."
"""Prefix of the language-model half of SGLang: its modules that are not in the lock file become placeholders."""
ABSENT = frozenset(
    {
        *("aiohttp", "av", "cache_dit", "cloudpickle", "cv2", "fastapi", "flashinfer", "ftfy", "imageio", "orjson"),
        *(
            "psutil",
            "pybase64",
            "remote_pdb",
            "setproctitle",
            "starlette",
            "torchvision",
            "transformers",
            "uvicorn",
            "zmq",
        ),
    }
)
"""Packages of servers and pipelines. If one is not installed, only SGLang's modules get a placeholder."""

FLASHINFER: Mapping[str, str] = {"0.5.12.post1": "0.6.11.post1", "0.5.23": "0.7.2"}
"""Release -> the version of flashinfer-python that its wheel requires."""


class _Named(abc.ABCMeta):
    """Any attribute of a placeholder class is a placeholder, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(cls.__module__, f"{cls.__qualname__}.{name}")


class _Placeholder(metaclass=_Named):
    """Can be imported and subclassed; creating an instance is an error, as the step then needs the real class."""

    def __new__(cls, *_: object, **__: object) -> _Placeholder:
        if cls.__dict__.get("_kda_placeholder"):
            raise MissingRequirement(
                f"the model calls {cls.__module__}.{cls.__qualname__}, which is only a placeholder: it is neither in "
                "the lock file nor a stand-in in kda_tools/models/standins.py"
            )
        return super().__new__(cls)


def no(*_: object, **__: object) -> bool:
    """The answer to questions about other hardware and other settings."""
    return False


def _placeholder(module: str, name: str) -> Any:
    TOUCHED.add(f"{module}.{name}")
    if name.startswith("is_") and module.startswith("sglang."):
        return no  # questions about other hardware; those about this machine are answered by name
    return _Named(name, (_Placeholder,), {"__module__": module, "__qualname__": name, "_kda_placeholder": True})


def _lenient(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module whose missing names are placeholders."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(module, name)

    return missing


class Finder(judge.Finder):
    """The judge's finder with the stand-ins of this file, and placeholders for the language-model half of SGLang."""

    def __init__(self, root: Any, version: str) -> None:
        super().__init__(root, version)
        self._standins = {"sglang": {"__version__": version}, **answers()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """An extracted file, a stand-in or a placeholder; for any other module a ModuleNotFoundError with its name."""
        try:
            return super().find_spec(fullname, path, target)
        except ModuleNotFoundError:
            if not fullname.startswith(HALF_OF_SGLANG):
                raise
            return _package_of(fullname)


class Absent(importlib.abc.MetaPathFinder):
    """Last finder on `sys.meta_path`: gives SGLang's own modules placeholders for `ABSENT` packages not installed."""

    def __init__(self, flashinfer: str | None = None) -> None:
        """With a version of `flashinfer`, importing its kernels raises an error that says to install it."""
        self._flashinfer = flashinfer

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """A placeholder package for SGLang's modules; nothing for others.

        Raises:
            MissingRequirement: SGLang imports a kernel of flashinfer; no ImportError, which would choose another path.
        """
        if fullname.partition(".")[0] not in ABSENT:
            return None
        frame = sys._getframe(1)  # find the importer: other libraries probe for packages and must not find these
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "importlib":
            frame = frame.f_back
        asks = str(frame.f_globals.get("__name__", ""))
        if not asks.startswith("sglang."):
            return None
        if self._flashinfer is not None and fullname.startswith("flashinfer."):
            raise MissingRequirement(
                f"{asks} imports {fullname}, which is not installed: pip install --no-deps "
                f"flashinfer-python=={self._flashinfer}, which this release of SGLang requires"
            )
        return _package_of(fullname)


def _package_of(fullname: str) -> importlib.machinery.ModuleSpec:
    loader = judge._StandInLoader({"__getattr__": _lenient(fullname)})
    return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)


_library: Any = torch.library.Library("sglang", "FRAGMENT")  # type: ignore[no-untyped-call]  # its ops live as long


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str],
    fake_impl: Callable[..., Any] | None = None,
    **_: object,
) -> None:
    """Define `sglang::op_name`, its implementation for this machine's device, and its fake."""
    _library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args))
    _library.impl(op_name, op_func, "CUDA" if torch.cuda.is_available() else "CPU")
    if fake_impl is not None:
        torch.library.register_fake(f"sglang::{op_name}", fake_impl, lib=_library)


def answers() -> Mapping[str, Mapping[str, object]]:
    """Module name -> its attributes, the union of what the releases ask for."""
    cuda = torch.cuda.is_available()
    common: dict[str, object] = {
        "direct_register_custom_op": direct_register_custom_op,
        "get_cuda_version": judge.get_cuda_version,
        "is_cuda": judge.is_cuda,
        "is_cpu": lambda: not cuda,
        "get_device_capability": lambda *_: torch.cuda.get_device_capability() if cuda else (None, None),
        "get_device_module": lambda *_: torch.get_device_module("cuda" if cuda else "cpu"),
        "is_device_stream_capturing": lambda device: device.type == "cuda" and torch.cuda.is_current_stream_capturing(),
        "add_prefix": lambda name, prefix: f"{prefix}.{name}" if prefix else name,
        "get_bool_env_var": lambda name, default="false": os.getenv(name, default).lower() in ("true", "1"),
        "round_up": lambda x, y: (x + y - 1) // y * y,
        "get_cpu_ids_by_node": list,
        "torch_release": tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]),
        "log_info_on_rank0": lambda logger, message: logger.info(message),
        **dict.fromkeys(
            ("is_hip", "is_npu", "is_musa", "is_xpu", "is_shm_available", "is_flashinfer_available", "mxfp_supported"),
            no,
        ),
    }
    quantization = "sglang.multimodal_gen.runtime.layers.quantization"
    return {
        "sglang.utils": {"is_in_ci": no, "__getattr__": _lenient("sglang.utils")},
        "sglang.srt.utils": {**common, "__getattr__": _lenient("sglang.srt.utils")},
        "sglang.srt.utils.common": {**common, "__getattr__": _lenient("sglang.srt.utils.common")},
        quantization: {"QuantizationMethods": str, "QUANTIZATION_METHODS": [], "__getattr__": _quantization},
    }


def _quantization(name: str) -> Any:
    """The real base class; placeholders for the methods, which would import half of SGLang."""
    package = "sglang.multimodal_gen.runtime.layers.quantization"
    if name == "QuantizationConfig":
        return importlib.import_module(f"{package}.configs.base_config").QuantizationConfig
    if name.startswith("__"):
        raise AttributeError(name)
    return _placeholder(package, name)


def rotate_in_place(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Flashinfer's `apply_rope_with_cos_sin_cache_inplace` in PyTorch: float32, rounded once.

    query and key are [tokens, heads * head_size]; cos_sin_cache is [positions, width], cosines first. The first `width`
    elements of each head are rotated.
    """
    width = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions][:, None].float().chunk(2, -1)
    for x in (query, key):
        turned = x.view(x.shape[0], -1, head_size)[..., :width]
        a, b = (one.float() for one in (turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])))
        pairs = (a * cos - b * sin, b * cos + a * sin)
        turned.copy_(torch.cat(pairs, -1) if is_neox else torch.stack(pairs, -1).flatten(-2))


def _on_gpu_with(package: str) -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec(package) is not None


def jit(name: str, *modules: str) -> Any:
    """A function of the first of these modules that the release has.

    Raises:
        MissingRequirement: it has none of them.
    """
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "?"):  # this module exists, but one that it imports does not
                raise
    raise MissingRequirement(f"none of {', '.join(modules)} is in the lock file")


def other_packages() -> Mapping[str, Mapping[str, object]]:
    """Stand-ins for compiled packages that are not installed: their ops run the JIT kernels of the same wheel.

    If flashinfer is installed, the norms on a GPU are flashinfer's, as they are in sgl_kernel.
    """
    real: Any = importlib.import_module("flashinfer.norm") if _on_gpu_with("flashinfer") else None

    def rmsnorm(
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        if not input.is_cuda:
            return torch.nn.functional.rms_norm(input, input.shape[-1:], weight, eps)
        if real is not None:
            normed: torch.Tensor = real.rmsnorm(input, weight, eps, out, enable_pdl)
            return normed
        out = torch.empty_like(input) if out is None else out
        jit("rmsnorm", "sglang.jit_kernel.norm", "sglang.kernels.ops.layernorm.norm")(input, weight, out, eps)
        return out

    def fused_add_rmsnorm(
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        enable_pdl: bool | None = None,
    ) -> None:
        if not input.is_cuda:
            residual.add_(input)
            input.copy_(torch.nn.functional.rms_norm(residual, residual.shape[-1:], weight, eps))
        elif real is not None:
            real.fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)
        else:
            jit("fused_add_rmsnorm", "sglang.jit_kernel.norm", "sglang.kernels.ops.layernorm.norm")(
                input, residual, weight, eps
            )

    def rope(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None:
        if not query.is_cuda:
            rotate_in_place(positions, query, key, head_size, cos_sin_cache, is_neox)
            return
        inplace = jit("apply_rope_inplace", "sglang.jit_kernel.rope", "sglang.kernels.ops.attention.rope")
        heads = (x.view(query.shape[0], -1, head_size) for x in (query, key))
        inplace(*heads, cos_sin_cache, positions, is_neox=is_neox)

    return {
        "sgl_kernel": {
            "rmsnorm": rmsnorm,
            "fused_add_rmsnorm": fused_add_rmsnorm,
            "__getattr__": _lenient("sgl_kernel"),
        },
        "flashinfer": {},
        "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": rope},
    }


def install_other_packages() -> tuple[str, ...]:
    """Install `other_packages` for packages that are missing here; returns the names of these packages."""
    placed = []
    for name, attributes in other_packages().items():
        top = name.partition(".")[0]
        if top not in placed and importlib.util.find_spec(top) is not None:
            continue
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(attributes)
        sys.modules[name] = module
        placed += [name] if "." not in name else []
    return tuple(placed)
