"""Inputs for this task's tests."""

import torch

from ..bench import reference

SINGLE = "fused_norm_scale_shift"
RESIDUAL = "fused_scale_residual_norm_scale_shift"
BOTH = ("weight", "bias")
ORDER = ("residual", "x", "gate", "weight", "bias", "scale", "shift")


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0, offset=0.0):
    """N(offset, 1), the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + len(shape))
    return (torch.randn(shape, generator=generator) + offset).to(device, dtype)


def make(
    batch=2,
    tokens=6,
    columns=256,
    *,
    residual=False,
    affine=BOTH,
    dtype=torch.bfloat16,
    parameters=None,
    operands=None,
    device="cpu",
    offset=0.0,
    **shapes,
):
    """The tensors of either op by name; `gate`, `scale`, `shift` are shapes, by default [1, 1, D]; gate may be None."""
    whole = (batch, tokens, columns)
    tensors = {"x": normal(*whole, dtype=dtype, device=device, offset=offset)}
    if residual:
        tensors["residual"] = normal(*whole, dtype=dtype, device=device, seed=1, offset=offset)
    for seed, name in enumerate(BOTH):
        vector = normal(columns, dtype=parameters or dtype, device=device, seed=2 + seed)
        tensors[name] = vector if name in affine else None
    for seed, name in enumerate(("gate", "scale", "shift") if residual else ("scale", "shift")):
        shape = shapes.get(name, (1, 1, columns))
        given = shape is not None
        tensors[name] = normal(*shape, dtype=operands or dtype, device=device, seed=4 + seed) if given else None
    return {name: tensors[name] for name in ORDER if name in tensors}


def name_of(tensors):
    return RESIDUAL if "residual" in tensors else SINGLE


def assert_right(op, tensors, norm_type="layer", eps=1e-5):
    """Call `op` and compare all of its outputs with the oracle; y with that of the r which was returned."""
    x = tensors["x"]
    keep = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    got = op(**tensors, norm_type=norm_type, eps=eps)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in keep.items())
    sums = name_of(tensors) == RESIDUAL
    outputs = got if sums else (got,)
    assert isinstance(outputs, tuple)
    rest = {name: tensors[name] for name in (*BOTH, "scale", "shift")}
    (y,) = reference.fused_norm_scale_shift(outputs[1] if sums else x, **rest, norm_type=norm_type, eps=eps)
    expected = [y]
    if sums:
        expected.append(reference.fused_scale_residual_norm_scale_shift(**tensors, norm_type=norm_type, eps=eps)[1])
    like = torch.empty_like(x)
    for out, want in zip(outputs, expected, strict=True):
        assert (out.shape, out.dtype, out.device, out.stride()) == (x.shape, x.dtype, x.device, like.stride())
        # Half a step of the dtype, and some of float32 before: of the largest term where terms cancel.
        step = torch.finfo(x.dtype).eps * 0.51 if x.dtype != torch.float32 else 4e-6
        torch.testing.assert_close(out.double(), want, atol=step / 4 + 4e-6, rtol=step)
    assert len({tensor.data_ptr() for tensor in (*outputs, x)}) == len(outputs) + 1
