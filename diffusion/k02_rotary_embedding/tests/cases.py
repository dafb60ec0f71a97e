"""Inputs for this task's tests."""

import torch

from ..bench import reference


def pairs(
    shape=(5, 6, 128),
    dtype=torch.bfloat16,
    table=torch.float32,
    columns=None,
    rows=None,
    packed=False,
    device="cpu",
):
    """The tensors of `apply_rotary_embedding`; with `packed`, x is a view into a qkv of three times as many heads."""
    generator = torch.Generator().manual_seed(sum(shape))
    *outer, heads, dim = shape
    x = torch.randn(*outer, heads * (3 if packed else 1), dim, generator=generator)
    # Angles of their own in every column, so that a wrong column shows.
    angles = torch.rand(rows or shape[-3], columns or dim // 2, generator=generator) * 6
    x, cos, sin = x.to(device, dtype), angles.cos().to(device, table), angles.sin().to(device, table)
    return [x[..., :heads, :], cos, sin]


def halves(batch=2, tokens=5, heads=32, half=32, dtype=torch.bfloat16, table=None, view=True, device="cpu"):
    """The tensors of `apply_ltx2_split_rotary_emb`; with `view`, tokens come before heads in the tables' memory."""
    generator = torch.Generator().manual_seed(batch + tokens + heads + half)
    x = torch.randn(batch, tokens, heads * 2 * half, generator=generator).to(device, dtype)
    angles = torch.rand(batch, tokens, heads, half, generator=generator) * 6
    angles = angles.transpose(1, 2) if view else angles.transpose(1, 2).contiguous()
    return [x, *(function(angles).to(device, table or dtype) for function in (torch.cos, torch.sin))]


def assert_matches(op, tensors, name=None, **scalars):
    """Call `op` and compare with the oracle to half a step of x's dtype, and a little of float32 before."""
    (expected,) = getattr(reference, name or op.__name__)(*tensors, **scalars)
    got = op(*tensors, **scalars)
    x = tensors[0]
    like = torch.empty_like(x)
    assert (got.shape, got.dtype, got.stride(), got.device) == (like.shape, like.dtype, like.stride(), like.device)
    step = torch.finfo(x.dtype).eps
    torch.testing.assert_close(got.double(), expected, atol=max(1e-5, step / 256), rtol=0.51 * step)


def same_bits(a, b):
    """Equal to the last bit, signs of zeros included."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
