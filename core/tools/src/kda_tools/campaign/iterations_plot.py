"""The plot of a campaign: each iteration's speedup over upstream, marked by its decision, and the best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence.run_record import Interval
from kda_judge.evidence.stats import geomean
from kda_tools.campaign.events import Decision, Done
from kda_tools.campaign.measure import BASELINE, BEST
from kda_tools.campaign.state import State
from kda_tools.publish.figures import BLUE, GREEN, MUTED, ORANGE, figure_svg, legend, whiskers
from kda_tools.publish.plots import missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAYS = "Speedup over upstream of every iteration with its 95% interval, and of the best so far in the same session"
MARKS = {Decision.KEEP: (GREEN, "o", "kept"), Decision.REVERT: (ORANGE, "D", "reverted")}


def draw(state: State) -> str | None:
    """The plot as SVG; None if no iteration was measured.

    Raises:
        MissingRequirement: matplotlib is missing, or not the release that the bytes are made with.
    """
    measured = {number: done for number, done in state.finished_iterations.items() if done.against_baseline}
    if not measured:
        return None
    if problem := missing():
        raise MissingRequirement(f"{problem}; a campaign's plot is drawn by it")
    best = {number: value for number, done in measured.items() if (value := best_in(done))}
    failed = [number for number, done in state.finished_iterations.items() if done.decision is Decision.FAILED]

    ends = [end for one in best.values() for end in (one.low, one.high)]
    ends += [end for done in measured.values() if (one := done.against_baseline) for end in (one.low, one.high)]
    margin = max(0.1 * (max(ends) - min(ends)), 0.005)
    low, high = min(ends) - margin, max(ends) + margin

    def picture(axes: Axes) -> None:
        # The best is measured anew in each session, beside the candidate: the distance of the two decides.
        estimates = [one.estimate for one in best.values()]
        axes.step(list(best), estimates, where="mid", color=BLUE, marker="_", markersize=14, label="best so far")
        for decision, (colour, marker, label) in MARKS.items():
            chosen = [(n, done.against_baseline) for n, done in measured.items() if done.decision is decision]
            values, places = [one for _, one in chosen if one], [n for n, one in chosen if one]
            whiskers(axes, values, places, colour, marker, label, upright=True)
        axes.plot(failed, [low] * len(failed), "x", color=MUTED, label="failed", clip_on=False)
        axes.set_ylim(low, high)
        axes.set_xticks(list(state.finished_iterations))
        axes.set_xlim(min(state.finished_iterations) - 0.6, max(state.finished_iterations) + 0.6)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("speedup over upstream")
        axes.set_xlabel("iteration")
        legend(axes, 4)

    return figure_svg(picture, 2.4, 0.45)


def best_in(done: Done) -> Interval | None:
    """The best so far against the baseline in this iteration's session: geometric mean over the measured rows."""
    pairs = [(row.samples[BASELINE], row.samples[BEST]) for row in done.rows if {BASELINE, BEST} <= set(row.samples)]
    return geomean(pairs) if pairs else None
