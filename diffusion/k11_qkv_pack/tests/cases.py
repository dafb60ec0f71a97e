"""Inputs for this task's tests."""

import torch

from ..bench import reference

OP = "qkv_norm_rope_pack"
NAMES = ("q", "k", "v", "q_weight", "k_weight", "cos", "sin")


def make(tokens=5, heads=6, dim=128, batch=1, rows=None, form="tables", dtype=torch.bfloat16, layout="", device="cpu"):
    """The op's tensors by name. `rows`: tokens that are rotated, all if None; `form`: tables, cache or none.

    `layout`: packed, q, k and v are views of one tensor; mlp, they lie in front of other columns.
    """
    generator = torch.Generator().manual_seed(tokens * dim + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if layout:
        wide = normal(batch, tokens, (7 if layout == "mlp" else 3) * heads * dim)
        planes = wide[..., : 3 * heads * dim].unflatten(-1, (3, heads, dim)).unbind(2)
    else:
        planes = [normal(batch, tokens, heads, dim) for _ in range(3)]
    weights = [1 + 0.3 * normal(dim) for _ in range(2)]
    angles = torch.rand(tokens if rows is None else rows, dim // 2, generator=generator) * 6
    tables = (angles.cos().to(device), angles.sin().to(device))
    tables = {"tables": tables, "cache": (torch.cat(tables, dim=-1), None), "none": (None, None)}[form]
    return dict(zip(NAMES, (*planes, *weights, *tables), strict=True))


def assert_matches(op, tensors, **scalars):
    """Call `op` and compare with the oracle to half a step of the dtype, and a little of float32 before; v by bits."""
    (want,) = reference.qkv_norm_rope_pack(**tensors, **scalars)
    got = op(**tensors, **scalars)
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, tensors["q"].dtype, True)
    step = torch.finfo(got.dtype).eps * 0.51
    torch.testing.assert_close(got[:2].double(), want[:2], atol=1e-5, rtol=step)
    assert torch.equal(got[2], tensors["v"])
