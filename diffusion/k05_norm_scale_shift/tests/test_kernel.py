"""The kernels over their whole envelope: on a GPU, or in Triton's interpreter (`test_interpreted.py` of kda-tools)."""

import pytest
import torch

from .. import solution
from ..bench import reference
from ..solution import norm_scale_shift as module
from ..solution import why_not
from .cases import BOTH, assert_right, make, name_of, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
norms = pytest.mark.parametrize("norm", ["layer", "rms"])
ops = pytest.mark.parametrize("residual", [False, True])


def check(norm="layer", eps=1e-5, tensors=None, **shape):
    tensors = tensors or make(device=DEVICE, **shape)
    assert why_not(name_of(tensors), **tensors, norm_type=norm, eps=eps) is None
    assert_right(getattr(solution, name_of(tensors)), tensors, norm, eps)


@norms
@ops
@pytest.mark.parametrize("columns", [256, 1280, 3072, 7936, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns(columns, dtype, residual, norm):
    check(norm, batch=1, tokens=3, columns=columns, dtype=dtype, residual=residual)


FORMS = [
    (1,),
    (256,),
    (1, 256),
    (2, 256),
    (1, 1, 256),
    (2, 1, 256),
    (1, 6, 256),
    (2, 6, 256),
    (2, 3, 1, 256),
    (2, 1, 1, 256),
    (2, 6, 1, 256),
    (2, 6, 1),
    (1, 1, 1, 1),
    (),
]


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("operand", ["gate", "scale", "shift"])
def test_every_broadcast_form_of_every_operand(operand, shape):
    check("rms" if operand == "gate" else "layer", residual=True, **{operand: shape})


@norms
def test_no_gate(norm):
    check(norm, residual=True, gate=None)
    check(norm, residual=True, gate=None, affine=())


@norms
def test_a_column_beyond_the_row_takes_no_part(norm):
    # 1280 columns end inside a chunk of 2048; one value for all columns reaches beyond them.
    with module.TUNED.forced(module.Config(8, whole=False)):
        for gate in ((1,), None):
            check(norm, columns=1280, residual=True, gate=gate, shift=(1,), scale=(1,), affine=())


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("step", range(3))
def test_mixed_dtypes(first, step):
    # Every pair of dtypes, for any two of the three kinds of tensors.
    dtype, parameters, operands = (DTYPES[(first + n * step) % 3] for n in (0, 1, 2))
    check("layer", dtype=dtype, parameters=parameters, operands=operands, residual=True)


def test_a_residual_of_another_dtype():
    tensors = make(residual=True, device=DEVICE)
    check("layer", tensors=tensors | {"residual": tensors["residual"].float()})


@norms
@ops
@pytest.mark.parametrize("affine", [(), ("weight",), ("bias",)])
def test_parameters_that_are_left_out(affine, residual, norm):
    check(norm, affine=affine, residual=residual)


def test_what_upstream_leaves_out_of_a_norm():
    both, weight, bias, none = (make(affine=affine, device=DEVICE) for affine in (BOTH, BOTH[:1], BOTH[1:], ()))

    def same(one, other, norm):
        op = solution.fused_norm_scale_shift
        return torch.equal(op(**one, norm_type=norm), op(**other, norm_type=norm))

    assert same(both, weight, "rms")
    assert same(bias, none, "rms")
    assert same(weight, none, "layer")
    assert same(bias, none, "layer")
    assert not same(both, none, "layer")


@ops
@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_row_counts(batch, tokens, residual):
    check(batch=batch, tokens=tokens, residual=residual)


@norms
@ops
def test_rows_apart(norm, residual):
    tensors = make(residual=residual, device=DEVICE)
    packed = normal(2, 6, 3 * 256, device=DEVICE)
    apart = normal(2, 6, 300, device=DEVICE)[..., :256]
    check(norm, tensors=tensors | {"x": packed[..., 256:512]})
    check(norm, tensors=tensors | {"x": apart})
    check(norm, tensors=tensors | {"x": normal(1, 1, 256, device=DEVICE).expand(2, 6, 256)})
    if residual:
        check(norm, tensors=tensors | {"residual": packed[..., :256]})
        check(norm, tensors=tensors | {"residual": packed[..., :256], "x": apart})


def test_the_norm_is_of_the_rounded_sum():
    # r is 64.125 and less than 0.01 more or less, of which bfloat16 keeps 64: nothing is left to be centred.
    tensors = make(residual=True, affine=(), gate=(1,), operands=torch.float32, device=DEVICE)
    tensors["gate"].fill_(1e-3)
    tensors["residual"] = torch.full_like(tensors["x"], 64.125, dtype=torch.float32)
    tensors["shift"].zero_()
    y, r = solution.fused_scale_residual_norm_scale_shift(**tensors, norm_type="layer")
    assert (r == 64).all()
    assert (y == 0).all()


@pytest.mark.parametrize("gate", [(1, 1, 1280), (2, 6, 1280), None], ids=str)
@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float32])
def test_the_sum_is_rounded_as_upstream_does(gate, operands):
    """At 4160, where a neighbour in bfloat16 is 32 away: one multiply-add, to the nearest."""
    tensors = make(columns=1280, residual=True, affine=(), gate=gate, operands=operands, offset=64.0, device=DEVICE)
    if gate:
        tensors["gate"] = (tensors["gate"].float() + 64).to(operands)
    _, want = reference.fused_scale_residual_norm_scale_shift(**tensors, norm_type="layer")
    _, r = solution.fused_scale_residual_norm_scale_shift(**tensors, norm_type="layer")
    assert torch.equal(r, want.float().to(r.dtype))


@pytest.mark.parametrize("columns", [256, 3072])
@ops
def test_statistics_keep_their_digits_beside_a_large_offset(columns, residual):
    tensors = make(dtype=torch.float32, columns=columns, offset=1000.0, residual=residual, affine=(), device=DEVICE)
    arguments = tensors | {"norm_type": "layer"}
    want = getattr(reference, name_of(tensors))(**arguments)[0]
    got = getattr(solution, name_of(tensors))(**arguments)
    y = got[0] if residual else got
    # A float32 step of 1000^2 is 0.06: mean(x^2) - mean(x)^2 could not tell the variance, which is of order one.
    torch.testing.assert_close(y.double(), want, atol=5e-4, rtol=5e-4)


@ops
def test_large_eps(residual):
    check("layer", eps=0.5, residual=residual)
    check("rms", eps=0.5, residual=residual)


def test_zero_rows():
    for residual in (False, True):
        tensors = make(tokens=1, residual=residual, device=DEVICE)
        empty = {name: tensors[name][:, :0].contiguous() for name in ("x", "residual") if name in tensors}
        got = getattr(solution, name_of(tensors))(**tensors | empty, norm_type="rms")
        assert all(out.shape == (2, 0, 256) for out in (got if residual else (got,)))


TUNED = set(module.TUNED.configs)
SOME = {
    module.Config(4, rows=2),
    module.Config(8, rows=4, ahead=1),
    module.Config(2, ahead=2, maxnreg=64),
    module.Config(16, rows=2, whole=False, load=".cg", store=".cs"),
}


@pytest.mark.parametrize("config", sorted(TUNED | SOME, key=repr), ids=str)
@norms
def test_every_tuned_configuration(config, norm):
    with module.TUNED.forced(config):
        for batch, tokens, columns in ((1, 7, 1280), (2, 4, 256)):
            for residual in (False, True):
                check(norm, batch=batch, tokens=tokens, columns=columns, residual=residual)


@pytest.mark.parametrize("ahead", [1, 2, module.ALL])
def test_a_program_of_several_rows_has_operands_of_every_form(ahead):
    # 1280 columns at 1 warp are 5 chunks.
    with module.TUNED.forced(module.Config(1, rows=4, ahead=ahead)):
        for form in FORMS:
            shape = tuple(1280 if size == 256 else size for size in form)
            check("layer", columns=1280, residual=True, gate=shape, scale=shape, shift=shape)
