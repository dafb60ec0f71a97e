"""GroupNorm followed by SiLU: one launch where a group fits into a program, else launches that pass on statistics.

    n = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias        over a group: some channels of one batch, in float32
    y = n / (1 + exp(-n))                                         SiLU; rounded once, to x's dtype

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/group_norm_silu.py` and
`jit_kernel/diffusion/group_norm_silu.py` (Apache-2.0); the code is our own.

Idea: the op streams, but every output needs the statistics of its whole group. A small group is held in the registers
of one program (`whole`). A larger one is cut into parts. Each part leaves its mean and centred squares, and x is read a
second time for the output. In `stretch` these are two launches: the later one starts early (programmatic dependent
launch) and has its x in registers when the statistics arrive, but beyond the L2 cache it reads x from memory again. In
`flow` one launch does both: the statistics run a group and some more before the output, so that the second reading
comes from the cache. Its programs wait for each other in an order in which nothing can hang, see `flow_kernel`.
`cluster` and `ring`, in CuTe DSL, read x once.
"""

from itertools import chain

import torch
from torch import nn

from kda_runtime.checks import Expect, elsewhere, given, unfit
from kda_runtime.launch import is_interpreted
from kda_runtime.op import Op

from .kernels import whole_kernel
from .plans import Call, plan

MAX_GROUP = 2**30
"""Most elements of a group: the kernels count them in 32 bits, up to the end of the last part."""
INTERPRETED = 45_000
"""Most elements of x for Triton's interpreter: it takes 10 ms a program, and the rows have hundreds of programs."""


# --- what is wrong with a call, what the kernels cover, and the path for the rest


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    x, groups = call.x, call.num_groups
    expect(x.dim() >= 2, "x", "two dimensions or more [batch, channels, ...]", list(x.shape))
    expect(isinstance(groups, int) and groups > 0, "num_groups", "a positive integer", groups)
    expect(x.shape[1] % groups == 0, "num_groups", f"a divisor of x's {x.shape[1]} channels", groups)
    for name in ("weight", "bias"):
        shape = list(getattr(call, name).shape)
        expect(shape == [x.shape[1]], name, f"shape {[x.shape[1]]}", shape)


def _uncovered(call: Call) -> str | None:
    """Why the kernels do not take this call, or None."""
    elements = call.x.numel()
    if call.x.is_cpu and is_interpreted(whole_kernel) and elements > INTERPRETED:
        return f"x has {elements} elements; Triton's interpreter is given up to {INTERPRETED}"
    for name in ("weight", "bias"):
        if not getattr(call, name).is_contiguous():
            return f"{name} has gaps; the kernels take it for contiguous"
    if elements > 0 and call.elements > MAX_GROUP:
        return f"a group has {call.elements} elements; the kernels count up to {MAX_GROUP}"
    return unfit(given(call))


def _ready(call: Call) -> Call:
    """The call with an x that the kernels can read: x itself if it is contiguous, else a copy, as upstream's."""
    return call if call.x.is_contiguous() else call._replace(x=call.x.contiguous())


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernels do not cover."""
    x = call.x.contiguous()
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = x.to(wide).view(call.groups, -1)
    rows = rows - rows.mean(dim=1, keepdim=True)
    rows = rows * torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + call.eps)
    lanes = (-1, *[1] * (x.dim() - 2))
    y = rows.view(x.shape) * call.weight.to(wide).view(lanes) + call.bias.to(wide).view(lanes)
    return torch.nn.functional.silu(y).to(x.dtype)


def _fused(x: torch.Tensor, norm: nn.Module, activation: nn.Module) -> Call | str:
    """The call that does what the modules do, or the reason why they are called one after the other."""
    if torch.is_grad_enabled():
        return "gradients are recorded; the kernels have no backward pass"
    if type(norm).forward is not nn.GroupNorm.forward or norm.weight is None or norm.bias is None:
        return "norm is no torch.nn.GroupNorm with weight and bias"
    if type(activation).forward is not nn.SiLU.forward or activation.inplace:
        return "activation is no torch.nn.SiLU that works out of place"
    if any(chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in (norm, activation))):
        return "a module has hooks, which fusing would skip"
    return elsewhere(x, whole_kernel) or Call(x, norm.weight, norm.bias, norm.num_groups, norm.eps)


# --- public functions

OP = Op(
    "triton_group_norm_silu",
    Call,
    kernel=whole_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    ready=_ready,
    outputs=("x",),
    contiguous=True,
)


@OP.public
def triton_group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float = 1e-5
) -> torch.Tensor:
    """GroupNorm, then SiLU.

    Args:
        x: [batch, channels, ...], two dimensions or more, float16, bfloat16 or float32.
        weight: [channels].
        bias: [channels].
        num_groups: how many groups the channels are divided into, evenly.
        eps: added to the variance.

    Returns:
        A new contiguous tensor like x.

    Other dtypes and CPU tensors take a plain PyTorch path, and so does a call for which gradients are recorded: see
    `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    return OP.call(x, weight, bias, num_groups, eps)


@OP.also(_fused)
def apply_group_norm_silu(x: torch.Tensor, norm: nn.Module, activation: nn.Module) -> torch.Tensor:
    """`activation(norm(x))`, in one op where the modules are an affine GroupNorm and a SiLU that is not in place.

    Args:
        x: [batch, channels, ...].
        norm: any module; fused are `torch.nn.GroupNorm` with weight and bias, and without hooks.
        activation: any module; fused are `torch.nn.SiLU` not in place, and without hooks.

    Returns:
        A new tensor like x: contiguous where fused, else what the modules return.

    Nothing is fused while gradients are recorded, nor for CPU tensors (unless the kernels are interpreted).
    """
    call = _fused(x, norm, activation)
    return activation(norm(x)) if isinstance(call, str) else OP.call(*call)
