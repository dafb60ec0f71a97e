"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import fused_add_rmsnorm, rmsnorm


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    """N(0, 1), the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape) + seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def make(rows=5, width=128, dtype=torch.bfloat16, gap=0, device="cpu"):
    """input, residual and weight; with a gap, the first two are views of buffers whose rows are that much longer."""
    x, residual = (normal(rows, width + gap, dtype=dtype, device=device, seed=seed)[:, :width] for seed in (1, 2))
    return [x, residual, normal(width, dtype=dtype, device=device)]


def assert_close(got, want):
    """Half a step of the dtype, and a little of float32 before; ten of float32, whose sums are rounded too."""
    step = torch.finfo(got.dtype).eps * (10 if got.dtype == torch.float32 else 0.51)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=step)


def assert_fused(x, residual, weight, eps=1e-6, op=fused_add_rmsnorm):
    """Call `op` and compare what it wrote with the oracle."""
    want, total = reference.fused_add_rmsnorm(x, residual, weight, eps)
    assert op(x, residual, weight, eps) is None
    assert_close(x, want)
    assert_close(residual, total)


def assert_norm(x, weight, out=None, eps=1e-6, op=rmsnorm):
    """Call `op` and compare what it wrote, and what it left alone, with the oracle."""
    (want,) = reference.rmsnorm(x, weight, eps=eps)
    keep = x.clone()
    assert op(x, weight, out, eps) is None
    assert_close(x if out is None else out, want)
    if out is not None and out is not x:
        assert torch.equal(x, keep)
