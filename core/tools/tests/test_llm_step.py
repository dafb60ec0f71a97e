"""`kda llm step`: both arms of a language model's step, what is kept of a run, and its part of the page."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.judge.tests.records_factory import gpu_reading, make_checkout, make_record
from core.tools.tests.every_task import ROOT
from core.tools.tests.reached_files import computed_with
from core.tools.tests.test_llm import kda
from kda_judge.contract.errors import ArmFailed, LedgerError
from kda_judge.contract.tasks import find_task
from kda_judge.evidence import provenance, record_log
from kda_judge.evidence.run_record import Metric
from kda_tools.llm import known_llms, readme_block, run_step, step_page, step_protocol, step_worker, task_gain
from kda_tools.llm.served_phase import Phase
from kda_tools.llm.served_step import ServedStep
from kda_tools.llm.solution_ops import NAMES, SolutionOps, functions, step_tasks
from kda_tools.llm.step_ops import PlainOps
from kda_tools.llm.step_protocol import LlmStepRecord, PhaseAnswer, StepAnswer
from kda_tools.llm.step_worth import RecordedRows, Saving
from kda_tools.models.calls import Call, Rows
from kda_tools.models.protocol import Timed
from kda_tools.publish import report, staleness

KNOWN = known_llms.load_llms(ROOT / "llm" / "models.toml")
FOLDER = ROOT / "llm"
TASKS = step_tasks()
PHASE = Phase(name="decode-b2-kv8", batch=2, new_tokens=1, kv_tokens=8)
NEVER_STALE = {
    *("protocol", "step_record", "step_protocol", "known_llms", "known_models", "capture_record", "capture"),
    *("served_names", "served_phase", "trace_events", "trace_places", "trace_read"),
}
"""Modules that say what data looks like and how it is named, or only whether memory was short."""


@pytest.fixture
def served() -> ServedStep:
    with torch.inference_mode():
        config = KNOWN.model("tiny-moe").config
        return ServedStep(config, 1, PlainOps(), torch.device("cpu"), torch.float32, 0)


def arms(**changed: Any) -> dict[str, Any]:
    base = PlainOps()
    return {"upstream": base, "solution": SolutionOps(base, functions(TASKS) | changed)}


def test_a_step_calls_every_op_of_our_tasks_and_computes_the_same(monkeypatch, capsys, tmp_path):
    assert kda(monkeypatch, "llm", "step", "tiny-moe", "--decode", 2, "--kv", 8, "--json", tmp_path / "run.json") == 0
    text = capsys.readouterr().out
    assert "without a GPU nothing was timed" in text
    record = LlmStepRecord.model_validate_json((tmp_path / "run.json").read_bytes())
    (phase,) = record.phases
    assert {call.op for call in phase.checked.calls} == set(NAMES)
    counts = {call.op: call.count for call in phase.checked.calls}
    assert counts["fused_add_rmsnorm"] == 2 * record.layers
    assert counts["silu_and_mul"] == counts["fused_inplace_qknorm_rope_kv_store"] == record.layers
    assert phase.checked.difference is not None
    assert phase.checked.difference < 1e-6
    assert phase.checked.same_token == phase.checked.plain_same_token == 1
    assert phase.checked.plain_difference == 0  # upstream's place is PyTorch's without a GPU
    assert (phase.modes, phase.checked.profile, record.machine.kind) == ({}, None, "cpu")
    assert set(record.hashes) == {"step", *(call.task for call in phase.checked.calls)}


@pytest.mark.parametrize("op", ["silu_and_mul", "moe_topk_sum"])
def test_a_solution_that_computes_something_else_shows(served, op):
    right = functions(TASKS)[op]

    def wrong(*args):
        return right(*args).mul_(2)

    with torch.inference_mode():
        step = served.step(2, 1, 8)
        served.ops = PlainOps()
        theirs = step()
        served.ops = arms(**{op: wrong})["solution"]
        assert not torch.allclose(step(), theirs, rtol=1e-3)


def test_not_finite_probabilities_are_an_error(served):
    with pytest.raises(ArmFailed, match="not finite"):
        step_worker._checked(served, lambda: torch.full((2, 8), float("nan")), arms())


def test_a_row_is_found_whatever_the_sizes_of_pool_and_table():
    task = next(task for task in TASKS if task.op == "qknorm_rope_kv_store")
    row = next(row for row in task.workloads if row.production)
    rows = Rows(TASKS)

    def signature(**sizes: int) -> Any:
        shapes = {name: (tuple(spec.shape), str(spec.dtype)) for name, spec in row.inputs.items()}
        changed = {name: ((size, *shapes[name][0][1:]), shapes[name][1]) for name, size in sizes.items()}
        return tuple((shapes | changed).items())

    assert rows.find(task, row.op, signature(k_cache=99, v_cache=99, cos_sin_cache=7)) == (row.id, True)
    assert rows.find(task, row.op, signature(q=99, k=99, v=99)) == (None, False)


def test_what_makes_no_sense_is_refused(monkeypatch, capsys):
    assert kda(monkeypatch, "llm", "step", "tiny", "--mode", "grapf") == 2
    assert "--mode grapf: expected graph or eager" in capsys.readouterr().err
    assert kda(monkeypatch, "llm", "step", "tiny", "--processes", 2) == 2
    assert "--processes 2: expected 3 or more" in capsys.readouterr().err
    assert kda(monkeypatch, "llm", "step", "kimi-k2") == 2
    assert "expected a model whose step is built here, tiny, tiny-moe, qwen3-8b" in capsys.readouterr().err


def test_what_does_not_fit_is_left_out_and_the_rest_goes_on(monkeypatch):
    real = step_worker._phase

    def phase(request, served, one, found):
        if one.batch == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(request, served, one, found)

    monkeypatch.setattr(step_worker, "_phase", phase)
    monkeypatch.setattr(step_worker, "await_turn", lambda: None)
    smaller = PHASE.model_copy(update={"batch": 1})
    request = step_protocol.StepRequest(
        model="tiny", tree=None, release="0.5.23", layers=1, seed=0, phases=(PHASE, smaller), check=True, modes=(),
        samples=1,
    )  # fmt: skip
    first, second = step_worker.answer(request).phases
    assert first.left_out == "out of memory: CUDA out of memory. Tried to allocate 9 GiB"
    assert (second.left_out, second.checked is None) == (None, False)
    merged = run_step._merged(PHASE, [first, PhaseAnswer(timed={})], ("graph",))
    assert (merged.modes, merged.left_out) == ({}, first.left_out)


def test_all_files_that_a_step_is_computed_with_make_a_run_stale():
    reached = computed_with("kda_tools.llm.step_worker", ("llm", "models", "traces"), NEVER_STALE)
    assert reached == set(run_step.DECIDING)


# ---- records and pages


SILU = Call(
    task="l01_silu_and_mul",
    op="silu_and_mul",
    inputs={"input": "16x24576:bfloat16"},
    count=36,
    row="qwen3-8b-16x12288",
    production=True,
)
NEW = SILU.model_copy(update={"row": None, "inputs": {"input": "3x8:bfloat16"}, "count": 1})


def measured(monkeypatch: pytest.MonkeyPatch, ours: float = 0.9, calls: tuple[Call, ...] = (SILU,)) -> LlmStepRecord:
    """A run on a GPU whose step took 1000 us, and `ours` of it with our kernels."""
    times = [[1000.0, 1001.0, 999.0], [1002.0, 1000.0, 1001.0], [998.0, 999.0, 1000.0]]
    share = {"total_us": 900.0, "by_kind": {"gemm": 800.0, "silu_and_mul": 100.0}, "launches": 3}
    less = {"total_us": 820.0, "by_kind": {"gemm": 790.0, "silu_and_mul": 30.0}, "launches": 3}
    checked = {
        "calls": [call.model_dump() for call in calls],
        "difference": 1e-3,
        "same_token": 1.0,
        "plain_difference": 2e-3,
        "plain_same_token": 0.5,
        "profile": {"upstream": share, "subject": less},
    }

    def answers(_worker: str, _answer: type, requests: Any, _show: Any) -> Any:
        assert [request.check for request in requests] == [True, False, False]
        for one in times:
            samples = {"upstream": tuple(one), "subject": tuple(t * ours for t in one), "again": tuple(one)}
            timed = {"graph": Timed(samples=samples), "eager": Timed(refused="no")}
            part = PhaseAnswer.model_validate_json(json.dumps({"checked": checked}))
            yield StepAnswer(phases=(part.model_copy(update={"timed": timed}),))

    prepared = run_step.prepare("tiny", KNOWN, KNOWN.kernels.pin, FOLDER, offline=True, allow_busy=True)
    reading = gpu_reading()
    monkeypatch.setattr(
        run_step,
        "prepare",
        lambda *_, **__: replace(prepared, before=reading, tree=ROOT, model=KNOWN.model("qwen3-8b")),
    )
    monkeypatch.setattr(run_step, "answers_of", answers)
    monkeypatch.setattr("kda_judge.evidence.gpu_state.read_state", lambda *_, **__: reading)
    plan = run_step.StepPlan(
        "qwen3-8b", None, (PHASE.model_copy(update={"batch": 16}),), run_step.MODES, 3, 3, 0, True, True, "kda llm step"
    )
    return run_step.run(plan, KNOWN, FOLDER, lambda _: None).model_copy(update={"dirty": False})


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded rows: a call of silu_and_mul saves 2.5 us."""
    saved = RecordedRows.saved_us
    monkeypatch.setattr(RecordedRows, "saved_us", lambda self, call: 2.5 if call.row else saved(self, call))


def page(record: LlmStepRecord) -> str:
    return "".join(step_page.section([record], FOLDER))


def test_the_page_compares_the_step_with_the_sum_of_its_rows(monkeypatch, rows):
    text = page(measured(monkeypatch))
    assert "| decode-b2-kv8 | graph | 1000.0 | 900.0 | 1.111 [1.111, 1.111] | 1.000 [1.000, 1.000] |" in text
    assert "| 16000 -> 17778 | [100.0, 100.0] | 90.0 |" in text
    assert "the step saves more than the sum by rows; by the profiles, all kernels together save 80.0 us" in text
    assert ", `silu_and_mul` 70.0 us where its rows say 90.0 us, and `gemm` changes by -10.0 us" in text
    assert "| eager | does not run: no |" in text
    assert "| silu_and_mul | 100.0 -> 30.0 |" in text
    assert "| all kernels | 900.0 -> 820.0 |" in text
    assert "| decode-b2-kv8 | 1.00e-03, 2.00e-03 | 100%, 50% |" in text
    assert "**stale**" not in text


def test_a_sum_of_some_calls_is_compared_only_where_it_is_too_large(monkeypatch, rows):
    text = page(measured(monkeypatch, calls=(SILU, NEW)))
    assert "| [100.0, 100.0] | 90.0 of some calls |" in text
    assert "not in the sums by rows, since no run on such a GPU has them: a new shape of silu_and_mul" in text
    assert "than the sum by rows" not in text
    assert "| [100.0, 100.0] | - |" in page(measured(monkeypatch, calls=(NEW,)))
    assert "the step saves less than the sum by rows" in page(measured(monkeypatch, ours=0.95, calls=(SILU, NEW)))


def test_a_step_that_agrees_with_its_rows_says_nothing_of_it(monkeypatch, rows):
    assert "than the sum by rows" not in page(measured(monkeypatch, ours=0.91))
    sums = {"softmax": 60.0, "rmsnorm": 30.0}
    assert Saving(sums, (), 89.0, 91.0).agrees is True
    assert Saving(sums, (), 91.0, 92.0).agrees is False
    assert Saving(sums, (NEW,), 91.0, 92.0).agrees is None
    assert Saving(sums, (NEW,), 70.0, 89.0).agrees is False, "calls without a row can only add to the sum"


def test_the_readme_shows_the_latest_clean_run_of_each_model(monkeypatch):
    assert readme_block.steps_md([], FOLDER) == readme_block.NOTHING
    record = measured(monkeypatch)
    disturbed = record.model_copy(update={"noisy": ("busy",)})
    assert readme_block.steps_md([disturbed], FOLDER) == readme_block.NOTHING
    old = measured(monkeypatch, ours=0.5).model_copy(update={"layers": 2})
    head, _, row, _, note = readme_block.steps_md([old, record, disturbed], FOLDER).splitlines()
    assert head == "| model | GPU | decode-b2-kv8 |"
    assert row.endswith("#the-step-with-our-kernels) | H200 | 1.111 [1.111, 1.111]<br>1.00 → 0.90 ms |")
    stale = old.model_copy(update={"hashes": {"step": "0" * 64}})
    shown = readme_block.steps_md([record, stale], FOLDER)
    assert ", 2 of 36 layers (stale) | H200 | 2.000" in shown
    assert shown.endswith("*Stale*: measured before the code, the shapes or a pin changed.\n")
    assert "*Stale*" not in note
    board = record.machine.model_copy(update={"before": gpu_reading("NVIDIA H100 80GB HBM3")})
    other = [record.model_copy(update=more) for more in ({"machine": board}, {"model": "llama3.1-8b"})]
    lines = readme_block.steps_md([record, *other[::-1]], FOLDER).splitlines()[2:5]
    told = [line.split(" | ")[:2] for line in lines]
    assert [(name.split("]")[0], gpu) for name, gpu in told] == [
        ("| [qwen3-8b", "H100"),
        ("| [qwen3-8b", "H200"),
        ("| [llama3.1-8b", "H200"),
    ]
    gone = other[0].model_copy(update={"hashes": {"step": "0" * 64}})
    assert "H100" not in readme_block.steps_md([gone, record], FOLDER), "there is one that is not stale"
    later = stale.model_copy(update={"utc": "2999-01-01T00:00:00Z"})
    for runs in ([gone, later], [later, gone]):
        assert "H100" not in readme_block.steps_md(runs, FOLDER), "the last of those that are stale"


def test_a_tasks_draft_has_the_newest_steps_that_call_it(monkeypatch):
    record = measured(monkeypatch)
    task, other = find_task("silu_and_mul"), find_task("temperature_softmax")
    stale = record.model_copy(update={"model": "llama3.1-8b", "hashes": {"step": "0" * 64}})
    disturbed = record.model_copy(update={"run_id": "last", "noisy": ("busy",)})
    old = record.model_copy(update={"run_id": "old"})
    monkeypatch.setattr(task_gain, "read", lambda _: [old, record, stale, disturbed])
    line, marked = task_gain.gain_of_steps(task).splitlines()[1:]
    assert line == f"- qwen3-8b (H200, run {record.run_id}, 36 of 36 layers): decode-b2-kv8 1.111 [1.111, 1.111]"
    assert marked.startswith("- llama3.1-8b (H200, run ")
    assert " (stale)): " in marked
    assert task_gain.gain_of_steps(task, stale_too=False).splitlines()[1:] == [line]
    assert task_gain.gain_of_steps(other) == task_gain.NOTHING


def test_what_is_stale_or_no_clean_run_is_said(monkeypatch):
    record = measured(monkeypatch)
    stale = record.model_copy(update={"hashes": {"step": "0" * 64, "l01_silu_and_mul": "0" * 64}, "dirty": True})
    text = page(stale)
    assert "**stale**: the code or the settings of the run, l01_silu_and_mul changed since" in text
    assert staleness.LOST in text
    clean, later = (stale.model_copy(update={"utc": f"{year}", "dirty": year != 2998}) for year in (2998, 2999))
    assert step_page.chosen([clean, later], FOLDER) == [clean]
    same = record.model_copy(update={"utc": "2999", "dirty": True})
    assert step_page.chosen([clean, same], FOLDER) == [same], "its files are those of this checkout"
    assert staleness.LOST not in page(same)
    assert " with changes`" not in page(same)
    assert "` with changes, `" in page(same)
    assert step_page.NOT_MEASURED in "".join(step_page.section([], FOLDER))


def test_an_interval_that_is_not_that_of_its_samples_is_refused(monkeypatch, tmp_path):
    record = measured(monkeypatch)
    log = step_protocol.log(tmp_path)
    record_log.append(log, record)
    assert step_page.read(tmp_path) == [record]
    phase = record.phases[0]
    better = phase.modes["graph"].speedup.model_copy(update={"estimate": 9.0})
    forged = phase.model_copy(update={"modes": {"graph": phase.modes["graph"].model_copy(update={"speedup": better})}})
    record_log.append(log, record.model_copy(update={"phases": (forged,), "run_id": provenance.run_id()}))
    with pytest.raises(LedgerError, match=r"decode-b2-kv8, modes[.]graph: its intervals are not those of its samples"):
        step_page.read(tmp_path)


def test_a_saving_is_that_of_the_newest_record_on_the_same_gpu(monkeypatch, tmp_path):
    task = make_checkout(tmp_path)
    records = [make_record(task, 0), make_record(task, 1, "2026-11-21T04:30:00Z")]
    pins = {"upstream_latest": "sglang 0.5.23 x"}
    records = [
        one.model_copy(update={"provenance": one.provenance.model_copy(update={"pins": pins})}) for one in records
    ]
    monkeypatch.setattr("kda_tools.llm.step_worth.ledger.read", lambda _: records)
    row = records[1].rows[0]
    call = SILU.model_copy(update={"task": task.folder, "row": row.id})
    found = RecordedRows([task], "NVIDIA H200", "sglang 0.5.23 x")
    theirs, ours = (report.median(row, arm, Metric.DEVICE) for arm in (*pins, records[1].settings.subject))
    assert found.saved_us(call) == theirs - ours != 0
    assert found.saved_us(call.model_copy(update={"row": "another"})) is None
    assert RecordedRows([task], "another GPU", "sglang 0.5.23 x").saved_us(call) is None
    assert RecordedRows([task], "NVIDIA H200", "sglang 0.5.24 x").saved_us(call) is None
