"""The one-pass RMSNorm in CUDA C++, built through tvm-ffi: a block per row, which stays in registers.

    y = x / sqrt(mean(x^2) + eps) * w        over a row, in float32

Covers contiguous x with w of its dtype, whole 16-byte vectors a row; else plain PyTorch. To time it:
`kda bench norm_infer --arm cuda_cpp --against solution --rows '*-rms-*'`.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from kda_runtime.cuda_cpp import CudaLaunch
from kda_runtime.op import Op, hooks

__all__ = ["launches", "triton_one_pass_rms_norm", "why_not"]

SOURCE = Path(__file__).with_name("rms_norm.cu")
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
VECTOR_BYTES, WARP, MOST_THREADS, MOST_BYTES = 16, 32, 512, 64 * 1024


class Call(NamedTuple):
    """The arguments."""

    x: torch.Tensor
    w: torch.Tensor
    eps: float


def uncovered(call: Call) -> str | None:
    """Why the kernel does not take the call."""
    x, w = call.x, call.w
    row_bytes = x.shape[-1] * x.itemsize
    if x.dtype not in ELEMENTS or w.dtype != x.dtype:
        return f"x and w have dtypes {x.dtype} and {w.dtype}; the kernel takes {', '.join(map(str, ELEMENTS))}"
    if row_bytes % VECTOR_BYTES or row_bytes > MOST_BYTES:
        return f"a row has {row_bytes} bytes; the kernel takes multiples of {VECTOR_BYTES} up to {MOST_BYTES}"
    if not (x.is_contiguous() and w.is_contiguous()):
        return "x or w is not contiguous"
    if x.device.type != "meta" and (x.data_ptr() | w.data_ptr()) % VECTOR_BYTES:
        return f"x or w is not aligned to {VECTOR_BYTES} bytes"
    return None


def plan(call: Call) -> CudaLaunch:
    """The launch of a call that the kernel takes."""
    columns = call.x.shape[-1]
    vectors = columns * call.x.itemsize // VECTOR_BYTES
    threads = min(-(-vectors // WARP) * WARP, MOST_THREADS)
    macros = (("ELEMENT", ELEMENTS[call.x.dtype]), ("COLUMNS", columns), ("THREADS", threads))
    return CudaLaunch(SOURCE, "rms_norm_kernel", "rms_norm", (call.eps,), macros)


def plain(call: Call) -> torch.Tensor:
    """The same in PyTorch."""
    x = call.x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps) * call.w.float()).to(call.x.dtype)


OP = Op("rms_norm", Call, kernel=None, plan=plan, plain=plain, uncovered=uncovered, outputs=("x",))


@OP.public
def triton_one_pass_rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension: x [..., columns], w [columns] of one dtype; a new tensor like x."""
    return OP.call(x, w, eps)


launches, why_not = hooks(triton_one_pass_rms_norm)
