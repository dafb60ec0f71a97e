"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import per_token_group_quant, silu_and_mul_quant

LAYOUTS = ("rows", "columns", "apart")


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    """N(0, 1), the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape) + seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def outputs(rows, width, group=128, layout="columns", device="cpu"):
    """output_q and output_s; of 0x7F, NaN, and of a number that no scale is. `apart` leaves gaps in both."""
    gap = 48 if layout == "apart" else 0
    q = torch.full((rows, width + gap), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    groups = width // group
    if layout == "columns":
        s = torch.full((groups, (rows + 3) // 4 * 4), -7.0, device=device).t()[:rows]
    else:
        s = torch.full((rows, groups + bool(gap)), -7.0, device=device)[:, :groups]
    return q[:, :width], s


def codes(q):
    """The numbers of float8 in their order, so that neighbours differ by one; -0 and 0 are the same."""
    bits = q.contiguous().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def assert_right(x, q, s, group=128, fused=False, op=None):
    """Call `op` and compare what it wrote, and what it left alone, with the oracle."""
    name = "silu_and_mul_quant" if fused else "per_token_group_quant"
    op = op or (silu_and_mul_quant if fused else per_token_group_quant)
    want_q, want_s = getattr(reference, name)(x, q, s, group)
    keep = x.clone()
    got = op(x, q, s, group)
    assert got[0] is q
    assert got[1] is s
    assert torch.equal(x, keep)
    # One place of float32; where SiLU was rounded to a neighbour, one of input's dtype.
    close = 2.0**-7 if fused and x.dtype == torch.bfloat16 else 2.0**-10 if fused else 2.0**-23
    torch.testing.assert_close(s.double(), want_s, atol=0.0, rtol=close)
    assert (codes(q) - codes(want_q.float().to(torch.float8_e4m3fn))).abs().max() <= 1 if q.numel() else True
    assert (codes(q) == codes(want_q.float().to(torch.float8_e4m3fn))).float().mean() > 0.98 if q.numel() else True
