"""Summaries, speedups and their confidence intervals, from samples alone.

Times are microseconds per call. `Generations` holds one sequence of samples per generation of workers; sample i of
two arms in one generation was taken back to back and is a pair.

**The interval.** A speedup is `median(opponent) / median(subject)` over all pairs. Two things blur it: noise from
sample to sample, and a level that each pair of worker processes draws once when it starts and then keeps. Two
estimates of that blur are made on the log scale and the interval reaches as far as the further of them:

1. a hierarchical paired bootstrap: generations with replacement, then pairs within each drawn generation, the same
   pairs for both arms (so drift that hits both cancels), 2.5% to 97.5% percentile;
2. Student's t over the log ratios of the single generations, with K - 1 degrees of freedom.

The bootstrap alone is too narrow when generations are few: of three it can draw little beyond the lowest and the
highest, which enclose the truth only 3 times in 4. Simulated with identical arms, 12 samples a generation, sample noise
of 1% (exponential) and a process level of relative spread s (3000 runs each), the coverage of the nominal 95% and the
rate of a false "faster" (nominal 2.5%) were:

| generations | s | bootstrap alone | both (this module) | width, both over alone |
|---|---|---|---|---|
| 3 | 0 | 98.5%, 0.7% | 99.4%, 0.2% | 1.5 |
| 3 | 1% | 82.9%, 9.2% | 96.1%, 2.0% | 2.4 |
| 3 | 5% | 78.3%, 11.3% | 94.9%, 2.8% | 2.5 |
| 5 | 1% | 90.3%, 4.6% | 95.4%, 2.5% | 1.3 |
| 5 | 5% | 92.7%, 3.6% | 95.5%, 2.2% | 1.1 |

The price is width, which more generations buy back. What it still cannot do: cover a process level that is rarely very
different (three generations may all miss it), a bias that is the same in every generation, or several rows at once (the
level holds for each row by itself, so among 40 rows without a difference one false "faster" is to be expected). One
generation says nothing about other processes: its interval is the bootstrap of its pairs alone, and
`kda_judge.evidence.derive` gives no FASTER for it.

The draws come from the raw PCG64 stream, which numpy promises to keep, so a published interval can be computed again
under any numpy version.
"""

from collections.abc import Callable, Sequence
from math import exp, isfinite

import numpy as np
from numpy.typing import NDArray

from kda_judge.evidence.run_record import Interval, Summary

Generations = Sequence[Sequence[float]]
Floats = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 2000
SEED = 20_261_120
T_QUANTILE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantile for 1, 2, ... 9 degrees of freedom; the last one serves for more, where it is up to 15% too wide."""


def summarise(samples: Generations) -> Summary:
    """Statistics over the samples of all generations; `std` is the sample standard deviation (0 for one sample)."""
    flat = np.concatenate([np.zeros(0), *(_checked(part, f"generation {g}") for g, part in enumerate(samples))])
    if flat.size == 0:
        raise ValueError("samples: expected at least one sample, got none")
    p10, p90 = np.percentile(flat, (10, 90))
    return Summary(
        count=flat.size,
        median=float(np.median(flat)),
        mean=float(flat.mean()),
        std=float(flat.std(ddof=1)) if flat.size > 1 else 0.0,
        min=float(flat.min()),
        p10=float(p10),
        p90=float(p90),
    )


def speedup(opponent: Generations, subject: Generations) -> Interval:
    """`median(opponent) / median(subject)` with its interval; above 1 the subject is faster.

    A generation counts with as many pairs as both arms have; generations without a pair are left out.

    Raises:
        ValueError: no pair at all, or a sample that is not a positive finite number.
    """
    return geomean([(opponent, subject)])


def constant_like(constant: float, subject: Generations) -> Generations:
    """An arm that always takes `constant`, in the shape of `subject`: turns a limit into an opponent."""
    if not (isfinite(constant) and constant > 0):
        raise ValueError(f"constant: expected a positive finite number, got {constant!r}")
    return [[constant] * len(part) for part in subject]


def geomean(rows: Sequence[tuple[Generations, Generations]]) -> Interval:
    """Equal-weight geometric mean of the rows' speedups; each row is (opponent, subject).

    One draw of generations serves all rows, because one generation's workers serve all rows; the pairs are drawn per
    row. Rows that lack a generation others have (an interrupted run) keep all their pairs in the estimate, and the
    interval is made from the generations that every row has.

    Raises:
        ValueError: no rows, a row without pairs, or no generation that all rows have.
    """
    return _interval(rows, lambda theirs, ours: np.mean(np.log(theirs) - np.log(ours), axis=0))


def step_gain(rows: Sequence[tuple[Generations, Generations]], calls: Sequence[float]) -> Interval:
    """The opponent's time over the subject's for all calls of a step, in which each row is called `calls` times.

    `sum(calls * median(opponent)) / sum(calls * median(subject))`: a row counts by the time that models spend in it.
    Raises as `geomean`.
    """
    weights = np.asarray(calls, dtype=np.float64)
    return _interval(rows, lambda theirs, ours: np.log(weights @ theirs) - np.log(weights @ ours))


def _interval(rows: Sequence[tuple[Generations, Generations]], combine: Callable[[Floats, Floats], Floats]) -> Interval:
    """The interval of a ratio: `combine` makes its logs [draws] of both arms' medians [rows, draws], opponent first."""
    if not rows:
        raise ValueError("rows: expected at least one row, got none")
    paired = [_pair(opponent, subject, index) for index, (opponent, subject) in enumerate(rows)]
    common = sorted(set.intersection(*(set(pairs) for pairs in paired)))
    if not common:
        raise ValueError("rows: expected a generation that every row has samples of, got none")
    count = len(common)
    whole = [[np.concatenate(list(pairs.values()), axis=1)] for pairs in paired]
    estimate = float(combine(*_medians(whole))[0])
    single = combine(*_medians([[pairs[g] for g in common] for pairs in paired]))

    drawn = (np.random.PCG64(SEED).random_raw(RESAMPLES * count) % count).reshape(RESAMPLES, count).astype(np.intp)
    resampled = [_resample([pairs[g] for g in common], drawn, index) for index, pairs in enumerate(paired)]
    logs = combine(*(np.stack(medians) for medians in zip(*resampled, strict=True)))
    low, high = np.quantile(logs, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    reach = _student_reach(single)
    centre = float(single.mean())
    return Interval(
        estimate=exp(estimate),
        low=exp(min(estimate, float(low), centre - reach)),
        high=exp(max(estimate, float(high), centre + reach)),
        level=LEVEL,
    )


def _student_reach(values: Floats) -> float:
    """Half width of Student's t interval of the mean; 0 for a single value."""
    count = values.size
    if count == 1:
        return 0.0
    quantile = T_QUANTILE[min(count - 1, len(T_QUANTILE)) - 1]
    return quantile * float(values.std(ddof=1)) / float(np.sqrt(count))


def _pair(opponent: Generations, subject: Generations, row: int) -> dict[int, Floats]:
    """Generation -> [2, pairs]; without the generations that have no pair."""
    pairs = {}
    for generation, (theirs, ours) in enumerate(zip(opponent, subject, strict=False)):
        count = min(len(theirs), len(ours))
        if count:
            where = f"row {row}, generation {generation}"
            pairs[generation] = np.stack(
                [_checked(theirs, f"opponent, {where}")[:count], _checked(ours, f"subject, {where}")[:count]]
            )
    if not pairs:
        raise ValueError(
            f"row {row}: expected at least one pair of samples, got {[len(part) for part in opponent]} of the opponent "
            f"and {[len(part) for part in subject]} of the subject, per generation"
        )
    return pairs


def _checked(samples: Sequence[float], where: str) -> Floats:
    values = np.asarray(samples, dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if wrong.size:
        raise ValueError(
            f"{where}, sample {wrong[0]}: expected a positive finite time in us, got {float(values[wrong[0]])!r}"
        )
    return values


def _medians(paired: Sequence[Sequence[Floats]]) -> tuple[Floats, Floats]:
    """Rows of draws of [2, pairs] -> the opponent's medians [rows, draws], and the subject's."""
    found = np.array([[np.median(draw, axis=1) for draw in row] for row in paired])
    return found[:, :, 0], found[:, :, 1]


def _resample(generations: list[Floats], drawn: NDArray[np.intp], row: int) -> tuple[Floats, Floats]:
    """Medians [RESAMPLES] of one row under the generation draw [RESAMPLES, K]: the opponent's, and the subject's.

    Every drawn generation gives as many pairs as the shortest one has, so that the draw stays one array.
    """
    counts = np.array([part.shape[1] for part in generations])
    starts = np.cumsum(counts) - counts
    size = (*drawn.shape, int(counts.min()))
    raw = np.random.PCG64([SEED, row]).random_raw(int(np.prod(size))).reshape(size)
    within = (raw % counts.astype(np.uint64)[drawn][:, :, None]).astype(np.intp)
    picked = (starts[drawn][:, :, None] + within).reshape(RESAMPLES, -1)
    flat = np.concatenate(generations, axis=1)
    return _median(flat[0][picked]), _median(flat[1][picked])


def _median(values: Floats) -> Floats:
    """Median of each row; a full sort is ten times faster than np.median's partition at these sizes (36 values)."""
    values.sort(axis=1)
    middle: Floats = (values[:, (values.shape[1] - 1) // 2] + values[:, values.shape[1] // 2]) / 2
    return middle
