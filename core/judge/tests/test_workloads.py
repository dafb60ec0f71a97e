"""Rows: what a spec refuses, how rows are chosen, and how they shrink."""

import re
from pathlib import Path

import pytest

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import find_tasks
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload, load_workloads, select, shrink


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
        ('"float32" }', '"int32" }', "dtype int32 needs fill 'arange', 'randint', .*, got 'normal'"),
        ('"float32" }', '"uint8" }', "dtype uint8 needs fill 'arange', 'randint', .*, got 'normal'"),
        ('"float32" }', '"float32", high = 3 }', r"fill = 'normal' takes no `high`, only \[\]"),
        (
            '"float32" }',
            '"int8", fill = "randint", high = 129 }',
            r"int8 holds -128 to 127, got low = 0, high = 129",
        ),
        ('"float32" }', '"int8", fill = "randint", low = 3, high = 3 }', "low below high, got low = 3, high = 3"),
        ('"float32" }', '"int32", fill = "slots", high = 31 }', "'slots': 32 different values below high = 31 do not"),
        ('"float32" }', '"float32", fill = "slots", high = 32 }', "'slots' needs dtype int32 or int64, got float32"),
        ('"float32" }', '"int32", fill = "slots", high = 32, stride = [0, 1] }', "no stride of 0, which repeats"),
        ('"float32" }', '"int32", fill = "expert_ids", high = 7 }', "8 different values below high = 7 do not exist"),
        ('"float32" }', '"int32", fill = "expert_ids", high = 8, skew = -1.0 }', "inputs.x.skew': .*greater than or"),
        ('"float32" }', '"int32", fill = "expert_ids", high = 9, counts = [1] }', "each of high = 9 experts, got 1"),
        (
            '"float32" }',
            '"int32", fill = "expert_ids", high = 9, counts = [1, 1, 1, 1, 1, 1, 1, 0, 0] }',
            "expected 8 experts or more that were chosen at all",
        ),
        ('"float32" }', '"int32", fill = "block_table", high = 32, lengths = "n" }', "'n': expected an input of"),
        ('"float32" }', '"float32", fill = "captured" }', "fill = 'captured' needs `file`"),
        ('"float32" }', '"float32", fill = "captured", file = "/x.npy" }', "inputs.x.file': .*pattern.*got '/x.npy'"),
        ('op = "f"', 'op = "f"\nrestore = true', "restore is for ops that work in place, and `inplace` names no input"),
        ('op = "f"', 'op = "f"\ninplace = ["x"]\nrestore = true\nloop = "same"', "expected `restore` or `loop`, got"),
        ('op = "f"', 'op = "f"\ncalls_a_step = 0', "key 'workload.0.calls_a_step': .*greater than 0, got 0"),
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


def test_what_points_into_another_input_stays_within_it_when_both_shrink() -> None:
    """Slots need as many rows as there are of them, whatever the remainders of the sizes are."""
    slots = spec(1023, dtype="int64", fill="slots", high=100_000)
    table = spec(20, 40, dtype="int32", fill="block_table", high=4096, lengths="lengths", block=1)
    lengths = spec(20, dtype="int32", fill="randint", low=12, high=41)
    before = row(pool=spec(100_000, 4, 64), slots=slots, pages=spec(4096, 16, 64), table=table, lengths=lengths)
    after = shrink(before, {}).inputs
    assert (after["slots"].shape, after["slots"].high, after["pool"].shape) == ((15,), 16, (16, 4, 64))
    assert (after["table"].shape, after["table"].high, after["pages"].shape[0]) == ((12, 8), 96, 96)
    assert (after["lengths"].shape, after["lengths"].low, after["lengths"].high) == ((12,), 8, 9)


def test_quantised_values_shrink_as_others_do_and_keep_their_range() -> None:
    q = spec(4096, 192, dtype="int8", fill="randint", low=-127, high=128)
    counts = tuple(range(160))
    ids = spec(4096, 6, dtype="int32", fill="expert_ids", high=160, counts=counts)
    after = shrink(row(q=q, ids=ids), {}).inputs
    assert (after["q"].shape, after["q"].low, after["q"].high) == ((8, 192), -127, 128)
    assert (after["ids"].high, after["ids"].counts) == (8, counts[:-9:-1])


def test_rows_of_every_task_in_this_checkout() -> None:
    tasks = find_tasks()
    assert "qknorm_rope" in [task.op for task in tasks]
    for task in tasks:
        assert any(workload.production for workload in task.workloads), task.op
        assert {workload.op for workload in task.workloads} == set(task.config.ops), task.op
