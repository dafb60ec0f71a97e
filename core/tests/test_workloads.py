"""Rows: what a spec refuses, how rows are chosen, and how they shrink."""

import re
from pathlib import Path

import pytest

from kda_core.errors import UsageError
from kda_core.tasks import find_tasks
from kda_core.workloads import TensorSpec, Workload, load_workloads, select, shrink


def row(identity: str = "r", **inputs: TensorSpec) -> Workload:
    return Workload(id=identity, op="op", inputs=inputs)


def spec(*shape: int, dtype: str = "bfloat16", **more: object) -> TensorSpec:
    return TensorSpec.model_validate({"shape": shape, "dtype": dtype, **more})


def load_error(tmp_path: Path, text: str) -> str:
    path = tmp_path / "workloads.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_workloads(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


ROW = """\
[[workload]]
id = "a"
op = "f"
inputs.x = { shape = [4, 8], dtype = "float32" }
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('id = "a"', 'id = "a b"', "key 'workload.0.id': .*pattern.*, got 'a b'"),
        ("[4, 8]", "[4, -8]", "key 'workload.0.inputs.x.shape.1': .*greater than or equal to 0, got -8"),
        ("[4, 8]", "[4, 8.5]", "key 'workload.0.inputs.x.shape.1': .*integer.*got 8.5"),
        ("float32", "float8", "key 'workload.0.inputs.x.dtype': .*got 'float8'"),
        ("dtype =", "dtpye =", "unknown key 'workload.0.inputs.x.dtpye'; did you mean dtype"),
        ('"float32" }', '"float32", stride = [1] }', "stride has 1 entries, shape has 2"),
        ('"float32" }', '"int32" }', "dtype int32 needs fill 'arange' or 'randint', got 'normal'"),
        ('"float32" }', '"int64", fill = "randint" }', "fill = 'randint' needs `high`"),
        ('op = "f"', 'op = "f"\ninplace = ["y"]', r"inplace names 'y', inputs are \['x'\]"),
    ],
)
def test_bad_row_is_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in ROW
    message = load_error(tmp_path, ROW.replace(old, new, 1))
    assert re.search(expected, message), message


def test_empty_file_and_duplicate(tmp_path: Path) -> None:
    assert "missing key 'workload'" in load_error(tmp_path, "")
    assert "duplicate workload id 'a'" in load_error(tmp_path, ROW + ROW)


def test_scalars_keep_their_type(tmp_path: Path) -> None:
    path = tmp_path / "workloads.toml"
    path.write_text(ROW + "scalars = { flag = true, count = 3, eps = 1e-6, kind = 'rms' }\n")
    scalars = load_workloads(path)[0].scalars
    assert [type(value) for value in scalars.values()] == [bool, int, float, str]


def test_strides_span_and_bytes() -> None:
    assert spec(2, 3, 4).strides == (12, 4, 1)
    packed = spec(4, 8, stride=(24, 1))
    assert (packed.span, packed.nbytes) == (3 * 24 + 8, 4 * 8 * 2)
    broadcast = spec(4, 8, stride=(0, 1))
    assert (broadcast.span, broadcast.nbytes) == (8, 8 * 2)
    assert (spec(0, 8).span, spec(0, 8).nbytes) == (0, 0)


def test_select_keeps_file_order_and_suggests() -> None:
    rows = (row("qwen-19"), row("zimage-32"), row("qwen-47"))
    assert [r.id for r in select(rows, ["qwen-47", "qwen*"])] == ["qwen-19", "qwen-47"]
    assert select(rows, []) == rows
    with pytest.raises(UsageError, match=r"--rows 'zimage-23': no such row; nearest: zimage-32"):
        select(rows, ["qwen*", "zimage-23"])


def test_shrink_keeps_ties_tails_and_last_dimension() -> None:
    before = row(q=spec(4097, 24, 128), cache=spec(4097, 64, dtype="float32"), w=spec(128), tail=spec(189, 128))
    after = shrink(before, {}).inputs
    assert after["q"].shape == (9, 8, 128)
    assert after["cache"].shape == (9, 64)
    assert after["w"].shape == (128,)
    assert after["tail"].shape == (13, 128)


def test_shrink_respects_keep_strides_and_high() -> None:
    positions = spec(4096, dtype="int64", fill="randint", high=4096)
    before = row(x=spec(4096, 24, 128, stride=(9216, 128, 1)), positions=positions)
    after = shrink(before, {"x": (1,)}).inputs
    assert after["x"].shape == (8, 24, 128)
    assert after["x"].stride == (9216, 128, 1)
    assert (after["positions"].shape, after["positions"].high) == ((8,), 8)
    assert before.inputs["x"].shape == (4096, 24, 128)


def test_what_always_shrinks_does_so_beside_its_equals_and_at_the_end() -> None:
    before = row(x=spec(1, 256, 20, 256, 132), weight=spec(256))
    assert shrink(before, {"x": (1,)}).inputs["x"].shape == (1, 256, 12, 256, 132)
    after = shrink(before, {"x": (1,)}, {"x": (2, 3, 4)}).inputs
    assert (after["x"].shape, after["weight"].shape) == ((1, 256, 12, 8, 12), (256,))


def test_shrink_takes_indices_along_their_last_dimension_too() -> None:
    before = row(x=spec(1, 8424, 3072), index=spec(1, 8424, dtype="int32", fill="randint", high=2))
    after = shrink(before, {}).inputs
    assert after["x"].shape == (1, 8, 3072)
    assert after["index"].shape == (1, 8)


def test_rows_of_every_task_in_this_checkout() -> None:
    tasks = find_tasks()
    assert "qknorm_rope" in [task.op for task in tasks]
    for task in tasks:
        assert any(workload.production for workload in task.workloads), task.op
        assert {workload.op for workload in task.workloads} == set(task.config.ops), task.op
