"""Inputs for this task's tests."""

import torch

from ..bench import reference

NORM = "temb_norm_scale_shift"
BOTH = "temb_residual_norm_scale_shift"
RESIDUAL = "temb_residual"
CALLS = {
    "first": (NORM, ("x", "temb", "table")),
    "gated": (BOTH, ("residual", "x", "temb", "gate_table", "table")),
    "affine": (BOTH, ("residual", "x", "temb", "gate_table", "weight", "bias")),
    "cross": (BOTH, ("residual", "x", "temb", "table")),
    "whole": (BOTH, ("residual", "x", "temb", "gate_table", "table", "weight", "bias")),
    "bare": (BOTH, ("residual", "x", "temb")),
    "last": (RESIDUAL, ("residual", "x", "temb", "gate_table")),
}
"""Call -> op and the tensors that it is given."""
SEEDS = ("residual", "x", "temb", "gate_table", "table", "weight", "bias")


def normal(*shape, dtype=torch.bfloat16, device="cpu", seed=0, offset=0.0):
    """N(offset, 1), the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + len(shape))
    return (torch.randn(shape, generator=generator) + offset).to(device, dtype)


def make(
    call="gated",
    batch=2,
    tokens=6,
    columns=256,
    *,
    outer=None,
    slices=6,
    dtype=torch.bfloat16,
    temb=None,
    tables=None,
    parameters=None,
    device="cpu",
    offset=0.0,
    **numbers,
):
    """Op and arguments by name; `outer` are temb's sizes in front of K and D, by default [B, S]."""
    whole = (batch, tokens, columns)
    op, names = CALLS[call]
    forms = {
        "temb": ((*(whole[:2] if outer is None else outer), slices, columns), temb or dtype, 0.0),
        **dict.fromkeys(("gate_table", "table"), ((1, slices, columns), tables or dtype, 0.0)),
        **dict.fromkeys(("weight", "bias"), ((columns,), parameters or dtype, 0.0)),
        **dict.fromkeys(("residual", "x"), (whole, dtype, offset)),
    }
    arguments = {name: None for name in SEEDS if op == BOTH}
    for name in names:
        shape, kind, middle = forms[name]
        arguments[name] = normal(*shape, dtype=kind, device=device, seed=10 * SEEDS.index(name), offset=middle)
    return op, arguments | numbers


def assert_right(function, op, arguments):
    """Call `function` and compare all of its outputs with the oracle's; y with that of the r which was returned."""
    x = arguments["x"]
    kept = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    got = function(**arguments)
    assert all(torch.equal(arguments[name], value) for name, value in kept.items())
    outputs = got if op == BOTH else (got,)
    assert isinstance(outputs, tuple)
    want = list(getattr(reference, op)(**arguments))
    if op == BOTH:  # the norm of r: what one step of r's dtype would do to y is not y's error
        zero = {"residual": torch.zeros_like(outputs[1]), "x": outputs[1], "gate_table": None}
        want[0] = reference.temb_residual_norm_scale_shift(**arguments | zero)[0]
    like = torch.empty_like(x)
    for out, expected in zip(outputs, want, strict=True):
        assert (out.shape, out.dtype, out.device, out.stride()) == (x.shape, x.dtype, x.device, like.stride())
        # Half a step of the dtype, and some of float32 before: of the largest term where terms cancel.
        step = torch.finfo(x.dtype).eps * 0.51 if x.dtype != torch.float32 else 4e-6
        torch.testing.assert_close(out.double(), expected, atol=step / 4 + 4e-6, rtol=step)
    assert len({tensor.data_ptr() for tensor in (*outputs, x)}) == len(outputs) + 1
