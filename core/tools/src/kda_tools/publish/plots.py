"""Draw SVG plots of a task's published runs: a summary, every row's speedup, the share attained, and the history."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import Task
from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.run_record import Basis, Headline, RowResult, RunRecord
from kda_tools.publish import report
from kda_tools.publish.figures import BLUE, GRID, LETTER, MUTED, ORANGE, ROW, figure_svg, legend, ratio_axis, whiskers
from kda_tools.publish.report import (
    BASELINE,
    LARGE_BYTES,
    LATEST,
    WORDS,
    pin_name,
    publishable,
    published,
    target_of,
    whole_runs,
)
from kda_tools.publish.summary_plots import overview, task_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATPLOTLIB = "3.10.9"
"""The release that the published bytes are made with; core/pyproject.toml and constraints.txt name the same one."""
FOLDER = "plots"
"""Folder in a task's `docs/`. This module makes every SVG file directly in it."""
LABELS = 6
"""Most labels of runs that fit side by side."""
SERIES = {BASELINE: (BLUE, "o", 0.0), LATEST: (ORANGE, "D", 0.2)}
"""Opponent -> colour, marker, and how far below the row's line it is drawn."""


class Plot(NamedTuple):
    """One kind of plot."""

    name: str
    says: str
    """What the plot shows: the text beside the picture."""


SUMMARY = Plot("summary", "Geometric means of the speedups with 95% intervals, and every row behind them")
SPEEDUP = Plot("speedup", "Speedup of each row with its 95% interval, and the geometric mean")
ATTAINED = Plot("attained", "Share of the machine's limit that each row attains, against the bytes that it moves")
HISTORY = Plot("history", "Geometric mean on the device of each recorded run with its 95% interval")
OVERVIEW = Path("docs") / FOLDER / "overview.svg"
"""The plot of all tasks, relative to the checkout."""
OVERVIEW_SAYS = "How many times as fast as SGLang's own kernels each task's kernels are"
KINDS = (SUMMARY, SPEEDUP, ATTAINED, HISTORY)


def file_name(kind: Plot, target: str) -> str:
    """File name of a plot: `speedup-h200.svg`."""
    return f"{kind.name}-{target}.svg"


def missing() -> str | None:
    """Why plots cannot be drawn here, with the remedy; None if they can."""
    try:
        found = version("matplotlib")
    except PackageNotFoundError:
        found = "none"
    if found == MATPLOTLIB:
        return None
    return f"plots need matplotlib {MATPLOTLIB}, got {found}: pip install matplotlib=={MATPLOTLIB}"


def plots(task: Task, records: Sequence[RunRecord]) -> dict[str, str]:
    """File name -> SVG of every plot of the task; empty without a published run.

    Raises:
        MissingRequirement: matplotlib is missing, or not the release that the bytes are made with.
    """
    latest = published(task, records)
    if latest and (problem := missing()):
        raise MissingRequirement(problem)
    found, every = {}, whole_runs(task, records)
    for target, record in latest.items():
        runs = [run for run in every if target_of(task, run) == target and run.headline]
        found[file_name(SUMMARY, target)] = task_summary(record)
        found[file_name(SPEEDUP, target)] = _speedup(record)
        found[file_name(ATTAINED, target)] = _attained(record, task.config.targets[target].attained)
        found[file_name(HISTORY, target)] = _history(runs, [not publishable(task, run) for run in runs])
    return found


def overview_svg(latest: Sequence[tuple[Task, RunRecord]]) -> str:
    """All tasks' geometric means in one picture; the runs are published ones.

    Raises:
        MissingRequirement: as `plots`.
    """
    if problem := missing():
        raise MissingRequirement(problem)
    return overview(latest)


def _speedup(record: RunRecord) -> str:
    """A line for each row, its interval against every upstream; the geometric mean below them."""
    rows = [row for row in record.rows if row.verdict in MEASURED]
    headline = record.headline
    assert headline is not None
    names = [row.id if row.production else f"{row.id} *" for row in rows] + ["geometric mean"]

    def draw(axes: "Axes") -> None:
        for arm in record.settings.against:
            colour, marker, shift = SERIES.get(arm, SERIES[LATEST])
            means: list[RowResult | Headline] = [*rows, headline]
            values = [report.speedup(of, record.settings.decides, arm) for of in means]
            points = [(value, line + shift) for line, value in enumerate(values) if value]
            whiskers(axes, [v for v, _ in points], [y for _, y in points], colour, marker, _label(record, arm))
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.axhline(len(rows) - 0.4, color=GRID, linewidth=0.8)
        axes.set_xscale("log")
        ratio_axis(axes)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        # A long label has room below the names.
        axes.set_xlabel(f"speedup, {WORDS[record.settings.decides]} (logarithmic; right of 1 is faster)", loc="right")
        legend(axes, len(record.settings.against))

    return figure_svg(draw, len(names) * ROW, max(map(len, names)) * LETTER)


def _attained(record: RunRecord, goal: float | None) -> str:
    """One point for each row."""
    subject = record.settings.subject
    rows = [row for row in record.rows if row.limit and row.verdict in MEASURED]

    def draw(axes: "Axes") -> None:
        points = [(row.limit.bytes_moved, row.attained) for row in rows if row.limit and row.attained]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, "o", color=BLUE, markersize=5, label="limit over device time")
        axes.axhline(1, color=MUTED, linewidth=1)
        if goal is not None:
            axes.axhline(goal, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"target above {LARGE_BYTES // 10**6} MB: {goal:g}",
                (1, goal),
                (0, -10),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                color=MUTED,
                fontsize=8,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: _size(value))
        axes.minorticks_off()
        axes.set_ylim(0, max([1.1, *(1.05 * (row.attained or 0) for row in rows)]))
        axes.set_xlabel("bytes moved by one call (logarithmic)")
        axes.set_ylabel(f"attained: limit / {subject}")
        legend(axes, 1)

    return figure_svg(draw, 2.4, 0.45)


def _history(runs: Sequence[RunRecord], publishable_runs: Sequence[bool]) -> str:
    """Every run on this GPU that has a headline, oldest first; hollow markers are runs that cannot be published."""
    arms = [arm for arm in SERIES if any(report.speedup(run.headline, Basis.DEVICE, arm) for run in runs)]

    def draw(axes: "Axes") -> None:
        for arm in arms:
            colour, marker, shift = SERIES[arm]
            for face, wanted in ((colour, True), ("none", False)):
                points = [
                    (value, number + shift)
                    for number, (run, may) in enumerate(zip(runs, publishable_runs, strict=True))
                    if may is wanted and (value := report.speedup(run.headline, Basis.DEVICE, arm))
                ]
                label = _label(runs[-1], arm) if wanted else None
                values, places = [v for v, _ in points], [x for _, x in points]
                whiskers(axes, values, places, colour, marker, label, face, upright=True)
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.set_yscale("log")
        ratio_axis(axes, upright=True)
        labelled = range(len(runs))[:: -(len(runs) // -LABELS)]
        axes.set_xticks(labelled, [f"{runs[n].utc[:10]}\n{runs[n].provenance.commit[:7]}" for n in labelled])
        axes.set_xlim(-0.6, max(len(runs) - 0.2, 2))
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("speedup on the device (logarithmic)")
        axes.set_xlabel("recorded runs, oldest first; hollow: cannot be published")
        legend(axes, len(arms))

    return figure_svg(draw, 2.4, 0.45, below=0.2)


def _label(record: RunRecord, arm: str) -> str:
    return f"against {pin_name(record.provenance.pins.get(arm)) or arm}"


def _size(value: float) -> str:
    """Bytes in words: 1e4 is `10 kB`."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:g} {unit}"
    return f"{value:g} B"
