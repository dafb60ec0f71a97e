"""Draw SVG figures in one style: light or dark as the reader prefers, and the same bytes from the same numbers.

matplotlib draws with placeholder colours. They become CSS variables that follow `prefers-color-scheme`. Text stays
text. Nothing depends on the width of a text, on a user's matplotlibrc, or on the clock.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from kda_judge.evidence.run_record import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LEAST = 6.0, 3.5
"""Inches. `WIDTH`: the figure's width if row names are short. `LEAST`: the least width of the axes beside long names.
Below, `ROW` is the height of a row and `LETTER` the width of one letter of its name."""
ROW, LETTER, MARGIN, TOP, BOTTOM = 0.24, 0.078, 0.25, 0.5, 0.55
TEXT, MUTED, GRID, BLUE, ORANGE, GREEN = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06"
"""Placeholder colours, which no drawing library chooses by itself."""
COLOURS = {
    TEXT: ("text", "#1f2328", "#e6edf3"),
    MUTED: ("muted", "#59636e", "#9198a1"),
    GRID: ("grid", "#d1d9e0", "#3d444d"),
    BLUE: ("blue", "#0550ae", "#6cb6ff"),
    ORANGE: ("orange", "#b34800", "#f69d50"),
    GREEN: ("green", "#1a7f37", "#57ab5a"),
}
"""Placeholder -> name of the CSS variable, its light and its dark value."""
CLASS = "kda-plot"
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


def whiskers(
    axes: "Axes",
    values: Sequence[Interval],
    places: Sequence[float],
    colour: str,
    marker: str,
    label: str | None,
    face: str | None = None,
    upright: bool = False,
) -> None:
    """Draw points with their intervals: horizontal, or vertical if `upright` (for plots over time)."""
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


FRACTIONS = (0.1, 0.2, 0.5)
"""Ticks of a long axis below 1."""
LABEL = 0.06
"""Share of an axis that a tick's label takes: on a logarithmic axis the high ticks come closer and closer."""


def ratio_axis(axes: "Axes", upright: bool = False) -> None:
    """Ticks at round ratios, as many as fit between the lowest and the highest interval."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = axes.get_ylim() if upright else axes.get_xlim()
    low, high = min(low, 0.96), max(high, 1.25)
    steps = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)
    step = next((step for step in steps if (high - low) / step <= 8), 50.0)
    ticks = [number * step for number in range(1, int(high / step) + 1) if low <= number * step <= high]
    if not any(abs(tick - 1) < 1e-9 for tick in ticks):
        ticks = sorted([1.0, *(tick for tick in ticks if abs(tick - 1) > step / 2)])
    if step >= 0.5:  # such steps leave a logarithmic axis without ticks where it is below them
        ticks = sorted({*ticks, *(tick for tick in FRACTIONS if tick >= low)})
    axis = axes.yaxis if upright else axes.xaxis
    if axis.get_scale() == "log":
        ticks = _apart(ticks, LABEL * math.log(high / low))
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    (axes.set_ylim if upright else axes.set_xlim)(low, high)


def _apart(ticks: Sequence[float], least: float) -> list[float]:
    """The ticks without those whose logarithm is too near that of the one before; 1 always stays."""
    kept: list[float] = []
    for tick in ticks:
        if kept and math.log(tick / kept[-1]) < least:
            if abs(tick - 1) > 1e-9:
                continue
            kept.pop()
        kept.append(tick)
    return kept


def legend(axes: "Axes", columns: int) -> None:
    """Put the legend above the axes, from the figure's left edge: beside long names the axes may be too narrow."""
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


def ratio_lanes(axes: "Axes", names: Sequence[str], label: str) -> None:
    """Finish a plot of horizontal lanes, one a name from the top, whose axis of ratios is logarithmic."""
    axes.axvline(1, color=MUTED, linewidth=1)
    axes.set_xscale("log")
    ratio_axis(axes)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label, loc="right")  # a long label has room below the names


def shares_svg(names: Sequence[str], parts: Iterable[tuple[str, str, Sequence[float]]], xlabel: str) -> str:
    """A bar for each name, made of `parts`: label, colour, and the part's share (0 to 1) of every bar."""

    def draw(axes: "Axes") -> None:
        left = [0.0] * len(names)
        for label, colour, shares in parts:
            widths = [100 * share for share in shares]
            axes.barh(range(len(names)), widths, left=left, color=colour, height=0.6, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(f"{xlabel}, per cent", loc="right")
        axes.grid(visible=False, axis="y")
        legend(axes, 3)

    return figure_svg(draw, max(1, len(names)) * 2 * ROW, max(map(len, names)) * LETTER, top=0.65)


def figure_svg(draw: Callable[["Axes"], None], height: float, left: float, below: float = 0.0, top: float = TOP) -> str:
    """A figure as SVG. Inches: `height` of the axes, `left` for names, `below` extra under them, `top` for a legend."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc of the user must not matter
        mpl.rcParams.update({**STYLE, "svg.hashsalt": CLASS})
        bottom, left = BOTTOM + below, left + MARGIN
        wide, high = max(WIDTH, left + LEAST + MARGIN), top + height + bottom
        figure: Figure = Figure(figsize=(wide, high))
        axes = figure.add_axes((left / wide, bottom / high, (wide - left - MARGIN) / wide, height / high))
        draw(axes)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    return _themed(out.getvalue())


def _themed(svg: str) -> str:
    """The SVG without matplotlib's preamble; placeholder colours become CSS variables with light and dark values."""
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
