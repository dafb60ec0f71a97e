"""Keep or revert: one test per try, and a threshold that all tries of a campaign share.

**The test.** The candidate and the best so far run in one session, in turns. In generation g of workers a row's log
ratio is `log median(best) - log median(candidate)`; `x_g` is its mean over the rows that the hypothesis is about.
With K generations, mean m and standard deviation s of the `x_g`, the lower bound of the gain is

    low = min(m - t(1 - a, K - 1) * s / sqrt(K),  lower end of the 95% interval of `kda_judge.evidence.stats`)

where t is Student's quantile. A candidate is kept when `low > 0` and its gain is at least `least_gain`.

**The threshold.** Each try that changes nothing is a chance to be kept by luck. A campaign may measure `tries` times,
so every try gets a share `a = ALPHA / tries` of the whole risk (Bonferroni). The sum of the shares bounds the chance
that a campaign keeps any candidate that is no better, whatever the tries have to do with each other. A measurement
that was interrupted and repeated counts as two tries: otherwise a run could be ended because it looks bad. `simulate`
tries this out on recorded noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import atan, cos, exp, inf, log, pi, sin, sqrt
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kda_judge.contract.strict_models import Strict
from kda_judge.evidence import stats
from kda_judge.evidence.run_record import Interval
from kda_judge.evidence.stats import Generations

ALPHA = 0.04
"""Most chance that a whole campaign keeps anything that is no better: below the 5% that is promised, since
recorded noise is not quite normal."""
Pair = tuple[Generations, Generations]
"""Samples of the best so far, and of the candidate."""


class Test(Strict):
    """One try's test, and all that its outcome follows from beside the samples."""

    __test__ = False  # for pytest, which collects classes of this name
    tries: Annotated[int, Field(gt=0)]
    """Among which ALPHA was shared."""
    share: float
    rows: tuple[str, ...]
    """Those that the hypothesis is about; they decide."""
    gain: Interval
    """Best over candidate, geometric mean of these rows, with its ordinary 95% interval."""
    low: float
    """Lower bound at the try's share: above 1 the candidate is better."""


def test(pairs: Mapping[str, Pair], rows: Sequence[str], tries: int) -> Test:
    """Test the candidate on `rows`.

    Raises:
        ValueError: no rows, or a row without paired samples.
    """
    share = ALPHA / tries
    chosen = [pairs[row] for row in rows]
    gain = stats.geomean(chosen)
    means = np.mean([_log_ratios(*pair) for pair in chosen], axis=0)
    low = exp(min(log(gain.low), float(bound(means[None, :], share)[0])))
    return Test(tries=tries, share=share, rows=tuple(rows), gain=gain, low=low)


def lost(pairs: Mapping[str, Pair], margin: float) -> list[str]:
    """Rows on which the candidate is slower by more than `margin`, by the whole 95% interval."""
    return [row for row, pair in pairs.items() if stats.speedup(*pair).high < 1 / (1 + margin)]


def won(pairs: Mapping[str, Pair]) -> list[str]:
    """Rows on which the candidate is faster by the whole 95% interval; each by itself, so that luck is among them."""
    return [row for row, pair in pairs.items() if stats.speedup(*pair).low > 1]


def bound(means: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """[tries, K] generation means of log ratios -> [tries] lower bounds of their expectation at level `1 - share`."""
    count = means.shape[1]
    if count < 2:
        return np.full(means.shape[0], -inf)
    reach = t_quantile(1 - share, count - 1) / sqrt(count)
    found: NDArray[np.float64] = means.mean(axis=1) - reach * means.std(axis=1, ddof=1)
    return found


def t_quantile(level: float, degrees: int) -> float:
    """Quantile of Student's t for a level above one half, by bisection of its distribution function."""
    if not 0.5 < level < 1 or degrees < 1:
        raise ValueError(f"expected a level between 0.5 and 1 and 1 degree of freedom or more, got {level}, {degrees}")
    low, high = 0.0, 1.0
    while _within(high, degrees) < 2 * level - 1:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 2 * level - 1 else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t): finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = atan(t / sqrt(degrees))
    odd = degrees % 2
    term = cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


def _log_ratios(best: Generations, candidate: Generations) -> list[float]:
    """One log ratio of medians for each generation that both have."""
    pairs = [(one[: len(other)], other[: len(one)]) for one, other in zip(best, candidate, strict=False)]
    return [log(float(np.median(one))) - log(float(np.median(other))) for one, other in pairs if len(one)]
