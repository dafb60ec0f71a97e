"""What solutions share around their kernels."""

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from kda_runtime import checks  # noqa: E402

X = torch.ones(2, 3)
EXPECT = checks.expecting("op")


class Call(NamedTuple):
    x: object
    weight: object
    eps: float


def test_given_tensors_are_named_in_order():
    assert list(checks.given(Call(X, None, 1e-5))) == ["x"]
    assert list(checks.given(Call(X, X, 1e-5))) == ["x", "weight"]
    assert list(checks.given(Call("x", X, 1e-5))) == ["weight"]


def test_expecting_names_the_op_and_the_argument_as_the_public_function_does():
    checks.expecting("op")(True, "x", "y", "z")
    with pytest.raises(ValueError, match=r"^op: x: expected y, got z$"):
        checks.expecting("op")(False, "x", "y", "z")
    with pytest.raises(ValueError, match=r"^op: w: expected y, got z$"):
        checks.expecting("op", {"weight": "w"})(False, "weight", "y", "z")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "x: expected a tensor, got None"),
        ({"weight": None}, None),
        ({"weight": 3}, "weight: expected a tensor, got 3"),
        ({"weight": X.to("meta")}, "weight: expected device cpu, as x, got meta"),
        ({"x": X.to("meta")}, "index: expected device meta, as x, got cpu"),
        ({"weight": X.int()}, "weight: expected a floating-point dtype, got torch.int32"),
        ({"weight": X.to(torch.complex64)}, "weight: expected a floating-point dtype, got torch.complex64"),
        ({"weight": X.double()}, None),
        ({"index": X}, "index: expected an integer dtype or bool, got torch.float32"),
        ({"index": X.to(torch.complex64)}, "index: expected an integer dtype or bool, got torch.complex64"),
        ({"index": X.bool()}, None),
    ],
)
def test_what_is_no_tensor_of_the_right_kind_is_named(change, message):
    arguments = {"x": X, "index": X.int(), "weight": X} | change
    if message is None:
        checks.check_tensors(EXPECT, arguments, optional=("weight",), integers=("index",))
    else:
        with pytest.raises(ValueError, match=f"^op: {message}$"):
            checks.check_tensors(EXPECT, arguments, optional=("weight",), integers=("index",))


def test_another_tensor_may_set_the_device():
    with pytest.raises(ValueError, match=r"^op: k: expected device cpu, as q, got meta$"):
        checks.check_tensors(EXPECT, {"k": X.to("meta"), "q": X}, like="q")


class InterpretedFunction:
    """What Triton makes of a kernel with TRITON_INTERPRET=1, as far as is asked here."""


def test_where_kernels_run():
    assert checks.elsewhere(X, InterpretedFunction()) is None
    reason = "q is on cpu; the kernel runs on CUDA devices, and on the CPU when TRITON_INTERPRET=1"
    assert checks.elsewhere(X, object(), "q") == reason
    assert checks.elsewhere(X.to("meta"), InterpretedFunction()).startswith("x is on meta")


def test_what_no_kernel_reads():
    assert checks.unfit({"x": X, "index": X.int()}) is None
    reason = "w has dtype torch.float64; the kernel takes float16, bfloat16 and float32"
    assert checks.unfit({"x": X, "w": X.double()}) == reason
    reason = "x has dtype torch.float32; the kernel takes float16 and bfloat16"
    assert checks.unfit({"x": X}, (torch.float16, torch.bfloat16)) == reason
    assert checks.unfit({"x": torch._neg_view(X)}).startswith("x is a negated or conjugated view")
    learned = X.clone().requires_grad_()
    assert checks.unfit({"w": learned}).startswith("w requires gradients, which are being recorded")
    with torch.no_grad():
        assert checks.unfit({"w": learned}) is None


def test_vectors_along_the_last_dimension():
    assert checks.scattered({"x": X, "scalar": torch.ones(()), "one": torch.ones(4, 2)[:, :1], "empty": X[:0]}) is None
    reason = "y has stride 3 in its last dimension; the kernel takes vectors along it"
    assert checks.scattered({"x": X, "y": X.T}) == reason


def test_what_a_launch_depends_on():
    assert checks.capability(X) == 9
    assert checks.pdl_works(object(), 9)
    assert checks.pdl_works(object(), 10)
    assert not checks.pdl_works(object(), 8)
    assert not checks.pdl_works(InterpretedFunction(), 9)


@pytest.mark.parametrize("x", [X, X.T, X[:, :2], torch.ones(4, 2, 3)[::2], torch.ones(1, 3).expand(2, 3)])
def test_output_strides_are_those_of_an_empty_tensor_like_x(x):
    assert checks.output_strides(x) == torch.empty_like(x).stride()


def test_lazy_tensors_are_seen():
    x = torch.zeros(3, dtype=torch.complex64)
    assert not checks.is_lazy(x)
    lazy = (x.conj(), x.conj().imag, torch._efficientzerotensor(3))
    assert [checks.is_lazy(one) for one in lazy] == [True] * 3
