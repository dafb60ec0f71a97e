"""The kernel over its whole envelope: on a GPU, or in Triton's interpreter (`test_interpreted.py` of kda-tools)."""

import pytest
import torch

from .. import solution
from ..bench import reference
from ..solution import temb_modulation as module
from ..solution import why_not
from .cases import BOTH, CALLS, assert_right, make, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
calls = pytest.mark.parametrize("call", CALLS)


def check(call, change=None, **form):
    op, arguments = make(call, device=DEVICE, **form)
    arguments |= change or {}
    assert why_not(op, **arguments) is None
    assert_right(getattr(solution, op), op, arguments)


@calls
@pytest.mark.parametrize("columns", [256, 1280, 3072, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns(columns, dtype, call):
    check(call, batch=1, tokens=3, columns=columns, dtype=dtype)


@calls
@pytest.mark.parametrize("outer", [(2, 6), (1, 6), (2, 1), (1, 1), (2,), (1,)], ids=str)
def test_every_form_of_temb(outer, call):
    check(call, outer=outer)
    with module.TUNED.forced(module.Config(4, rows=4)):
        check(call, outer=outer)


@pytest.mark.parametrize("numbers", [(0, 1, 2), (5, 4, 3), (3, 3, 3), (2, 5, 0)], ids=str)
def test_every_slice_is_the_one_that_was_asked_for(numbers):
    gate, shift, scale = numbers
    check("first", shift=shift, scale=scale)
    check("whole", gate=gate, shift=shift, scale=scale)
    check("last", gate=gate)
    check("whole", slices=7, gate=gate + 1, shift=shift + 1, scale=scale + 1)


def test_one_slice():
    check("whole", slices=1, gate=0, shift=0, scale=0)


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("step", range(3))
def test_mixed_dtypes(first, step):
    # Every pair of dtypes, for any two of x, temb, the tables and the parameters.
    dtype, temb, tables = (DTYPES[(first + n * step) % 3] for n in (0, 1, 2))
    check("whole", dtype=dtype, temb=temb, tables=tables, parameters=DTYPES[(first + step) % 3])


def test_a_residual_of_another_dtype():
    check("gated", {"residual": normal(2, 6, 256, dtype=torch.float32, device=DEVICE)})


@pytest.mark.parametrize("left", ["weight", "bias"])
def test_one_of_weight_and_bias_is_left_out(left):
    op, both = make("affine", device=DEVICE)
    got, want = (getattr(solution, op)(**both | change)[0] for change in ({left: None}, {"weight": None, "bias": None}))
    assert torch.equal(got, want)
    assert not torch.equal(got, getattr(solution, op)(**both)[0])


@calls
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 5), (3, 8)])
def test_row_counts(batch, tokens, call):
    check(call, batch=batch, tokens=tokens)


@pytest.mark.parametrize("name", ["x", "residual"])
def test_rows_apart(name):
    packed = normal(2, 6, 3 * 256, device=DEVICE)[..., 256:512]
    for call in ("gated", "last"):
        check(call, {name: packed})


def test_temb_and_tables_that_are_parts_of_others():
    temb = normal(2, 6, 12, 512, device=DEVICE)[:, :, ::2, 256:]
    one, other = (normal(2, rows, 256, device=DEVICE)[1:, :6] for rows in (7, 9))
    apart = normal(1, 12, 256, device=DEVICE)[:, ::2]
    for call in ("whole", "cross", "last"):
        names = CALLS[call][1]
        change = {"temb": temb, "gate_table": one, "table": other}
        check(call, {name: value for name, value in change.items() if name in names})
        check(call, {name: apart for name in ("gate_table", "table") if name in names})


@calls
def test_slices_that_have_all_tokens_each(call):
    """As Helios makes them: in memory temb is [B, K, S, D]."""
    temb = normal(1, 6, 5, 1280, dtype=torch.float32, device=DEVICE).transpose(1, 2)
    check(call, {"temb": temb}, batch=1, tokens=5, columns=1280)


def test_the_norm_is_of_the_rounded_sum():
    # r is 64.125 and less than 0.01 more or less, of which bfloat16 keeps 64: nothing is left to be centred.
    op, arguments = make("whole", device=DEVICE, temb=torch.float32, tables=torch.float32)
    arguments |= {"residual": torch.full_like(arguments["x"], 64.125, dtype=torch.float32), "weight": None}
    for name, value in (("temb", 0.0), ("gate_table", 1e-3), ("table", 0.0)):
        arguments[name].fill_(value)
    y, r = getattr(solution, op)(**arguments)
    assert (r == 64).all()
    assert (y == 0).all()


@pytest.mark.parametrize("call", ["gated", "cross", "last"])
@pytest.mark.parametrize("temb", [torch.bfloat16, torch.float32])
def test_the_sum_is_rounded_as_upstream_does(call, temb):
    """At 4160, where a neighbour in bfloat16 is 32 away: one multiply-add, to the nearest, of a gate in float32."""
    op, arguments = make(call, columns=1280, temb=temb, device=DEVICE, offset=64.0)
    arguments["temb"] = (arguments["temb"].float() + 64).to(temb)
    want = getattr(reference, op)(**arguments)[-1]
    got = getattr(solution, op)(**arguments)
    r = got[1] if op == BOTH else got
    assert torch.equal(r, want.float().to(r.dtype))


@pytest.mark.parametrize("call", ["first", "cross"])
def test_statistics_keep_their_digits_beside_a_large_offset(call):
    op, arguments = make(call, dtype=torch.float32, columns=3072, offset=1000.0, device=DEVICE)
    want, got = getattr(reference, op)(**arguments)[0], getattr(solution, op)(**arguments)
    # A float32 step of 1000^2 is 0.06: mean(x^2) - mean(x)^2 could not tell the variance, which is of order one.
    torch.testing.assert_close((got[0] if op == BOTH else got).double(), want, atol=2e-3, rtol=5e-4)


def test_large_eps():
    check("first", eps=0.5)
    check("affine", eps=0.5)


@calls
def test_zero_rows(call):
    op, arguments = make(call, tokens=1, outer=(2, 1), device=DEVICE)
    empty = {name: arguments[name][:, :0].contiguous() for name in ("x", "residual") if arguments.get(name) is not None}
    got = getattr(solution, op)(**arguments | empty)
    assert all(out.shape == (2, 0, 256) for out in (got if op == BOTH else (got,)))


TUNED = set(module.TUNED.configs)
SOME = {
    module.Config(4, rows=2, early=True),
    module.Config(8, rows=4, ahead=1),
    module.Config(2, ahead=2, maxnreg=64),
    module.Config(16, rows=2, early=True, load=".cg", store=".cs"),
}


@pytest.mark.parametrize("config", sorted(TUNED | SOME, key=repr), ids=str)
@calls
def test_every_tuned_configuration(config, call):
    with module.TUNED.forced(config):
        for batch, tokens, columns in ((1, 7, 1280), (2, 4, 256)):
            check(call, batch=batch, tokens=tokens, columns=columns)


@pytest.mark.parametrize("ahead", [1, 2, module.ALL])
@pytest.mark.parametrize("early", [False, True])
def test_a_program_of_several_rows_has_chunks_of_every_form(ahead, early):
    # 1280 columns at 1 warp are 5 chunks.
    with module.TUNED.forced(module.Config(1, rows=4, ahead=ahead, early=early)):
        for outer in ((2, 6), (1, 6), (2, 1), (1, 1), (2,), (1,)):
            check("whole", columns=1280, outer=outer)
