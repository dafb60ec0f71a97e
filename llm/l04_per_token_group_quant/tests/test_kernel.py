"""The kernel over its whole envelope: on a GPU or, by `core/tools/tests/test_interpreted.py`, interpreted."""

import pytest
import torch

from ..solution import per_token_group_quant, why_not
from ..solution.group_quant import GROUPS, TUNED, Config
from .cases import LAYOUTS, assert_right, codes, normal, outputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(rows=3, width=384, group=128, layout="columns", dtype=torch.bfloat16, gap=0):
    """Both ops; with a gap, rows of input are that much longer."""
    for fused in (False, True):
        columns = width * (1 + fused)
        x = normal(rows, columns + gap, dtype=dtype, device=DEVICE)[:, :columns]
        q, s = outputs(rows, width, group, layout, DEVICE)
        assert why_not("silu_and_mul_quant" if fused else "per_token_group_quant", x, q, s, group) is None
        assert_right(x, q, s, group, fused)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 384, 1408, 2048, 7168])
def test_widths(width, dtype):
    check(width=width, dtype=dtype)


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group):
    check(width=6 * group, group=group)
    check(width=6 * group, group=group, layout="rows")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
def test_rows_that_fill_programs_and_that_do_not(rows, layout):
    for config in (Config(4, 2, beside=1), Config(1), Config(4, beside=8), Config(4, 2, each=8)):
        with TUNED.forced(config):
            check(rows, 256, layout=layout, gap=16)


def test_what_lies_between_rows_is_left_alone():
    q, s = outputs(5, 256, layout="apart", device=DEVICE)
    assert_right(normal(5, 256, device=DEVICE), q, s)
    assert (q._base[:, 256:].view(torch.uint8) == 0x7F).all()
    assert (s._base[:, 2:] == -7.0).all()


def test_padding_of_scales_is_left_alone():
    q, s = outputs(5, 256, device=DEVICE)
    assert_right(normal(5, 256, device=DEVICE), q, s)
    assert (s._base[:, 5:] == -7.0).all()


def test_ties_and_the_ends_of_the_range():
    """A largest element of 448 makes the scale 1: what is stored is the element, rounded."""
    values = [448.0, -448.0, 17.0, 19.0, -17.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0, 415.0, 433.0]
    want = [448.0, -448.0, 16.0, 20.0, -16.0, 2.0**-9, 0.0, 2.0**-8, 0.0, 0.0, 416.0, 448.0]
    x = torch.zeros(1, 128, device=DEVICE)
    x[0, : len(values)] = torch.tensor(values, device=DEVICE)
    q, s = per_token_group_quant(x)
    assert s.item() == 1.0
    assert q[0, : len(values)].float().tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_zeros_and_tiny_groups(dtype):
    x = torch.zeros(2, 256, dtype=dtype, device=DEVICE)
    x[1, 130] = 2.0**-20
    q, s = per_token_group_quant(x)
    assert s.flatten().tolist() == pytest.approx([1e-10 / 448] * 3 + [2.0**-20 / 448], rel=1e-6)
    assert codes(q).sum() == codes(torch.full((1,), 448.0).to(torch.float8_e4m3fn)).item()


def test_not_a_number_stays_in_its_group():
    x = normal(1, 256, device=DEVICE)
    x[0, 3] = float("nan")
    q, s = per_token_group_quant(x)
    other_q, other_s = per_token_group_quant(x[:, 128:])
    assert q[0, 3].isnan()
    assert torch.equal(q[:, 128:].float(), other_q.float())
    assert torch.equal(s[:, 1:], other_s)


def test_legacy_mode_rounds_silu_first():
    x = normal(9, 2 * 256, device=DEVICE)
    gate, up = x.chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate.float()).bfloat16()
    want_q, want_s = per_token_group_quant(act * up)
    q, s = per_token_group_quant(x, fuse_silu_and_mul=True)
    assert (codes(q) - codes(want_q)).abs().max() <= 1
    torch.testing.assert_close(s, want_s, atol=0.0, rtol=2.0**-7)
    dense, _ = per_token_group_quant(x, fuse_silu_and_mul=True, silu_and_mul_mode="dense")
    assert (codes(dense) != codes(q)).any()
    assert (codes(want_q) == codes(q)).float().mean() > (codes(want_q) == codes(dense)).float().mean()


@pytest.mark.parametrize("width", [384, 2048])
@pytest.mark.parametrize("config", TUNED.configs, ids=str)
def test_every_tuned_configuration(config, width):
    for rows in (4, 7):
        with TUNED.forced(config) as asked:
            check(rows, width)
        assert len(asked) == 2
