"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import silu_and_mul


def normal(*shape, dtype=torch.bfloat16, device="cpu"):
    """N(0, 1), the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_close(got, want):
    """Half a step of the dtype, and a little of float32 before; ten of float32, for the exponential is approximate."""
    step = torch.finfo(got.dtype).eps * (10 if got.dtype == torch.float32 else 0.51)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=step)


def assert_right(x, out=None, op=silu_and_mul):
    """Call `op` and compare value and form with the oracle."""
    (want,) = reference.silu_and_mul(x)
    got = op(x, out)
    assert got is out or (out is None and got.is_contiguous())
    assert got.dtype == x.dtype
    assert_close(got, want)


def assert_filtered(x, idle, *filters, dtype=torch.int32, **more):
    """Rows of `idle` keep what `out` held, the others are as without filters."""
    out = torch.full((*x.shape[:-1], x.shape[-1] // 2), 7.0, dtype=x.dtype, device=x.device)
    assert silu_and_mul(x, out, *filters, **more) is out
    (want,) = reference.silu_and_mul(x)
    rows, wanted = out.flatten(0, -2), want.flatten(0, -2)
    assert (rows[idle] == 7.0).all()
    assert_close(rows[~idle], wanted[~idle])
