"""GroupNorm followed by SiLU: one launch where a group fits into a program, else launches that share their statistics.

    n = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias        over a group: some channels of one batch, in float32
    y = n / (1 + exp(-n))                                         SiLU; rounded once, to x's dtype

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/group_norm_silu.py` and
`jit_kernel/diffusion/group_norm_silu.py` (Apache-2.0); the code is our own.

Idea: the op streams, but every element waits for all of its group. A small group is one program's, in registers
(`whole`). A larger one is cut into parts, which leave mean and centred squares each, and read their x a second time for
the output. In `stretch` these are two launches: the later one starts early (programmatic dependent launch) and has its
x in registers when the statistics arrive, but beyond the L2 cache it reads x from memory again. In `flow` one launch
does both, the statistics a group and some more ahead of the output, so that the second reading comes from the cache.
Only there programs wait for each other, in an order in which nothing can hang, see `flow_kernel`.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kda_core.calls import check_tensors, elsewhere, register, unfit
from kda_core.errors import expecting
from kda_core.launch import MISS, Plans, is_interpreted, is_tracing

from .kernels import whole_kernel
from .plans import Call, plan

OP = "triton_group_norm_silu"
MODULE_OP = "apply_group_norm_silu"
MAX_GROUP = 2**30
"""Elements of a group: the kernels count them in 32 bits, a last part included."""
INTERPRETED = 45_000
"""Elements of x that Triton's interpreter is given: a program takes it 10 ms, and these rows have hundreds of them."""


# --- launcher


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Any]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = _call(op, **inputs, **scalars)
    _check(call)
    if _uncovered(call) or call.x.numel() == 0:
        return []
    return list(plan(_ready(call)).launches)


def _ready(call: Call) -> Call:
    """The call with an x that the kernels read: itself where it is contiguous, else a copy, as upstream's."""
    return call if call.x.is_contiguous() else call._replace(x=call.x.contiguous())


def _triton_call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float = 1e-5) -> Call:
    return Call(x, weight, bias, num_groups, eps)


def _module_call(x: torch.Tensor, norm: nn.GroupNorm, activation: nn.SiLU) -> Call:  # noqa: ARG001
    return Call(x, norm.weight, norm.bias, norm.num_groups, norm.eps)


def _call(op: str, *args: Any, **kwargs: Any) -> Call:
    """The call of `op` with these arguments; eps may be left out."""
    return (_triton_call if op == OP else _module_call)(*args, **kwargs)


# --- what is wrong with a call, what the kernels cover, and the path for the rest


def _check(call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""
    expect = expecting(OP)
    check_tensors(OP, {"x": call.x, "weight": call.weight, "bias": call.bias})
    x, groups = call.x, call.num_groups
    expect(x.dim() >= 2, "x", "two dimensions or more [batch, channels, ...]", list(x.shape))
    expect(isinstance(groups, int) and groups > 0, "num_groups", "a positive integer", groups)
    expect(x.shape[1] % groups == 0, "num_groups", f"a divisor of x's {x.shape[1]} channels", groups)
    for name, tensor in call.tensors.items():
        shape = list(tensor.shape)
        expect(name == "x" or shape == [x.shape[1]], name, f"shape {[x.shape[1]]}", shape)


def _uncovered(call: Call) -> str | None:
    """Why the kernels cannot take this call on any device, or None."""
    for name, tensor in call.tensors.items():
        if name != "x" and not tensor.is_contiguous():
            return f"{name} has gaps; the kernels take it for contiguous"
    if call.x.numel() > 0 and call.elements > MAX_GROUP:
        return f"a group has {call.elements} elements; the kernels count up to {MAX_GROUP}"
    return unfit(call.tensors)


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of a kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    if op == MODULE_OP and (reason := _not_fused(*args, **kwargs)) is not None:
        return reason
    call = _call(op, *args, **kwargs)
    _check(call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    if call.x.is_cpu and is_interpreted(whole_kernel) and call.x.numel() > INTERPRETED:
        return f"x has {call.x.numel()} elements; Triton's interpreter is given up to {INTERPRETED}"
    return elsewhere(call.x, whole_kernel) or _uncovered(call)


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


_PLANS = Plans()


def _launch(call: Call) -> Any:
    """Launch for the first time: on CUDA tensors through a new entry, which is remembered."""
    return _PLANS.launch(plan(call), call[:3], call[3:])


def _run(call: Call) -> torch.Tensor:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    tensors: Sequence[torch.Tensor] = call[:3]
    scalars = call[3:]
    y = _PLANS.recall(tensors, scalars)
    if y is MISS:
        _check(call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        ready = _ready(call)
        if ready is not call:
            return _run(ready)
        y = _launch(call)
    assert isinstance(y, torch.Tensor)
    return y


# --- custom op and fake: what torch.compile and other tracers see


def _impl(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _run(_triton_call(*args, **kwargs))


def _fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A contiguous tensor like x."""
    return torch.empty_like(x.contiguous())


_SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int num_groups, float eps=1e-05) -> Tensor"
_op = register(__name__, OP, _SCHEMA, _impl, _fake)


# --- public functions


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

    Other dtypes and CPU tensors take a plain PyTorch path, and so does a call that gradients are recorded of: see
    `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _PLANS.hot:
            result = entry(x, weight, bias, num_groups, eps)
            if result is not MISS:
                return result
    call = Call(x, weight, bias, num_groups, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _op(*call)
    return _run(call)


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
    if _not_fused(x, norm, activation) is not None:
        return activation(norm(x))
    return triton_group_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps)


def _not_fused(x: torch.Tensor, norm: nn.Module, activation: nn.Module) -> str | None:
    """Why the modules are called one after the other, or None."""
    if torch.is_grad_enabled():
        return "gradients are recorded; the kernels have no backward pass"
    if type(norm).forward is not nn.GroupNorm.forward or norm.weight is None or norm.bias is None:
        return "norm is no torch.nn.GroupNorm with weight and bias"
    if type(activation).forward is not nn.SiLU.forward or activation.inplace:
        return "activation is no torch.nn.SiLU that works out of place"
    if any(chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in (norm, activation))):
        return "a module has hooks, which fusing would skip"
    return elsewhere(x, whole_kernel)
