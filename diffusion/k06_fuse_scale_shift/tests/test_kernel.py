"""The kernels over their whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from .. import solution
from ..bench import reference
from ..solution import fuse_scale_shift_kernel, scale_shift, select01, why_not
from .cases import (
    SCALE_SHIFT,
    assert_scale_shift,
    assert_select01,
    make_scale_shift,
    make_select01,
    name_of,
    normal,
    upstreams_bits,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check_scale_shift(constant=1.0, tensors=None, **shape):
    tensors = tensors or make_scale_shift(device=DEVICE, **shape)
    assert why_not(SCALE_SHIFT, *tensors, scale_constant=constant) is None
    assert_scale_shift(fuse_scale_shift_kernel, tensors, scale_constant=constant)


def check_select01(eps=1e-6, tensors=None, **shape):
    tensors = tensors or make_select01(device=DEVICE, **shape)
    assert why_not(name_of(tensors), **tensors, eps=eps) is None
    assert_select01(getattr(solution, name_of(tensors)), tensors, eps=eps)


# --- scale and shift

FORMS = [
    (),
    (1,),
    (96,),
    (2, 96),
    (1, 96),
    (2, 1),
    (1, 1),
    (2, 6, 96),
    (1, 6, 96),
    (2, 1, 96),
    (1, 1, 96),
    (2, 6, 1),
    (1, 1, 1),
    (2, 3, 1, 96),
    (2, 1, 1, 96),
    (2, 6, 1, 96),
    (1, 6, 1, 96),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("constant", [0, 1])
def test_every_broadcast_form_of_either_operand(shape, constant):
    check_scale_shift(constant, scale=shape)
    if len(shape) < 4:
        check_scale_shift(constant, scale=(1, 1, 96), shift=shape)
    check_scale_shift(constant, scale=(2, 3, 1, 96), shift=shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("scale", [(1, 1, 96), (2, 6, 96)], ids=str)
def test_mixed_dtypes(dtype, other, scale):
    check_scale_shift(dtype=dtype, other=other, scale=scale)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels", [1, 7, 96, 512, 1536, 3072])
def test_channels_that_fill_tiles_and_that_do_not(channels, batch):
    check_scale_shift(batch=batch, tokens=3, channels=channels)


@pytest.mark.parametrize("batch", [1, 2])
def test_strided_operands_are_read_where_they_lie(batch):
    chunks = normal(batch, 6, 6, 96, dtype=torch.float32, device=DEVICE)
    x, _, shift = make_scale_shift(batch=batch, device=DEVICE)
    check_scale_shift(0, tensors=[x, chunks[:, :, 4], shift])
    check_scale_shift(tensors=[x, chunks[:, 0, 2], chunks[:, :, 1]])
    check_scale_shift(tensors=[x, chunks.view(batch, 3, 12, 96)[:, :, 2:3], shift])
    check_scale_shift(tensors=[x, chunks[0, 0, 0], chunks[:1, :, 5].expand(batch, -1, -1)])


def test_a_whole_shift_of_another_shape_beside_frames():
    x, scale, shift = make_scale_shift(scale=(2, 3, 1, 96), device=DEVICE)
    expected = fuse_scale_shift_kernel(x, scale, shift)
    for shape in ((12, 96), (2, 3, 2, 96)):
        other = shift.view(shape)
        assert why_not(SCALE_SHIFT, x, scale, other) is None
        assert torch.equal(fuse_scale_shift_kernel(x, scale, other), expected)


@pytest.mark.parametrize("shapes", [((), ()), ((), (1,)), ((1,), (1,))], ids=str)
@pytest.mark.parametrize("constant", [0.0, 1.0, 0.5])
def test_two_scalars(shapes, constant):
    x = normal(2, 6, 96, device=DEVICE)
    x[0, 0, 0] = -0.0
    scale, shift = (torch.zeros(shape, dtype=x.dtype, device=DEVICE) for shape in shapes)
    y = fuse_scale_shift_kernel(x, scale, shift, constant)
    assert torch.equal(y.view(torch.int16), x.view(torch.int16))  # bit for bit, whatever scale_constant is
    assert y.data_ptr() != x.data_ptr()
    for tensors in ([x, scale + 0.5, shift], [x, scale, shift + 2], [x, scale + 3, shift - 1]):
        check_scale_shift(constant, tensors=tensors)


def test_a_broadcast_zero_is_no_scalar():
    x = normal(2, 6, 96, device=DEVICE)
    zero = torch.zeros(1, 1, dtype=x.dtype, device=DEVICE)
    assert not fuse_scale_shift_kernel(x, zero, zero[0], 0.0).any()


# --- the setting exact


@pytest.fixture
def exact():
    scale_shift.OP.set_exact()
    yield
    scale_shift.OP.set_exact(False)


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("scale", DTYPES)
@pytest.mark.parametrize("shift", DTYPES)
@pytest.mark.parametrize("constant", [0, 1, 0.3])
def test_exact_gives_upstreams_bits(exact, x, scale, shift, constant):
    tensors = [
        normal(2, 3, 1000, dtype=x, device=DEVICE),
        normal(1, 1, 1000, dtype=scale, device=DEVICE, seed=1),
        normal(2, 3, 1000, dtype=shift, device=DEVICE, seed=2),
    ]
    got = fuse_scale_shift_kernel(*tensors, scale_constant=constant)
    assert torch.equal(got, upstreams_bits(*tensors, constant))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_is_another_rounding(exact, dtype):
    tensors = [normal(2, 3, 1000, dtype=dtype, device=DEVICE, seed=seed) for seed in range(3)]
    got = fuse_scale_shift_kernel(*tensors)
    scale_shift.OP.set_exact(False)
    assert not torch.equal(fuse_scale_shift_kernel(*tensors), got), "plans of the other setting are in use"


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_exact_in_every_broadcast_form(exact, shape):
    tensors = make_scale_shift(scale=shape, device=DEVICE)
    got = fuse_scale_shift_kernel(*tensors)
    scale = tensors[1]
    scale = scale.repeat_interleave(6 // shape[1], dim=1).squeeze(2) if len(shape) == 4 else scale
    scale = scale.unsqueeze(1) if scale.dim() == 2 else scale.reshape(1, 1, -1) if scale.dim() < 2 else scale
    assert torch.equal(got, upstreams_bits(tensors[0], scale, tensors[2]))


@pytest.mark.parametrize("values", [(0.0, 0.0), (-0.0, 0.0), (0.5, 0.0), (0.0, 2.0)])
def test_exact_of_two_scalars(exact, values):
    x = normal(2, 6, 96, device=DEVICE)
    scale, shift = (torch.tensor(value, dtype=x.dtype, device=DEVICE) for value in values)
    want = upstreams_bits(x, scale.reshape(1), shift.reshape(1), 0.5) if any(values) else x
    assert torch.equal(fuse_scale_shift_kernel(x, scale, shift, 0.5), want)


# --- select01


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("affine", [False, True])
def test_select01(residual, dtype, index, affine):
    check_select01(residual=residual, dtype=dtype, index=index, affine=affine)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("channels", [1, 7, 96, 512, 1536, 3072, 8200])
def test_select01_channels(residual, channels):
    check_select01(residual=residual, channels=channels, tokens=2)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("residual", [False, True])
def test_select01_modulation_of_one_table(batch, residual):
    check_select01(batch=batch, residual=residual, strided=True)


@pytest.mark.parametrize("name", reference.MODULATION)
def test_select01_rows_of_one_operand_at_another_distance(name):
    """None may be read by the strides of another one. Upstream makes them all contiguous, or reads them wrongly."""
    tensors = make_select01(batch=3, residual=True, device=DEVICE)
    apart = torch.stack([tensors[name], -tensors[name]], dim=1)[:, 0]
    assert apart.stride() != tensors[name].stride()
    check_select01(tensors=tensors | {name: apart})


def test_select01_strided_index_and_large_values():
    tensors = make_select01(device=DEVICE)
    wide = torch.stack([tensors["index"] * 6, tensors["index"] + 1], dim=-1)
    check_select01(tensors=tensors | {"index": wide[..., 0]})


def test_select01_only_one_of_weight_and_bias():
    tensors = make_select01(affine=True, device=DEVICE)
    check_select01(tensors=tensors | {"bias": None})
    check_select01(tensors=tensors | {"weight": None})


def test_select01_mixed_dtypes():
    wide = make_select01(residual=True, affine=True, dtype=torch.float32, device=DEVICE)
    check_select01(tensors=wide | {"x": wide["x"].bfloat16()})


@pytest.mark.parametrize("residual", [False, True])
def test_statistics_keep_their_digits_beside_a_large_offset(residual):
    tensors = make_select01(residual=residual, dtype=torch.float32, channels=1536, device=DEVICE)
    tensors["residual" if residual else "x"] += 1000.0
    expected = getattr(reference, name_of(tensors))(**tensors, eps=1e-6)[0]
    y = getattr(solution, name_of(tensors))(**tensors, eps=1e-6)[0]
    # A float32 step of 1000^2 is 0.06: E[r^2] - E[r]^2 could not tell the variance, which is of order one.
    torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-3)


# --- both


def test_zero_tokens():
    check_scale_shift(tokens=0, scale=(1, 1, 96))
    for residual in (False, True):
        tensors = make_select01(tokens=1, residual=residual, device=DEVICE)
        for name in {"x", "residual", "residual_gate", "index"} & set(tensors):
            tensors[name] = tensors[name][:, :0].contiguous()
        outputs = getattr(solution, name_of(tensors))(**tensors, eps=1e-6)
        assert [tuple(out.shape) for out in outputs] == [(2, 0, 96)] * (3 if residual else 2)


@pytest.mark.parametrize("config", scale_shift.TUNED.configs, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tuned_configuration(config, dtype):
    with scale_shift.TUNED.forced(config) as asked:
        for batch, tokens in ((1, 1), (1, 7), (1, 8), (2, 6)):
            check_scale_shift(batch=batch, tokens=tokens, channels=1536, dtype=dtype)
            check_scale_shift(batch=batch, tokens=tokens, scale=(1, 1, 96), dtype=dtype)
    assert asked


SOME = {select01.Config(4, rows=4, early=False), select01.Config(8, early=False), select01.Config(2, rows=2)}


@pytest.mark.parametrize("config", {*select01.TUNED.configs, *SOME}, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_every_tuned_configuration_of_select01(config, residual):
    with select01.TUNED.forced(config) as asked:
        for batch, tokens, channels in ((1, 1, 1536), (1, 7, 1536), (2, 5, 96), (2, 4, 3072)):
            check_select01(residual=residual, batch=batch, tokens=tokens, channels=channels)
    assert asked
