"""Recorded regression grids: runs that add up and runs that do not, from `kda validate --record` to the page."""

from pathlib import Path
from typing import Any

import pytest
import torch

from core.judge.tests.records_factory import cpu_record, gpu_reading, make_checkout, make_record
from core.tools.tests.conftest import Kda
from core.tools.tests.test_cli import GRID
from kda_judge import bench
from kda_judge.bench import CHANGED
from kda_judge.contract.errors import ExitCode, LedgerError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.evidence import gpu_state, record_log
from kda_judge.evidence.run_record import RunRecord, Verdict
from kda_tools.lab.grid import run_grid as grid_run
from kda_tools.lab.grid.grid_record import (
    FailedRow,
    GridRecord,
    Worst,
    failures,
    fingerprint,
    log,
    opponents_outside,
    positions,
    ranges,
    runs,
)
from kda_tools.lab.grid.join_runs import join
from kda_tools.project.new_task import IGNORED
from kda_tools.publish.generate import publish
from kda_tools.publish.grid_page import SHOWN, digest_md

IDS = [f"row-{number}" for number in range(10)]
README = "<!-- kda:results:begin -->\n<!-- kda:results:end -->\n"


def a_run(task: Task, hour: int, *checked: tuple[int, int], **changes: Any) -> GridRecord:
    """A run at that hour over those rows of ten, all of which agree; `changes` replace its fields."""
    base = make_record(task, utc=f"2026-11-20T{hour:02d}:00:00Z")
    fields = {
        "run_id": base.run_id,
        "utc": base.utc,
        "seconds": 61.5,
        "command": "kda validate fake --record",
        "task": "fake",
        "provenance": base.provenance,
        "machine": base.machine,
        "settings": base.settings,
        "total": 10,
        "grid": fingerprint(IDS),
        "asked": sum(last - first + 1 for first, last in checked),
        "checked": checked,
        "calls": 100 * hour,
        "failed": (),
        "opponents": {},
        "worst": {},
    }
    return GridRecord(**{**fields, **changes})


def on_gpu(record: GridRecord, name: str) -> GridRecord:
    machine = record.machine.model_copy(update={"before": gpu_reading(name)})
    return record.model_copy(update={"machine": machine})


def of(record: GridRecord, part: str, **values: Any) -> GridRecord:
    """The run with other entries in `hashes` or `versions` of its provenance."""
    changed = {**getattr(record.provenance, part), **values}
    return record.model_copy(update={"provenance": record.provenance.model_copy(update={part: changed})})


def failed(position: int, verdict: Verdict = Verdict.INCORRECT) -> FailedRow:
    return FailedRow(id=IDS[position], position=position, verdict=verdict, reason=f"solution: `y` | {position} wrong")


def page(task: Task, *records: GridRecord) -> str:
    for record in records:
        record_log.append(log(task), record)
    text, short = digest_md(task, whole=True), digest_md(task)
    assert text is not None
    assert short is not None
    assert short.partition("## What was checked")[0] == text.partition("## What was checked")[0]
    return text


# ---- which rows agree -------------------------------------------------------------------------


CHECKED = "RuntimeError: Runtime check failed at fused_add_rmsnorm.cuh:177: Large hidden_sizes are not supported"


@pytest.mark.parametrize(
    ("arm", "raised", "passed", "production", "partial", "agrees"),
    [
        ("baseline", CHECKED, True, False, False, True),
        ("baseline", "RuntimeError: jit rmsnorm: unsupported hidden_size=2880", True, False, False, True),
        ("baseline", "RuntimeError: ninja exited with status 1", True, False, False, True),
        ("baseline", "RuntimeError: Failed at a.cuh:9: cudaErrorIllegalAddress", True, False, False, False),
        ("baseline", "RuntimeError: Triton Error [CUDA]: an illegal memory access", True, False, False, False),
        (
            "baseline",
            "RuntimeError: Tensor match failed: device=cuda:0, a.cuh:9",
            True,
            False,
            False,
            True,
        ),
        ("baseline", "ImportError: no FlashInfer", True, False, False, False),
        ("baseline", "RuntimeError: CUDA error: an illegal memory access was encountered", True, False, False, False),
        ("baseline", CHECKED, False, False, False, False),
        ("solution", CHECKED, False, False, False, False),
        ("baseline", CHECKED, True, True, False, False),
        ("baseline", CHECKED, True, False, True, False),
    ],
)
def test_an_opponent_may_refuse_a_row_of_a_grid(
    tmp_path: Path, arm: str, raised: str, passed: bool, production: bool, partial: bool, agrees: bool
) -> None:
    """SGLang checks arguments in host code and throws a RuntimeError, as CUDA does when the GPU fails."""
    record = cpu_record(make_checkout(tmp_path))
    row = record.rows[0]
    theirs = row.arms["solution"].correctness.model_copy(update={"passed": False, "failure": raised})
    ours = row.arms["solution"].correctness.model_copy(update={"passed": passed})
    arms = {
        "solution": row.arms["solution"].model_copy(update={"correctness": ours}),
        "baseline": row.arms["solution"].model_copy(update={"correctness": theirs}),
    }
    reason = f"arm {arm!r} raised {raised}"
    update = {"verdict": Verdict.ERROR, "reason": reason, "production": production, "arms": arms}
    run = record.model_copy(
        update={
            "rows": (row.model_copy(update=update),),
            "partial": partial,
            "settings": record.settings.model_copy(update={"against": ("baseline",)}),
        }
    )
    assert (failures(run) == []) == agrees
    assert opponents_outside(run) == ({"baseline": (row.id,)} if agrees else {})


# ---- ranges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((), ()), ((4,), ((4, 4),)), ((3, 1, 2, 2, 7, 9, 8), ((1, 3), (7, 9))), ((0, 2, 4), ((0, 0), (2, 2), (4, 4)))],
)
def test_ranges(numbers: tuple[int, ...], expected: tuple[tuple[int, int], ...]) -> None:
    assert ranges(numbers) == expected
    assert list(positions(expected)) == sorted(set(numbers))


def test_the_fingerprint_is_of_names_and_their_order() -> None:
    assert len({fingerprint(ids) for ids in (["a", "b"], ["b", "a"], ["ab"], ["a"], ["a", "b", "c"])}) == 5


# ---- runs that add up -------------------------------------------------------------------------


def test_runs_of_one_state_add_up_and_rows_count_once(task: Task) -> None:
    text = page(task, a_run(task, 3, (0, 4), asked=10), a_run(task, 4, (3, 6), (9, 9)), a_run(task, 5, (7, 8)))
    assert (
        "## NVIDIA H200\n\n**10 of 10 rows agree with the oracle** (1200 calls compared in full) on NVIDIA H200, "
        "in 3 runs of commit `0123456789`, 2026-11-20.\n"
    ) in text
    assert "| 5 of 10, 5 left out: `--limit-s` | 0 | 300 | 62 |" in text
    assert "changed since:" not in text


def test_what_is_missing_is_said(task: Task) -> None:
    text = page(task, a_run(task, 4, (5, 5), (7, 8), failed=(failed(7),), asked=9, interrupted=True))
    assert "**2 of 10 rows agree with the oracle, 1 does not, 7 are not checked yet** (400 calls" in text
    assert "| 3 of 10, 6 left out: interrupted | 1 |" in text


@pytest.mark.parametrize("part", ["solution", "reference", "workloads", "config", "baseline", "harness"])
def test_a_run_of_other_files_adds_nothing(task: Task, part: str) -> None:
    old = of(a_run(task, 3, (0, 4)), "hashes", **{part: "0" * 64})
    text = page(task, old, a_run(task, 4, (5, 6)))
    assert "**2 of 10 rows agree with the oracle, 8 are not checked yet** (400 calls" in text
    assert f"| {old.run_id} | 1 | 5 of 10 |" in text
    assert text.endswith(f"`kda validate fake --record` | {part} |\n")


def test_a_run_of_another_compiler_or_grid_adds_nothing(task: Task) -> None:
    first = a_run(task, 3, (0, 3))
    others = [
        of(a_run(task, 4, (4, 5)), "versions", torch="2.12.0"),
        a_run(task, 5, (6, 7), grid=fingerprint(IDS[::-1])),
        a_run(task, 6, (8, 10), total=11, grid=fingerprint([*IDS, "new"])),
    ]
    same = of(a_run(task, 7, (9, 9)), "versions", driver="580.2", python="3.11.0")
    joined = join([first, *others, same])
    assert [(len(one.records), sorted(one.checked)) for one in joined] == [
        (1, [4, 5]),
        (1, [6, 7]),
        (1, [8, 9, 10]),
        (2, [0, 1, 2, 3, 9]),
    ]


def test_every_kind_of_gpu_has_its_own_rows(task: Task) -> None:
    text = page(task, a_run(task, 3, (0, 8)), on_gpu(a_run(task, 4, (0, 9)), "NVIDIA B200"))
    assert "## NVIDIA H200\n\n**9 of 10 rows agree with the oracle, 1 is not checked yet** (300 calls" in text
    assert "## NVIDIA B200\n\n**10 of 10 rows agree with the oracle** (400 calls" in text


# ---- rows that fail ---------------------------------------------------------------------------


def test_a_wrong_result_is_not_taken_back_by_a_later_run(task: Task) -> None:
    text = page(task, a_run(task, 3, (0, 9), failed=(failed(2),)), a_run(task, 4, (2, 2)))
    assert "**9 of 10 rows agree with the oracle, 1 does not** (700 calls" in text
    assert "| `row-2` | INCORRECT | `solution: 'y' \\| 2 wrong` | 20261120T030000Z-000000 | agreed |\n" in text


def test_what_could_not_be_compared_is_settled_by_a_later_check(task: Task) -> None:
    error, timeout = failed(1, Verdict.ERROR), failed(2, Verdict.TIMEOUT)
    text = page(task, a_run(task, 3, (0, 9), failed=(error, timeout)), a_run(task, 4, (1, 1)))
    assert "**9 of 10 rows agree with the oracle, 1 does not** (700 calls" in text
    assert (
        "| `row-1` | ERROR | `solution: 'y' \\| 1 wrong` | 20261120T030000Z-000000 | agreed, which counts |\n" in text
    )
    assert "| `row-2` | TIMEOUT | `solution: 'y' \\| 2 wrong` | 20261120T030000Z-000000 | - |\n" in text
    again = page(task, a_run(task, 5, (1, 1), failed=(error,)))
    assert "**8 of 10 rows agree with the oracle, 2 do not**" in again, "the latest check of row-1 failed"


def test_a_row_on_which_an_opponent_failed_says_nothing_about_the_subject(task: Task) -> None:
    theirs = failed(1, Verdict.ERROR).model_copy(update={"reason": "arm 'baseline' raised ImportError: no FlashInfer"})
    ours = failed(2, Verdict.ERROR).model_copy(update={"reason": "arm 'solution' raised RuntimeError: no result"})
    run = a_run(task, 3, (0, 9), failed=(theirs, ours, failed(3)))
    assert "baseline" in run.settings.against
    begin = "**7 of 10 rows agree with the oracle, 2 do not, 1 is not compared, since an opponent failed there** (300"
    assert begin in page(task, run)
    (joined,) = join([run])
    assert joined.settled_positions == set(range(10)) - {1, 2}, (
        "a wrong result stands, a check that broke off may be repeated"
    )
    assert "**8 of 10 rows agree with the oracle, 2 do not** (700" in page(task, a_run(task, 4, (1, 1)))


def test_opponents_and_the_worst_elements(task: Task) -> None:
    worst = [
        Worst(used=used, row=f"row-{used}", output="y", rel_l2=error) for used, error in ((0.4, 3e-3), (0.5, 1e-3))
    ]
    text = page(
        task,
        a_run(task, 3, (0, 4), opponents={"baseline": ("row-1", "row-3")}, worst={"float32": worst[0]}),
        a_run(task, 4, (3, 9), opponents={"baseline": ("row-3", "row-9")}, worst={"float32": worst[1]}),
    )
    assert (
        "<details><summary>On 3 rows baseline (sglang 1.0) itself is outside the tolerance or refuses.</summary>\n\n"
        "`row-1`, `row-3`, `row-9`\n" in text
    )
    assert "| float32 | 0.500 | `y` of `row-0.5` | 3.00e-03 |\n" in text


def test_a_page_names_so_many_rows_and_says_that_there_are_more(task: Task) -> None:
    ids = tuple(f"wrong-{number}" for number in range(SHOWN + 2))
    text = page(task, a_run(task, 3, (0, 9), opponents={"baseline": ids}))
    assert f"`wrong-{SHOWN - 1}`\n\n2 more are in `grid.jsonl`.\n" in text
    assert f"`wrong-{SHOWN}`" not in text


# ---- what the page follows --------------------------------------------------------------------


def test_the_page_says_what_changed_since_and_prefers_what_holds_now(task: Task) -> None:
    current = a_run(task, 3, (0, 9))
    assert "changed since:" not in page(task, current)
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    assert "in 1 run of commit `0123456789`, 2026-11-20; **changed since: solution**.\n" in page(task)
    newer = a_run(task, 4, (0, 1))
    assert "**2 of 10 rows agree with the oracle, 8 are not checked yet**" in page(task, newer)
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x\n")
    text = page(task)
    assert "**10 of 10 rows agree with the oracle** (300 calls" in text
    assert f"| {newer.run_id} | 2 | 2 of 10 |" in text


def test_a_moved_pin_is_named(task: Task) -> None:
    record_log.append(log(task), a_run(task, 3, (0, 9)))
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('version = "1.0"', 'version = "1.1"'))
    assert "; **changed since: config, pin of baseline**.\n" in page(Task(task.path))


def test_an_edited_digit_of_the_page_or_of_a_line_is_found(task: Task) -> None:
    record_log.append(log(task), a_run(task, 3, (0, 8), asked=10))
    publish([task], check=False, draw=False)
    path = task.path / "docs" / "grid.md"
    assert publish([task], check=True, draw=False) == []
    path.write_text(path.read_text().replace("9 of 10 rows", "10 of 10 rows"))
    (wrong,) = publish([task], check=True, draw=False)
    assert wrong.startswith(f"{path}:")
    assert "expected '**9 of 10 rows agree" in wrong
    publish([task], check=False, draw=False)
    log(task).write_text(log(task).read_text().replace('"checked":[[0,8]]', '"checked":[[0,9]]'))
    assert len(publish([task], check=True, draw=False)) == 1


def test_a_task_without_a_run_has_no_page_and_a_copy_takes_none(task: Task) -> None:
    assert digest_md(task) is None
    assert IGNORED("docs", ["grid.jsonl", "grid.md", "grid.py", "dispatch.md"]) == {"grid.jsonl", "grid.md"}


# ---- lines that cannot be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"checked": ((0, 4), (4, 6))}, "checked: expected ascending ranges with gaps below 10"),
        ({"checked": ((0, 4), (5, 6))}, "checked: expected ascending ranges with gaps below 10"),
        ({"checked": ((4, 3),)}, "checked: expected ascending ranges with gaps below 10"),
        ({"checked": ((-1, 3),)}, "checked: expected ascending ranges with gaps below 10"),
        ({"checked": ((8, 10),)}, "checked: expected ascending ranges with gaps below 10"),
        ({"failed": (failed(9),)}, "failed: row 'row-9' at 9 is not among the checked ones"),
    ],
)
def test_a_line_that_contradicts_itself(task: Task, changes: dict[str, Any], named: str) -> None:
    record_log.append(log(task), a_run(task, 3, (0, 8)).model_copy(update=changes))
    with pytest.raises(LedgerError, match=rf"grid\.jsonl:1: .*{named}"):
        runs(task)


def test_lines_of_a_cpu_of_another_task_or_twice(task: Task) -> None:
    run = a_run(task, 3, (0, 8))
    for lines, named in (
        ((run.model_copy(update={"machine": cpu_record(task).machine}),), "1: .*expected a GPU and its state"),
        ((run, run.model_copy(update={"task": "other"})), "2: expected a run of fake, got one of other"),
        ((run, run), f"2: run {run.run_id} is there twice"),
    ):
        log(task).unlink(missing_ok=True)
        with pytest.raises(LedgerError, match=rf"grid\.jsonl:{named}"):
            page(task, *lines)


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def recorded(toy: Task, monkeypatch: pytest.MonkeyPatch) -> list[RunRecord]:
    """`kda validate --record` takes the CPU for an H200: rows agree there as they would; gives what was run."""
    made: list[RunRecord] = []
    real = bench.run

    def run(*args: Any, **kwargs: Any) -> RunRecord:
        result = real(*args, **kwargs)
        machine = result.machine.model_copy(update={"kind": "cuda", "before": gpu_reading(), "after": gpu_reading()})
        made.append(result.model_copy(update={"machine": machine}))
        return made[-1]

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(grid_run, "demand_gpu", lambda session: None)
    monkeypatch.setattr(gpu_state, "read_state", lambda *_: gpu_reading())
    (toy.path / "bench" / "grid.py").write_text(GRID)
    return made


def test_limited_runs_complete_a_grid(recorded: list[RunRecord], toy: Task, kda: Kda) -> None:
    wrong = "factor * x + y + (1 if factor == 2 and x.numel() == 32 else 0)"
    baseline = toy.path / "baseline" / "__init__.py"
    baseline.write_text(baseline.read_text().replace("factor * x + y", wrong, 1))
    code, out, _ = kda("validate", "axpy", "--record", "--rows", "row-1")
    assert code == ExitCode.OK
    assert "files and published numbers" not in out
    assert out.endswith(
        "axpy: 1 of 5 rows agree with the oracle, 4 are not checked yet (7 calls compared in full) on NVIDIA H200, "
        f"in 1 run of commit unknown (dirty), {recorded[0].utc[:10]}\n"
    )
    for checked in (((0, 0),), ((1, 1),)):
        code, out, _ = kda("validate", "axpy", "--record", "--rest", "--limit-s", "0")
        assert code == ExitCode.OK
        assert runs(toy)[-1].checked == checked
    assert f"axpy: 1 of {3} rows checked, 2 not: --limit-s 0\n" in out
    assert kda("validate", "axpy", "--record", "--rest")[0] == ExitCode.OK
    last = runs(toy)[-1]
    assert (last.checked, last.asked, last.total, last.failed) == (((2, 2), (4, 4)), 2, 5, ())
    assert last.grid == fingerprint(["out-64x16", "inplace-64x16", "row-0", "row-1", "row-2"])
    # The first opponent that runs on this machine: the baseline is for GPUs alone.
    assert last.opponents == {"baseline" if torch.cuda.is_available() else "eager": ("row-2",)}
    assert last.worst["float32"].used < 1
    code, out, _ = kda("validate", "axpy", "--record", "--rest")
    assert code == ExitCode.OK
    assert out.startswith("axpy: nothing left to check: 5 of 5 rows agree with the oracle (35 calls compared in full)")
    assert len(recorded) == len(runs(toy)) == 4
    with (toy.path / "solution" / "__init__.py").open("a") as file:
        file.write("# faster\n")
    assert kda("validate", "axpy", "--record", "--rest", "--rows", "row*", "--limit-s", "0")[0] == ExitCode.OK
    assert runs(toy)[-1].checked == ((2, 2),), "another solution has no checked rows"


def test_parts_of_a_grid_are_apart_whatever_is_recorded_meanwhile(
    recorded: list[RunRecord], toy: Task, kda: Kda
) -> None:
    assert kda("validate", "axpy", "--record", "--rest", "--part", "2/2")[0] == ExitCode.OK
    assert runs(toy)[-1].checked == ((1, 1), (3, 3))
    assert kda("validate", "axpy", "--record", "--rest", "--part", "1/2")[0] == ExitCode.OK
    assert runs(toy)[-1].checked == ((0, 0), (2, 2), (4, 4)), "counted from the whole grid, not from the rest"
    assert kda("validate", "axpy", "--record", "--rest", "--part", "1/2")[1].startswith("axpy: nothing left to check")
    code, _, err = kda("validate", "axpy", "--part", "3/2")
    assert (code, "--part '3/2': expected I/N with I from 1 to N, like 2/3" in err) == (ExitCode.USAGE, True)


def test_a_row_that_upstream_refuses_by_an_error_of_the_host_is_no_failure(
    recorded: list[RunRecord], toy: Task, kda: Kda
) -> None:
    baseline = toy.path / "baseline" / "__init__.py"
    text = baseline.read_text().replace(
        "factor * x + y", "factor * x + y if factor != 2 or x.numel() != 32 else refuse()", 1
    )
    baseline.write_text(f"{text}\n\ndef refuse():\n    raise RuntimeError('view size is not compatible')\n")
    code, out, _ = kda("validate", "axpy", "--record", "--rows", "row-*")
    assert [row.verdict.value for row in recorded[0].rows] == ["CORRECT", "CORRECT", "ERROR"]
    assert "axpy: 3 of 3 rows agree with the oracle" in out
    assert code == ExitCode.OK
    assert runs(toy)[-1].failed == ()


def test_a_row_that_fails_is_recorded_and_published(recorded: list[RunRecord], toy: Task, kda: Kda) -> None:
    solution = toy.path / "solution" / "__init__.py"
    solution.write_text(solution.read_text().replace("alpha=factor)", "alpha=factor).add_(x.numel() == 32)", 1))
    assert kda("validate", "axpy", "--record", "--rows", "*-1", "--rows", "out*")[0] == ExitCode.UNFIT_ROWS
    (record,) = runs(toy)
    assert (record.checked, [(row.id, row.position, row.verdict) for row in record.failed]) == (
        ((0, 0), (3, 3)),
        [("row-1", 3, Verdict.INCORRECT)],
    )
    assert record.failed[0].reason == recorded[0].rows[1].reason
    assert record.worst["float32"].row == "out-64x16"
    (toy.path.parents[1] / "README.md").write_text(README)
    assert kda("publish")[0] == ExitCode.OK
    text = (toy.path / "docs" / "grid.md").read_text()
    assert "**1 of 5 rows agree with the oracle, 1 does not, 3 are not checked yet**" in text
    assert "| `row-1` | INCORRECT | `solution: output 'out': 32 of 32 elements outside tolerance" in text
    assert kda("validate", "axpy", "--static")[:2] == (ExitCode.OK, "axpy: files and published numbers: ok\n")
    (toy.path / "docs" / "grid.md").write_text(text.replace("1 of 5 rows", "2 of 5 rows"))
    code, _, err = kda("validate", "axpy", "--static")
    assert (code, f"{toy.path / 'docs' / 'grid.md'}:" in err) == (ExitCode.UNFIT_ROWS, True)


def test_what_changed_under_a_run_or_checked_no_row_is_not_recorded(
    recorded: list[RunRecord], toy: Task, kda: Kda, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.run
    for update, code, words in (
        ({"noisy": (f"solution {CHANGED}",)}, ExitCode.LEDGER, f"is not recorded: solution {CHANGED}; run it again"),
        ({"rows": (), "partial": True}, ExitCode.INTERRUPTED, "axpy: not recorded: no row was checked to the end"),
    ):
        monkeypatch.setattr(bench, "run", lambda *a, _more=update, **k: real(*a, **k).model_copy(update=_more))
        got, out, err = kda("validate", "axpy", "--record", "--rows", "row-1")
        assert got == code
        assert words in out + err
        assert not log(toy).exists()


def test_without_a_gpu_nothing_is_recorded(checkout: Path, kda: Kda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: False)
    for device in ((), ("--device", "cpu")):
        code, out, err = kda("validate", "axpy", "--record", *device)
        assert (code, out) == (ExitCode.REQUIREMENT, "")
        assert err.startswith("kda: --record: needs a GPU; on the CPU the grid is thinned, its rows are shrunken")
    assert not log(find_task("axpy")).exists()
    assert kda("validate", "axpy", "--record", "--static")[::2] == (
        ExitCode.USAGE,
        "kda: --record: expected without --static, which runs no row\n",
    )
    assert kda("validate", "axpy", "--rest")[0] == ExitCode.USAGE
