"""Inputs for this task's tests."""

import torch

from ..bench import reference

SINGLE = "fused_norm_tanh_mul_add"
DOUBLE = "fused_norm_tanh_mul_add_norm_scale"
BOTH = ("weight", "bias")
OPERANDS = ("scale", "shift", "scale2")


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0, offset=0.0):
    """N(offset, 1), the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + len(shape))
    return (torch.randn(shape, generator=generator) + offset).to(device, dtype)


def make(
    batch=2,
    tokens=6,
    columns=256,
    *,
    double=False,
    affine=BOTH,
    dtype=torch.bfloat16,
    parameters=None,
    operands=None,
    device="cpu",
    offset=0.0,
    **shapes,
):
    """The tensors of either op by name; `scale`, `shift`, `scale2` are shapes, by default [1, 1, D], x's, [1, 1, D]."""
    whole = (batch, tokens, columns)
    usual = {"scale": (1, 1, columns), "shift": whole, "scale2": (1, 1, columns)}
    tensors = {"x": normal(*whole, dtype=dtype, device=device, offset=offset)}
    for norm, number in enumerate(("", "2") if double else ("",)):
        for seed, name in enumerate(BOTH):
            vector = normal(columns, dtype=parameters or dtype, device=device, seed=10 * norm + seed + 1)
            tensors[name + number] = vector if name in affine else None
        for seed, name in enumerate(OPERANDS[2:] if number else OPERANDS[:2]):
            shape = shapes.get(name) or usual[name]
            tensors[name] = normal(*shape, dtype=operands or dtype, device=device, seed=10 * norm + seed + 3)
    return tensors


def name_of(tensors):
    return DOUBLE if "scale2" in tensors else SINGLE


def assert_right(op, tensors, norm_type="rms", eps=1e-5):
    """Call `op` and compare all of its outputs with the oracle; y2 with that of the y which was returned."""
    x = tensors["x"]
    keep = x.clone()
    got = op(**tensors, norm_type=norm_type, eps=eps)
    assert torch.equal(x, keep)
    double = name_of(tensors) == DOUBLE
    outputs = got if double else (got,)
    assert isinstance(outputs, tuple)
    first = {name: tensors[name] for name in ("x", *BOTH, "scale", "shift")}
    (y,) = reference.fused_norm_tanh_mul_add(**first, norm_type=norm_type, eps=eps)
    expected = [y]
    if double:
        normed = reference._norm(outputs[0].double(), tensors["weight2"], tensors["bias2"], norm_type, eps)
        expected.append(normed * (1 + reference._per_token(tensors["scale2"], x)))
    like = torch.empty_like(x)
    for out, want in zip(outputs, expected, strict=True):
        assert (out.shape, out.dtype, out.device, out.stride()) == (x.shape, x.dtype, x.device, like.stride())
        # Half a step of the dtype, some of float32 before, and the tanh of bfloat16 on a GPU: of terms that may cancel.
        step = torch.finfo(x.dtype).eps * 0.51 if x.dtype != torch.float32 else 4e-6
        slack = 16 * 2**-11 if x.dtype == torch.bfloat16 and x.is_cuda else 8e-6
        torch.testing.assert_close(out.double(), want, atol=slack, rtol=step)
    assert len({tensor.data_ptr() for tensor in (*outputs, x)}) == len(outputs) + 1
