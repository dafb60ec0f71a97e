"""Make SGLang's model classes importable in a fresh process: the pinned files, stand-ins, one rank.

The process group is gloo with world size 1. Attention is PyTorch's scaled_dot_product_attention, as SGLang's own
backend `torch_sdpa` calls it; production takes FlashAttention 3, so shares of a step are approximate.
On the CPU the platform answers that it is CUDA when layers choose their path, so that the fused ops are called there.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import sysconfig
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from kda_judge.arms import upstream
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import MissingRequirement, UpstreamError
from kda_judge.contract.tasks import checkout_root
from kda_tools.models import standins

EXTRA = "pip install 'kda-tools[models]', with Python 3.11 or later"
NEEDED = ("diffusers", "addict")
"""Packages that SGLang's model modules import beside torch and that have no stand-in."""
RUNTIME = "sglang.multimodal_gen.runtime."
OURS_OR_PYTHONS = r"(kda_|_?importlib|_frozen_importlib)"
"""Modules that are part of every import."""


def obtain(pin: Pin, lock: Path, *, offline: bool = False) -> Path:
    """The wheel's listed files, each verified, in the cache."""
    return upstream.fetch(pin, lock, upstream.cache_folder(checkout_root()), offline=offline)


def boot(tree: Path, version: str) -> tuple[str, ...]:
    """Ready this process for the classes in `tree`; returns the compiled packages that stand-ins replace.

    Raises:
        MissingRequirement: a package of the extra `models` is not installed.
        UpstreamError: an SGLang is imported already.
    """
    if any(name.partition(".")[0] == "sglang" for name in sys.modules):
        raise UpstreamError(f"sglang is already imported; run {version} in a fresh process")
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise MissingRequirement(f"the package {name} is missing, which SGLang's models import: {EXTRA}")
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        del os.environ[name]
    builds = os.environ.setdefault("TVM_FFI_CACHE_DIR", str(tree.resolve().parent / "jit"))
    os.environ["SGLANG_JIT_CACHE_DIR"] = os.environ["SGLANG_CACHE_DIR"] = builds
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    warnings.filterwarnings("ignore", module=r"sglang\..*|diffusers\..*")
    sys.meta_path.insert(0, standins.Finder(tree.resolve(), version))
    sys.meta_path.append(standins.Absent(standins.FLASHINFER.get(version) if torch.cuda.is_available() else None))
    replaced = standins.install_other_packages()
    _platform()
    _one_rank()
    logging.getLogger("sglang").setLevel(logging.ERROR)
    return replaced


def load(dotted: str) -> Any:
    """The class or function of this dotted name.

    Raises:
        UpstreamError: its module does not import, or lacks the name; says what is missing, and which module needs it.
    """
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        frames, trace = [], error.__traceback__
        while trace is not None:
            frames.append((str(trace.tb_frame.f_globals.get("__name__", "?")), trace.tb_lineno))
            trace = trace.tb_next
        asks, line = next((each for each in reversed(frames) if each[0].startswith("sglang.")), (module, 0))
        last = next((name for name, _ in reversed(frames) if not re.match(OURS_OR_PYTHONS, name)), asks)
        through = f", through {last}" if last != asks else ""
        raise UpstreamError(f"{dotted} does not import: {error}; asked for by {asks}, line {line}{through}") from error
    except AttributeError:
        raise UpstreamError(f"{dotted} does not import: {module} has no name {name!r}") from None


def _platform() -> None:
    """On a GPU keep the wheel's own platform; on the CPU use one that layers take for CUDA, and other code for CPU."""
    platforms = importlib.import_module(f"{RUNTIME}platforms")
    if torch.cuda.is_available():
        _ = platforms.current_platform  # loads the platform's module, which asks for Sphinx
        _drop_empty("sphinx", "sphinx.ext")
        return
    cpu = importlib.import_module(f"{RUNTIME}platforms.cpu").CpuPlatform
    answers = {
        "is_cuda": lambda _: True,
        "is_cpu": lambda _: False,
        "is_cuda_static": classmethod(lambda _: True),
        "get_torch_distributed_backend_str": classmethod(lambda _: "gloo"),
    }
    platforms._current_platform = type("CudaForLayers", (cpu,), answers)()  # type: ignore[attr-defined]
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(warp_size=32)  # type: ignore[attr-defined]
    torch.cuda.is_current_stream_capturing = lambda: False


def _drop_empty(package: str, part: str) -> None:
    """Forget a package that was imported without this part.

    SGLang's platform tries to import a part of Sphinx. Where any folder named `sphinx` is on the path, Python keeps an
    empty package of that name, from which SciPy concludes that Sphinx is running.
    """
    if part not in sys.modules:
        sys.modules.pop(package, None)


class _ServerArgs(types.SimpleNamespace):
    """Settings of a server that runs one model on one GPU."""

    def is_arg_explicitly_set(self, _name: str) -> bool:
        return False


def _one_rank() -> None:
    """A process group of one, and the settings that layers ask for."""
    settings = importlib.import_module(f"{RUNTIME}server_args")
    off = (
        "enable_torch_compile comfyui_mode enable_cfg_parallel disable_autocast sp_split_auto"
        " enable_attention_backend_autotune"
    )
    settings.set_global_server_args(
        _ServerArgs(
            attention_backend="torch_sdpa",
            attention_backend_config=None,
            pipeline_config=None,
            sp_degree=1,
            tp_size=1,
            kv_gather_degree=1,
            component_precisions={},
            component_attention_backends={},
            **dict.fromkeys(off.split(), False),
        )
    )
    for name, value in {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = importlib.import_module(f"{RUNTIME}distributed.parallel_state")
    state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    degrees = (
        "data_parallel_size classifier_free_guidance_degree tensor_parallel_degree ulysses_degree ring_degree"
        " sequence_parallel_degree"
    )
    state.initialize_model_parallel(**dict.fromkeys(degrees.split(), 1), backend="gloo")
