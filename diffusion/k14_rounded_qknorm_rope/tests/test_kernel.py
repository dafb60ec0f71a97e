"""The kernel's bits: on a GPU, interpreted, or on the PTX machine, which runs the code for an H200 without one."""

import pytest
import torch

from kda_judge.contract.errors import KdaError
from kda_judge.contract.tasks import find_task
from kda_tools.lab.beside_upstream import run_beside

from ..bench import tune
from ..solution import rounded_qknorm_rope as op
from ..solution import why_not
from ..solution.rounded_qknorm_rope import TUNED
from .cases import EPS, OP, TIES, cancelling, in_upstreams_order, make, rotated_even, rotated_odd, unrotated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]


def check(eps=EPS, **shape):
    tensors = make(device=DEVICE, **shape)
    assert why_not(OP, **tensors, eps=eps) is None
    assert_bits(tensors, eps)


def assert_bits(tensors, eps=EPS):
    for got, want in zip(op(**tensors, eps=eps), in_upstreams_order(**tensors, eps=eps), strict=True):
        assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
        different = got.view(torch.int16) != want.view(torch.int16)  # the sign of zero counts, too
        assert not different.any(), f"{int(different.sum())} elements differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.02, 1.0, 30.0])
def test_bits(dtype, spread):
    check(dtype=dtype, spread=spread)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_sums_is_pytorchs(dtype):
    check(dtype=dtype, **TIES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("halves", [(1, 2, 4, 8), (4, 8, 2, 1), (8, 2, 4, 1), (8, 4, 1, 2)])
def test_another_order_of_lanes_would_show(dtype, halves):
    tensors = make(dtype=dtype, **TIES)
    other = in_upstreams_order(**tensors, halves=halves)
    assert any(not torch.equal(*pair) for pair in zip(other, in_upstreams_order(**tensors), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_in_a_lane_would_show(dtype):
    """With the eight elements of each lane in reverse."""
    tensors = unrotated(make(dtype=dtype, **TIES))
    back = {name: _reversed(x) if name != "cos_sin" else x for name, x in tensors.items()}
    other = [_reversed(x) for x in in_upstreams_order(**back)]
    assert any(not torch.equal(*pair) for pair in zip(other, in_upstreams_order(**tensors), strict=True))


def _reversed(x):
    return x.unflatten(-1, (-1, 8)).flip(-1).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_multiply_adds(dtype):
    assert_bits(cancelling(dtype, DEVICE))


@pytest.mark.parametrize(
    "rotated",
    [
        (lambda even, odd, cos, sin: even * cos - odd * sin, rotated_odd),
        (lambda even, odd, cos, sin: -rotated_even(odd, even, sin, cos), rotated_odd),
        (rotated_even, lambda even, odd, cos, sin: odd * cos + even * sin),
        (rotated_even, lambda even, odd, cos, sin: rotated_odd(odd, even, sin, cos)),
    ],
    ids=["even: none", "even: the other", "odd: none", "odd: the other"],
)
def test_other_multiply_adds_would_show(rotated):
    other = in_upstreams_order(**cancelling(), rotated=rotated)
    for one, want in zip(other, in_upstreams_order(**cancelling()), strict=True):
        assert (one != want).float().mean() > 0.2


@pytest.mark.parametrize("layout", ["", "packed", "apart"])
@pytest.mark.parametrize(("batch", "own"), [(1, False), (3, False), (3, True)])
def test_tensors_are_read_where_they_lie(layout, batch, own):
    check(layout=layout, batch=batch, own=own)


def test_tables_with_gaps():
    tensors = make(device=DEVICE)
    tensors["cos_sin"] = torch.cat((tensors["cos_sin"], tensors["cos_sin"]), dim=-1)[:, :128]
    assert why_not(OP, **tensors, eps=EPS) is None
    assert_bits(tensors)


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 24, 30])
def test_head_counts_that_fill_tiles_and_that_do_not(heads):
    check(heads=heads, tokens=2, layout="packed")


@pytest.mark.parametrize("eps", [0.5, 1e-6])
def test_eps(eps):
    check(eps=eps, spread=0.02)


def test_zeros_of_either_sign():
    tensors = make(device=DEVICE)
    tensors["q"] = torch.zeros_like(tensors["q"]).copysign(tensors["q"])
    assert_bits(tensors)


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config):
    with TUNED.forced(config) as asked:
        check(tokens=2, heads=30, layout="packed")
    assert asked


BESIDE_UPSTREAM = """
import sys, torch
from pathlib import Path
from kda_judge.arms import upstream
from kda_judge.contract.tasks import find_task
from kda_runtime.launch import Launch
from kda_tools.lab.ptx.kernels import launching_on_the_machine, on_the_machine

task = find_task("rounded_qknorm_rope")
cases = task.load("tests.cases")
own = task.load("solution").rounded_qknorm_rope
upstream.activate(Path(sys.argv[1]), "0.5.23")
from sglang.kernels.ops.diffusion.norm import zimage_qk_rmsnorm_triton as theirs
for shape in ({"spread": 0.02}, {"spread": 30.0}, cases.TIES):
    tensors = cases.unrotated(cases.make(layout="packed", **shape))
    with on_the_machine(task):
        results = own(**tensors, eps=cases.EPS)
    for x, weight, got in zip((tensors["q"], tensors["k"]), (tensors["q_weight"], tensors["k_weight"]), results):
        want = torch.full(x.shape, torch.nan, dtype=x.dtype)
        rows = x.shape[1] * x.shape[2]
        launch = Launch.make(
            theirs._qk_rmsnorm_native_kernel, (-(-rows // 8),), want, x, weight, x.stride(1), x.shape[2], rows,
            head_dim=128, eps=cases.EPS, rows_per_prog=8, num_warps=8,
        )
        with launching_on_the_machine():
            launch.run(want, x, weight)
        assert not want.isnan().any()
        assert torch.equal(got, want), f"{shape}: {int((got != want).sum())} elements differ"
"""


def test_the_norms_bits_are_those_of_upstreams_kernel():
    """In a process of its own, in which `sglang` is the pinned files, and Triton compiles."""
    try:
        run_beside(find_task(OP), "sglang-0.5.23", BESIDE_UPSTREAM)
    except KdaError as missing:
        pytest.skip(str(missing))
