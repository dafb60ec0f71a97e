"""What kind of work a kernel does, told by names: the kernel's, its operator's, its module's."""

import re
from enum import Enum
from functools import cache


class KernelClass(str, Enum):
    """Classes of GPU work."""

    ATTENTION = "attention"
    GEMM = "gemm"
    """Products of matrices, and convolutions."""
    NORM = "norm"
    MODULATION = "modulation"
    """Scale, shift and gate by what the time step says."""
    ROPE = "rope"
    ACTIVATION = "activation"
    COPY = "copy"
    CAT = "cat"
    QUANT = "quant"
    COMMUNICATION = "communication"
    SAMPLING = "sampling"
    OTHER = "other"


BOUND_BY_BYTES = frozenset(KernelClass) - {KernelClass.ATTENTION, KernelClass.GEMM, KernelClass.COMMUNICATION}
"""Classes whose limit is the bytes they move; the others are bound by arithmetic or by links."""

BY_NAME = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (KernelClass.COMMUNICATION, r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_?ep|nvshmem"),
        (
            KernelClass.ATTENTION,
            r"(?<!cache_)flash(?!infer)|fmha|attention|attn_fwd|_sdpa_|mla_decode|BatchPrefill|BatchDecode|splitkv",
        ),
        (
            KernelClass.GEMM,
            (
                r"gemm|gemv|nvjet|cublas|cutlass_80|cutlass3x|xmma|wgmma|splitk|(^|[^a-z])bmm|addmm"
                r"|aten::(mm|matmul|linear)"
                r"|fused_moe_kernel|implicit_convolve|conv(olution)?_?([23]d|fprop|depthwise)|aten::\w*convolution"
            ),
        ),
        (KernelClass.QUANT, r"quant|to_fp8|scaled_fp8|cvt_\w*fp8"),
        (KernelClass.ROPE, r"rope|rotary|qkv_epilogue"),
        (KernelClass.NORM, r"rms_?norm|layer_?norm|group_?norm|qk_?norm|norm_infer|norm_scale_shift|residual_norm"),
        (KernelClass.MODULATION, r"scale_shift|modulat|gate_add|residual_gate|temb_table|ada_values"),
        (KernelClass.ACTIVATION, r"silu|gelu|swiglu|act_and_mul|relu"),
        (
            KernelClass.SAMPLING,
            r"sampl|arg_?max|top_?[kp]_?(renorm|mask)|multinomial|gatherTopK|radixSort|bitonicSort|softmax_temp",
        ),
        (KernelClass.CAT, r"CatArray|aten::(cat|concat|stack)\b|_cat_kernel"),
        (
            KernelClass.COPY,
            (
                r"memcpy|memset|copy_kernel|reshape_and_cache|store_?(kv_?)?cache"
                r"|aten::(copy_|clone|contiguous|_to_copy|fill_|zero_)"
            ),
        ),
    )
]
"""(class, pattern for a name). The first match in this order wins, not the first word in the name of a fused kernel."""
BY_MODULE = [
    (KernelClass.NORM, re.compile(r"(RMS|Layer|Group)_?Norm", re.IGNORECASE)),
    (KernelClass.ROPE, re.compile(r"rotary|rope", re.IGNORECASE)),
    (KernelClass.ACTIVATION, re.compile(r"gelu|silu", re.IGNORECASE)),
    (KernelClass.MODULATION, re.compile(r"modulat|ada_?ln", re.IGNORECASE)),
]
"""(class, pattern for the innermost module), for pointwise and reduction kernels, whose own names say nothing."""
FUNCTOR = re.compile(
    r"(?:elementwise|reduce)_kernel.*?\b(?!gpu_kernel_impl)(\w+(?:Functor\w*|_kernel_cuda|KernelImpl|Ops|_kernel_impl))"
)
"""Finds the part of a pointwise kernel's name that says what it computes."""


@cache
def classify(kernel: str, operator: str = "", module: str = "") -> KernelClass:
    """The class by the kernel's name, else by its operator's, else by its innermost module's, else OTHER."""
    for text in (kernel, operator):
        for kind, pattern in BY_NAME:
            if pattern.search(text):
                return kind
    leaf = module.rpartition("/")[2]
    return next((kind for kind, pattern in BY_MODULE if pattern.search(leaf)), KernelClass.OTHER)


@cache
def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters; a pointwise one with what it computes."""
    if kernel.startswith("Mem"):  # Memcpy DtoD (Device -> Device)
        return kernel
    functor = FUNCTOR.search(kernel)
    text, depth, kept = kernel.removeprefix("void ").replace("(anonymous namespace)::", ""), 0, []
    for letter in text:
        depth += letter in "<("
        if depth == 0:
            kept.append(letter)
        depth -= letter in ">)" and depth > 0
    plain = "".join(kept).replace("at::native::", "").strip() or kernel
    return f"{plain}[{functor[1]}]" if functor else plain
