"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import triton_group_norm_silu


def normal(*shape, dtype=torch.float16, device="cpu", offset=0.0):
    """N(offset, 1), the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (torch.randn(*shape, generator=generator) + offset).to(device, dtype)


def make(shape=(2, 8, 3, 5), dtype=torch.float16, device="cpu", offset=0.0):
    """x, weight and bias."""
    vectors = (normal(shape[1] + i, dtype=dtype, device=device)[i:] for i in range(2))
    return [normal(*shape, dtype=dtype, device=device, offset=offset), *vectors]


def assert_close(got, want, allowed=1e-5):
    """Half a step of the dtype, and a little of float32 before; twenty of float32, whose sums are rounded too."""
    step = torch.finfo(got.dtype).eps * (20 if got.dtype == torch.float32 else 0.51)
    torch.testing.assert_close(got.double(), want, atol=allowed, rtol=step)


def assert_op(x, weight, bias, num_groups=4, eps=1e-5, op=triton_group_norm_silu, allowed=1e-5):
    """Call `op` and compare value and form with the oracle."""
    keep = x.clone()
    got = op(x, weight, bias, num_groups, eps)
    assert got.is_contiguous()
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    assert torch.equal(x, keep)
    assert_close(got, reference.triton_group_norm_silu(x, weight, bias, num_groups, eps)[0], allowed)
