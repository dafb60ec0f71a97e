"""The kernel's bits: on a GPU, interpreted, or on the PTX machine, which runs the code for an H200 without one."""

import pytest
import torch

from .. import solution
from ..baseline import eager
from ..bench import tune
from ..solution import why_not
from ..solution.rounded_rmsnorm_modulate import TUNED
from .cases import EPS, FORMS, OTHER_ORDERS, as_tuple, in_pytorchs_order, make, order_shows, shows_at_all, unmodulated

SINGLE = "rounded_rmsnorm_modulate"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]
COLUMNS = [512, 1024, 2048, 2560, 4096, 8192]


def check(form="gate-modulate", eps=EPS, **shape):
    op, tensors = make(form, device=DEVICE, **shape)
    assert_bits(op, tensors, eps)


def assert_bits(op, tensors, eps=EPS):
    """On a GPU PyTorch says what is right: its own rsqrt decides some bits. Elsewhere NumPy does."""
    assert why_not(op, **tensors, eps=eps) is None
    right = getattr(eager, op) if DEVICE == "cuda" else in_pytorchs_order
    results, wanted = (as_tuple(function(**tensors, eps=eps)) for function in (getattr(solution, op), right))
    assert len(results) == len(wanted)
    for place, (got, want) in enumerate(zip(results, wanted, strict=True)):
        assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
        different = got.view(torch.int16) != want.view(torch.int16)  # the sign of zero counts, too
        assert not different.any(), f"output {place}: {int(different.sum())} elements differ"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(form, dtype):
    check(form, dtype=dtype)


@pytest.mark.parametrize("spread", [1e-3, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_and_large_numbers(dtype, spread):
    check("add-two", dtype=dtype, spread=spread)


@pytest.mark.parametrize("columns", COLUMNS)
def test_columns(columns):
    check("gate-two", columns=columns, tokens=2)


# --- the order of the sum


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_order_of_the_sum_is_pytorchs(columns, dtype):
    assert_bits(SINGLE, unmodulated(order_shows(columns, dtype).to(DEVICE)))


@pytest.mark.parametrize("warps", [2, 4])
def test_the_order_of_the_sum_does_not_depend_on_warps(warps):
    for columns in (512, 2560):
        with TUNED.forced(tune.Config(warps)) as asked:
            assert_bits(SINGLE, unmodulated(order_shows(columns).to(DEVICE)))
        assert asked


def test_the_order_of_the_sum_is_pytorchs_after_a_residual():
    h = order_shows(1024).to(DEVICE)
    tensors = dict.fromkeys(("gate", "scale", "shift"))
    assert_bits("rounded_residual_rmsnorm_modulate", {"residual": torch.zeros_like(h), "x": h, **tensors})


@pytest.mark.parametrize("name", OTHER_ORDERS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_another_order_of_the_sum_would_show(columns, name):
    """In the rows of the tests above."""
    for dtype in DTYPES:
        tensors = unmodulated(order_shows(columns, dtype))
        (right,), (other,) = in_pytorchs_order(**tensors), in_pytorchs_order(**tensors, order=OTHER_ORDERS[name])
        assert torch.equal(right, other) != shows_at_all(name, columns)


# --- the roundings


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_rounding_would_show(dtype):
    """Each of the five, in a tensor of the size of `test_bits`."""
    _, tensors = make("gate-modulate", dtype=dtype)
    y, h = in_pytorchs_order(**tensors)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    assert not torch.equal(h, (wide["residual"] + wide["x"] * wide["gate"]).to(dtype))
    unrounded_h = in_pytorchs_order(wide["residual"] + (tensors["x"] * tensors["gate"]).float())[0].to(dtype)
    n = in_pytorchs_order(h)[0]
    assert not torch.equal(n, unrounded_h)
    others = {
        "norm": in_pytorchs_order(h.float())[0] * (1 + tensors["scale"]).float(),
        "1 + scale": (n.float() * (1 + wide["scale"])).to(dtype),
        "product": n.float() * (1 + tensors["scale"]).float(),
    }
    for name, product in others.items():
        assert not torch.equal(y, (product.to(dtype if name == "norm" else product.dtype) + wide["shift"]).to(dtype))


def test_zeros_of_either_sign():
    """A row of zeros has a norm of zeros with its signs; x * gate and the sums keep or lose them as in PyTorch."""
    op, tensors = make("gate-two", device=DEVICE)
    for name in ("residual", "x"):
        tensors[name] = torch.zeros_like(tensors[name]).copysign(tensors[name])
    for name in ("shift", "other_shift"):
        tensors[name] = torch.zeros_like(tensors[name]).copysign(tensors[name])
    assert_bits(op, tensors)
    none = dict.fromkeys(("gate", "scale", "shift"))
    for x in (tensors["x"], tensors["x"].neg()):
        minus = {"residual": torch.full_like(x, -0.0), "x": x}
        assert_bits("rounded_residual_rmsnorm_modulate", minus | none)


@pytest.mark.parametrize("eps", [0.5, 1e-5, 0.0])
def test_eps(eps):
    check("gate-modulate", eps, spread=0.02)
    check("modulate", eps, spread=0.02)


# --- where tensors lie


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["", "packed", "apart"])
def test_operands_are_read_where_they_lie(form, layout):
    check(form, batch=3, tokens=2, layout=layout)


def test_every_batch_has_operands_of_its_own():
    """One batch alone, and all rows of each of several."""
    for batch, tokens in ((1, 1), (1, 5), (5, 1)):
        check("gate-two", batch=batch, tokens=tokens)


@pytest.mark.parametrize("form", ["modulate", "gate", "gate-two"])
@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config, form):
    for batch, tokens in ((1, 3), (2, 2)):
        with TUNED.forced(config) as asked:
            check(form, columns=1536, batch=batch, tokens=tokens)
        assert asked
