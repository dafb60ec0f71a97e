"""The float64 oracles, the bytes that the ops must move, and the contract of a row."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.tensor_spec import ITEM_SIZE
from kda_judge.contract.workloads import Workload

FLOATS = ("float16", "bfloat16", "float32")
OPS = ("apply_rotary_embedding", "apply_ltx2_split_rotary_emb")


def apply_rotary_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor]:
    """The pairs (2p, 2p + 1) of every head turned, in x's shape, float64.

    `interleaved` is about the tables, not about x: with it a table as wide as the head holds every angle twice.
    """
    tokens, dim = x.shape[-3], x.shape[-1]
    even = torch.arange(0, dim, 2, device=x.device)
    columns = even if interleaved and cos.shape[-1] == dim else even // 2
    c = cos.double()[:tokens, None, columns]
    s = sin.double()[:tokens, None, columns]
    wide = x.double()
    y = torch.empty_like(wide)
    y[..., even] = wide[..., even] * c - wide[..., even + 1] * s
    y[..., even + 1] = wide[..., even + 1] * c + wide[..., even] * s
    return (y,)


def apply_ltx2_split_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor]:
    """The pairs (p, p + half) of every head turned, in x's shape, float64 but for one rounding.

    That rounding is part of the contract: the product with cos passes through the dtype of x * cos and then bfloat16,
    before the product with sin is added. float64 holds both products exactly (24 + 24 bits of 53), so every
    other operation here is exact or wrong by 1e-16.
    """
    batch, tokens, inner = x.shape
    heads, half = cos.shape[1], cos.shape[3]
    split = x.double().reshape(batch, tokens, heads, 2, half)
    a, b = split[..., 0, :], split[..., 1, :]
    c, s = cos.double().permute(0, 2, 1, 3), sin.double().permute(0, 2, 1, 3)
    product = torch.promote_types(x.dtype, cos.dtype)

    def rounded(exact: torch.Tensor) -> torch.Tensor:
        return exact.to(product).to(torch.bfloat16).double()

    y = torch.stack((rounded(a * c) - b * s, rounded(b * c) + a * s), dim=3)
    return (y.reshape(batch, tokens, inner),)


def bytes_moved(workload: Workload) -> int:
    """X read, y written, and the rows and columns of each table that the op reads, perhaps not all of them."""
    inputs = workload.inputs
    x = inputs["x"]
    tables = inputs["cos"].nbytes + inputs["sin"].nbytes
    if workload.op == "apply_rotary_embedding":
        dim, columns = x.shape[-1], inputs["cos"].shape[1]
        # Reading every second column touches as many sectors of memory as reading all columns.
        used = dim if workload.scalars.get("interleaved", False) and columns == dim else dim // 2
        tables = x.shape[-3] * used * sum(ITEM_SIZE[inputs[name].dtype] for name in ("cos", "sin"))
    return x.nbytes + ITEM_SIZE[x.dtype] * _count(x.shape) + tables


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    expect(workload.op in OPS, "op", " or ".join(OPS), workload.op)
    expect(set(inputs) == {"x", "cos", "sin"}, "inputs", "x, cos and sin", sorted(inputs))
    x, cos, sin = inputs["x"], inputs["cos"], inputs["sin"]
    for name, spec in inputs.items():
        expect(spec.dtype in FLOATS, name, f"dtype {', '.join(FLOATS)}", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in the last dimension", spec.strides[-1])
    expect(sin.shape == cos.shape, "sin", f"shape {list(cos.shape)}, as cos", list(sin.shape))
    if workload.op == "apply_rotary_embedding":
        expect(len(x.shape) in (3, 4), "x", "three or four dimensions", list(x.shape))
        tokens, dim = x.shape[-3], x.shape[-1]
        expect(dim > 0 and dim % 2 == 0, "x", "an even head size", dim)
        fits = len(cos.shape) == 2 and cos.shape[0] >= tokens and cos.shape[1] >= dim // 2
        expect(fits, "cos", f"at least {tokens} rows of {dim // 2} columns", list(cos.shape))
        expect(set(scalars) <= {"interleaved"}, "scalars", "interleaved", sorted(scalars))
        flag = scalars.get("interleaved", False)
        expect(isinstance(flag, bool), "interleaved", "true or false", flag)
    else:
        expect(len(x.shape) == 3, "x", "three dimensions [batch, tokens, heads * head size]", list(x.shape))
        expect(len(cos.shape) == 4, "cos", "four dimensions [batch, heads, tokens, half]", list(cos.shape))
        batch, heads, tokens, half = cos.shape
        want = [batch, tokens, heads * 2 * half]
        expect(list(x.shape) == want, "x", f"shape {want}, from cos", list(x.shape))
        expect(not scalars, "scalars", "none", sorted(scalars))


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
