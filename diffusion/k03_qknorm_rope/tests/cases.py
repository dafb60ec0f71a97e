"""Inputs for this task's tests."""

import torch

from ..bench import reference


def make(
    tokens=5,
    q_heads=6,
    k_heads=2,
    dim=128,
    rope=128,
    dtype=torch.bfloat16,
    positions=torch.int64,
    packed=False,
    device="cpu",
):
    """The op's six tensors; with `packed`, q and k are views into one qkv buffer."""
    generator = torch.Generator().manual_seed(tokens * dim + rope)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if packed:
        qkv = normal(tokens, q_heads + 2 * k_heads, dim)
        q, k = qkv[:, :q_heads], qkv[:, q_heads : q_heads + k_heads]
    else:
        q, k = normal(tokens, q_heads, dim), normal(tokens, k_heads, dim)
    angles = torch.rand(tokens + 3, rope // 2, generator=generator) * 6
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    order = torch.randperm(tokens + 3, generator=generator)[:tokens].to(device, positions)
    return [q, k, normal(dim), normal(dim), cache, order]


def assert_matches(op, tensors, **scalars):
    """Call `op` and compare q and k with the oracle to half a step of their dtype, and a little of float32 before."""
    expected = reference.fused_inplace_qknorm_rope(*tensors, **scalars)
    assert op(*tensors, **scalars) is None
    step = torch.finfo(tensors[0].dtype).eps * 0.51
    for got, want in zip(tensors[:2], expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=step)
