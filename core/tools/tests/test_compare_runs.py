"""Two runs side by side: what counts as moved, what cannot be compared, and `kda compare` and `kda rerun` around it."""

import re
from io import StringIO
from math import exp, log

import numpy as np
import pytest
import torch
from rich.console import Console

from core.judge.tests.records_factory import COMMIT, ROWS, cpu_record, gpu_reading, make_record, make_row
from core.tools.tests.conftest import Kda
from kda_judge.contract.errors import ExitCode, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import gpu_state, provenance, stats
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.ledger import append, read
from kda_judge.evidence.run_record import Basis, Interval, RunRecord, Verdict
from kda_tools.cli import measure
from kda_tools.lab.compare_runs import Change, compare, obstacles, ratio
from kda_tools.project.rerun import comparison_notes, find_run, same_session
from kda_tools.publish.comparison_view import outcome, print_comparison
from kda_tools.publish.report import stale


@pytest.fixture
def old(task: Task) -> RunRecord:
    return make_record(task)


def new_run(task: Task, faster: float = 1.0, seed: int = 1) -> RunRecord:
    """A later run; the solution of the first row takes `1 / faster` of what it took."""
    record = make_record(task, seed=seed, utc="2026-11-21T04:30:00Z")
    row = record.rows[0]
    arm = row.arms["solution"]
    samples = {
        metric: tuple(tuple(value / faster for value in part) for part in parts)
        for metric, parts in arm.samples.items()
    }
    changed = row.model_copy(update={"arms": {**row.arms, "solution": arm.model_copy(update={"samples": samples})}})
    return recompute(record.model_copy(update={"rows": (changed, *record.rows[1:])}))


def about(estimate: float, reach: float) -> Interval:
    return Interval(estimate=estimate, low=estimate / (1 + reach), high=estimate * (1 + reach))


# ---- the rule ---------------------------------------------------------------------------------


def test_the_interval_of_the_ratio() -> None:
    """By hand: log half widths 0.03 and 0.04 make 0.05, and each side takes the other run's opposite one."""
    symmetric = ratio(
        Interval(estimate=2.0, low=2 * exp(-0.03), high=2 * exp(0.03)),
        Interval(estimate=1.0, low=exp(-0.04), high=exp(0.04)),
    )
    assert symmetric.estimate == pytest.approx(0.5)
    assert (log(symmetric.low), log(symmetric.high)) == pytest.approx((log(0.5) - 0.05, log(0.5) + 0.05))
    skew = ratio(
        Interval(estimate=1.0, low=exp(-0.04), high=exp(0.12)), Interval(estimate=1.0, low=exp(-0.05), high=exp(0.03))
    )
    assert (log(skew.low), log(skew.high)) == pytest.approx((-0.13, 0.05))
    exact = Interval(estimate=1.5, low=1.5, high=1.5)
    assert ratio(exact, exact) == Interval(estimate=1.0, low=1.0, high=1.0)
    with pytest.raises(ValueError, match=r"of one level, got 0.95 and 0.9"):
        ratio(about(1, 0.1), about(1, 0.1).model_copy(update={"level": 0.9}))


@pytest.mark.parametrize(
    ("factor", "reach", "moved"),
    [
        (1.0, 0.001, False),
        (1.019, 0.0001, False),  # significant, but sessions differ by as much
        (1.021, 0.0001, True),
        (1 / 1.019, 0.0001, False),
        (1 / 1.021, 0.0001, True),
        (1.10, 0.03, True),
        (1.10, 0.09, False),  # large, but no better known than that
        (0.90, 0.03, True),
    ],
)
def test_moved_takes_the_whole_interval_beyond_the_margin(factor: float, reach: float, moved: bool) -> None:
    before, after = about(1.5, reach / 2**0.5), about(1.5 * factor, reach / 2**0.5)
    assert Change("row", "baseline", before, after, ratio(before, after)).outside_margin is moved


def test_equal_runs_rarely_disagree_and_unequal_ones_do() -> None:
    """The rates that docs/method_evidence.md states for 3 generations and processes that differ by 1%: 0% and 87%."""

    def speedup(rng: np.random.Generator, factor: float) -> Interval:
        arms: tuple[list[list[float]], ...] = ([], [])
        for _ in range(3):
            for arm, samples in enumerate(arms):
                level = 10 * np.exp(rng.normal(0, 0.01)) * (factor if arm == 0 else 1)
                samples.append((level * (1 + rng.exponential(0.01, 12))).tolist())
        return stats.speedup(*arms)

    def share_moved(factor: float, runs: int) -> float:
        rng = np.random.default_rng(5)
        pairs = [(speedup(rng, 1.0), speedup(rng, factor)) for _ in range(runs)]
        return sum(Change("row", "baseline", *pair, ratio(*pair)).outside_margin for pair in pairs) / runs

    assert share_moved(1.0, 100) <= 0.01
    assert 0.75 <= share_moved(1.10, 60) <= 0.97


# ---- whole runs -------------------------------------------------------------------------------


def test_runs_of_the_same_code_agree(task: Task, old: RunRecord) -> None:
    comparison = compare(old, new_run(task))
    assert comparison.agree
    assert [(change.row, change.opponent) for change in comparison.changes] == [
        (row, arm) for row in ROWS for arm in ("baseline", "upstream_latest")
    ]
    assert [change.opponent for change in comparison.headline] == ["baseline", "upstream_latest"]
    assert outcome(comparison) == "the runs agree: the speedup of 0 of 2 rows changed by more than 2%"


@pytest.mark.parametrize("factor", [1.15, 0.85])
def test_the_row_that_moved_is_named_with_how_much(task: Task, old: RunRecord, factor: float) -> None:
    comparison = compare(old, new_run(task, faster=factor))
    moved = [change for change in comparison.changes if change.outside_margin]
    assert [(change.row, change.opponent) for change in moved] == [(ROWS[0], "baseline"), (ROWS[0], "upstream_latest")]
    assert all(change.ratio.estimate == pytest.approx(factor, rel=0.02) for change in moved)
    assert not comparison.agree
    out = StringIO()
    print_comparison(Console(file=out, width=60), comparison, ["torch was 2.11.0, now 2.13.0"])
    lines = out.getvalue().splitlines()
    (line,) = [line for line in lines if ROWS[0] in line and " baseline " in line]
    shown = re.search(r"([+-]\d+\.\d)% \[", line)
    assert shown
    assert float(shown[1]) == pytest.approx(100 * (factor - 1), abs=2)
    assert line.rstrip().endswith("changed")
    assert "note: torch was 2.11.0, now 2.13.0" in lines
    assert lines[-1] == "the runs do not agree: the speedup of 1 of 2 rows changed by more than 2% (small-4x8)"


def test_what_cannot_be_compared_is_said(task: Task, old: RunRecord) -> None:
    new = new_run(task)
    wrong = new.rows[0].model_copy(update={"verdict": Verdict.INVALID, "reason": "no samples"})
    extra = recompute(new.model_copy(update={"rows": (make_row("extra", 5.0, np.random.default_rng(3)),)})).rows
    fewer = new.model_copy(update={"rows": (wrong, *extra)})
    settings = new.settings.model_copy(update={"against": ("baseline", "eager")})
    comparison = compare(old, fewer.model_copy(update={"settings": settings}))
    assert comparison.lost == (
        f"only {old.run_id} was against upstream_latest",
        f"only {new.run_id} was against eager",
        f"row {ROWS[1]}: only {old.run_id} has it",
        f"row extra: only {new.run_id} has it",
        f"row {ROWS[0]}: was FASTER, is INVALID: no samples",
    )
    assert (comparison.changes, comparison.headline, comparison.agree) == ((), (), False)
    assert outcome(comparison).endswith("; 5 things could not be compared")


def test_a_missing_speedup_is_lost_and_not_passed_over(task: Task, old: RunRecord) -> None:
    new = new_run(task)
    kept = {"baseline": new.rows[0].speedup[Basis.DEVICE]["baseline"]}
    row = new.rows[0].model_copy(update={"speedup": {Basis.DEVICE: kept}})
    comparison = compare(old, new.model_copy(update={"rows": (row, new.rows[1])}))
    assert comparison.lost == (f"row {ROWS[0]}: no speedup against upstream_latest",)
    assert not comparison.agree


def test_the_headline_compares_means_of_the_same_rows_only(task: Task, old: RunRecord) -> None:
    new = new_run(task)
    assert compare(old, new).headline
    assert not compare(old, recompute(new.model_copy(update={"rows": new.rows[:1]}))).headline


def test_everything_that_differs_is_noted(task: Task, old: RunRecord) -> None:
    new = new_run(task)
    assert comparison_notes(old, new) == []
    versions = {**new.provenance.versions, "torch": "2.13.0"}
    hashes = {**new.provenance.hashes, "solution": "f" * 64}
    new = new.model_copy(
        update={
            "provenance": new.provenance.model_copy(update={"versions": versions, "hashes": hashes, "pins": {}}),
            "machine": new.machine.model_copy(update={"before": gpu_reading("NVIDIA B200")}),
            "settings": new.settings.model_copy(update={"samples": 20}),
            "noisy": ("before: the GPU is held by pid 7",),
        }
    )
    assert comparison_notes(old, new) == [
        f"solution differs: sha256 {old.provenance.hashes['solution'][:12]}, now ffffffffffff",
        f"the pin of baseline differs: {old.provenance.pins['baseline']}, now absent",
        "the GPU differs: NVIDIA H200, now NVIDIA B200",
        "torch was 2.11.0, now 2.13.0",
        "samples was 12, now 20",
        f"{new.run_id} is noisy: before: the GPU is held by pid 7",
    ]


# ---- finding and repeating a run --------------------------------------------------------------


def test_a_run_is_found_by_how_its_id_begins(task: Task, old: RunRecord) -> None:
    new = new_run(task)
    with pytest.raises(UsageError, match=r"run '2026': no such run in the ledger of fake; the ledgers are empty"):
        find_run([task], "2026")
    append(task.ledger, old)
    append(task.ledger, new)
    assert find_run([task], "20261121") == (task, new)
    assert find_run([task], old.run_id) == (task, old)
    with pytest.raises(
        UsageError, match=f"expected the beginning of one run id, got that of {old.run_id}, {new.run_id}"
    ):
        find_run([task], "2026112")
    with pytest.raises(UsageError, match=r"run '2027': no such run in the ledger of fake; nearest: 2026"):
        find_run([task], "2027")
    with pytest.raises(UsageError, match="no such run"):
        find_run([task], "")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: gpu_reading())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_the_session_has_the_record_s_own_settings(task: Task, old: RunRecord, h200: None) -> None:
    settings = old.settings.model_copy(update={"rows": ("small*",), "generations": 5, "samples": 7, "seeds": (1, 2, 3)})
    session = same_session(task, old.model_copy(update={"settings": settings}), allow_busy=True, anyway=False, ports={})
    assert session.settings == settings
    assert (session.kind, session.request.rows, session.request.again) == ("cuda", ["small*"], True)
    assert session.request.allow_busy
    quiet = same_session(task, old.model_copy(update={"noise_floor": {}}), allow_busy=False, anyway=False, ports={})
    assert not quiet.request.again


def test_a_repetition_of_something_else_is_refused(
    task: Task, old: RunRecord, h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return 1 * x\n")
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: gpu_reading("NVIDIA B200"))
    with pytest.raises(UsageError) as refused:
        same_session(task, old, allow_busy=False, anyway=False, ports={})
    first, solution, other, last = str(refused.value).splitlines()
    assert first == f"run {old.run_id} cannot be repeated here, what it measured is not what is here:"
    was, now = old.provenance.hashes["solution"][:12], provenance.hashes(task)["solution"][:12]
    assert solution == f"  solution differs: sha256 {was}, now {now}"
    assert other == "  the GPU differs: NVIDIA H200, now NVIDIA B200"
    assert last == f"check out its commit {COMMIT[:10]} on an NVIDIA H200, or compare with --anyway"
    assert same_session(task, old, allow_busy=False, anyway=True, ports={}).settings == old.settings


@pytest.mark.parametrize("part", ["solution", "baseline", "workloads", "reference", "config", "harness"])
def test_every_part_that_decides_a_number_stands_in_the_way(old: RunRecord, part: str) -> None:
    now = old.provenance.model_copy(update={"hashes": {**old.provenance.hashes, part: "0" * 64}})
    (reason,) = obstacles(old.provenance, now, "NVIDIA H200", "NVIDIA H200")
    assert reason.startswith(f"{part} differs: sha256 ")
    assert obstacles(old.provenance, old.provenance, "NVIDIA H200", "NVIDIA H200") == []


def test_an_arm_that_the_run_brought_stands_in_no_way(task: Task, old: RunRecord, h200: None) -> None:
    """The solution's export is made anew for every run, and its hash is in the record beside those of the task."""
    hashes = {**old.provenance.hashes, "port portable": "0" * 64}
    with_port = old.model_copy(update={"provenance": old.provenance.model_copy(update={"hashes": hashes})})
    assert same_session(task, with_port, allow_busy=False, anyway=False, ports={}).settings == old.settings
    assert stale(task, with_port) == []


def test_a_run_of_a_cpu_and_a_machine_without_a_gpu(
    task: Task, old: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="was made without a GPU and measured nothing that could be repeated"):
        same_session(task, cpu_record(task), allow_busy=False, anyway=True, ports={})
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    with pytest.raises(
        MissingRequirement, match="was measured on an NVIDIA H200: to repeat it takes one, and no NVIDIA"
    ):
        same_session(task, old, allow_busy=False, anyway=True, ports={})


# ---- the commands -----------------------------------------------------------------------------


def test_compare_two_recorded_runs(task: Task, old: RunRecord, kda: Kda) -> None:
    for record in (old, new_run(task), new_run(task, faster=1.2, seed=2).model_copy(update={"run_id": "third"})):
        append(task.ledger, record)
    code, shown, _ = kda("compare", "20261120", "20261121")
    assert code == ExitCode.OK
    assert "the runs agree" in shown
    code, shown, _ = kda("compare", "20261120", "third", "--task", "fake")
    assert code == ExitCode.UNFIT_ROWS
    assert "the speedup of 1 of 2 rows changed by more than 2% (small-4x8)" in shown
    assert kda("compare", "20261120", "fourth").code == ExitCode.USAGE


@pytest.mark.parametrize(("faster", "code"), [(1.0, ExitCode.OK), (1.2, ExitCode.UNFIT_ROWS)])
def test_rerun_measures_compares_and_records(
    task: Task, old: RunRecord, kda: Kda, h200: None, monkeypatch: pytest.MonkeyPatch, faster: float, code: ExitCode
) -> None:
    """All but the measuring itself, which takes a GPU."""
    append(task.ledger, old)
    made = new_run(task, faster=faster)
    monkeypatch.setattr(measure, "_measure", lambda session: made)
    answer = kda("rerun", "2026")
    assert answer.code == code
    assert ("the runs agree" in answer.out) == (code is ExitCode.OK)
    assert read(task.ledger) == [old], "nothing is recorded without --record"
    assert kda("rerun", "2026", "--record").code == code
    assert read(task.ledger)[1] == made.model_copy(update={"rerun_of": old.run_id})


def test_a_rerun_with_a_failed_row_says_so_by_its_exit_code(
    task: Task, old: RunRecord, kda: Kda, h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(task.ledger, old)
    rows = tuple(row.model_copy(update={"verdict": Verdict.TIMEOUT, "reason": "no answer"}) for row in old.rows)
    failed = new_run(task).model_copy(update={"rows": rows})
    monkeypatch.setattr(measure, "_measure", lambda session: failed)
    assert kda("rerun", "2026").code == ExitCode.ARM_FAILED
    monkeypatch.setattr(measure, "_measure", lambda _: new_run(task).model_copy(update={"partial": True}))
    assert kda("rerun", "2026").code == ExitCode.INTERRUPTED
