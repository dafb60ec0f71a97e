"""From a ledger to published numbers: every claim is computed again, and every edit is caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.tests.records_factory import COMMIT, ROWS, cpu_record, gpu_state, make_checkout, make_record
from kda_core import derive
from kda_core.derive import mismatches, recompute
from kda_core.errors import LedgerError, UsageError
from kda_core.ledger import append, read
from kda_core.publish import publish
from kda_core.records import ArmRow, Interval, Limit, Metric, RunRecord, Verdict
from kda_core.report import publishable, published, replace_block, results_md, stale, top_table_md
from kda_core.tasks import Task

LATER = "2026-11-21T04:30:00Z"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    return make_checkout(tmp_path)


@pytest.fixture
def record(task: Task) -> RunRecord:
    return make_record(task)


def change_row(record: RunRecord, **update: Any) -> RunRecord:
    """The record with its first row changed, and nothing computed again."""
    first = record.rows[0].model_copy(update=update)
    return record.model_copy(update={"rows": (first, *record.rows[1:])})


def change_arm(record: RunRecord, arm: str, **update: Any) -> RunRecord:
    arms = record.rows[0].arms
    return change_row(record, arms={**arms, arm: arms[arm].model_copy(update=update)})


def with_samples(arm: ArmRow, samples: Any, metric: Metric = Metric.WALL) -> dict[Metric, Any]:
    return {**arm.samples, metric: samples}


# ---- computing again --------------------------------------------------------------------------


def test_everything_is_made_from_samples(record: RunRecord) -> None:
    row, headline = record.rows[0], record.headline
    assert headline is not None
    assert headline.attained is not None
    assert row.verdict is Verdict.FASTER
    assert row.speedup["baseline"].estimate == pytest.approx(2.0, rel=0.02)
    assert row.speedup["upstream_latest"].estimate == pytest.approx(1.8, rel=0.02)
    assert row.attained == pytest.approx(4.3 / 5, rel=0.02), "the host limit decides the small row"
    assert record.rows[1].attained == pytest.approx(28 / 40, rel=0.02), "the device limit decides the large row"
    assert row.attained_device == pytest.approx(3.5 / 4, rel=0.02)
    assert headline.rows == 2
    estimates = [r.speedup["baseline"].estimate for r in record.rows]
    assert headline.speedup["baseline"].estimate == pytest.approx((estimates[0] * estimates[1]) ** 0.5)
    assert headline.attained.estimate == pytest.approx((row.attained * (record.rows[1].attained or 0)) ** 0.5)
    ratio = record.noise_floor[ROWS[0]].ratio
    assert ratio is not None
    assert ratio.low <= 1 <= ratio.high
    assert recompute(record) == record
    assert mismatches(record) == []


def test_the_limit_comes_from_its_own_samples_where_they_are_kept(record: RunRecord) -> None:
    solution = record.rows[0].arms["solution"]
    floor = solution.model_copy(
        update={"samples": {Metric.WALL: ((4.0,) * 12,) * 3, Metric.DEVICE: ((3.0,) * 12,) * 3}}
    )
    again = recompute(change_row(record, arms={**record.rows[0].arms, "limit": floor}))
    assert again.rows[0].limit == Limit(bytes_moved=256, device_us=3.0, host_us=4.0)
    assert again.rows[0].attained == pytest.approx(4.0 / solution.summary[Metric.WALL].median)
    assert mismatches(again) == []


@pytest.mark.parametrize(
    ("opponent", "generations", "verdict", "reason"),
    [
        (1.001, 3, Verdict.FASTER, "speedup 1.001, 95% interval [1.001, 1.001]"),
        (1.0, 3, Verdict.NOT_FASTER, "speedup 1.000"),
        (0.5, 3, Verdict.NOT_FASTER, "speedup 0.500"),
        (2.0, 1, Verdict.NOT_FASTER, "from 1 generation; FASTER needs 2"),
    ],
)
def test_the_interval_decides(
    record: RunRecord, opponent: float, generations: int, verdict: Verdict, reason: str
) -> None:
    arms = record.rows[0].arms
    changed = {
        name: arm.model_copy(update={"samples": with_samples(arm, ((value,) * 12,) * generations)})
        for name, arm, value in (("baseline", arms["baseline"], opponent), ("solution", arms["solution"], 1.0))
    }
    row = recompute(change_row(record, arms={**arms, **changed})).rows[0]
    assert row.verdict is verdict
    assert pytest.approx(opponent) == row.speedup["baseline"].estimate
    assert reason in row.reason


def test_a_measured_verdict_needs_a_correct_subject_a_gpu_and_samples(record: RunRecord) -> None:
    arm = record.rows[0].arms["solution"]
    wrong = arm.correctness.model_copy(update={"passed": False, "failure": "output 'y' at [3]: expected 1, got 2"})
    row = recompute(change_arm(record, "solution", correctness=wrong)).rows[0]
    assert (row.verdict, row.reason) == (Verdict.INCORRECT, "output 'y' at [3]: expected 1, got 2")
    row = recompute(change_arm(record, "solution", samples={})).rows[0]
    assert row.verdict is Verdict.ERROR
    assert "no wall samples of solution and baseline" in row.reason
    row = recompute(change_row(record, arms={})).rows[0]
    assert (row.verdict, row.reason) == (Verdict.ERROR, "solution: no result")
    machine = record.machine.model_copy(update={"kind": "cpu"})
    assert recompute(record.model_copy(update={"machine": machine})).rows[0].verdict is Verdict.UNVERIFIED


@pytest.mark.parametrize("verdict", [Verdict.INCORRECT, Verdict.INVALID, Verdict.TIMEOUT])
def test_the_judges_findings_stay_and_leave_the_headline(record: RunRecord, verdict: Verdict) -> None:
    again = recompute(change_row(record, verdict=verdict, reason="because"))
    assert (again.rows[0].verdict, again.rows[0].reason) == (verdict, "because")
    assert again.headline is not None
    assert again.headline.rows == 1
    assert again.headline.speedup["baseline"] == again.rows[1].speedup["baseline"]


def test_a_mean_that_not_every_row_has_is_not_stated(record: RunRecord) -> None:
    headline = recompute(change_arm(record, "upstream_latest", samples={})).headline
    assert headline is not None
    assert set(headline.speedup) == {"baseline"}
    assert set(headline.speedup_device) == {"baseline"}


def test_rows_outside_production_are_not_in_the_headline(record: RunRecord) -> None:
    headline = recompute(change_row(record, production=False)).headline
    assert headline is not None
    assert headline.rows == 1


# ---- tampering --------------------------------------------------------------------------------


def tampered_sample(record: RunRecord) -> RunRecord:
    arm = record.rows[0].arms["solution"]
    wall = arm.samples[Metric.WALL]
    return change_arm(record, "solution", samples=with_samples(arm, ((wall[0][0] - 0.0001, *wall[0][1:]), *wall[1:])))


def tampered_summary(record: RunRecord) -> RunRecord:
    arm = record.rows[0].arms["solution"]
    summary = arm.summary[Metric.WALL]
    better = summary.model_copy(update={"median": summary.median * 0.999})
    return change_arm(record, "solution", summary={**arm.summary, Metric.WALL: better})


def tampered_headline(record: RunRecord) -> RunRecord:
    assert record.headline is not None
    better = Interval(estimate=3.0, low=2.9, high=3.1)
    return record.model_copy(update={"headline": record.headline.model_copy(update={"speedup": {"baseline": better}})})


def dropped_bad_row(record: RunRecord) -> RunRecord:
    return record.model_copy(update={"rows": record.rows[1:]})


def doubled_row(record: RunRecord) -> RunRecord:
    return record.model_copy(update={"rows": (*record.rows, record.rows[0])})


def forged_verdict(record: RunRecord) -> RunRecord:
    slower = record.rows[0].arms["solution"].samples
    return recompute(change_arm(record, "baseline", samples=slower)).model_copy(
        update={"rows": (record.rows[0], *record.rows[1:])}
    )


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (tampered_sample, "row small-4x8: arms.solution.summary.wall.mean: the record says 5"),
        (tampered_summary, "row small-4x8: arms.solution.summary.wall.median: the record says"),
        (tampered_headline, "headline.speedup.baseline.estimate: the record says 3.0, its samples give 2.0"),
        (dropped_bad_row, "headline.rows: the record says 2, its samples give 1"),
        (doubled_row, "row small-4x8: listed 2 times"),
        (lambda r: change_row(r, attained=0.99), "row small-4x8: attained: the record says 0.99"),
        (lambda r: change_row(r, verdict=Verdict.NOT_FASTER), "row small-4x8: verdict"),
        (
            lambda r: change_arm(r, "solution", samples={Metric.WALL: ((0.0, 1.0),)}),
            "samples: generation 0, sample 0: expected a positive finite time in us, got 0.0",
        ),
        (forged_verdict, "headline.speedup.baseline.estimate"),
    ],
)
def test_tampering_is_named(record: RunRecord, tamper: Callable[[RunRecord], RunRecord], named: str) -> None:
    found = mismatches(tamper(record))
    assert any(line.startswith(named) for line in found), found


def test_a_tampered_ledger_is_not_published(task: Task, record: RunRecord) -> None:
    append(task.ledger, tampered_sample(record))
    with pytest.raises(LedgerError, match=f"run {record.run_id}: row small-4x8: arms.solution.summary.wall.mean"):
        publish([task], check=False)
    assert not (task.path / "docs" / "results.md").exists()


# ---- what may be published --------------------------------------------------------------------


def updated(record: RunRecord, **parts: dict[str, Any]) -> RunRecord:
    return record.model_copy(update={k: getattr(record, k).model_copy(update=v) for k, v in parts.items()})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: updated(r, provenance={"dirty": True}), "the checkout was dirty"),
        (lambda r: updated(r, provenance={"commit": "unknown"}), "the commit is unknown"),
        (lambda r: r.model_copy(update={"noisy": ("pid 7",)}), "noisy: pid 7"),
        (lambda r: r.model_copy(update={"partial": True}), "interrupted"),
        (lambda r: r.model_copy(update={"task": "other"}), "is a run of other"),
        (lambda r: updated(r, machine={"kind": "cpu", "before": None}), "ran without a GPU"),
        (lambda r: updated(r, machine={"before": gpu_state("NVIDIA A100")}), "NVIDIA A100 is no target"),
        (lambda r: updated(r, settings={"cold": True}), "cold inputs"),
        (lambda r: updated(r, settings={"rows": ("small*",)}), "restricted to rows small*"),
        (
            lambda r: updated(r, settings={"against": ("upstream_latest", "baseline")}),
            "compares solution against upstream_latest, baseline; published is solution against baseline, ",
        ),
        (lambda r: updated(r, settings={"against": ("baseline",)}), "compares solution against baseline;"),
        (lambda r: updated(r, settings={"generations": 2}), "generations 2; published runs have 3 or more"),
        (lambda r: updated(r, settings={"samples": 3}), "samples 3; published runs have 12 or more"),
        (lambda r: updated(r, settings={"seeds": (11, 23)}), "without seeds [47]"),
        (dropped_bad_row, "no result for production rows small-4x8"),
        (lambda r: change_row(r, verdict=Verdict.INVALID), "small-4x8 is INVALID"),
        (lambda r: change_row(r, limit=None), "small-4x8: no limit was measured"),
        (
            lambda r: change_arm(
                r,
                "solution",
                samples={Metric.WALL: tuple(g[1:] for g in r.rows[0].arms["solution"].samples[Metric.WALL])},
            ),
            "small-4x8: 11+11+11 wall samples of solution, expected 3 generations of 12",
        ),
    ],
)
def test_what_cannot_be_published_says_why(
    task: Task, record: RunRecord, change: Callable[[RunRecord], RunRecord], reason: str
) -> None:
    assert publishable(task, record) == []
    problems = publishable(task, change(record))
    assert len(problems) == 1
    assert problems[0].startswith(reason)
    assert published(task, [change(record)]) == {}


def test_a_cpu_run_is_never_published(task: Task) -> None:
    record = cpu_record(task)
    assert record.headline is None
    assert "ran without a GPU" in publishable(task, record)
    assert mismatches(record) == []


def test_the_latest_publishable_run_of_each_gpu(task: Task, record: RunRecord) -> None:
    later = make_record(task, seed=1, utc=LATER)
    dirty = updated(make_record(task, seed=2, utc="2026-11-22T04:30:00Z"), provenance={"dirty": True})
    b200 = updated(make_record(task, seed=3), machine={"before": gpu_state("NVIDIA B200")})
    assert published(task, [later, dirty, b200, record]) == {"h200": later, "b200": b200}


# ---- stale ------------------------------------------------------------------------------------


def test_what_changed_since_the_run_is_named(task: Task, record: RunRecord) -> None:
    assert stale(task, record) == []
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    (line,) = stale(task, record)
    assert line.startswith(f"solution has changed since run {record.run_id}: sha256 was ")


def test_a_moved_pin_is_named(task: Task, record: RunRecord) -> None:
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('version = "1.0"', 'version = "1.1"'))
    lines = stale(Task(path=task.path, package=task.package), record)
    assert [line.split(" has changed")[0] for line in lines] == ["config", "the pin of baseline"]
    assert "was sglang 1.0 " in lines[1]
    assert "is sglang 1.1 " in lines[1]


# ---- the pages --------------------------------------------------------------------------------


def test_results_hold_what_a_reader_needs(task: Task, record: RunRecord) -> None:
    dirty = updated(make_record(task, seed=2, utc=LATER), provenance={"dirty": True})
    text = results_md(task, [record, dirty])
    assert text.startswith("<!-- Generated by `kda publish`.")
    headline = record.headline
    assert headline is not None
    wall = headline.speedup["baseline"]
    stated = f"{wall.estimate:.3f} [{wall.low:.3f}, {wall.high:.3f}]"
    assert f"| speedup against baseline (sglang 1.0) | {stated} | >= 1.6: met |" in text
    assert "| >= 1.9: missed |" in text
    row = next(line for line in text.splitlines() if line.startswith("| large-512x8 |"))
    median = record.rows[1].arms["solution"].summary[Metric.WALL].median
    assert f"| {median:.2f} |" in row
    assert row.endswith(f"| 28.00 | {28 / median:.3f} | FASTER |")
    for fact in (
        record.command,
        COMMIT,
        "driver 580.1",
        "torch 2.11.0",
        "Synthetic CPU",
        "noise floor (A/A): the first",
    ):
        assert fact in text
    assert f"`{record.run_id}` | NVIDIA H200 | `{COMMIT[:10]}` | 2 | {stated} | published above |" in text
    assert "| not published: the checkout was dirty |" in text
    assert "## b200\n\nCompiled (sm_100a), not measured" in text


def test_results_without_a_run_say_how_to_make_one(task: Task) -> None:
    text = results_md(task, [])
    assert "`kda bench fake --record`" in text
    assert "The ledger is empty." in text


def test_the_table_of_all_tasks(task: Task, record: RunRecord) -> None:
    assert top_table_md([task]) == "No task has a published run yet.\n"
    append(task.ledger, record)
    head, rule, line = top_table_md([task]).splitlines()
    assert head == "| task | GPU | rows | vs sglang 1.0 | attained | measured | commit |"
    assert rule.count("---") == 7
    assert line.startswith("| [k99_fake](fam/k99_fake/docs/results.md) | NVIDIA H200 | 2 | 2.0")
    assert line.endswith(f"| 2026-11-20 | `{COMMIT[:10]}` |")


def test_publish_writes_and_check_finds_one_changed_digit(task: Task, record: RunRecord, tmp_path: Path) -> None:
    append(task.ledger, record)
    results, source, readme = (
        task.path / "docs" / "results.md",
        task.path / "docs" / "baseline_source.md",
        tmp_path / "README.md",
    )
    assert [line.split(": ")[1] for line in publish([task], check=True)[:2]] == [
        "file not found; run `kda publish`"
    ] * 2
    assert not results.exists()
    assert publish([task], check=False) == [str(results), str(source), str(readme)]
    assert publish([task], check=True) == publish([task], check=False) == []
    assert "sglang/kernel.py" in source.read_text()
    assert readme.read_text().startswith("# Fake\n<!-- kda:results:begin -->\n| task |")
    assert readme.read_text().endswith("<!-- kda:results:end -->\nThe rest.\n")

    lines = results.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if line.startswith("| large-512x8"))
    honest = lines[number]
    lines[number] = honest.replace("28.00", "29.00")
    results.write_text("".join(lines))
    (found,) = publish([task], check=True)
    assert found.startswith(f"{results}:{number + 1}: expected {honest.rstrip()!r}, got ")
    assert results.read_text() == "".join(lines), "a check writes nothing"


def test_publish_notices_a_lost_newline(task: Task) -> None:
    publish([task], check=False)
    results = task.path / "docs" / "results.md"
    results.write_text(results.read_text().rstrip())
    assert "differs in line endings or the newline at its end" in publish([task], check=True)[0]


def test_a_readme_without_its_block_is_an_error(task: Task, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Fake\n")
    with pytest.raises(UsageError, match=r"README.md: expected the line '<!-- kda:results:begin -->' once, got it 0"):
        publish([task], check=True)
    (tmp_path / "README.md").unlink()
    with pytest.raises(UsageError, match=r"README.md: file not found"):
        publish([task], check=True)


BEGIN, END = "<!-- kda:x:begin -->\n", "<!-- kda:x:end -->\n"


def test_a_block_is_replaced_and_nothing_else() -> None:
    once = replace_block(f"a\n{BEGIN}old\n{END}b\n", "x", "new\n")
    assert once == f"a\n{BEGIN}new\n{END}b\n"
    assert replace_block(once, "x", "new") == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{BEGIN}", "x:end -->' once, got it 0 times"),
        (f"{BEGIN}{END}{END}", "x:end -->' once, got it 2 times"),
        (f"{BEGIN}{BEGIN}{END}", "x:begin -->' once, got it 2 times"),
        (f"{END}{BEGIN}", "the other way round"),
    ],
)
def test_broken_markers_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace_block(text, "x", "new")


def test_rounding_is_a_fixed_point(task: Task, record: RunRecord) -> None:
    assert derive.rounded(record) == record
    append(task.ledger, record)
    assert read(task.ledger) == [record]
