"""The ops around their kernel; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_judge.contract.workloads import Workload
from kda_tools.lab.inspect.aot import meta_tensors

from .. import solution
from ..baseline import eager
from ..bench import grid, reference, tune
from ..solution import launches, why_not
from ..solution.rounded_rmsnorm_modulate import TUNED
from .cases import EPS, FORMS, NAMES, as_tuple, assert_matches, in_pytorchs_order, make

# --- the plain path and the eager arm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [96, 512, 2568])
@pytest.mark.parametrize("form", FORMS)
def test_plain_path(form, columns, dtype):
    op, tensors = make(form, columns=columns, dtype=dtype)
    assert_matches(solution, op, tensors)


@pytest.mark.parametrize("form", FORMS)
def test_eager_arm(form):
    """Which is the plain path, bit for bit."""
    op, tensors = make(form, layout="apart")
    assert_matches(eager, op, tensors)
    got, want = (as_tuple(getattr(module, op)(**tensors, eps=EPS)) for module in (solution, eager))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_roundings_are_those_of_pytorchs_operators(form, dtype):
    """The order of the sum aside, which few elements show: on a CPU PyTorch has another one."""
    op, tensors = make(form, dtype=dtype, tokens=16)
    got = as_tuple(getattr(solution, op)(**tensors, eps=EPS))
    for one, want in zip(got, in_pytorchs_order(**tensors), strict=True):
        assert (one == want).float().mean() > 0.999
    if op != grid.SINGLE:
        assert torch.equal(got[-1], in_pytorchs_order(**tensors)[-1])


@pytest.mark.parametrize("form", FORMS)
def test_the_oracle_rounds_after_each_step(form):
    """Its results are the kernel's but for the last rounding; without those before, some are off by far more."""
    op, tensors = make(form, tokens=16)
    for want, bits in zip(getattr(reference, op)(**tensors, eps=EPS), in_pytorchs_order(**tensors), strict=True):
        assert (want.to(bits.dtype) == bits).float().mean() > 0.999
    if form == "gate-modulate":
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        once = getattr(eager, op)(**wide, eps=EPS)[0].bfloat16()
        assert (once == in_pytorchs_order(**tensors)[0]).float().mean() < 0.8


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens(form):
    op, tensors = make(form)
    empty = {name: tensors[name][:, :0] for name in ("residual", "x") if name in tensors}
    results = as_tuple(getattr(solution, op)(**tensors | empty, eps=EPS))
    assert [tuple(one.shape) for one in results] == [(2, 0, 512)] * len(results)
    assert len(results) == len(in_pytorchs_order(**tensors))


def test_results_are_tensors_of_their_own():
    """Also the sum, also where a modulation changes nothing."""
    op, tensors = make("add")
    y, h = getattr(solution, op)(**tensors, eps=EPS)
    places = [x.data_ptr() for x in (y, h, tensors["x"], tensors["residual"])]
    assert len(set(places)) == len(places)


# --- what the kernel does not cover

OP, TENSORS = make("gate-modulate")
SINGLE, FEW = make("modulate")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({name: tensor.float() for name, tensor in TENSORS.items()}, "x has dtype torch.float32"),
        (make("gate-modulate", columns=96)[1], "x has 96 columns"),
        (make("gate-modulate", columns=2568)[1], "x has 2568 columns"),
        (make("gate-modulate", columns=8704, tokens=1)[1], "x has 8704 columns"),
        ({name: TENSORS[name][:, ::2] for name in ("x", "residual")}, "x is not contiguous"),
        ({"residual": TENSORS["residual"].transpose(1, 2).contiguous().transpose(1, 2)}, "residual is not contiguous"),
        ({"gate": TENSORS["gate"].repeat_interleave(2, dim=-1)[..., ::2]}, "gate has stride 2 in its last dimension"),
        ({"shift": torch.nn.Parameter(TENSORS["shift"])}, "shift requires gradients"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    inputs = {**TENSORS, **change}
    assert reason in solution.rounded_rmsnorm_modulate.kda_op.uncovered(_call(inputs))
    assert launches(OP, inputs, {"eps": EPS}) == []
    with torch.no_grad():
        assert_matches(solution, OP, inputs)


def _call(inputs):
    from ..solution.rounded_rmsnorm_modulate import Call

    return Call(**dict.fromkeys(Call._fields) | inputs | {"eps": EPS})


def test_a_call_that_the_kernel_covers_has_no_reason():
    for form in FORMS:
        op, tensors = make(form)
        assert solution.rounded_rmsnorm_modulate.kda_op.uncovered(_call(tensors)) is None
        assert len(launches(op, tensors, {"eps": EPS})) == 1


# --- what has no meaning

_, ALL = make("gate-two")
TWO = grid.TWO


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (SINGLE, {"x": FEW["x"][0]}, r"x: expected 3 dimensions \[B, S, D\], got \[3, 512\]"),
        (SINGLE, {"scale": FEW["scale"][:1]}, r"scale: expected shape \[2, 1, 512\], got \[1, 1, 512\]"),
        (SINGLE, {"shift": FEW["shift"][:, 0]}, r"shift: expected shape \[2, 1, 512\], got \[2, 512\]"),
        (SINGLE, {"shift": FEW["shift"].float()}, "shift: expected dtype torch.bfloat16, as x, got torch.float32"),
        (SINGLE, {"scale": None}, "scale: expected a tensor, got None"),
        (SINGLE, {"x": None}, "x: expected a tensor, got None"),
        (OP, {"residual": ALL["residual"][:, :2]}, r"residual: expected shape \[2, 3, 512\], got \[2, 2, 512\]"),
        (OP, {"residual": ALL["residual"].half()}, "residual: expected dtype torch.bfloat16, as x"),
        (OP, {"residual": None}, "residual: expected a tensor, got None"),
        (OP, {"gate": ALL["x"]}, r"gate: expected shape \[2, 1, 512\], got \[2, 3, 512\]"),
        (OP, {"gate": ALL["gate"][..., :8]}, r"gate: expected shape \[2, 1, 512\], got \[2, 1, 8\]"),
        (OP, {"shift": None}, "shift: expected a tensor with scale, None without, got None"),
        (OP, {"scale": None}, "shift: expected a tensor with scale, None without, got a tensor"),
        (OP, {"gate": ALL["gate"].to("meta")}, "gate: expected device cpu, as x, got meta"),
        (TWO, {"other_scale": None}, "other_scale: expected a tensor, got None"),
        (TWO, {"other_shift": None}, "other_shift: expected a tensor, got None"),
        (TWO, {"scale": None}, "scale: expected a tensor, got None"),
        (TWO, {"other_shift": ALL["shift"].half()}, "other_shift: expected dtype torch.bfloat16, as x"),
        (TWO, {"other_scale": ALL["scale"][:1]}, r"other_scale: expected shape \[2, 1, 512\], got \[1, 1, 512\]"),
    ],
)
def test_meaningless_arguments_are_named(op, change, message):
    arguments = {name: ALL[name] for name in NAMES[op]} | change
    for function in (getattr(solution, op), lambda **given: why_not(op, **given)):
        with pytest.raises(ValueError, match=f"{op}: {message}"):
            function(**arguments, eps=EPS)


# --- rows that the oracle refuses


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": None}, ""),
        ({"shift": None}, "inputs: expected .*scale and shift together"),
        ({"x": None}, "inputs: expected "),
        ({"gate": {"shape": (1, 1, 512)}}, r"gate: expected shape \[2, 1, 512\], got \[1, 1, 512\]"),
        ({"scale": {"dtype": "float32"}}, "scale: expected dtype bfloat16, as x, got float32"),
        ({"scale": {"stride": (1024, 1024, 2)}}, "scale: expected stride 1 in its last dimension, got 2"),
        ({"residual": {"stride": (99999, 1, 33)}}, "residual: expected stride 1 in its last dimension, got 33"),
    ],
)
def test_a_row_outside_the_envelope_is_named(change, message):
    (row,) = (row for row in grid.grid() if row.id == "gate-modulate-2x33x512-bfloat16-packed")
    specs = dict(row.inputs)
    for name, new in change.items():
        spec = specs.pop(name)
        if new is not None:
            specs[name] = spec.model_copy(update=new)
    changed: Workload = row.model_copy(update={"inputs": specs})
    if not message:
        reference.check(changed)
        return
    with pytest.raises(ValueError, match=message):
        reference.check(changed)


# --- how calls become launches


def test_every_row_has_a_program():
    for row in grid.thin(grid.grid()):
        batch, tokens, columns = row.inputs["x"].shape
        found = launches(row.op, meta_tensors(row), row.scalars)
        if columns % 512 or row.inputs["x"].stride:
            assert found == []
            continue
        (launch,) = found
        assert launch.grid == (batch * tokens, 1, 1)
        assert launch.constexprs["N"] == columns


@pytest.mark.parametrize("config", [*tune.grid()], ids=str)
def test_a_configuration_reaches_the_launch(config):
    op, tensors = make("gate-modulate", batch=1, device="meta")
    with TUNED.forced(config) as asked:
        (launch,) = launches(op, tensors, {"eps": EPS})
    assert asked
    constants = launch.constexprs
    assert launch.options["num_warps"] == config.warps
    assert launch.options["enable_fp_fusion"] is False, "a rounded product and a sum have two roundings"
    assert not (constants["PDL"] and not config.pdl)


def test_the_number_of_tokens_compiles_nothing_anew():
    """A clip's length changes from request to request."""
    found = [launches(op, tensors, {"eps": EPS}) for op, tensors in (make(tokens=n, device="meta") for n in (27, 51))]
    assert found[0][0].constexprs == found[1][0].constexprs


def test_operands_of_one_batch_have_one_launch_whatever_their_gaps():
    """The stride of a dimension of one element has no meaning, and differs from call to call."""
    found = [
        launches(op, tensors, {"eps": EPS})[0].constexprs
        for op, tensors in (make(batch=1, layout=layout, device="meta") for layout in ("", "packed", "apart"))
    ]
    assert found[0] == found[1] == found[2]


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("columns", [512, 2048, 4096, 7680])
    @pytest.mark.parametrize("form", FORMS)
    def test_the_bits_are_pytorchs(self, form, columns):
        op, tensors = make(form, tokens=257, columns=columns, spread=3.0, device="cuda")
        assert why_not(op, **tensors, eps=EPS) is None
        got, want = (as_tuple(getattr(module, op)(**tensors, eps=EPS)) for module in (solution, eager))
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
