"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import norm_infer, triton_one_pass_rms_norm


def normal(*shape, dtype=torch.bfloat16, device="cpu", offset=0.0):
    """N(offset, 1), the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (torch.randn(*shape, generator=generator) + offset).to(device, dtype)


def make(rows=5, width=128, dtype=torch.bfloat16, affine=("weight", "bias"), gap=0, device="cpu", offset=0.0):
    """x, weight and bias of `norm_infer`; with a gap, x is a view of a buffer whose rows are that much longer."""
    x = normal(rows, width + gap, dtype=dtype, device=device, offset=offset)[:, :width]
    vectors = [normal(width, dtype=dtype, device=device) if name in affine else None for name in ("weight", "bias")]
    return [x, *vectors]


def assert_close(got, want):
    """Half a step of the dtype, and a little of float32 before; ten of float32, whose sums are rounded too."""
    step = torch.finfo(got.dtype).eps * (10 if got.dtype == torch.float32 else 0.51)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=step)


def assert_norm(x, weight, bias, eps=1e-6, is_rms_norm=False, out=None, op=norm_infer):
    """Call `op` and compare value and form with the oracle."""
    (want,) = reference.norm_infer(x.clone(), weight, bias, eps, is_rms_norm)
    keep = x.clone()
    got = op(x, weight, bias, eps, is_rms_norm, out)
    if out is None:
        assert got.is_contiguous()
        assert got.dtype == x.dtype
        assert torch.equal(x, keep)
    else:
        assert got is out
    assert_close(got, want)


def assert_one_pass(x, w, op=triton_one_pass_rms_norm):
    """Call `op` and compare value and form with the oracle."""
    got = op(x, w)
    assert got.is_contiguous()
    assert got.dtype == x.dtype
    assert_close(got, reference.triton_one_pass_rms_norm(x, w.reshape(-1))[0])
