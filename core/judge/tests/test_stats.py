"""Intervals against known cases, and their coverage on simulated runs whose truth is known."""

import time

import numpy as np
import pytest

from kda_judge.evidence import stats
from kda_judge.evidence.stats import constant_like, geomean, speedup, step_gain, summarise

FLAT = [[2.0] * 12] * 3
RUNS = 500


def simulated(rng: np.random.Generator, level: float, generations: int = 3, common: float = 0.0) -> list[list[float]]:
    """One arm of true median 1 (up to a factor all arms share): process level per generation, 1% sample noise."""
    own = rng.normal(0, level, generations) + common
    return np.exp(own[:, None] + rng.exponential(0.01, (generations, 12))).tolist()


def test_summary_of_known_samples() -> None:
    summary = summarise([[1.0, 2.0], [3.0, 4.0, 5.0]])
    assert (summary.count, summary.median, summary.mean, summary.min) == (5, 3.0, 3.0, 1.0)
    assert summary.std == pytest.approx(np.sqrt(2.5))
    assert (summary.p10, summary.p90) == (pytest.approx(1.4), pytest.approx(4.6))
    assert summarise([[7.0]]).std == 0.0


def test_a_constant_ratio_has_no_width() -> None:
    interval = speedup([[3.0] * 12] * 3, FLAT)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((1.5, 1.5, 1.5))
    assert speedup(constant_like(1.0, FLAT), FLAT).estimate == pytest.approx(0.5)


def test_the_estimate_is_the_ratio_of_medians() -> None:
    rng = np.random.default_rng(1)
    one, two = simulated(rng, 0.02), simulated(rng, 0.02)
    interval = speedup(one, two)
    assert interval.estimate == pytest.approx(np.median(one) / np.median(two))
    assert interval.low < interval.estimate < interval.high
    assert speedup(one, two) == interval, "the draws are fixed"
    again = speedup(two, one)
    assert again.estimate == pytest.approx(1 / interval.estimate)
    assert (again.low, again.high) == pytest.approx((1 / interval.high, 1 / interval.low), rel=1e-3)


def test_a_step_counts_rows_by_the_time_spent_in_them() -> None:
    long, short = [[100.0] * 12] * 3, [[1.0] * 12] * 3
    rows = [([[150.0] * 12] * 3, long), ([[4.0] * 12] * 3, short)]
    gain = step_gain(rows, [2.0, 10.0])
    assert (gain.estimate, gain.low, gain.high) == pytest.approx(((2 * 150 + 10 * 4) / (2 * 100 + 10 * 1),) * 3)
    assert step_gain(rows[:1], [7.0]).estimate == pytest.approx(speedup(*rows[0]).estimate)
    noisy = [(simulated(np.random.default_rng(n), 0.02), simulated(np.random.default_rng(n + 9), 0.02)) for n in (1, 2)]
    near = step_gain(noisy, [1.0, 1.0])
    assert near.low < near.estimate < near.high
    with pytest.raises(ValueError, match="expected at least one row, got none"):
        step_gain([], [])


def test_pairing_cancels_drift_that_both_arms_share() -> None:
    rng = np.random.default_rng(2)
    drift = np.exp(rng.normal(0, 0.3, (3, 12)))
    noise = np.exp(rng.normal(0, 0.001, (2, 3, 12)))
    one, two = (drift * noise[0] * 1.5).tolist(), (drift * noise[1]).tolist()
    paired = speedup(one, two)
    assert paired.low > 1.49
    assert paired.high < 1.51
    shuffled = speedup([rng.permutation(part).tolist() for part in one], two)
    assert shuffled.high - shuffled.low > 10 * (paired.high - paired.low)


@pytest.mark.parametrize("level", [0.0, 0.01, 0.05])
def test_coverage_and_false_faster_under_identical_arms(level: float) -> None:
    """With 500 runs three standard errors are 2.9% around 95% and 2.1% around 2.5%."""
    rng = np.random.default_rng(3)
    intervals = [speedup(simulated(rng, level), simulated(rng, level)) for _ in range(RUNS)]
    covered = np.mean([interval.low <= 1 <= interval.high for interval in intervals])
    faster = np.mean([interval.low > 1 for interval in intervals])
    print(f"process level {level:.0%}: coverage {covered:.1%}, false FASTER {faster:.1%}")
    assert covered >= 0.92
    assert faster <= 0.046


def test_the_bootstrap_alone_would_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why Student's t is there: without it three generations cover about 3 times in 4."""
    monkeypatch.setattr(stats, "_student_reach", lambda values: -100.0)
    rng = np.random.default_rng(3)
    intervals = [speedup(simulated(rng, 0.05), simulated(rng, 0.05)) for _ in range(RUNS)]
    assert np.mean([interval.low <= 1 <= interval.high for interval in intervals]) < 0.85


def test_generations_that_differ_for_both_arms_do_not_hurt() -> None:
    """A machine that is 20% slower or faster in some generation: coverage holds, width does not follow it."""
    rng = np.random.default_rng(4)
    intervals = []
    for _ in range(200):
        common = rng.normal(0, 0.2, 3)
        intervals.append(speedup(*(simulated(rng, 0.01, common=common) for _ in range(2))))
    assert np.mean([interval.low <= 1 <= interval.high for interval in intervals]) >= 0.9
    assert np.median([interval.high / interval.low for interval in intervals]) < 1.1


def test_geometric_mean_of_known_rows() -> None:
    rows = [([[8.0] * 4] * 3, [[2.0] * 4] * 3), ([[1.0] * 4] * 3, [[1.0] * 4] * 3)]
    interval = geomean(rows)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))


def test_rows_of_one_run_share_the_draw_of_generations() -> None:
    """Opposite generation effects cancel in the mean only when one draw serves both rows."""
    up, down = [[1.0] * 12, [1.1] * 12, [1.21] * 12], [[1.21] * 12, [1.1] * 12, [1.0] * 12]
    one = [[1.0] * 12] * 3
    assert speedup(up, one).high > 1.2
    interval = geomean([(up, one), (down, one)])
    assert interval.low == pytest.approx(1.1)
    assert interval.high == pytest.approx(1.1)


def test_coverage_of_the_geometric_mean() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(150):
        rows = [(simulated(rng, 0.02), simulated(rng, 0.02)) for _ in range(4)]
        interval = geomean(rows)
        hits += interval.low <= 1 <= interval.high
    assert hits / 150 >= 0.9


def test_unequal_counts_are_cut_to_pairs() -> None:
    full, short = [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]], [[1.0, 1.0], [1.0]]
    assert speedup(full, short) == speedup([[2.0, 2.0], [2.0]], short)
    assert speedup([[9.0, 9.0], [2.0, 2.0]], [[], [1.0, 1.0]]).estimate == pytest.approx(2.0)
    assert geomean([(FLAT, FLAT), (FLAT[:2], FLAT[:2])]).estimate == pytest.approx(1.0)


def test_more_generations_than_the_table_of_quantiles() -> None:
    rng = np.random.default_rng(6)
    interval = speedup(simulated(rng, 0.01, generations=15), simulated(rng, 0.01, generations=15))
    assert interval.low < 1 < interval.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summarise([[], []]), "expected at least one sample"),
        (lambda: speedup([], []), "expected at least one pair"),
        (lambda: speedup([[1.0]], [[]]), r"\[1\] of the opponent and \[0\] of the subject"),
        (lambda: speedup([[1.0, float("nan")]], [[1.0, 1.0]]), "opponent, row 0, generation 0, sample 1: .* got nan"),
        (lambda: speedup([[1.0]], [[-2.0]]), "subject, row 0, generation 0, sample 0: .* got -2.0"),
        (lambda: geomean([]), "at least one row"),
        (lambda: geomean([([[1.0], []], [[1.0], []]), ([[], [1.0]], [[], [1.0]])]), "a generation that every row"),
        (lambda: constant_like(0.0, FLAT), "constant: expected a positive finite number, got 0.0"),
    ],
)
def test_bad_samples_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_the_largest_task_is_quick() -> None:
    """39 rows and 3 arms, all intervals of a run: about 0.5 s; the bound leaves room for a loaded machine."""
    rng = np.random.default_rng(7)
    rows = [[simulated(rng, 0.01) for _ in range(3)] for _ in range(39)]
    start = time.process_time()
    for one, two, ours in rows:
        speedup(one, ours), speedup(two, ours), speedup(constant_like(0.5, ours), ours)
    for arm in (0, 1):
        geomean([(row[arm], row[2]) for row in rows])
    assert time.process_time() - start < 2
