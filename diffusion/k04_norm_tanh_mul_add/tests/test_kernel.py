"""The kernels over their whole envelope: on a GPU, or in Triton's interpreter (`test_interpreted.py` of kda-tools)."""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from .. import solution
from ..solution import norm_tanh_mul_add as module
from ..solution import why_not
from .cases import BOTH, assert_right, make, name_of, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
norms = pytest.mark.parametrize("norm", ["layer", "rms"])
ops = pytest.mark.parametrize("double", [False, True])


def check(norm="rms", eps=1e-5, tensors=None, **shape):
    tensors = tensors or make(device=DEVICE, **shape)
    assert why_not(name_of(tensors), **tensors, norm_type=norm, eps=eps) is None
    assert_right(getattr(solution, name_of(tensors)), tensors, norm, eps)


@norms
@ops
@pytest.mark.parametrize("columns", [256, 1280, 3840, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns(columns, dtype, double, norm):
    check(norm, batch=1, tokens=2, columns=columns, dtype=dtype, double=double)


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
]


KINDS = cycle(product(["layer", "rms"], DTYPES))
"""Of norm and dtype, in turn, so that every operand and every form has several."""


@pytest.mark.parametrize(
    ("operand", "shape", "norm", "dtype"),
    [(*form, *kind) for form, kind in zip(product(["scale", "shift", "scale2"], FORMS), KINDS, strict=False)],
    ids=str,
)
def test_every_broadcast_form_of_every_operand(operand, shape, norm, dtype):
    check(norm, double=operand == "scale2" or norm == "rms", dtype=dtype, **{operand: shape})


@norms
def test_a_column_beyond_the_row_takes_no_part(norm):
    # 1280 columns end inside a chunk of 2048; a one-value shift and scale reach beyond them.
    check(norm, columns=1280, double=True, shift=(1,), scale=(1,), affine=())


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("step", range(3))
def test_mixed_dtypes(first, step):
    # Every pair of dtypes, for any two of the three kinds of tensors.
    dtype, parameters, operands = (DTYPES[(first + n * step) % 3] for n in (0, 1, 2))
    check("layer", dtype=dtype, parameters=parameters, operands=operands, double=True)


@norms
@ops
@pytest.mark.parametrize("affine", [(), ("weight",), ("bias",)])
def test_parameters_that_are_left_out(affine, double, norm):
    check(norm, affine=affine, double=double)


def test_what_upstream_leaves_out_of_a_norm():
    both, weight, bias, none = (make(affine=affine, device=DEVICE) for affine in (BOTH, BOTH[:1], BOTH[1:], ()))

    def same(one, other, norm):
        op = solution.fused_norm_tanh_mul_add
        return torch.equal(op(**one, norm_type=norm), op(**other, norm_type=norm))

    assert same(both, weight, "rms")
    assert same(bias, none, "rms")
    assert same(weight, none, "layer")
    assert same(bias, none, "layer")
    assert not same(both, none, "layer")


@ops
@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_row_counts(batch, tokens, double):
    check(batch=batch, tokens=tokens, double=double)


@norms
@ops
def test_rows_apart(norm, double):
    tensors = make(double=double, device=DEVICE)
    packed = normal(2, 6, 3 * 256, device=DEVICE)
    check(norm, tensors=tensors | {"x": packed[..., 256:512]})
    check(norm, tensors=tensors | {"x": normal(2, 6, 300, device=DEVICE)[..., :256]})
    check(norm, tensors=tensors | {"x": normal(1, 1, 256, device=DEVICE).expand(2, 6, 256)})


@pytest.mark.parametrize("columns", [256, 3840])
def test_statistics_keep_their_digits_beside_a_large_offset(columns):
    tensors = make(dtype=torch.float32, columns=columns, offset=1000.0, double=True, affine=(), device=DEVICE)
    expected = torch.nn.functional.layer_norm(tensors["x"].double(), (columns,), eps=1e-5)
    y, _ = solution.fused_norm_tanh_mul_add_norm_scale(**tensors, norm_type="layer")
    # A float32 step of 1000^2 is 0.06: mean(x^2) - mean(x)^2 could not tell the variance, which is of order one.
    want = expected * torch.tanh(tensors["scale"].double()) + tensors["shift"].double()
    torch.testing.assert_close(y.double(), want, atol=2e-4, rtol=2e-4)


def test_the_second_norm_is_of_the_rounded_y():
    # y is 64.125 and less than 0.01 more or less, of which bfloat16 keeps 64: nothing is left to be centred.
    tensors = make(double=True, affine=(), operands=torch.float32, shift=(1,), scale=(1,), device=DEVICE)
    tensors["scale"].fill_(1e-3)
    tensors["shift"].fill_(64.125)
    y, y2 = solution.fused_norm_tanh_mul_add_norm_scale(**tensors, norm_type="layer")
    assert (y == 64).all()
    assert (y2 == 0).all()


def test_large_eps():
    check("layer", eps=0.5, double=True)
    check("rms", eps=0.5, double=True)


@ops
def test_gates_of_every_size(double):
    """tanh near 0, at the border of its two formulas, and saturated: relative to the result, not to 1.

    With every approximate instruction off by its bound, 5.3e-7 was seen.
    """
    columns = 256
    sizes = torch.logspace(-6, 2, columns // 2, dtype=torch.float64)
    line = torch.cat([sizes, -sizes]).to(DEVICE, torch.float32)
    tensors = make(columns=columns, dtype=torch.float32, affine=(), double=double, device=DEVICE)
    tensors |= {"scale": line, "shift": torch.zeros(1, device=DEVICE)}
    x = tensors["x"] = torch.ones_like(tensors["x"])
    got = getattr(solution, name_of(tensors))(**tensors, norm_type="rms", eps=0.0)
    y = got[0] if double else got
    torch.testing.assert_close(y.double(), torch.tanh(line.double()).expand_as(x), atol=0.0, rtol=6e-7)


def test_zero_rows():
    for double in (False, True):
        tensors = make(tokens=1, double=double, device=DEVICE)
        empty = {name: tensors[name][:, :0].contiguous() for name in ("x", "shift")}
        got = getattr(solution, name_of(tensors))(**tensors | empty, norm_type="rms")
        assert all(out.shape == (2, 0, 256) for out in (got if double else (got,)))


TUNED = set(module.TUNED.configs)
SOME = {
    module.Config(4, rows=2),
    module.Config(8, rows=4, early=0),
    module.Config(4, early=2, approximate=False),
    module.Config(16, rows=2, early=2, load=".cg", store=".cs"),
}


@pytest.mark.parametrize("config", sorted(TUNED | SOME, key=repr), ids=str)
@norms
def test_every_tuned_configuration(config, norm):
    with module.TUNED.forced(config):
        for batch, tokens, columns in ((1, 7, 1280), (2, 4, 256)):
            for double in (False, True):
                check(norm, batch=batch, tokens=tokens, columns=columns, double=double)


def test_a_program_of_several_rows_has_operands_of_every_form():
    with module.TUNED.forced(replace(module.TUNED.configs[0], rows=4)):
        for shape in FORMS:
            check("layer", double=True, scale=shape, shift=shape, scale2=shape)
