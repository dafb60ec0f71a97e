"""Inputs for this task's tests."""

import torch

from kda_judge.arms.fused_rounding import fma, fma_to_odd

from ..bench import reference

SCALE_SHIFT = "fuse_scale_shift_kernel"
SELECT01 = "fuse_layernorm_scale_shift_gate_select01_kernel"
RESIDUAL_SELECT01 = "fuse_residual_layernorm_scale_shift_gate_select01_kernel"


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def make_scale_shift(
    batch=2, tokens=6, channels=96, scale=None, shift=None, dtype=torch.bfloat16, other=None, device="cpu"
):
    """x, scale and shift; `scale` and `shift` are shapes, by default [B, C] and [B, L, C], `other` is scale's dtype."""
    whole = (batch, tokens, channels)
    return [
        normal(*whole, dtype=dtype, device=device),
        normal(*((batch, channels) if scale is None else scale), dtype=other or dtype, device=device, seed=1),
        normal(*(whole if shift is None else shift), dtype=dtype, device=device, seed=2),
    ]


def make_select01(
    batch=2,
    tokens=5,
    channels=96,
    dtype=torch.bfloat16,
    index=torch.int64,
    affine=False,
    residual=False,
    strided=False,
    device="cpu",
):
    """The tensors of either select01 op by name; `strided`: the modulation is six chunks of one tensor."""
    whole = (batch, tokens, channels)
    tensors = {"x": normal(*whole, dtype=dtype, device=device)}
    if residual:
        tensors["residual"] = normal(*whole, dtype=dtype, device=device, seed=1)
        tensors["residual_gate"] = normal(*whole, dtype=dtype, device=device, seed=2)
    for number, name in enumerate(("weight", "bias")):
        tensors[name] = normal(channels, dtype=dtype, device=device, seed=3 + number) if affine else None
    table = normal(batch, 6, channels, dtype=dtype, device=device, seed=5)
    for number, name in enumerate(reference.MODULATION):
        tensors[name] = table[:, number] if strided else table[:, number].contiguous()
    chosen = torch.randint(0, 2, (batch, tokens), generator=torch.Generator().manual_seed(7))
    chosen[:, 0] = 1  # both are there, whatever is drawn
    chosen[:, -1] = 0
    tensors["index"] = chosen.to(device, index)
    return tensors


def name_of(tensors):
    return RESIDUAL_SELECT01 if "residual" in tensors else SELECT01


def assert_scale_shift(op, tensors, **scalars):
    """Call `op` and compare with the oracle."""
    _assert_close([op(*tensors, **scalars)], reference.fuse_scale_shift_kernel(*tensors, **scalars), tensors[0])


def assert_select01(op, tensors, eps=1e-6):
    """Call `op` and compare all of its outputs with the oracle."""
    expected = getattr(reference, name_of(tensors))(**tensors, eps=eps)
    got = op(**tensors, eps=eps)
    assert isinstance(got, tuple)
    _assert_close(got, expected, tensors["x"])
    assert len({tensor.data_ptr() for tensor in got} | {tensors["x"].data_ptr()}) == len(got) + 1


def upstreams_bits(x, scale, shift, scale_constant=1.0):
    """What upstream's kernel stores, for operands that broadcast with x as they are.

    Its operations compute in the wider dtype of their operands; float16 with bfloat16 is float16 there. Product and sum
    of one dtype are a fused multiply-add.
    """
    factor = torch.tensor(scale_constant, dtype=scale.dtype, device=scale.device) + scale
    product = _common(x, factor)
    total = _common(shift, torch.empty(0, dtype=product))
    if total != product:
        return ((x.to(product) * factor.to(product)).to(total) + shift.to(total)).to(x.dtype)
    fused = fma if product == torch.float32 else fma_to_odd
    y = fused(*(tensor.to(product).float().cpu().numpy() for tensor in (x, factor, shift)))
    return torch.from_numpy(y).to(product).to(x.device, x.dtype)


def _common(one, other):
    dtypes = {one.dtype, other.dtype}
    return next(dtype for dtype in (torch.float32, torch.float16, torch.bfloat16) if dtype in dtypes)


def _assert_close(got, expected, x):
    """To half a step of x's dtype, and a little of float32 before, of x's form and contiguous."""
    for out, want in zip(got, expected, strict=True):
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        assert out.is_contiguous()
        atol, rtol = (2e-6, 4e-6) if x.dtype == torch.float32 else (1e-5, torch.finfo(x.dtype).eps * 0.51)
        torch.testing.assert_close(out.double(), want, atol=atol, rtol=rtol)
