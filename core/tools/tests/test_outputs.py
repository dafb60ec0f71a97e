"""Ops whose outputs are like no input: what their rows say, how these shrink, and the judge with them, on a CPU."""

import re

import pytest
import torch

from kda_judge.arms.protocol import Traffic
from kda_judge.bench import run
from kda_judge.contract.config import Op
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.contract.tensor_spec import OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload, shrink
from kda_judge.evidence.run_record import Verdict
from kda_judge.judge.open_row import Case, footprint, output_spec, traffic
from kda_judge.judge.oracle import ask_oracle, load_reference
from kda_judge.session import Request, frozen_rows, open_session
from kda_tools.project.validate import problems

OPS = """
[ops.silu_and_mul]
inputs = ["x"]
outputs = ["y"]
per_row = ["y"]

[ops.row_sums]
inputs = ["x"]
outputs = ["same", "sums"]
like = { same = "x" }
per_row = ["sums"]
"""
ROWS = """
[[workload]]
id = "glu-4097x48"
op = "silu_and_mul"
inputs.x = { shape = [4097, 48], dtype = "bfloat16" }
outputs.y = { shape = [4097, 24], dtype = "bfloat16" }

[[workload]]
id = "sums-33x48"
op = "row_sums"
inputs.x = { shape = [33, 48], dtype = "bfloat16", stride = [96, 1] }
outputs.sums = { shape = [33], dtype = "float32" }
"""
ORACLE = """

def silu_and_mul(x):
    a, b = x.double().chunk(2, -1)
    return (a / (1 + (-a).exp()) * b,)


def row_sums(x):
    return x.double(), x.double().sum(-1)
"""
ARM = """

def silu_and_mul(x):
    a, b = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(a) * b).to(x.dtype)


def row_sums(x):
    return x.contiguous(), x.double().sum(-1).float()
"""


@pytest.fixture
def task(toy):
    """The test task with the two ops and rows above."""
    for name, text in (
        ("config.toml", OPS),
        ("bench/workloads.toml", ROWS),
        ("bench/reference.py", ORACLE),
        ("baseline/__init__.py", ARM),
        ("solution/__init__.py", ARM),
    ):
        path = toy.path / name
        path.write_text(path.read_text() + text)
    return toy


def replace(task, name, old, new):
    path = task.path / name
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def bench(task, row):
    fresh = Task(task.path)
    session = open_session(Request(task=fresh, rows=[row], device="cpu", generations=1))
    return run(session, frozen_rows(session), measure=True, progress=lambda row, phase: None).rows[0]


@pytest.mark.parametrize("row", ["glu-4097x48", "sums-33x48"])
def test_a_right_solution_is_verified(task, row):
    got = bench(task, row)
    assert got.verdict is Verdict.CORRECT, got.reason
    outputs = [error.output for error in got.arms["solution"].correctness.outputs]
    assert outputs == (["y"] if row.startswith("glu") else ["same", "sums"])


@pytest.mark.parametrize(
    ("row", "old", "new", "said"),
    [
        ("glu*", "silu(a) * b)", "silu(x.float()))", "output 'y': expected shape [9, 24], got [9, 48]"),
        ("glu*", "* b).to(x.dtype)", "* b)", "output 'y': expected dtype bfloat16, got float32"),
        (
            "glu*",
            "* b).to(x.dtype)",
            "* b).to(x.dtype).t().contiguous().t()",
            "output 'y': expected stride [24, 1], got",
        ),
        ("glu*", "silu(a) * b", "silu(b) * a", "output 'y': "),
        ("sums*", "sum(-1).float()", "sum(-1).to(x.dtype)", "output 'sums': expected dtype float32, got bfloat16"),
        ("sums*", "sum(-1).float()", "sum(-1, True).float()", "output 'sums': expected shape [9], got [9, 1]"),
    ],
)
def test_a_wrong_form_or_value_is_named(task, row, old, new, said):
    replace(task, "solution/__init__.py", old, new)
    got = bench(task, row)
    assert got.verdict is Verdict.INCORRECT
    assert got.reason.startswith(f"solution: {said}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "outputs.y = {",
            "outputs.z = {",
            "row 'glu-4097x48': key 'outputs.z': expected only what `per_row` of [ops.silu_and_mul] in config.toml",
        ),
        (
            'outputs.y = { shape = [4097, 24], dtype = "bfloat16" }',
            "",
            "row 'glu-4097x48': missing key 'outputs.y': `per_row` of [ops.silu_and_mul] in config.toml names it, so",
        ),
        ("[4097, 24]", "[4097, -24]", "outputs.y.shape.1': Input should be greater than or equal to 0, got -24"),
        ('24], dtype = "bfloat16"', '24], dtype = "float8"', "outputs.y.dtype': Input should be"),
        ("24], dtype", "24], stride = [24, 1], dtype", "outputs.y.stride'"),
        ("shape = [4097, 24], ", "", "outputs.y.shape'"),
    ],
)
def test_a_wrong_row_is_named(task, old, new, said):
    replace(task, "bench/workloads.toml", old, new)
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        bench(task, "glu*")
    assert str(raised.value).startswith(str(task.path / "bench" / "workloads.toml"))


def test_a_dtype_without_a_tolerance_is_named(task):
    assert not [line for line in problems(task) if "tolerance" in line]
    replace(task, "bench/workloads.toml", 'shape = [33], dtype = "float32"', 'shape = [33], dtype = "float64"')
    fresh = Task(task.path)
    assert any("missing key 'tolerance.float64'" in line for line in problems(fresh))
    with pytest.raises(UsageError, match=r"missing key 'tolerance\.float64': output 'sums' of row 'sums-33x48'"):
        bench(task, "sums*")


def spec(*shape, kind=TensorSpec, dtype="bfloat16", **more):
    return kind(shape=shape, dtype=dtype, **more)


def row(inputs, outputs, **more):
    made = {name: spec(*shape, kind=OutputSpec) for name, shape in outputs.items()}
    return Workload(id="r", op="f", inputs={name: spec(*shape) for name, shape in inputs.items()}, outputs=made, **more)


@pytest.mark.parametrize(
    ("inputs", "outputs", "small_inputs", "small_outputs"),
    [
        # GLU: the output's last dimension stays as an input's does.
        ({"x": (4097, 48)}, {"y": (4097, 24)}, {"x": (9, 48)}, {"y": (9, 24)}),
        # Tokens as many as the output has columns: whatever happens to the one, happens to the other.
        ({"x": (24, 48)}, {"y": (24, 24)}, {"x": (24, 48)}, {"y": (24, 24)}),
        # A matrix product, and a sum over rows.
        ({"a": (77, 64), "b": (64, 40)}, {"y": (77, 40)}, {"a": (13, 64), "b": (64, 40)}, {"y": (13, 40)}),
        ({"x": (77, 64)}, {"y": (64,), "z": (77,)}, {"x": (13, 64)}, {"y": (64,), "z": (13,)}),
    ],
)
def test_sizes_shrink_alike_in_inputs_and_outputs(inputs, outputs, small_inputs, small_outputs):
    small = shrink(row(inputs, outputs), {})
    assert {name: made.shape for name, made in small.inputs.items()} == small_inputs
    assert {name: made.shape for name, made in small.outputs.items()} == small_outputs


def test_outputs_are_kept_and_shrunken_by_name():
    concatenated = row({"a": (19, 8), "b": (47, 8)}, {"y": (66, 8)})
    small = shrink(concatenated, {"a": (0,), "b": (0,), "y": (0,)})
    assert small == concatenated
    # Transposed: tokens along the last dimension stay, unless that dimension is named.
    transposed = row({"x": (77, 64)}, {"y": (64, 77)})
    assert shrink(transposed, {}).inputs["x"].shape == (77, 64)
    small = shrink(transposed, {}, {"y": (1,)})
    assert (small.inputs["x"].shape, small.outputs["y"].shape) == ((13, 64), (64, 13))


def test_a_size_that_is_a_sum_gets_a_hint(task):
    replace(task, "bench/workloads.toml", "outputs.y = { shape = [4097, 24]", "outputs.y = { shape = [4098, 24]")
    with pytest.raises(UsageError, match=r"output 'y': expected shape \[10, 24\], got \[9, 24\]; .*\[cpu\] keep"):
        bench(task, "glu*")


@pytest.mark.parametrize(
    ("op", "row", "in_place"),
    [
        ("qknorm_rope", "qwen-4096x24x128", True),
        ("fused_add_rmsnorm", "qwen3-30b-a3b-add-4096x2048", True),
        ("fused_add_rmsnorm", "qwen3-8b-first-4096x4096", False),  # its output is given, but not read
        ("per_token_group_quant", "glm-5-4096x6144", False),
        ("gelu_cat", "flux-4608x3072+12288", False),
    ],
)
def test_a_limit_is_in_place_where_the_op_overwrites_what_it_reads(op, row, in_place):
    task = find_task(op)
    (found,) = [one for one in task.workloads if one.id == row]
    assert traffic(task.config.ops[found.op], found, load_reference(task)).in_place is in_place


def test_outputs_count_as_bytes_and_have_their_place():
    op = Op(inputs=("x",), outputs=("y", "z"), like={"z": "x"}, per_row=("y",))
    made = Workload(id="r", op="f", inputs={"x": spec(6, 8)}, outputs={"y": spec(6, kind=OutputSpec, dtype="int64")})
    assert output_spec(op, made, "y").nbytes == 6 * 8
    assert traffic(op, made, None) == Traffic(read=6 * 8 * 2, written=6 * 8 * 2 + 6 * 8)
    assert footprint(op, made) == 2 * 6 * 8 * 2 + 6 * 8
    case = Case.open(op, made, "cpu", traffic(op, made, None))
    try:
        places = [(place.shape, place.stride, place.dtype) for place in case.spec.outputs]
        assert places == [((6,), (1,), "int64"), ((6, 8), (8, 1), "bfloat16")]
    finally:
        case.close()


def test_the_oracle_is_held_to_the_row(task):
    made = next(made for made in task.workloads if made.id == "sums-33x48")
    op = task.config.ops["row_sums"]
    same, sums = ask_oracle(load_reference(task), op, made, {"x": torch.ones(33, 48, dtype=torch.bfloat16)})
    assert (same.shape, sums.shape) == ((33, 48), (33,))
