"""The op around its kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_tools.lab.inspect.aot import meta_tensors

from ..baseline import eager
from ..bench import grid
from ..solution import launches, rounded_qknorm_rope
from ..solution.rounded_qknorm_rope import TUNED, Call, Config, _uncovered, plan
from .cases import EPS, OP, assert_matches, cancelling, in_upstreams_order, make, unrotated

# --- the plain path and the eager arm


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
def test_plain_path(dim, dtype, own):
    assert_matches(rounded_qknorm_rope, make(dim=dim, dtype=dtype, batch=2, own=own))


def test_plain_path_in_float64():
    tensors = make(dtype=torch.float64)
    assert_matches(rounded_qknorm_rope, tensors | {"cos_sin": tensors["cos_sin"].double()})


@pytest.mark.parametrize("layout", ["", "packed", "apart"])
@pytest.mark.parametrize("own", [False, True])
def test_eager_arm(layout, own):
    tensors = make(layout=layout, batch=2, own=own)
    assert_matches(eager.rounded_qknorm_rope, tensors)
    for got, want in zip(
        rounded_qknorm_rope(**tensors, eps=EPS), eager.rounded_qknorm_rope(**tensors, eps=EPS), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_roundings_are_those_of_pytorchs_operators(dtype):
    """The order of the sum aside, which few heads show: on a CPU PyTorch has another one."""
    tensors = unrotated(make(dtype=dtype, tokens=64))
    for got, want in zip(rounded_qknorm_rope(**tensors, eps=EPS), in_upstreams_order(**tensors, eps=EPS), strict=True):
        assert (got == want).all(dim=-1).float().mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_plain_path_rotates_as_the_kernel_does(dtype):
    """Pairs whose products nearly cancel show which product is rounded."""
    tensors = cancelling(dtype)
    for got, want in zip(rounded_qknorm_rope(**tensors, eps=EPS), in_upstreams_order(**tensors, eps=EPS), strict=True):
        assert torch.equal(got, want)


def test_the_oracle_rounds_after_each_step():
    """Without those roundings a bfloat16 result is off by far more than its own last rounding."""
    tensors = unrotated(make(tokens=64))
    assert_matches(lambda **_: in_upstreams_order(**tensors), tensors)
    x, weight = tensors["q"].double(), tensors["q_weight"].double()
    once = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight
    error = ((in_upstreams_order(**tensors)[0].double() - once) / once).abs().max()
    assert error > 1.2 * torch.finfo(torch.bfloat16).eps


def test_no_tokens():
    tensors = make()
    empty = {name: tensors[name][:, :0] for name in ("q", "k")} | {"cos_sin": tensors["cos_sin"][:0]}
    assert [x.shape[1] for x in rounded_qknorm_rope(**tensors | empty, eps=EPS)] == [0, 0]


# --- what the kernel does not cover


TENSORS = make()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": TENSORS["k"].transpose(2, 3).contiguous().transpose(2, 3)}, "k has stride 6 in its last dimension"),
        ({name: TENSORS[name].float() for name in TENSORS}, "q has dtype torch.float32"),
        ({"k_weight": torch.nn.Parameter(TENSORS["k_weight"])}, "k_weight requires gradients"),
        ({"cos_sin": TENSORS["cos_sin"].half()}, "cos_sin has dtype torch.float16"),
        (make(dim=64), "head_dim is 64"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    inputs = {**TENSORS, **change}
    assert reason in _uncovered(Call(**inputs, eps=EPS))
    assert launches(OP, inputs, {"eps": EPS}) == []


# --- what has no meaning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 6, 128).bfloat16()}, r"q: expected four dimensions .*, got \[5, 6, 128\]"),
        ({"q": torch.zeros(1, 5, 6, 127).bfloat16()}, "q: expected an even head_dim, got 127"),
        ({"k": TENSORS["k"][:, :4]}, r"k: expected shape \[1, 5, 6, 128\], as q, got \[1, 4, 6, 128\]"),
        ({"k": TENSORS["k"].half()}, "k: expected dtype torch.bfloat16, as q, got torch.float16"),
        ({"q_weight": torch.zeros(64).bfloat16()}, r"q_weight: expected shape \[128\], got \[64\]"),
        ({"k_weight": torch.zeros(128)}, "k_weight: expected dtype torch.bfloat16, as q, got torch.float32"),
        ({"cos_sin": TENSORS["cos_sin"][:, :64]}, r"cos_sin: expected shape \[rows, 128\], got \[5, 64\]"),
        ({"cos_sin": TENSORS["cos_sin"][:4]}, r"cos_sin: expected 5 or 5 rows: T or B\*T rows, got 4"),
    ],
)
def test_meaningless_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=f"{OP}: {message}"):
        rounded_qknorm_rope(**{**TENSORS, **change}, eps=EPS)


# --- how calls become launches


@pytest.mark.parametrize(
    ("heads", "warps", "most", "cut"),
    [(30, 4, 4, (8, 4, 1)), (30, 4, 3, (8, 2, 2)), (30, 1, 5, (2, 5, 3)), (1, 4, 4, (8, 1, 1)), (9, 4, 3, (8, 2, 1))],
)
def test_tiles_are_even(heads, warps, most, cut):
    # A warp holds 2 heads of 128 at 8 elements a thread.
    with TUNED.forced(Config(warps, most)):
        launch = plan(Call(**make(heads=heads, device="meta"), eps=EPS))
    assert tuple(launch.constexprs[name] for name in ("HEADS", "TILES", "PARTS")) == cut
    assert launch.grid == (5 * 2 * cut[2], 1, 1)


def test_every_token_and_head_has_a_program():
    for row in grid.thin(grid.grid()):
        (launch,) = launches(row.op, meta_tensors(row), row.scalars)
        batch, tokens, heads, _ = row.inputs["q"].shape
        constants = launch.constexprs
        assert constants["PARTS"] * constants["TILES"] * constants["HEADS"] >= heads
        assert constants["SHARED"] == (row.inputs["cos_sin"].shape[0] == tokens)
        assert launch.grid == (batch * tokens * 2 * constants["PARTS"], 1, 1)


def test_the_number_of_tokens_compiles_nothing_anew():
    """A prompt's length changes from request to request."""
    one, other = (plan(Call(**make(n, layout="packed", device="meta"), eps=EPS)).constexprs for n in (27, 51))
    assert one == other


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("spread", [0.02, 1.0, 30.0])
    def test_the_norms_bits_are_pytorchs(self, spread):
        tensors = unrotated(make(tokens=257, heads=30, layout="packed", spread=spread, device="cuda"))
        packed = tensors | {name: tensors[name].contiguous() for name in ("q", "k")}
        for got, want in zip(
            rounded_qknorm_rope(**tensors, eps=EPS), eager.rounded_qknorm_rope(**packed, eps=EPS), strict=True
        ):
            assert torch.equal(got, want)
