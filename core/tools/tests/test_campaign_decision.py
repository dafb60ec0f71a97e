"""Keep or revert: the test, its threshold, and how often a campaign keeps something that is no better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kda_judge.contract.tasks import find_task
from kda_judge.evidence import record_log, stats
from kda_tools.campaign import decision, noise_page, simulate
from kda_tools.campaign.rules import Rules
from kda_tools.campaign.simulate import Simulation

ROOT = Path(__file__).resolve().parents[3]
PROMISED = 0.05
"""Of false keeps a campaign: what the issue and the page promise."""


def samples(level: float, rng: np.random.Generator, generations: int = 5) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(level * np.exp(rng.normal(0, 0.002) + rng.normal(0, 0.0005, 4))) for _ in range(generations))


def test_quantiles_of_student() -> None:
    for degrees, expected in enumerate(stats.T_QUANTILE, start=1):
        assert decision.t_quantile(0.975, degrees) == pytest.approx(expected, abs=6e-4)
    assert decision.t_quantile(0.999, 4) == pytest.approx(7.1732, abs=1e-3)
    assert decision.t_quantile(0.99875, 3) == pytest.approx(9.4649, abs=1e-3)
    with pytest.raises(ValueError, match="level between"):
        decision.t_quantile(0.5, 3)


def test_the_bound_is_students() -> None:
    means = np.array([[0.01, 0.012, 0.011, 0.009, 0.013]])
    reach = decision.t_quantile(0.999, 4) * means.std(ddof=1) / 5**0.5
    assert decision.bound(means, 0.001)[0] == pytest.approx(means.mean() - reach)
    assert decision.bound(np.array([[0.5]]), 0.001)[0] == -np.inf, "one generation says nothing"


def test_more_tries_ask_for_more() -> None:
    rng = np.random.default_rng(1)
    pairs = {"a": (samples(10.0, rng), samples(9.8, rng))}
    few, many = (decision.test(pairs, ["a"], tries) for tries in (2, 200))
    assert few.share == pytest.approx(decision.ALPHA / 2)
    assert few.gain == many.gain
    assert many.low < few.low < few.gain.estimate


def test_the_ordinary_interval_bounds_it_too() -> None:
    """Where the generations agree by chance, the bootstrap of the samples still says how far they scatter."""
    same = ((10.0, 12.0, 10.0, 12.0),) * 5
    faster = ((9.9, 11.9, 9.9, 11.9),) * 5
    found = decision.test({"a": (same, faster)}, ["a"], 40)
    assert found.low <= found.gain.low


def test_rows_decide_by_their_mean() -> None:
    rng = np.random.default_rng(2)
    pairs = {"a": (samples(10.0, rng), samples(9.0, rng)), "b": (samples(10.0, rng), samples(11.0, rng))}
    assert decision.test(pairs, ["a"], 40).low > 1
    assert decision.test(pairs, ["a", "b"], 40).low < 1
    assert (decision.won(pairs), decision.lost(pairs, 0.02)) == (["a"], ["b"])
    assert decision.lost(pairs, 0.2) == []


def test_false_keeps_of_a_campaign_stay_below_what_is_promised() -> None:
    """On the recorded noise that has shown the most, and on the worst model; and not because nothing is ever kept."""
    found = simulate.simulate([find_task(str(ROOT / "diffusion" / "k01_norm_infer"))], Rules(), 400)
    by_name = {one.noise: one for one in found.results}
    recorded = by_name["device times of norm_infer"]
    shared = next(one for name, one in by_name.items() if "all rows share" in name)
    for one in (recorded, shared):
        low, _ = noise_page.wilson(one.false_keeps, one.campaigns)
        assert low < PROMISED
        assert one.false_keeps / one.campaigns < PROMISED + 0.02, "400 campaigns: two standard errors are 2%"
        assert one.false_keeps_alone / one.campaigns > 0.3, "without sharing the risk luck would be found"
    assert recorded.kept["0.02"] > 0.9


def test_a_kernel_with_a_gain_is_not_in_the_noise() -> None:
    """The simulation can fail: with levels that differ between the arms it keeps them."""
    better = simulate.Noise("x", 2, (), lambda rng, tries: rng.normal(0, 1e-3, (tries, 5, 2)))
    found = simulate._simulated(better, Rules(), 40)
    assert found.kept["0.02"] > 0.99


def test_the_published_rates_are_below_what_is_promised_and_of_this_rule() -> None:
    last = record_log.read(ROOT / "docs" / simulate.FILE, Simulation)[-1]
    assert last.decision == simulate.decision_hash(), "the rule has changed: kda campaign simulate --record"
    assert (last.rules, last.alpha) == (Rules(), decision.ALPHA)
    assert len(last.results) >= 10
    for one in last.results:
        assert one.campaigns >= 4000
        assert noise_page.wilson(one.false_keeps, one.campaigns)[1] < PROMISED, one.noise
    assert noise_page.publish(ROOT, check=True) == []


def test_an_old_rule_is_named(tmp_path: Path) -> None:
    last = record_log.read(ROOT / "docs" / simulate.FILE, Simulation)[-1]
    assert "The rule has changed since" not in noise_page.table_md(last)
    assert "The rule has changed since" in noise_page.table_md(last.model_copy(update={"decision": "0" * 64}))


def test_wilson() -> None:
    assert noise_page.wilson(0, 100) == pytest.approx((0.0, 0.037), abs=5e-4)
    assert noise_page.wilson(50, 100) == pytest.approx((0.404, 0.596), abs=5e-4)
