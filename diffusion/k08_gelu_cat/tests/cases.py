"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import fused_gelu_tanh_cat

OP = "fused_gelu_tanh_cat"


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    """N(0, 2), the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (2 * torch.randn(shape, generator=generator)).to(device, dtype)


def make(leading=(2, 5), attn=96, mlp=200, dtype=torch.bfloat16, device="cpu", packed=0):
    """attn and mlp; with `packed`, mlp is what follows so many columns of a wider tensor."""
    wide = normal(*leading, packed + mlp, dtype=dtype, device=device, seed=1)
    return [normal(*leading, attn, dtype=dtype, device=device), wide[..., packed:]]


def every(dtype):
    """Every number of a 16-bit dtype, infinities and NaNs included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_right(attn, mlp, op=fused_gelu_tanh_cat):
    """Call `op` and compare value and form with the oracle: to half a step of the dtype, and float32's errors."""
    (want,) = reference.fused_gelu_tanh_cat(attn, mlp)
    got = op(attn, mlp)
    assert (got.shape, got.dtype, got.device) == (want.shape, attn.dtype, attn.device)
    assert got.is_contiguous()
    assert torch.equal(got[..., : attn.shape[-1]], attn)
    share = 8 if attn.dtype == torch.float32 else 0.51
    atol = 1e-6 if attn.dtype != torch.float64 else 1e-12
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=share * torch.finfo(attn.dtype).eps)
