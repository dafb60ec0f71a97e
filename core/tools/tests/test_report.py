"""From a ledger to published numbers: every claim is computed again, and every edit is caught."""

import csv
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.judge.tests.records_factory import COMMIT, ROWS, cpu_record, gpu_reading, make_record
from kda_judge.contract.errors import LedgerError, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import derive
from kda_judge.evidence.claims import mismatches
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.ledger import append, read
from kda_judge.evidence.run_record import (
    LIMIT_ARM,
    ArmRow,
    Basis,
    Distance,
    Interval,
    Limit,
    MachineWatch,
    Metric,
    RowResult,
    RunRecord,
    Spread,
    Verdict,
)
from kda_tools.project.validate import problems, uncompared
from kda_tools.publish import family_map, plots
from kda_tools.publish.generate import publish
from kda_tools.publish.joined_runs import measured
from kda_tools.publish.other_opponents import other_opponents_line
from kda_tools.publish.read_once import once_per_task, unchanged_files
from kda_tools.publish.report import (
    WHOSE,
    interval,
    median,
    misses,
    passed_limit,
    publishable,
    published,
    row_ratio,
    slower_rows,
    stale,
)
from kda_tools.publish.results_page import numerics, results_md
from kda_tools.publish.rows_data import flat_rows, rows_csv, rows_json
from kda_tools.publish.site.task_page import compared_runs
from kda_tools.publish.tables import bounds_md, overview_md, replace_block, target_words

LATER = "2026-11-21T04:30:00Z"
OTHER_FILES = {"dirty": True, "hashes": {"solution": "1" * 64}}
"""Provenance of a run whose files nobody has."""
# In CI nothing is skipped: without matplotlib these tests fail there.
draws = pytest.mark.skipif(not os.environ.get("CI") and plots.missing() is not None, reason=str(plots.missing()))


@pytest.fixture
def task(task: Task, tmp_path: Path) -> Task:
    """A checkout that `validate` finds nothing wrong with, with a map of its family."""
    for name in ("prompt.md", "pyproject.toml", "baseline/latest.py", "docs/dispatch.md"):
        (task.path / name).parent.mkdir(exist_ok=True)
        (task.path / name).touch()
    (task.path / "pyproject.toml").write_text('[project]\nname = "kda-fake"\n')
    rows = task.path / "bench" / "workloads.toml"
    rows.write_text(rows.read_text().replace("production = true\n", 'production = true\nmodels = ["some-model"]\n'))
    (tmp_path / "fam" / "README.md").write_text(
        "".join(f"<!-- kda:{name}:begin -->\n<!-- kda:{name}:end -->\n" for name in ("tasks", "models"))
    )
    return task


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
    for basis in (Basis.DEVICE, Basis.COLD, Basis.WALL):
        assert row.speedup[basis]["baseline"].estimate == pytest.approx(2.0, rel=0.02)
        assert row.speedup[basis]["upstream_latest"].estimate == pytest.approx(1.8, rel=0.02)
    assert row.speedup[Basis.PORTABLE]["baseline"].estimate == pytest.approx(1 / 0.7, rel=0.02)
    assert Basis.REPLAYED not in row.speedup
    assert row.attained == pytest.approx(3.5 / 4, rel=0.02)
    assert headline.rows == 2
    for basis in row.speedup:
        estimates = [r.speedup[basis]["baseline"].estimate for r in record.rows]
        assert headline.speedup[basis]["baseline"].estimate == pytest.approx((estimates[0] * estimates[1]) ** 0.5)
    assert headline.attained.estimate == pytest.approx((row.attained * (record.rows[1].attained or 0)) ** 0.5)
    ratio = record.noise_floor[ROWS[0]].ratio
    assert ratio is not None
    assert ratio.low <= 1 <= ratio.high
    assert recompute(record) == record
    assert mismatches(record) == []


def test_the_limit_comes_from_its_own_samples_where_they_are_kept(record: RunRecord) -> None:
    solution = record.rows[0].arms["solution"]
    # No two generations are the same.
    walls, times = (tuple((us,) * 11 + (us + part / 10,) for part in range(3)) for us in (4.0, 3.0))
    floor = solution.model_copy(update={"samples": {Metric.WALL: walls, Metric.DEVICE: times}})
    again = recompute(change_row(record, arms={**record.rows[0].arms, "limit": floor}))
    assert again.rows[0].limit == Limit(bytes_moved=256, device_us=3.0, host_us=4.0)
    assert again.rows[0].attained == pytest.approx(3.0 / solution.summary[Metric.DEVICE].median)
    assert mismatches(again) == []


def test_the_gain_in_use_weighs_rows_by_their_calls(task: Task, record: RunRecord) -> None:
    assert "In use" not in results_md(task, [record])
    rows = task.path / "bench" / "workloads.toml"
    first, *rest = rows.read_text().split('op = "fake"\n')
    calls = (100, 2)
    parts = zip(calls, rest, strict=True)
    rows.write_text(first + "".join(f'op = "fake"\ncalls_a_step = {n}\n{text}' for n, text in parts))
    baseline = record.rows[0].arms["baseline"]
    slow = {"samples": {Metric.WALL: ((90.0,) * 12,) * 3, Metric.DEVICE: ((90.0,) * 12,) * 3}}
    slowed = recompute(change_row(record, arms={**record.rows[0].arms, "baseline": baseline.model_copy(update=slow)}))
    own, other = (slowed.rows[n].arms["solution"].summary[Metric.DEVICE].median for n in (0, 1))
    theirs = slowed.rows[1].arms["baseline"].summary[Metric.DEVICE].median
    gain = (100 * 90.0 + 2 * theirs) / (100 * own + 2 * other)
    line = r"\*\*In use\*\*: on the device ([\d.]+) \[.*over baseline.*\((\d) of (\d) rows"
    found = re.search(line, results_md(Task(task.path), [slowed]))
    assert found is not None
    assert float(found[1]) == pytest.approx(gain, rel=1e-3)
    assert (found[2], found[3]) == ("2", str(len(record.rows)))


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
        name: arm.model_copy(update={"samples": with_samples(arm, ((value,) * 12,) * generations, Metric.DEVICE)})
        for name, arm, value in (("baseline", arms["baseline"], opponent), ("solution", arms["solution"], 1.0))
    }
    row = recompute(change_row(record, arms={**arms, **changed})).rows[0]
    assert row.verdict is verdict
    assert pytest.approx(opponent) == row.speedup[Basis.DEVICE]["baseline"].estimate
    assert reason in row.reason


def test_a_measured_verdict_needs_a_correct_subject_a_gpu_and_samples(record: RunRecord) -> None:
    arm = record.rows[0].arms["solution"]
    wrong = arm.correctness.model_copy(update={"passed": False, "failure": "output 'y' at [3]: expected 1, got 2"})
    row = recompute(change_arm(record, "solution", correctness=wrong)).rows[0]
    assert (row.verdict, row.reason) == (Verdict.INCORRECT, "output 'y' at [3]: expected 1, got 2")
    row = recompute(change_arm(record, "solution", samples={})).rows[0]
    assert row.verdict is Verdict.ERROR
    assert "no device samples of solution and baseline" in row.reason
    row = recompute(change_row(record, arms={})).rows[0]
    assert (row.verdict, row.reason) == (Verdict.ERROR, "solution: no result")
    machine = record.machine.model_copy(update={"kind": "cpu"})
    assert recompute(record.model_copy(update={"machine": machine})).rows[0].verdict is Verdict.CORRECT


@pytest.mark.parametrize("verdict", [Verdict.INCORRECT, Verdict.INVALID, Verdict.TIMEOUT])
def test_the_judges_findings_stay_and_leave_the_headline(record: RunRecord, verdict: Verdict) -> None:
    again = recompute(change_row(record, verdict=verdict, reason="because"))
    assert (again.rows[0].verdict, again.rows[0].reason) == (verdict, "because")
    assert again.headline is not None
    assert again.headline.rows == 1
    assert again.headline.speedup[Basis.DEVICE]["baseline"] == again.rows[1].speedup[Basis.DEVICE]["baseline"]


def test_a_mean_that_not_every_row_has_is_not_stated(record: RunRecord) -> None:
    headline = recompute(change_arm(record, "upstream_latest", samples={})).headline
    assert headline is not None
    assert {tuple(means) for means in headline.speedup.values()} == {("baseline",)}


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
    headline = record.headline.model_copy(update={"speedup": {Basis.DEVICE: {"baseline": better}}})
    return record.model_copy(update={"headline": headline})


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
        (tampered_headline, "headline.speedup.device.baseline.estimate: the record says 3.0, its samples give 1.99"),
        (dropped_bad_row, "headline.rows: the record says 2, its samples give 1"),
        (doubled_row, "row small-4x8: listed 2 times"),
        (lambda r: change_row(r, attained=0.99), "row small-4x8: attained: the record says 0.99"),
        (lambda r: change_row(r, verdict=Verdict.NOT_FASTER), "row small-4x8: verdict"),
        (
            lambda r: change_arm(r, "solution", samples={Metric.WALL: ((0.0, 1.0),)}),
            "samples: generation 0, sample 0: expected a positive finite time in us, got 0.0",
        ),
        (forged_verdict, "headline.speedup.device.baseline.estimate"),
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
        (lambda r: updated(r, provenance=OTHER_FILES), "the checkout was dirty, and this one differs from it in "),
        (lambda r: updated(r, provenance={"commit": "unknown"}), "the commit is unknown"),
        (lambda r: r.model_copy(update={"noisy": ("pid 7",)}), "noisy: pid 7"),
        (  # the record claims to be quiet, its readings say otherwise
            lambda r: updated(r, machine={"after": gpu_reading().model_copy(update={"throttle": ("hw_slowdown",)})}),
            "noisy: after: clocks throttled by hw_slowdown at 40 C",
        ),
        (lambda r: r.model_copy(update={"partial": True}), "interrupted"),
        (lambda r: r.model_copy(update={"task": "other"}), "is a run of other"),
        (lambda r: updated(r, machine={"kind": "cpu", "before": None}), "ran without a GPU"),
        (lambda r: updated(r, machine={"before": gpu_reading("NVIDIA A100")}), "NVIDIA A100 is no target"),
        (lambda r: updated(r, settings={"cold": True, "decides": Basis.WALL}), "cold inputs"),
        (lambda r: updated(r, settings={"quick": True}), "a quick look"),
        (
            lambda r: updated(r, settings={"against": ("upstream_latest", "baseline")}),
            "compares solution against upstream_latest, baseline; published is solution against baseline, ",
        ),
        (lambda r: updated(r, settings={"against": ("baseline",)}), "compares solution against baseline;"),
        (lambda r: updated(r, settings={"generations": 2}), "generations 2; published runs have 3 or more"),
        (lambda r: updated(r, settings={"samples": 3}), "samples 3; published runs have 12 or more"),
        (lambda r: updated(r, settings={"seeds": (11, 23)}), "without seeds [47]"),
        (dropped_bad_row, "no result for production row small-4x8"),
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
    dirty = updated(make_record(task, seed=2, utc="2026-11-22T04:30:00Z"), provenance=OTHER_FILES)
    b200 = updated(make_record(task, seed=3), machine={"before": gpu_reading("NVIDIA B200")})
    assert published(task, [later, dirty, b200, record]) == {"h200": later, "b200": b200}


def test_answers_are_kept_while_files_do_not_change(task: Task, record: RunRecord) -> None:
    asked: list[object] = []

    @once_per_task
    def ask(_task: Task, records: Sequence[RunRecord]) -> int:
        asked.append(records)
        return len(asked)

    runs = [record]
    assert [ask(task, runs), ask(task, runs)] == [1, 2], "files may have changed in between"
    with unchanged_files():
        assert [ask(task, runs), ask(task, runs)] == [3, 3]
        assert ask(task, [record]) == 4, "another list may hold other runs"
        with unchanged_files():
            assert ask(task, runs) == 3
        assert ask(task, runs) == 3
    assert ask(task, runs) == 5


def test_runs_of_the_present_code_come_first(task: Task, record: RunRecord) -> None:
    """Whoever opens a page sees numbers of the kernels that are there."""
    b200 = updated(make_record(task, seed=3), machine={"before": gpu_reading("NVIDIA B200")})
    assert list(published(task, [record, b200])) == ["h200", "b200"]
    hashes = {**record.provenance.hashes, "solution": "1" * 64}
    old = updated(record, provenance={"hashes": hashes})
    assert list(published(task, [old, b200])) == ["b200", "h200"]
    text = results_md(task, [old, b200])
    assert text.index("## b200\n") < text.index("## h200\n")
    alone = results_md(task, [b200])
    assert alone.index("## b200\n") < alone.index("## h200\n\nCompiled (")


def test_a_changed_checkout_matters_where_its_files_are_not_those_of_this_one(task: Task, record: RunRecord) -> None:
    """The hashes cover every file that decides a number, so an edit elsewhere costs nobody a run."""
    elsewhere = updated(record, provenance={"dirty": True})
    assert published(task, [elsewhere]) == {"h200": elsewhere}
    brought = {**record.provenance.hashes, "port portable": "2" * 64}  # an arm of the run, no file of the task
    assert publishable(task, updated(record, provenance={"dirty": True, "hashes": brought})) == []
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    assert publishable(task, record) == []
    (why,) = publishable(task, elsewhere)
    assert why == "the checkout was dirty, and this one differs from it in solution"


# ---- stale ------------------------------------------------------------------------------------


def test_what_changed_since_the_run_is_named(task: Task, record: RunRecord) -> None:
    assert stale(task, record) == []
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    (line,) = stale(task, record)
    assert line.startswith(f"solution has changed since run {record.run_id}: sha256 was ")


def test_a_part_that_only_one_side_has_is_named(task: Task, record: RunRecord) -> None:
    """Modules of core that the solution began to import since the run, or no longer imports."""
    now = {**record.provenance.hashes, "library": "1" * 64}
    older = updated(record, provenance={"hashes": now})
    assert stale(task, older) == [f"library has changed since run {record.run_id}: sha256 was {'1' * 12}, is -"]
    (task.path / "solution" / "kernel.py").write_text("from kda_runtime.tuned_table import Table\n")
    _, library = stale(task, record)
    assert library.startswith(f"library has changed since run {record.run_id}: sha256 was -, is ")


def test_a_moved_pin_is_named(task: Task, record: RunRecord) -> None:
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('version = "1.0"', 'version = "1.1"'))
    lines = stale(Task(task.path), record)
    assert [line.split(" has changed")[0] for line in lines] == ["config", "the pin of baseline"]
    assert "was sglang 1.0 " in lines[1]
    assert "is sglang 1.1 " in lines[1]


# ---- the pages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distances", "said"),
    [
        ([(1.0, 1.0, 0)], "all elements have equal bits"),
        ([(0.5, 1.0, 1), (1.0, 1.0, 0)], "75.00% of the elements have equal bits (50.00% in the worst row), all are "),
        (
            [(0.99999, 0.999999, 3)],
            "99.99% of the elements have equal bits (99.99% in the worst row), at least 99.99% ",
        ),
        ([(0.7, 0.9065, 128)], "at least 90.65% are within 1 ulp in every row, the furthest is 128 ulp away"),
        ([(0.7, 0.9065, 129)], "at least 90.65% are within 1 ulp in every row"),
        ([(0.2, 0.5, 9), (0.0, 0.0, 8386506)], "(none in the worst row), in the worst row none are within 1 ulp"),
        (
            [(0.00005, 0.00009, 500)],
            "almost none of the elements have equal bits (almost none in the worst row), in the ",
        ),
    ],
)
def test_closeness_is_said_in_words_that_fit_it(
    record: RunRecord, distances: list[tuple[float, float, int]], said: str
) -> None:
    """The shares are rounded down, so that "all" and "none" are exact; a distance that says nothing is left out."""
    found = tuple(Distance(output="y", equal=equal, near=near, ulps=ulps) for equal, near, ulps in distances)
    row = record.rows[0]
    arm = row.arms["baseline"].model_copy(update={"distance": found})
    words = numerics(record.model_copy(update={"rows": (row.model_copy(update={"arms": {"baseline": arm}}),)}), "exact")
    assert said in words
    assert ("ulp away" in words) == ("ulp away" in said or distances[0][2] == 3)


def test_results_hold_what_a_reader_needs(task: Task, record: RunRecord) -> None:
    dirty = updated(make_record(task, seed=2, utc=LATER), provenance=OTHER_FILES)
    text = results_md(task, [record, dirty])
    assert text.startswith("<!-- Generated by `kda publish`.")
    headline = record.headline
    assert headline is not None
    device, wall = (headline.speedup[basis]["baseline"] for basis in (Basis.DEVICE, Basis.WALL))
    stated = f"{device.estimate:.3f} [{device.low:.3f}, {device.high:.3f}]"
    assert "| speedup | device | device, cold inputs | portable wall | wall with kda-runtime |" in text
    assert f"| over baseline (sglang 1.0) | {stated} | " in text
    assert f"| {wall.estimate:.3f} [{wall.low:.3f}, {wall.high:.3f}] |\n" in text
    assert (
        "- **Numerics**: *lossless*, every output within the tolerance of the float64 oracle; beside baseline (sglang "
        "1.0) 75.00% of the elements have equal bits (75.00% in the worst row), all are within 1 ulp"
    ) in text
    assert f"- **Limit**: {interval(headline.attained)} of what the machine's memory allows" in text
    assert "- **Models**: some-model\n" in text
    assert "the target (a row that moves more than 64 MB at 0.8 of its limit or better, any other within" in text
    assert WHOSE in text
    row = next(line for line in text.splitlines() if line.startswith("| large-512x8 |"))
    median = record.rows[1].arms["solution"].summary[Metric.DEVICE].median
    decided = interval(record.rows[1].speedup[Basis.DEVICE]["baseline"])
    assert row.startswith(f"| large-512x8 | FASTER | {decided} | missed | {median:.2f} | ")
    assert row.endswith(f" | 28.00 | {28 / median:.3f} |")
    assert "slower" not in text
    for fact in (
        record.command,
        COMMIT,
        "driver 580.1; before 1980 MHz, 40 C, 120 W; after 1980 MHz, 40 C, 120 W",
        "torch 2.11.0",
        "Synthetic CPU",
        "noise floor (A/A): the first",
    ):
        assert fact in text
    assert f"| `{record.run_id}` | NVIDIA H200 | `{COMMIT[:10]}` | 2 | {stated} | 1.8" in text
    assert text.count("| published above |") == 1
    for picture in ("summary", "speedup", "attained", "history"):
        assert f"](plots/{picture}-h200.svg)\n" in text
    screen = text.partition("## h200")[2].partition("<details>")[0]
    assert "summary-h200.svg" in screen
    assert len(screen.splitlines()) <= 18, "the picture, the means, four lines and the way to every row"
    assert "| not published: the checkout was dirty, and this one differs from it in " in text
    assert "## b200\n\nCompiled (sm_100a). The ledger holds no run" in text


def test_the_target_is_a_share_for_large_rows_and_a_distance_for_small_ones(task: Task, record: RunRecord) -> None:
    goal = task.config.targets["h200"].model_copy(update={"attained": 0.9, "within_us": 0.4})

    def missed(medians: Sequence[float], moved: Sequence[int], limits: Sequence[float]) -> list[str]:
        changed = _with_medians(record, *({Metric.WALL: 99.0, Metric.DEVICE: us} for us in medians))
        both = [Limit(bytes_moved=size, device_us=us, host_us=4.3) for size, us in zip(moved, limits, strict=True)]
        rows = tuple(row.model_copy(update={"limit": limit}) for row, limit in zip(changed.rows, both, strict=True))
        return misses(changed.model_copy(update={"rows": rows}), goal)

    small, large = (row.id for row in record.rows)
    assert missed((1.375, 20.0), (1000, 64_000_001), (1.0, 18.0)) == []
    assert missed((1.41, 20.01), (1000, 64_000_001), (1.0, 18.0)) == [small, large]
    assert missed((10.375, 20.41), (1000, 64_000_000), (10.0, 20.0)) == [large]
    goal = goal.model_copy(update={"ops_within_us": {record.rows[1].op: 0.5}})
    assert missed((10.375, 20.41), (1000, 64_000_000), (10.0, 20.0)) == []
    assert missed((10.375, 20.51), (1000, 64_000_000), (10.0, 20.0)) == [large]


def test_a_target_may_ask_for_a_speedup_of_some_rows(task: Task, record: RunRecord) -> None:
    """Over every release of upstream: the nearer one decides."""
    (first, second), goal = record.rows, task.config.targets["h200"].model_copy(update={"attained": None})
    reached = {arm: first.speedup[Basis.DEVICE][arm].estimate for arm in ("baseline", "upstream_latest")}
    assert reached["upstream_latest"] < reached["baseline"]
    for times, missed in ((reached["upstream_latest"] - 0.01, []), (reached["upstream_latest"] + 0.01, [first.id])):
        asked = goal.model_copy(update={"within_us": None, "times_as_fast": {first.id: times}})
        assert misses(record, asked) == missed
        assert f"{first.id} {times:g} times as fast as upstream" in target_words(record, asked)
    bare = second.model_copy(update={"speedup": {}})  # measured against another arm alone
    asked = goal.model_copy(update={"within_us": None, "times_as_fast": {"*": 1.01}})
    assert misses(record.model_copy(update={"rows": (bare,)}), asked) == [second.id]


def test_a_target_for_rows_that_there_are_not_is_named(task: Task) -> None:
    config = task.path / "config.toml"
    config.write_text(
        config.read_text().replace("[targets.h200]\n", '[targets.h200]\ntimes_as_fast = { "decode*" = 2 }\n')
    )
    expected = f"{config}: key 'targets.h200.times_as_fast': expected patterns of frozen rows, got 'decode*', which"
    assert any(line.startswith(expected) for line in problems(Task(task.path)))


def test_a_limit_that_kernels_pass_is_none(task: Task, record: RunRecord) -> None:
    """The geometric mean with its whole interval above 1.02 fails `validate`; up to there it is noise."""
    assert record.headline is not None
    for low, words in ((1.02, None), (1.021, "attained 1.050 [1.021, 1.100]: the interval lies above 1.02: ")):
        attained = Interval(estimate=1.05, low=low, high=1.1)
        found = passed_limit(updated(record, headline={"attained": attained}))
        assert found is None if words is None else (found or "").startswith(words)
    far = {Metric.DEVICE: tuple(tuple(99.0 + index for index in range(first, first + 12)) for first in range(3))}

    def limited(row: RowResult) -> RowResult:
        limit = row.arms[LIMIT_ARM]
        limit = limit.model_copy(update={"samples": {**limit.samples, **far}})
        return row.model_copy(update={"arms": {**row.arms, LIMIT_ARM: limit}})

    append(task.ledger, recompute(record.model_copy(update={"rows": tuple(map(limited, record.rows))})))
    publish([task], check=False)
    (found,) = problems(task)
    assert "so it is too slow" in found


def test_exact_numerics_are_held_to_what_was_measured(task: Task, record: RunRecord) -> None:
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace('op = "fake"', 'op = "fake"\nnumerics = "exact"', 1))
    append(task.ledger, make_record(Task(task.path)))
    publish([Task(task.path)], check=False)
    assert [line.rpartition(", got ")[2] for line in problems(Task(task.path))] == [
        f"1 ulp in 'y' of row {row.id}" for row in record.rows
    ]


def parts_of(record: RunRecord) -> list[RunRecord]:
    """A run of the same state for each row."""
    return [
        recompute(
            updated(record, settings={"rows": (row.id,)}).model_copy(
                update={"rows": (row,), "run_id": f"20261120T0430{number:02}Z-00000{number}", "noise_floor": {}}
            )
        )
        for number, row in enumerate(record.rows)
    ]


def test_a_result_joined_from_runs_can_be_compared_as_one(task: Task, record: RunRecord) -> None:
    halves = parts_of(record)
    old = make_record(task, seed=7, utc="2026-11-01T00:00:00Z").model_copy(update={"partial": True})
    joined, *rest = json.loads(compared_runs(task, [old, *halves]))
    assert joined["name"].endswith(f"{len(ROWS)} rows (published, joined from {len(halves)} runs)")
    assert (list(joined["rows"]), joined["published"], joined["part"]) == (list(ROWS), True, False)
    assert [one["id"] for one in rest] == [half.run_id for half in reversed(halves)] + [old.run_id]
    assert joined["id"] not in {one["id"] for one in rest}
    assert [one["part"] for one in rest] == [True] * len(halves) + [False]
    assert [one["published"] for one in rest] == [False] * len(rest)
    assert [one["published"] for one in json.loads(compared_runs(task, [record]))] == [True]


def test_a_run_in_parts_is_published_as_one(task: Task, record: RunRecord) -> None:
    """Two halves, of one state, give the rows of the whole; a half alone, or of another state, does not."""
    halves = parts_of(record)
    assert published(task, halves[:1]) == {}
    (whole,) = published(task, halves).values()
    assert whole.rows == record.rows
    assert whole.headline == record.headline
    assert whole.parts == tuple(half.run_id for half in halves)
    second, first = (
        half.model_copy(update={"run_id": other.run_id}) for half, other in zip(halves, halves[::-1], strict=True)
    )
    (turned,) = published(task, [first, second]).values()
    assert turned.rows == record.rows, "in the order of the task's rows, whichever part came first"
    assert results_md(task, halves).count("| published above |") == 2
    assert mismatches(whole) == [f"parts: expected none in a line of a ledger, got {', '.join(whole.parts)}"]
    other = updated(halves[1], provenance={"versions": {"torch": "2.12.0"}})
    assert published(task, [halves[0], other]) == {}
    later = updated(halves[1], provenance={"commit": "f" * 40})  # of the same files
    assert published(task, [halves[0], later]).keys() == published(task, halves).keys()


def test_one_part_that_has_every_row_is_published(task: Task, record: RunRecord) -> None:
    part = updated(record, settings={"rows": tuple(row.id for row in record.rows)})
    assert publishable(task, part) == ["restricted to rows small-4x8, large-512x8"], "as it is"
    (whole,) = published(task, [part]).values()
    assert (whole.rows, whole.headline, whole.settings.rows) == (record.rows, record.headline, ())
    text = results_md(task, [part])
    assert "| published above |" in text
    assert "joined from" not in text
    with (task.path / "bench" / "workloads.toml").open("a") as rows:
        rows.write('[[workload]]\nid = "odd"\nop = "fake"\ninputs.x = { shape = [5, 8], dtype = "float32" }\n')
    assert published(Task(task.path), [part]) == {}


def test_a_noisy_part_is_left_out_and_its_rows_come_from_others(task: Task, record: RunRecord) -> None:
    first, second = (
        updated(record, settings={"rows": (row.id,)}).model_copy(update={"rows": (row,), "noise_floor": {}})
        for row in record.rows
    )
    noisy = second.model_copy(update={"run_id": "20261120T042900Z-000009", "noisy": ("it was busy",)})
    assert published(task, [noisy, first]) == {}
    (whole,) = published(task, [noisy, first, second]).values()
    assert (whole.rows, whole.noisy) == (record.rows, ())
    assert noisy.run_id not in whole.parts
    assert "not published: noisy: it was busy" in results_md(task, [noisy, first, second])


def test_a_part_completes_a_whole_run_and_no_later_run_takes_that_away(task: Task, record: RunRecord) -> None:
    wrong = record.rows[0].model_copy(update={"verdict": Verdict.INVALID, "reason": "it claims too little"})
    whole = recompute(record.model_copy(update={"rows": (wrong, record.rows[1])}))
    part = updated(record, settings={"rows": (wrong.id,)}).model_copy(
        update={"run_id": "20261120T050000Z-00000a", "utc": "2026-11-20T05:00:00Z", "rows": record.rows[:1]}
    )
    assert published(task, [whole]) == {}
    (made,) = published(task, [whole, part]).values()
    assert (sorted(row.id for row in made.rows), made.parts) == (sorted(ROWS), (whole.run_id, part.run_id))
    again = whole.model_copy(update={"run_id": "20261120T060000Z-00000b", "utc": "2026-11-20T06:00:00Z"})
    assert published(task, [whole, part, again]) == {"h200": made}


def test_rows_that_a_state_has_results_of(record: RunRecord) -> None:
    first, second = (row.id for row in record.rows)
    assert record.machine.before is not None
    asked = (record.provenance, record.machine.before.name, record.settings.model_copy(update={"rows": (second,)}))
    half = record.model_copy(update={"rows": record.rows[:1]})
    assert measured([half], *asked) == {first: True}
    assert measured([record], *asked) == {first: True, second: True}
    for other in ({"partial": True}, {"noisy": ("it was busy",)}):
        assert measured([record.model_copy(update=other)], *asked) == {}
    assert measured([updated(record, provenance={"hashes": {"solution": "0" * 64}})], *asked) == {}
    wrong = record.rows[0].model_copy(update={"verdict": Verdict.INVALID})
    fails = record.model_copy(update={"rows": (wrong, record.rows[1])})
    assert measured([fails], *asked) == {first: False, second: True}
    assert measured([half, fails], *asked) == {first: True, second: True}


def test_rows_that_are_slower_are_named(record: RunRecord) -> None:
    first, second = record.rows
    slow, equal = (
        row.model_copy(update={"speedup": {Basis.DEVICE: {"baseline": Interval(estimate=0.9, low=0.8, high=high)}}})
        for row, high in ((first, 0.99), (second, 1.0))
    )
    assert slower_rows(record.model_copy(update={"rows": (slow, equal)}))[0] == [(first.id, "baseline")]


def test_a_verdict_stands_beside_what_decided_it(task: Task, record: RunRecord) -> None:
    """Runs of older harnesses were decided by wall; their times on the device explain no verdict."""
    text = results_md(task, [updated(record, settings={"cold": False, "decides": Basis.WALL})])
    assert "2 of 2 rows are FASTER than baseline (sglang 1.0) by wall with kda-runtime;" in text
    assert "| row | verdict | speedup over baseline, wall with kda-runtime | target | device us, solution |" in text
    wall = interval(record.rows[1].speedup[Basis.WALL]["baseline"])
    assert wall != interval(record.rows[1].speedup[Basis.DEVICE]["baseline"])
    assert f"| large-512x8 | FASTER | {wall} | missed |" in text
    assert "2 of 2 rows are FASTER than baseline (sglang 1.0) by device;" in results_md(task, [record])


def test_a_device_that_the_host_hides_is_named(task: Task, record: RunRecord) -> None:
    """By medians, where the interval is too wide to say so."""
    times = {arm: median(record.rows[0], arm, Metric.DEVICE) for arm in ("baseline", "upstream_latest")}
    assert None not in times.values()
    fastest = min(times, key=lambda arm: times[arm] or 0.0)
    least = times[fastest] or 0.0
    for factor, named in ((1.02, []), (1.021, [(record.rows[0].id, fastest)])):
        changed = _with_medians(record, {Metric.DEVICE: factor * least}, {})
        assert slower_rows(changed) == ([], named)
    assert f"slower on the device: {record.rows[0].id} ({fastest})" in results_md(task, [changed])
    table = results_md(task, [changed]).partition("Rows to look at")[2]
    assert "| missed |" in table
    config = task.path / "config.toml"
    config.write_text(config.read_text().replace("attained = 0.8\nwithin_us = 0.4\n", ""))
    table = results_md(Task(task.path), [changed]).partition("Rows to look at")[2]
    assert "| missed |" not in table
    assert "| met |" not in table, "no target is stated, so none is met"


@pytest.mark.parametrize(
    ("high", "replayed", "named"),
    [(0.949, None, True), (0.951, None, False), (0.6, 0.94, True), (0.6, 0.97, False), (1.5, 0.9, True)],
)
def test_rows_that_a_port_would_slow_down_are_named(
    task: Task, record: RunRecord, high: float, replayed: float | None, named: bool
) -> None:
    """By the plain export's wall, under upstream's own launcher where that applies; the interval has to say so."""

    def spoilt(end: float) -> dict[str, Interval]:
        return {"upstream_latest": Interval(estimate=0.7 * end, low=0.5 * end, high=end, level=0.95)}

    bases = {Basis.PORTABLE: spoilt(high)} | ({Basis.REPLAYED: spoilt(replayed)} if replayed else {})
    changed = change_row(record, speedup={**record.rows[0].speedup, **bases})
    text = results_md(task, [changed])
    words = (
        "by wall the portable form is more than 5% slower than the newest release on 1 row: there, keep SGLang's own"
    )
    assert (words in text) == named
    table = text.partition("Rows to look at")[2].partition("</details>")[0]
    assert ("| portable wall, newest release |" in table) == named
    cells = next((line for line in table.splitlines() if line.startswith("| small-4x8 |")), "")
    assert (f" {interval(spoilt(replayed or high)['upstream_latest'])} |" in cells) == named
    assert "newest release" not in results_md(task, [record])


def test_rows_are_told_apart_by_what_bounds_them(task: Task, record: RunRecord) -> None:
    """The small row's device takes less than 0.8 of its wall, the large one's nearly all of it."""
    small = {Metric.WALL: 10.0, Metric.DEVICE: 7.9}
    text = results_md(task, [_with_medians(record, small, {Metric.WALL: 40.0, Metric.DEVICE: 35.0})])
    assert f"; 1 row bound by the host, {10 / 4.3:.3f} times its floor; 1 row bound by the device, 1.250 times" in text
    both = _with_medians(record, small, {Metric.WALL: 8.6, Metric.DEVICE: 1.0})
    assert "; 2 rows bound by the host, 2.000 to 2.326 times its floor\n" in results_md(task, [both])
    assert bounds_md(both).endswith("|\n| host | 2 | 8.60 to 10.00 | 1.00 to 7.90 | 2.000 to 2.326 |\n")


def _with_medians(record: RunRecord, *rows: Mapping[Metric, float]) -> RunRecord:
    """The record with these medians of the solution, row by row."""
    changed = []
    for row, medians in zip(record.rows, rows, strict=True):
        arm = row.arms["solution"]
        summary = {metric: arm.summary[metric].model_copy(update={"median": us}) for metric, us in medians.items()}
        arms = row.arms | {"solution": arm.model_copy(update={"summary": arm.summary | summary})}
        changed.append(row.model_copy(update={"arms": arms}))
    return record.model_copy(update={"rows": tuple(changed)})


def test_results_show_the_gpu_during_the_run_where_it_was_watched(task: Task, record: RunRecord) -> None:
    watch = MachineWatch(
        readings=300,
        busy=280,
        seconds=61.0,
        longest_gap_s=0.3,
        cpu_s=0.1,
        sm_mhz=Spread(low=1815, median=1980, high=1980),
        memory_mhz=None,
        power_w=None,
        temperature_c=Spread(low=40, median=51, high=53),
        throttle_s={"sw_power_cap": 0.4},
        foreign=(),
    )
    text = results_md(task, [record.model_copy(update={"machine_watch": watch})])
    assert (
        "- GPU during the run: 300 readings in 61 s (lowest, median, highest): 1815, 1980, 1980 MHz; 40, 51, 53 C; "
        "sw_power_cap 0.4 s; foreign processes: 0\n"
    ) in text
    assert "during" not in results_md(task, [record])


def test_results_without_a_run_say_how_to_make_one(task: Task) -> None:
    text = results_md(task, [])
    assert "`kda bench fake --record`" in text
    assert "The ledger is empty." in text
    assert "plots/" not in text


def test_the_picture_of_all_tasks(task: Task, record: RunRecord) -> None:
    assert overview_md([(task, {})]) == "No task has a published run yet.\n"
    text = overview_md([(task, published(task, [record]))])
    assert text.startswith("![How many times as fast as SGLang's own kernels each task's kernels are](docs/plots/")
    assert WHOSE in text
    assert text.endswith(" The same in numbers: [fam](fam/README.md).\n")


def test_the_latest_sound_run_against_another_opponent_has_a_line(task: Task) -> None:
    with (task.path / "config.toml").open("a") as config:
        config.write('[arms.rival]\nmodule = "baseline.rival"\nupstream = "sglang-1.0"\n')
    task = Task(task.path)
    record = make_record(task)
    assert record.headline is not None

    def against(run: str, **parts: Any) -> RunRecord:
        """As `record`, but with another first opponent, which takes the place of the latest release."""
        first = "rival", *record.settings.against
        of = {basis: {**means, "rival": means["upstream_latest"]} for basis, means in record.headline.speedup.items()}
        changed = updated(record, settings={"against": first}, headline={"speedup": of})
        return updated(changed.model_copy(update={"run_id": run, "utc": LATER}), **parts)

    assert not list(other_opponents_line(task, record, [record])), "no such run"
    sound, quick = against("20261121T000000Z-aaaaaa"), against("20261121T000000Z-bbbbbb", settings={"quick": True})
    quick = updated(quick, settings={"against": ("rival",), "quick": True})
    elsewhere = updated(against("20261121T000000Z-cccccc"), machine={"before": gpu_reading("NVIDIA B200")})
    noisy = against("20261121T000000Z-dddddd").model_copy(update={"noisy": ("pid 7",)})
    (line,) = other_opponents_line(task, record, [sound, quick, elsewhere, noisy])
    mean = interval(record.headline.speedup[Basis.DEVICE]["upstream_latest"])
    assert line.startswith(
        f"over rival (sglang 1.0) {mean} on the device, rows `small-4x8` and 1 more, all FASTER, run `2026"
    )
    assert "aaaaaa" in line
    worse = change_row(sound, verdict=Verdict.NOT_FASTER)
    assert ", 1 of them not FASTER, " in next(other_opponents_line(task, record, [worse]))
    assert f"- **Other opponents**: {line}\n" in results_md(task, [record, sound])


def test_rows_can_be_downloaded(task: Task, record: RunRecord) -> None:
    """Every row once, its numbers those of the record; JSON and CSV hold the same."""
    first, second = flat_rows(task, {"h200": record})
    assert [first["row"], second["row"]] == list(ROWS)
    row = record.rows[1]
    assert (second["verdict"], second["models"], second["bytes_moved"]) == ("FASTER", "some-model", 256)
    speedup = row.speedup[Basis.DEVICE]["upstream_latest"]
    shown = [second[f"device_speedup_vs_upstream_latest{end}"] for end in ("", "_low", "_high")]
    assert shown == [round(value, 4) for value in (speedup.estimate, speedup.low, speedup.high)]
    assert second["wall_us_portable"] == round(row.arms["portable"].summary[Metric.WALL].median, 4)
    assert second["baseline_against_itself"] is None
    assert first["baseline_against_itself"] is not None
    assert json.loads(rows_json(task, {"h200": record})) == [first, second]
    table = list(csv.DictReader(rows_csv(task, {"h200": record}).splitlines()))
    assert [list(line.values()) for line in table] == [
        ["" if value is None else str(value) for value in one.values()] for one in (first, second)
    ]


def test_a_row_without_an_interval_shows_the_ratio_of_its_medians(task: Task) -> None:
    """Records from before version 3 have device times, and intervals of the wall alone."""
    record = make_record(task, old=True)
    row = record.rows[0]
    assert Basis.DEVICE not in row.speedup
    times = [median(row, arm, Metric.DEVICE) for arm in ("baseline", "solution")]
    assert row_ratio(record, row, Basis.DEVICE, "baseline") == times[0] / times[1]
    assert row_ratio(record, row, Basis.WALL, "baseline") == row.speedup[Basis.WALL]["baseline"].estimate
    assert row_ratio(record, row, Basis.PORTABLE, "baseline") is None


@draws
def test_publish_writes_everything_once(task: Task, record: RunRecord, tmp_path: Path) -> None:
    append(task.ledger, record)
    docs, readme = task.path / "docs", tmp_path / "README.md"
    pictures = [docs / "plots" / f"{kind}-h200.svg" for kind in ("summary", "speedup", "attained", "history")]
    pages = [docs / name for name in ("results.md", "rows.csv", "rows.json", "baseline_source.md")]
    overview, family = tmp_path / "docs" / "plots" / "overview.svg", tmp_path / "fam" / "README.md"
    written = [*pages, *pictures, readme, overview, family]
    missing = publish([task], check=True)
    new = [line for line in missing if line.endswith(": file not found; run `kda publish`")]
    assert new == [*missing[:8], missing[9]]
    assert not written[0].exists(), "a check writes nothing"
    assert publish([task], check=False) == [str(path) for path in written]
    assert publish([task], check=True) == publish([task], check=False) == []
    assert "sglang/kernel.py" in written[3].read_text()
    assert readme.read_text().startswith("# Fake\n<!-- kda:results:begin -->\n![How many times")
    assert readme.read_text().endswith("<!-- kda:results:end -->\nThe rest.\n")


@draws
@pytest.mark.parametrize(
    ("name", "line", "honest", "edited"),
    [
        ("fam/k99_fake/docs/results.md", "| large-512x8 |", "| 28.00 |", "| 29.00 |"),
        ("fam/k99_fake/docs/rows.csv", "large-512x8", "28.0", "29.0"),
        ("fam/k99_fake/docs/rows.json", "small-4x8", "256", "257"),
        ("docs/plots/overview.svg", "k99_fake", "k99", "k98"),
        ("fam/k99_fake/docs/baseline_source.md", "- files: 1", "1", "2"),
        ("fam/k99_fake/docs/plots/speedup-h200.svg", "<path d=", "1", "2"),
        ("fam/k99_fake/docs/plots/attained-h200.svg", "100 B", "100", "101"),
        ("fam/k99_fake/docs/plots/history-h200.svg", "2026-11-20", "20", "21"),
        ("README.md", "Geometric means", "95%", "99%"),
        ("fam/README.md", "| [k99_fake]", "1.997", "1.998"),
        ("fam/README.md", "| some-model |", "(2)", "(3)"),
    ],
)
def test_one_edited_digit_is_found_with_its_line(
    task: Task, record: RunRecord, tmp_path: Path, name: str, line: str, honest: str, edited: str
) -> None:
    append(task.ledger, record)
    publish([task], check=False)
    assert problems(task) == []
    path = tmp_path / name
    lines = path.read_text().splitlines(keepends=True)
    number = next(n for n, text in enumerate(lines) if line in text and honest in text)
    was = lines[number]
    lines[number] = was.replace(honest, edited, 1)
    path.write_text("".join(lines))
    (found,) = publish([task], check=True)
    assert found.startswith(f"{path}:{number + 1}: expected {was.rstrip()!r}, got ")
    own = path.is_relative_to(task.path)
    assert problems(task) == ([found] if own else []), "validate says the same of the task's own pages"
    assert path.read_text() == "".join(lines), "a check writes nothing"
    assert publish([task], check=False) == [str(path)]
    assert path.read_text().splitlines(keepends=True)[number] == was


@draws
def test_a_plot_without_a_run_is_found_and_removed(task: Task, record: RunRecord) -> None:
    append(task.ledger, record)
    publish([task], check=False)
    left = task.path / "docs" / "plots" / "speedup-b200.svg"
    left.write_text("<svg/>")
    assert publish([task], check=True) == [f"{left}: no published run gives this plot; run `kda publish`"]
    assert publish([task], check=False) == [f"{left}: removed"]
    assert not left.exists()


@draws
def test_without_matplotlib_nothing_is_written_and_validate_says_what_it_left_out(
    task: Task, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(task.ledger, record)
    publish([task], check=False)
    speedup = task.path / "docs" / "plots" / "speedup-h200.svg"
    speedup.write_text("<svg/>")
    monkeypatch.setattr(plots, "MATPLOTLIB", "0.1")
    remedy = r"plots need matplotlib 0.1, got 3\..*: pip install matplotlib==0.1"
    for check in (True, False):
        with pytest.raises(MissingRequirement, match=remedy):
            publish([task], check=check)
    assert speedup.read_text() == "<svg/>"
    assert problems(task) == []
    assert "plots need matplotlib 0.1" in str(uncompared(task))
    monkeypatch.undo()
    assert uncompared(task) is None


def test_without_a_run_no_plot_is_needed(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "MATPLOTLIB", "0.1")
    publish([task], check=False)
    assert not (task.path / "docs" / "plots").exists()
    assert uncompared(task) is None


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


def test_the_map_leads_from_a_model_to_its_steps(task: Task, tmp_path: Path) -> None:
    model = next(name for row in task.workloads if row.production for name in row.models)
    for name in ("dit", "vae"):
        page = tmp_path / "models" / "docs" / f"{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.touch()

    def steps(**parts: Sequence[str]) -> str:
        lines = family_map.blocks([(task, {})], tmp_path, parts)["models"].splitlines()
        return next(one.split(" | ")[1] for one in lines if one.startswith(f"| {model} "))

    assert steps(**{model: ("dit", "vae", "audio")}) == "[dit](models/docs/dit.md), [vae](models/docs/vae.md)"
    assert steps() == "-", "no page has its name"


def test_a_task_without_a_release_shows_its_speedups_over_its_own_baseline(task: Task, record: RunRecord) -> None:
    unpinned = record.model_copy(update={"provenance": record.provenance.model_copy(update={"pins": {}})})

    def table(*records: RunRecord) -> list[list[str]]:
        text = family_map.blocks([(task, {"h200": one}) for one in records], task.path, {})["tasks"]
        return [one.split(" | ")[5:] for one in text.splitlines() if one.startswith("| ")]

    (head, known), (_, pinned, own) = table(record), table(record, unpinned)
    assert known[0].count("/") == 2, "device, portable, wall"
    assert pinned == [*known[:-1], "-", known[-1]], "it has no baseline of its own"
    assert own == ["-", known[0], known[-1]]
    assert table(record, unpinned)[0] == [*head[:-1], "vs own baseline", head[-1]]


def test_a_family_without_a_map_needs_none_and_one_with_a_map_all_its_blocks(task: Task, tmp_path: Path) -> None:
    page = tmp_path / "fam" / "README.md"
    page.write_text(page.read_text().replace("kda:models:end", "kda:model:end"))
    with pytest.raises(UsageError, match=r"fam/README.md: expected the line '<!-- kda:models:end -->' once, got it 0"):
        publish([task], check=True)
    page.unlink()
    publish([task], check=False)
    assert not page.exists()


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
