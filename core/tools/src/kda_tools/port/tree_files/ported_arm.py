"""An arm of the command line: the public functions of a ported tree, as `arm.json` beside this file names them.

On a CPU the platform says that it is CUDA, so that the dispatch is reached and its kernels run in Triton's interpreter.
A call that the kernels leave to SGLang's own code then raises: that code needs a GPU.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kda_judge.arms import sglang_standins
from kda_judge.arms.upstream import activate

_here = Path(__file__).resolve().parent
_plan: dict[str, Any] = json.loads((_here / "arm.json").read_text(encoding="utf-8"))


def _say_cuda() -> None:
    """On the CPU: the platform's answers, and registered ops that take CPU tensors."""
    platform: Any = sglang_standins.Platform
    platform.is_cuda, platform.is_cpu = (lambda _: True), (lambda _: False)
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(warp_size=32)  # type: ignore[attr-defined]
    original = sglang_standins.direct_register_custom_op

    def register(op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(op_name, op_func, *args, **kwargs)
        sglang_standins._library.impl(op_name, op_func, "CPU")

    answers: Any = sglang_standins.STANDINS["sglang.srt.utils.common"]
    answers["direct_register_custom_op"], answers["is_cuda"] = register, lambda: True


def _stand_in_for_float8() -> None:
    """As k10's baseline does: its file imports constants, for a variant that stores float8, from an unpinned module."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    constants = {"fp8_dtype": torch.float8_e4m3fn, "fp8_min": -largest, "fp8_max": largest}
    modules: Any = sglang_standins.STANDINS
    modules.setdefault("sglang.kernels.ops.quantization.fp8_kernel", constants)


def _or_raise(attempt: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if (result := attempt(*args, **kwargs)) is None:
            raise RuntimeError(_plan["left"])
        return result

    return called


def _or_refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a word for calls that SGLang's own function refuses: a gate that compares bits calls it first.

    The judge also draws tensors that begin at any element. Where the function refuses these, it gets aligned copies.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            why = error
        copies = [*map(_aligned, (*args, *kwargs.values()))]
        moved = [pair for pair in zip((*args, *kwargs.values()), copies, strict=True) if pair[0] is not pair[1]]
        try:
            if str(why).startswith("CUDA") or not moved:
                raise why
            result = function(*copies[: len(args)], **dict(zip(kwargs, copies[len(args) :], strict=True)))
        except RuntimeError as error:
            if str(error).startswith("CUDA") or str(error) == _plan["left"]:
                raise
            raise ValueError(f"{_plan['refused']}: {error}") from None
        for given, copy in moved:
            _memory(given).copy_(_memory(copy))
        return result

    return called


def _aligned(value: Any) -> Any:
    """A copy, with the same strides, of a tensor that begins at no multiple of 16 bytes; all else as it is."""
    if not isinstance(value, torch.Tensor) or value.data_ptr() % 16 == 0:
        return value
    return _memory(value).clone().as_strided(value.size(), value.stride())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All elements between the tensor's first and its last, those in gaps included."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((span + 1,), (1,))


class _Every:
    """In place of the signatures that gave SGLang's bits: without a GPU there is nothing to compare with."""

    def __contains__(self, _: object) -> bool:
        return True


if not torch.cuda.is_available():
    _say_cuda()
_stand_in_for_float8()
activate(_here / "tree", _plan["version"])
if _plan["gate"]:
    _gate = getattr(import_module(_plan["gate"][0]), _plan["gate"][1])
    if not _plan["exact"]:
        _gate.mount(None)
    elif not torch.cuda.is_available():
        _gate.verified_sigs = _Every()
for _op, _module in _plan["functions"].items():
    _host = import_module(_module)
    if not torch.cuda.is_available() and (_try := getattr(_host, f"try_{_op}", None)) is not None:
        setattr(_host, f"try_{_op}", _or_raise(_try))
    _function = getattr(_host, _op)
    setattr(sys.modules[__name__], _op, _or_refused(_function) if _plan["exact"] else _function)
