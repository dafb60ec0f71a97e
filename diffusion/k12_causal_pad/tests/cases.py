"""Inputs for this task's tests."""

import torch

from ..bench import reference
from ..solution import causal_pad, upsample_causal_pad

OPS = {"causal_pad": causal_pad, "upsample_causal_pad": upsample_causal_pad}
MARGINS = (2, 1, 1)
"""Frames, lines and columns, as the model has them."""


def normal(*shape, dtype=torch.float16, device="cpu"):
    """N(0, 1), the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def numbers_of(margins=MARGINS, factors=None):
    """Name and numbers of a call; with factors of frames and pixels it upsamples."""
    return ("upsample_causal_pad", (*factors, *margins)) if factors else ("causal_pad", margins)


def assert_right(x, margins=MARGINS, factors=None, arm=None):
    """Call the op, of `arm` or of the solution, and compare value and form with the oracle."""
    name, numbers = numbers_of(margins, factors)
    (want,) = getattr(reference, name)(x, *numbers)
    got = (getattr(arm, name) if arm else OPS[name])(x, *numbers)
    assert (got.shape, got.dtype, got.device) == (want.shape, x.dtype, x.device)
    assert got.is_contiguous()
    assert torch.equal(got.double(), want)
