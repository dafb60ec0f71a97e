"""Inputs for this task's tests."""

import torch

from ..bench import reference

SLOTS = 11
"""Rows of the caches: more than the tests have tokens."""


def make(
    tokens=5,
    q_heads=6,
    k_heads=2,
    dim=128,
    rope=128,
    dtype=torch.bfloat16,
    index=torch.int64,
    packed=False,
    device="cpu",
):
    """The op's ten tensors; with `packed`, q, k and v are views into one qkv buffer."""
    generator = torch.Generator().manual_seed(tokens * dim + rope)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkv = normal(tokens, q_heads + 2 * k_heads, dim)
    q, k, v = qkv.split((q_heads, k_heads, k_heads), dim=1)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    angles = torch.rand(tokens + 3, rope // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    positions = torch.randperm(tokens + 3, generator=generator)[:tokens].to(device, index)
    slots = torch.randperm(SLOTS, generator=generator)[:tokens].to(device, index)
    caches = (normal(SLOTS, k_heads * dim) for _ in "kv")
    return [q, k, v, *caches, normal(dim), normal(dim), table, positions, slots]


def assert_matches(op, tensors, **scalars):
    """Call `op`; q, k and the caches' rows are the oracle's to half a step, and no other row of a cache has changed."""
    slots = tensors[9].long()
    kept = [cache.clone() for cache in tensors[3:5]]
    expected = reference.fused_inplace_qknorm_rope_kv_store(*tensors, **scalars)
    assert op(*tensors, **scalars) is None
    step = torch.finfo(tensors[0].dtype).eps * 0.51
    for got, want in zip((*tensors[:2], *(cache[slots] for cache in tensors[3:5])), expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=step)
    for cache, before in zip(tensors[3:5], kept, strict=True):
        before[slots] = cache[slots]
        assert torch.equal(cache, before)
