"""The kernel's bits: on the PTX machine, which runs the code for an H200 without one."""

import pytest
import torch

from kda_judge.contract.errors import KdaError
from kda_judge.contract.tasks import find_task
from kda_tools.lab.beside_upstream import run_beside
from kda_tools.lab.ptx.kernels import on_the_machine

from ..bench import tune
from ..solution import fused_layernorm_modulate, layernorm_modulate
from .cases import in_pytorchs_order, make

pytest.importorskip("cutlass")
TASK = find_task("layernorm_modulate")


COLUMNS = [1536, 2560, 3072, 5120, 6144]
SENSITIVE = [{"offset": -200.0, "spread": 0.3}, {"offset": -200.0, "spread": 0.4}]
"""Rows with so small a deviation beside the mean that the order of the sums shows in some bits of y."""


@pytest.mark.parametrize("form", [{}, *SENSITIVE], ids=str)
@pytest.mark.parametrize("columns", [512, 1024, *COLUMNS])
def test_the_order_of_sums_is_pytorchs(columns, form):
    x, scale, shift, eps = make(2, 2, columns, **form)
    with on_the_machine(TASK) as launched:
        got = fused_layernorm_modulate(x, scale, shift, eps)
        alone = fused_layernorm_modulate(x, scale, None, eps)
    assert len(launched) == 2
    assert torch.equal(got, in_pytorchs_order(x, scale, shift, eps))
    assert torch.equal(alone, in_pytorchs_order(x, scale, None, eps))


@pytest.mark.parametrize("columns", COLUMNS)
def test_another_order_of_sums_would_show(columns):
    """In the rows of the test above, with the columns in reverse."""
    differ = 0
    for form in SENSITIVE:
        x, scale, shift, eps = make(2, 2, columns, **form)
        back = in_pytorchs_order(x.flip(-1), scale.flip(-1), shift.flip(-1), eps).flip(-1)
        differ += int((back != in_pytorchs_order(x, scale, shift, eps)).sum())
    assert differ > 0


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_every_configuration(config, monkeypatch):
    """On one multiprocessor, and with several rows for a warp where a configuration allows it."""
    monkeypatch.setattr(layernorm_modulate, "multiprocessors", lambda _: 1)
    tokens = 5 if config.following == "once" else config.held // config.row_warps + 3
    x, scale, shift, eps = make(2, tokens, 512)
    with layernorm_modulate.TUNED.forced(config) as asked, on_the_machine(TASK) as launched:
        got = fused_layernorm_modulate(x, scale, shift, eps)
    assert asked
    assert (launched[0].blocks * config.rows < 2 * tokens) == (config.following != "once")
    assert torch.equal(got, in_pytorchs_order(x, scale, shift, eps))


@pytest.mark.parametrize("columns", [1024, 3072])
@pytest.mark.parametrize("form", [{}, *SENSITIVE], ids=str)
@pytest.mark.parametrize(("row_warps", "following"), [(2, "once"), (2, "after"), (4, "once"), (4, "before")])
def test_the_order_of_sums_is_pytorchs_if_several_warps_have_a_row(columns, form, row_warps, following, monkeypatch):
    monkeypatch.setattr(layernorm_modulate, "multiprocessors", lambda _: 1)
    config = layernorm_modulate.Config(1, row_warps, following, row_warps)
    x, scale, shift, eps = make(2, 2, columns, **form)
    with layernorm_modulate.TUNED.forced(config), on_the_machine(TASK):
        got = fused_layernorm_modulate(x, scale, shift, eps)
    assert torch.equal(got, in_pytorchs_order(x, scale, shift, eps))


def test_uneven_gaps_between_the_rows_of_scale():
    x, scale, shift, eps = make(2, 3, 512, chunks=3)
    uneven = [torch.cat((one, one[:, :3]), dim=-1)[:, :512] for one in (scale, shift)]
    with on_the_machine(TASK) as launched:
        got = fused_layernorm_modulate(x, *uneven, eps)
    assert launched[0].constants[3] is False
    assert torch.equal(got, in_pytorchs_order(x, scale, shift, eps))


BESIDE_UPSTREAM = """
import sys, torch, triton.language as tl
from pathlib import Path
from kda_judge.arms import upstream
from kda_judge.contract.tasks import find_task
from kda_runtime.launch import Launch
from kda_tools.lab.ptx.kernels import launching_on_the_machine, on_the_machine

task = find_task("layernorm_modulate")
make = task.load("tests.cases").make
own = task.load("solution").fused_layernorm_modulate
upstream.activate(Path(sys.argv[1]), "0.5.23")
theirs = sys.modules[task.load("baseline.primary").fused_layernorm_modulate.__module__]
for columns in (512, 3072):
    x, scale, shift, _ = make(2, 2, columns, offset=-200.0, spread=0.3)
    with on_the_machine(task):
        got = own(x, scale, shift, 2.0)  # the machine takes no fraction as a parameter
    want, quantised = torch.empty_like(x), torch.empty_like(x)
    tensors = (want, quantised, x, scale, shift, scale)
    launch = Launch.make(
        theirs._layernorm_modulate_kernel, (2,), *tensors, x.shape[1], 4, scale.stride(0), 2, D=columns, ROWS=2,
        FP8_DTYPE=tl.float8e4nv, FP8_MIN=-448.0, FP8_MAX=448.0, STORE_BF16=True, QUANTIZE_FP8=False, HAS_SHIFT=True,
        num_warps=4 if columns >= 2048 else 2,
    )
    with launching_on_the_machine():
        launch.run(*tensors)
    assert not want.isnan().any()
    assert torch.equal(got, want), f"{columns}: {int((got != want).sum())} elements differ"
"""


def test_the_bits_are_those_of_upstreams_kernel():
    """In a process of its own, in which `sglang` is the pinned files, and Triton compiles."""
    try:
        run_beside(TASK, "sglang-0.5.23", BESIDE_UPSTREAM)
    except KdaError as missing:
        pytest.skip(str(missing))
