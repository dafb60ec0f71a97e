"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

HEADS, WEIGHTS, ANGLES = ("q", "k", "v"), ("q_weight", "k_weight"), ("cos", "sin")


def qkv_norm_rope_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor]:
    """What y shall be, [3, B, tokens, heads, head_dim] float64."""
    half, planes = q.shape[-1] // 2, []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x.to(torch.float64, copy=True)
        y /= torch.sqrt(torch.linalg.vector_norm(y, dim=-1, keepdim=True).square() / y.shape[-1] + eps)
        y *= weight.double()
        if cos is not None:
            rows = min(cos.shape[0], x.shape[1])
            c = cos[:rows, None, :half].double()
            s = (cos[:rows, None, half:] if sin is None else sin[:rows, None]).double()
            a, b = y[:, :rows, :, 0::2].clone(), y[:, :rows, :, 1::2].clone()
            y[:, :rows, :, 0::2] = a * c - b * s
            y[:, :rows, :, 1::2] = b * c + a * s
        planes.append(y)
    return (torch.stack((*planes, v.double())),)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, wanted = workload.inputs, {*HEADS, *WEIGHTS}
    angles = set(inputs) - wanted
    fits = wanted <= set(inputs) and angles in ({"cos", "sin"}, {"cos"}, set())
    expect(fits, "inputs", f"{sorted(wanted)}, and cos, or cos and sin, or neither", sorted(inputs))
    q = inputs["q"]
    expect(len(q.shape) == 4, "q", "4 dimensions [B, tokens, heads, head_dim]", list(q.shape))
    tokens, dim = q.shape[1], q.shape[3]
    expect(dim in (64, 128, 256), "q", "head_dim 64, 128 or 256", dim)
    expect(q.dtype in ("float16", "bfloat16"), "q", "dtype float16 or bfloat16", q.dtype)
    if angles != {"cos"}:  # as in HunyuanVideo, whose kernels take no others
        expect(dim <= 128, "q", "head_dim 64 or 128, unless sin lies behind cos", dim)
        expect(q.dtype == "bfloat16", "q", "dtype bfloat16, unless sin lies behind cos", q.dtype)
    shapes = dict.fromkeys(HEADS, q.shape) | dict.fromkeys(WEIGHTS, (dim,))
    for name, shape in shapes.items():
        expect(inputs[name].shape == shape, name, f"shape {list(shape)}", list(inputs[name].shape))
        expect(inputs[name].dtype == q.dtype, name, f"dtype {q.dtype}, as q", inputs[name].dtype)
        expect(inputs[name].strides[-1] == 1, name, "stride 1 in its last dimension", inputs[name].strides[-1])
    for name in angles:
        rows, width = inputs[name].shape
        expect(width == (dim // 2 if len(angles) > 1 else dim), name, f"a width that fits head_dim {dim}", width)
        expect(inputs[name].dtype == "float32", name, "dtype float32", inputs[name].dtype)
        expect(rows == inputs["cos"].shape[0], name, f"{inputs['cos'].shape[0]} rows, as cos", rows)
        # FLUX has an angle for every token of its own; HunyuanVideo's text has none.
        expect(0 < rows <= tokens if "sin" in angles else rows >= tokens, name, f"rows for {tokens} tokens", rows)
    expect(set(workload.scalars) == {"eps"}, "scalars", "eps", sorted(workload.scalars))
