"""What serving needs of the judge, in a toy of its own: every kind of values, every rule, and a wrong arm for each."""

import re
import shutil
from pathlib import Path

import pytest

from core.judge.tests.conftest import NOTHING_COMPILED
from kda_judge.bench import run
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Verdict
from kda_judge.session import Request, frozen_rows, open_session
from kda_tools.lab.grid.grid_rows import grid_rows

TOY = Path(__file__).parent / "data" / "k91_serving"
WRONG = {
    "quantise-fp8": r"output 'scales': 1 of 16 elements outside tolerance; worst at \[1, 1\].*numbers of float32",
    "quantise-int8": r"output 'q': 1 of 512 elements outside tolerance; worst at \[1, 5\].*numbers of int8",
    "dequantise-fp8": "output 'y': .* outside tolerance",
    "dequantise-int8": "output 'y': .* outside tolerance",
    "topk-2": r"output 'weights': ",
    "topk-4": r"output 'ids': 1 of 24 elements outside tolerance; worst at \[3, 3\].*of what stands at the indices",
    "align": "output 'order': 2 of 48 elements outside tolerance.*of what stands at the indices",
    "route": "output 'counts': .* outside tolerance",
    "mean": "output 'y': .* outside tolerance",
    "store": r"row \d of 'pool' was changed, which 'slots' does not name",
    "softmax": r"output 'p': row \d sums to 1.0005, expected 1 \+- 1e-05",
    "tally": r"output 'counts': 1 of 8 elements outside tolerance; worst at \[0\]: expected .* \+- 0",
    "total": "expected 'out', which it wrote into, got tensor",
    "moments": "expected 'mean' and 'most', which it wrote into, got tensor",
}


@pytest.fixture
def serving(checkout):
    """The task in a temporary checkout."""
    path = checkout / "toys" / TOY.name
    shutil.copytree(TOY, path, ignore=NOTHING_COMPILED)
    return Task(path)


def bench(task, arm, *rows, measure=False):
    session = open_session(Request(task=task, rows=list(rows), subject=arm, device="cpu"))
    return run(session, frozen_rows(session), measure=measure, progress=lambda *_: None)


def test_what_the_rules_allow_is_right(serving):
    record = bench(serving, "solution")
    assert {row.id: row.reason for row in record.rows if row.verdict is not Verdict.CORRECT} == {}
    assert len(record.rows) == len(WRONG)
    largest = {row.id: {e.output: e.max_abs for e in row.arms["solution"].correctness.outputs} for row in record.rows}
    assert largest["quantise-int8"]["scales"] == 1.0  # in numbers of float32: a unit, whatever the scale
    assert largest["align"] == {"order": 0.0}
    assert largest["store"] == {"pool": 0.0}


def test_every_rule_catches_what_it_is_for(serving):
    record = bench(serving, "wrong")
    said = {row.id: (row.verdict, row.reason) for row in record.rows}
    for row, words in WRONG.items():
        verdict, reason = said[row]
        assert verdict is Verdict.INCORRECT, (row, reason)
        assert re.search(f"^wrong: {words}", reason), (row, reason)


@pytest.mark.parametrize("named", [{"subject": "wrong"}, {"against": ["wrong"]}], ids=["arm", "against"])
def test_an_arm_of_few_ops_leaves_the_rows_of_others_out(serving, named):
    config = serving.path / "config.toml"
    config.write_text(config.read_text().replace('"faulty.wrong"', '"faulty.wrong"\nops = ["topk", "align"]'))
    asked = {"task": Task(serving.path), "device": "cpu", **named}
    assert {row.op for row in run(Request(**asked, generations=1), measure=False).rows} == {"topk", "align"}
    assert [row.id for row in grid_rows(open_session(Request(**asked, rows=["topk-2", "mean"])), full=True)] == [
        "topk-2"
    ]
    with pytest.raises(UsageError, match="ops that every arm has, got none: wrong has topk, align"):
        frozen_rows(open_session(Request(**asked, rows=["mean"])))


def test_in_place_every_timed_call_finds_what_was_drawn(serving):
    record = bench(serving, "solution", "tally", "store", "total", measure=True)
    assert {row.verdict for row in record.rows} == {Verdict.CORRECT}


def test_calls_on_their_own_output_need_restored_inputs(serving):
    rows = serving.path / "bench" / "workloads.toml"
    rows.write_text(rows.read_text().replace("restore = true\n", ""))
    row = bench(Task(serving.path), "solution", "tally", measure=True).rows[0]
    assert row.verdict is Verdict.ERROR
    assert "counts: expected zeros" in row.reason


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('outputs = ["mean", "most"]', 'outputs = ["mean", "y"]\nlike = { y = "x" }'),
        ('"out"]\noutputs', '"z"]\noutputs'),
    ],
)
def test_what_an_op_in_place_may_return_is_what_it_writes(serving, old, new):
    config = serving.path / "config.toml"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(UsageError, match=r"expected outputs that are inputs|is no input"):
        Task(serving.path).config  # noqa: B018
