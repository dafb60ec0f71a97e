"""SVG plots of a task's published runs: the same bytes from the same ledger, in the reader's light or dark colours.

matplotlib draws with placeholder colours, which become CSS variables that follow `prefers-color-scheme`; text stays
text. Nothing depends on the width of a text, on a user's matplotlibrc, or on the clock.
"""

import re
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import Task
from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.run_record import Basis, Headline, Interval, RowResult, RunRecord
from kda_tools.publish import report
from kda_tools.publish.report import (
    BASELINE,
    LARGE_BYTES,
    LATEST,
    WORDS,
    by_age,
    pin_name,
    publishable,
    published,
    target_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATPLOTLIB = "3.10.9"
"""The release that the published bytes are made with; core/pyproject.toml and constraints.txt name the same one."""
FOLDER = "plots"
"""In a task's `docs/`. Every SVG file there is made here."""
WIDTH, LEAST = 6.0, 3.5
"""Inches: of a figure whose names are short, and of the axes beside long ones; `ROW` and `LETTER` are what a row and a
letter of its name take."""
ROW, LETTER, MARGIN, TOP, BOTTOM = 0.24, 0.078, 0.25, 0.5, 0.55
LABELS = 6
"""Of runs, as many as fit side by side."""
TEXT, MUTED, GRID, BLUE, ORANGE = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
"""Placeholders that no drawing library chooses by itself."""
COLOURS = {
    TEXT: ("text", "#1f2328", "#e6edf3"),
    MUTED: ("muted", "#59636e", "#9198a1"),
    GRID: ("grid", "#d1d9e0", "#3d444d"),
    BLUE: ("blue", "#0550ae", "#6cb6ff"),
    ORANGE: ("orange", "#bc4c00", "#f69d50"),
}
"""Placeholder -> name of the CSS variable, its light and its dark value."""
CLASS = "kda-plot"
SERIES = {BASELINE: (BLUE, "o", 0.0), LATEST: (ORANGE, "D", 0.2)}
"""Opponent -> colour, marker, and how far below the row's line it is drawn."""
STYLE = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": TEXT,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "svg.fonttype": "none",
    "text.color": TEXT,
    "xtick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.color": MUTED,
    "ytick.labelcolor": TEXT,
}


class Plot(NamedTuple):
    """One kind of plot."""

    name: str
    says: str
    """What a reader sees in it: the text beside the picture."""


SPEEDUP = Plot("speedup", "Speedup of each row with its 95% interval, and the geometric mean")
ATTAINED = Plot("attained", "Share of the machine's limit that each row attains, against the bytes that it moves")
HISTORY = Plot("history", "Geometric mean on the device of each recorded run with its 95% interval")
KINDS = (SPEEDUP, ATTAINED, HISTORY)


def file_name(kind: Plot, target: str) -> str:
    """`speedup-h200.svg`."""
    return f"{kind.name}-{target}.svg"


def missing() -> str | None:
    """Why plots cannot be drawn here, with the remedy; None where they can."""
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
    found = {}
    for target, record in latest.items():
        runs = [run for run in sorted(records, key=by_age) if target_of(task, run) == target and run.headline]
        found[file_name(SPEEDUP, target)] = _speedup(record)
        found[file_name(ATTAINED, target)] = _attained(record, task.config.targets[target].attained)
        found[file_name(HISTORY, target)] = _history(runs, [not publishable(task, run) for run in runs])
    return found


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
            _whiskers(axes, [v for v, _ in points], [y for _, y in points], colour, marker, _label(record, arm))
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.axhline(len(rows) - 0.4, color=GRID, linewidth=0.8)
        axes.set_xscale("log")
        _ratios(axes)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"speedup, {WORDS[record.settings.decides]} (logarithmic; right of 1 is faster)")
        _legend(axes, len(record.settings.against))

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
        _legend(axes, 1)

    return figure_svg(draw, 2.4, 0.45)


def _history(runs: Sequence[RunRecord], publishable_runs: Sequence[bool]) -> str:
    """Every run of the ledger on this GPU that has a headline, oldest first; hollow where it cannot be published."""
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
                _whiskers(axes, values, places, colour, marker, label, face, upright=True)
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.set_yscale("log")
        _ratios(axes, upright=True)
        labelled = range(len(runs))[:: -(len(runs) // -LABELS)]
        axes.set_xticks(labelled, [f"{runs[n].utc[:10]}\n{runs[n].provenance.commit[:7]}" for n in labelled])
        axes.set_xlim(-0.6, max(len(runs) - 0.2, 2))
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("speedup on the device (logarithmic)")
        axes.set_xlabel("recorded runs, oldest first; hollow: cannot be published")
        _legend(axes, len(arms))

    return figure_svg(draw, 2.4, 0.45, below=0.2)


def _label(record: RunRecord, arm: str) -> str:
    return f"against {pin_name(record.provenance.pins.get(arm)) or arm}"


def _size(value: float) -> str:
    """`10 kB` of 1e4."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:g} {unit}"
    return f"{value:g} B"


def _whiskers(
    axes: "Axes",
    values: Sequence[Interval],
    places: Sequence[float],
    colour: str,
    marker: str,
    label: str | None,
    face: str | None = None,
    upright: bool = False,
) -> None:
    """Points with their intervals: along the line of a row, or `upright` along time."""
    estimates = [value.estimate for value in values]
    reach = [[v.estimate - v.low for v in values], [v.high - v.estimate for v in values]]
    look: dict[str, Any] = {
        "fmt": marker,
        "color": colour,
        "markersize": 4.5,
        "elinewidth": 1.4,
        "capsize": 2.0,
        "label": label,
    }
    look["markerfacecolor"] = face or colour
    if upright:
        drawn = axes.errorbar(places, estimates, yerr=reach, **look)
    else:
        drawn = axes.errorbar(estimates, places, xerr=reach, **look)
    drawn[0].set_gid(f"points-{COLOURS[colour][0]}{'-hollow' if face == 'none' else ''}")


def _ratios(axes: "Axes", upright: bool = False) -> None:
    """Ticks at round ratios, as many as fit between the lowest and the highest interval."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = axes.get_ylim() if upright else axes.get_xlim()
    low, high = min(low, 0.96), max(high, 1.25)
    steps = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)
    step = next((step for step in steps if (high - low) / step <= 8), 50.0)
    ticks = [number * step for number in range(1, int(high / step) + 1) if low <= number * step <= high]
    if not any(abs(tick - 1) < 1e-9 for tick in ticks):
        ticks = sorted([1.0, *(tick for tick in ticks if abs(tick - 1) > step / 2)])
    axis = axes.yaxis if upright else axes.xaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    (axes.set_ylim if upright else axes.set_xlim)(low, high)


def _legend(axes: "Axes", columns: int) -> None:
    """Above the axes, from the figure's left edge: long names leave the axes no room for it."""
    from matplotlib.transforms import blended_transform_factory

    figure = axes.get_figure()
    assert figure is not None
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.02, 1),
        bbox_transform=blended_transform_factory(figure.transFigure, axes.transAxes),
        ncols=columns,
        borderaxespad=0.2,
        handletextpad=0.3,
    )


def figure_svg(draw: Callable[["Axes"], None], height: float, left: float, below: float = 0.0) -> str:
    """The figure whose axes are `height` inches high, with `left` inches for the names beside them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc of the user must not matter
        mpl.rcParams.update({**STYLE, "svg.hashsalt": CLASS})
        bottom, left = BOTTOM + below, left + MARGIN
        wide, high = max(WIDTH, left + LEAST + MARGIN), TOP + height + bottom
        figure: Figure = Figure(figsize=(wide, high))
        axes = figure.add_axes((left / wide, bottom / high, (wide - left - MARGIN) / wide, height / high))
        draw(axes)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    return _themed(out.getvalue())


def _themed(svg: str) -> str:
    """The picture without matplotlib's preamble, its placeholders as variables with light and dark values."""
    for colour, (name, _, _) in COLOURS.items():
        svg = svg.replace(colour, f"var(--kda-{name})")
    light, dark = (";".join(f"--kda-{both[0]}:{both[which]}" for both in COLOURS.values()) for which in (1, 2))
    style = (
        f"<style>.{CLASS}{{{light};stroke-linejoin:round;stroke-linecap:butt}}"
        f"@media (prefers-color-scheme:dark){{.{CLASS}{{{dark}}}}}</style>"
    )
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", style, svg, count=1, flags=re.DOTALL)
    svg = svg.replace("'DejaVu Sans', sans-serif", "system-ui, sans-serif")
    svg = svg.replace("<svg ", f'<svg class="{CLASS}" role="img" ', 1)
    return re.sub(r" +$", "", svg[svg.index("<svg ") :], flags=re.MULTILINE).rstrip() + "\n"
