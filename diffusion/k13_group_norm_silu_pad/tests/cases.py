"""Inputs for this task's tests, and upstream's classes."""

import ast

import numpy as np
import torch

from ..bench import reference
from ..solution import bias_residual, group_norm_silu_pad, upsample_pad

WANTED = [
    f"HunyuanVideo{name}"
    for name in ("CausalConv3d", "UpsampleCausal3D", "ResnetBlockCausal3D", "MidBlock3D", "UpBlock3D", "Decoder3D")
]
"""Classes of the VAE."""
MARGINS = (2, 1, 1)
"""Frames, lines and columns, as the model has them."""
EPS = 1e-5
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}
"""Largest error beside the output's size or 1: two roundings to 16 bits; some of float32."""


def normal(*shape, dtype=torch.float16, device="cpu", mean=0.0):
    """N(mean, 1), the same for the same shape."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) + mean).to(device, dtype)


def arguments(x, groups, margins=MARGINS, eps=EPS, biased=False):
    """The arguments of a call of the norm: x, weight, bias and the bias of x, then numbers."""
    vectors = [normal(x.shape[4] + shift, dtype=x.dtype, device=x.device)[shift:].clone() for shift in (0, 16, 32)]
    return (x, *vectors[:2], vectors[2] if biased else None, groups, eps, *margins)


def assert_normed(x, groups, margins=MARGINS, arm=None, **more):
    """Call the norm, of `arm` or of the solution, and compare with the oracle."""
    args = arguments(x, groups, margins, **more)
    (want,) = reference.group_norm_silu_pad(*args)
    got = (arm.group_norm_silu_pad if arm else group_norm_silu_pad)(*args)
    assert (got.shape, got.dtype, got.device) == (want.shape, x.dtype, x.device)
    assert got.is_contiguous()
    assert ((got.double() - want).abs() <= TOLERANCE[x.dtype] * want.abs().clamp(min=1)).all()


def assert_copied(source, factors=(1, 1), margins=MARGINS, arm=None):
    """Call the op without a norm, and compare bit for bit with the oracle."""
    (want,) = reference.upsample_pad(source, *factors, *margins)
    got = (arm.upsample_pad if arm else upsample_pad)(source, *factors, *margins)
    assert (got.shape, got.dtype, got.device) == (want.shape, source.dtype, source.device)
    assert got.is_contiguous()
    assert torch.equal(got.double(), want)


def summands(x, how):
    """The arguments of a sum: x, its bias, then a residual and that one's bias, if `how` asks for them."""
    bias, residual_bias = (normal(x.shape[-1] + shift, dtype=x.dtype, device=x.device)[shift:] for shift in (0, 8))
    residual = normal(*x.shape[::-1], dtype=x.dtype, device=x.device).reshape(x.shape)
    return (
        x,
        bias,
        None if how == "plain" else residual,
        residual_bias.clone() if how == "both" else None,
    )


def assert_summed(x, how="both", arm=None):
    """Call the sum, of `arm` or of the solution, and compare with the oracle."""
    args = summands(x, how)
    (want,) = reference.bias_residual(*args)
    got = (arm.bias_residual if arm else bias_residual)(*args)
    assert (got.shape, got.dtype, got.device) == (want.shape, x.dtype, x.device)
    assert got.is_contiguous()
    assert ((got.double() - want).abs() <= TOLERANCE[x.dtype] * want.abs().clamp(min=1)).all()


def classes_of(text, **names):
    """The classes of `WANTED` out of the text of SGLang's hunyuanvae.py, made of their text alone.

    `names`: what the text finds under other names, such as functions of a port.
    """
    module = ast.parse(text)
    kept, kinds = (*WANTED, "_apply_group_norm_silu"), (ast.ClassDef, ast.FunctionDef)
    module.body = [one for one in module.body if isinstance(one, kinds) and one.name in kept]
    found = {
        "torch": torch,
        "np": np,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "SpatialParallelConv3d": torch.nn.Conv3d,
        "HunyuanVAEAttention": torch.nn.Module,  # not used
        "get_act_fn": lambda _: torch.nn.SiLU(),
        "apply_group_norm_silu": lambda x, norm, activation: activation(norm(x)),
        **names,
    }
    exec(compile(module, "hunyuanvae.py", "exec"), found)
    return {name: found[name] for name in WANTED}


def decoder_of(classes):
    """A decoder of two blocks, without attention."""
    layers = {"up_block_types": ("HunyuanVideoUpBlock3D",) * 2, "block_out_channels": (32, 64), "layers_per_block": 1}
    torch.manual_seed(0)
    return classes["HunyuanVideoDecoder3D"](in_channels=32, mid_block_add_attention=False, **layers).eval()
