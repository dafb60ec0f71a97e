"""Inputs for this task's tests."""

import ast

import torch

from ..bench import reference
from ..solution import causal_pad, upsample_causal_pad

OPS = {"causal_pad": causal_pad, "upsample_causal_pad": upsample_causal_pad}
MARGINS = (2, 1, 1)
"""Frames, lines and columns, as the model has them."""


def classes_of(text, **names):
    """The convolution and the upsampling of the VAE, made of their text alone; `names` is what else they ask for."""
    module = ast.parse(text)
    wanted = ("HunyuanVideoCausalConv3d", "HunyuanVideoUpsampleCausal3D")
    module.body = [one for one in module.body if isinstance(one, ast.ClassDef) and one.name in wanted]
    found = {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "SpatialParallelConv3d": torch.nn.Conv3d,
        **names,
    }
    exec(compile(module, "hunyuanvae.py", "exec"), found)
    return [found[name] for name in wanted]


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
