"""Draw two plots of geometric means: one task's, with a tick for each of its rows, and one of all tasks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, RunRecord
from kda_tools.publish import report
from kda_tools.publish.figures import BLUE, GREEN, GRID, LETTER, ORANGE, figure_svg, legend, ratio_lanes, whiskers
from kda_tools.publish.report import BASELINE, LATEST, WORDS, pin_name, row_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANE = 0.34
"""Height of one line of the plots, in inches."""
KINDS = {Basis.DEVICE: (BLUE, "o"), Basis.PORTABLE: (GREEN, "s"), Basis.WALL: (ORANGE, "D")}
"""Basis -> colour and marker; no two bases differ by colour alone."""
ROW_OPACITY = 0.75
"""Opacity of a row's tick: as faint as a contrast of 3 to the page allows."""


def task_summary(record: RunRecord) -> str:
    """A line for each clock and release: a faint tick for every row, and the geometric mean with its interval."""
    assert record.headline is not None
    lanes = [
        (basis, arm)
        for basis in KINDS
        for arm in record.settings.against
        if report.speedup(record.headline, basis, arm)
    ]
    names = [f"{WORDS[basis]}, {_release(record, arm)}" for basis, arm in lanes]

    def draw(axes: "Axes") -> None:
        for lane, (basis, arm) in enumerate(lanes):
            colour, marker = KINDS[basis]
            rows = [value for row in record.rows if (value := row_ratio(record, row, basis, arm))]
            axes.plot(
                rows, [lane] * len(rows), "|", color=colour, markersize=10, markeredgewidth=1.2, alpha=ROW_OPACITY
            )
            mean = report.speedup(record.headline, basis, arm)
            whiskers(axes, [mean] if mean else [], [lane], colour, marker, None)
        ratio_lanes(axes, names, "speedup (logarithmic); ticks: rows, marks: geometric means")

    return figure_svg(draw, len(names) * LANE, max(map(len, names), default=0) * LETTER, top=0.1)


def overview(latest: Sequence[tuple[Task, RunRecord]]) -> str:
    """All tasks and GPUs, two lines each: against the first release, and with hollow markers against the latest."""
    lanes = [
        (f"{task.folder}, {report.gpu_of(record.machine)}" if first else "", record, arm)
        for task, record in latest
        for first, arm in ((True, BASELINE), (False, LATEST))
        if first or arm in record.settings.against
    ]
    shown = [basis for basis in KINDS if any(report.speedup(record.headline, basis, arm) for _, record, arm in lanes)]

    def draw(axes: "Axes") -> None:
        for arm, opponent in ((BASELINE, "baseline"), (LATEST, "latest release")):
            for basis in shown:
                colour, marker = KINDS[basis]
                points = [
                    (value, place)
                    for place, (_, record, of) in enumerate(lanes)
                    if of == arm and (value := report.speedup(record.headline, basis, arm))
                ]
                face = colour if arm == BASELINE else "none"
                label = f"{WORDS[basis]}, over {opponent}" if points else None
                whiskers(axes, [v for v, _ in points], [y for _, y in points], colour, marker, label, face)
        for place, (name, _, _) in enumerate(lanes):
            if name and place:
                axes.axhline(place - 0.5, color=GRID, linewidth=0.8)
        ratio_lanes(axes, [name for name, _, _ in lanes], "times as fast as SGLang's own kernel (logarithmic)")
        legend(axes, 2)

    names = max((len(name) for name, _, _ in lanes), default=0)
    return figure_svg(draw, len(lanes) * LANE * 0.7, names * LETTER, top=0.2 + 0.2 * len(shown))


def _release(record: RunRecord, arm: str) -> str:
    return pin_name(record.provenance.pins.get(arm)) or arm
