"""What ops around a norm of rows share: which arguments they take, where these lie, and the norm in PyTorch."""

import re
from typing import NamedTuple

import pytest
import torch

from kda_runtime import norm_rows
from kda_runtime.broadcast import Form, Placed
from kda_runtime.checks import expecting


class Call(NamedTuple):
    residual: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor
    weight2: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    norm_type: str = "layer"
    eps: float = 1e-5


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


WHOLE, VECTOR = ones(2, 6, 256), ones(256)
CALL = Call(WHOLE, WHOLE, VECTOR, VECTOR, ones(2, 256))


@pytest.mark.parametrize(
    ("norm", "given", "used"),
    [
        ("layer", ("weight", "bias"), {"weight", "bias"}),
        ("layer", ("weight",), set()),
        ("layer", ("bias", "weight2", "bias2"), {"weight2", "bias2"}),
        ("rms", ("weight", "bias", "weight2"), {"weight", "weight2"}),
        ("rms", ("bias", "bias2"), set()),
    ],
)
def test_parameters_that_a_norm_takes_notice_of(norm, given, used):
    call = Call(None, WHOLE, None, None, VECTOR, norm_type=norm)._replace(**dict.fromkeys(given, VECTOR))
    assert set(norm_rows.used(call)) == used | {"x", "scale"}
    assert set(norm_rows.operands(call)) == {"scale"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": ones(6, 256)}, "x: expected three dimensions [B, S, D], got [6, 256]"),
        ({"x": ones(2, 6, 384)}, "x: expected D a multiple of 256 up to 8192, got 384"),
        ({"norm_type": "batch"}, "norm_type: expected 'layer' or 'rms', got 'batch'"),
        ({"residual": ones(2, 5, 256)}, "residual: expected shape [2, 6, 256], got [2, 5, 256]"),
        ({"bias2": ones(1, 256)}, "bias2: expected shape [256], got [1, 256]"),
        ({"scale": ones(3, 256)}, "scale: expected a shape that broadcasts to [2, 256], got [3, 256]"),
        ({"scale": VECTOR.double()}, "scale: expected dtype float16, bfloat16 or float32, got torch.float64"),
        ({"scale": ones(1).expand(256)}, "scale: expected stride 1 in its last dimension, got 0"),
    ],
)
def test_meaningless_arguments_are_named(change, message):
    norm_rows.check(CALL, expecting("op"))
    with pytest.raises(ValueError, match=re.escape(f"op: {message}")):
        norm_rows.check(CALL._replace(**change), expecting("op"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"residual": ones(4, 6, 256)[::2]}, "residual has shape [2, 6, 256] and strides (3072, 256, 1); the kernel"),
        ({"x": ones(300).as_strided((2, 6, 256), (6, 1, 1))}, "x has strides (6, 1, 1); an output like it is not"),
        ({"weight": torch._neg_view(VECTOR)}, "weight is a negated"),
        ({"scale": ones(4, 6, 256)[::2]}, "scale has shape [2, 6, 256] and strides (3072, 256, 1), for which there"),
    ],
)
def test_what_kernels_of_rows_do_not_take(change, reason):
    assert norm_rows.uncovered(CALL) is None
    assert norm_rows.uncovered(CALL._replace(**change)).startswith(reason)


def test_places_and_bytes_of_what_is_used():
    x = ones(1, 1, 256, dtype=torch.bfloat16).expand(2, 6, 256)
    call = Call(None, x, VECTOR, VECTOR, ones(2, 256), weight2=VECTOR, norm_type="rms")
    places = norm_rows.places(call)
    assert places == {
        "x": Placed(Form("rows", 0)),  # rows also where it could be read as one
        "weight": Placed(Form("one")),
        "scale": Placed(Form("groups", 256), 6),
        "weight2": Placed(Form("one")),
    }
    assert norm_rows.column_bytes(call, places, rows=3) == {"x": 3 * 2, "weight": 4, "scale": 3 * 4, "weight2": 4}
    narrow = call._replace(scale=ones(2, 1))
    assert "scale" not in norm_rows.column_bytes(narrow, norm_rows.places(narrow), rows=3)


def test_registers_are_limited_to_what_holds_the_loads():
    held = 4 * 96 - norm_rows.ROOM
    assert norm_rows.register_limit(96, held) == {"maxnreg": 96}
    assert norm_rows.register_limit(96, held + 1) == norm_rows.register_limit(0, 0) == {}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_norms(dtype):
    x, weight, bias = normal(2, 6, 32, dtype=dtype), normal(32, seed=1), normal(32, seed=2)
    functional = torch.nn.functional
    wide = [weight.to(dtype), bias.to(dtype)]
    torch.testing.assert_close(
        norm_rows.plain_norm(x, weight, bias, 0.5, rms=False), functional.layer_norm(x, (32,), *wide, eps=0.5)
    )
    torch.testing.assert_close(
        norm_rows.plain_norm(x, None, None, 0.5, rms=True), functional.rms_norm(x, (32,), eps=0.5)
    )


def test_the_plain_path_has_wide_operands_and_outputs_like_x():
    scale = ones(2, 3, 1, 256, dtype=torch.bfloat16)
    wide = norm_rows.wide(CALL._replace(scale=scale))
    assert (wide["scale"].shape, wide["scale"].dtype) == ((2, 6, 256), torch.float32)
    x = ones(6, 2, 256, dtype=torch.bfloat16).transpose(0, 1)
    y = norm_rows.like(x, 2 * WHOLE)
    assert (y.dtype, y.stride()) == (x.dtype, x.stride())
    assert torch.equal(y, 2 * x)
