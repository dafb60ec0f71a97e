"""The plots: deterministic, made of the record's numbers, and readable in light and dark."""

import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import tomli

from core.judge.tests.records_factory import ROWS, make_record
from kda_judge.contract.tasks import Task, find_tasks
from kda_judge.evidence import ledger, record_log
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.run_record import Basis, RunRecord
from kda_tools.models import known_models, page
from kda_tools.models.step_record import StepRecord, log
from kda_tools.publish import figures, plots, report
from kda_tools.publish.read_once import unchanged_files

ROOT = Path(__file__).resolve().parents[3]
# In CI nothing is skipped: without matplotlib the tests fail there.
pytestmark = pytest.mark.skipif(not os.environ.get("CI") and plots.missing() is not None, reason=str(plots.missing()))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def records(task: Task) -> list[RunRecord]:
    """One that can be published, and a later one that cannot."""
    later = make_record(task, seed=1, utc="2026-11-21T04:30:00Z")
    return [make_record(task), later.model_copy(update={"partial": True})]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_release_is_the_same_one_everywhere() -> None:
    constraint = f"matplotlib=={plots.MATPLOTLIB}"
    assert constraint in (ROOT / "constraints.txt").read_text().splitlines()
    project = tomli.loads((ROOT / "core" / "tools" / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["plots"] == [constraint]


def test_the_same_ledger_gives_the_same_bytes_whatever_the_users_settings(task: Task, records: list[RunRecord]) -> None:
    import matplotlib as mpl

    first = plots.plots(task, records)
    assert sorted(first) == ["attained-h200.svg", "history-h200.svg", "speedup-h200.svg", "summary-h200.svg"]
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "lines.linewidth": 9, "axes.facecolor": "red"}):
        assert plots.plots(task, records[::-1]) == first


def test_a_change_of_the_record_shows(task: Task, records: list[RunRecord]) -> None:
    other = [make_record(task, seed=5), records[1]]
    first, second = plots.plots(task, records), plots.plots(task, other)
    assert all(first[name] != second[name] for name in first)


def test_the_summaries_show_every_clock_and_row(task: Task, records: list[RunRecord]) -> None:
    """The portable arm, too, and the releases in words; in the overview each task once for each GPU."""
    names = texts(plots.plots(task, records)["summary-h200.svg"])
    clocks = {f"{words}, sglang 1.0" for words in ("device", "portable wall", "wall with kda-runtime")}
    assert clocks <= set(names)
    names = texts(plots.overview_svg([(task, records[0])]))
    assert names.count(f"{task.folder}, H200") == 1
    assert {"device, over baseline", "portable wall, over baseline", "wall with kda-runtime, over baseline"} <= set(
        names
    )


def test_nothing_of_a_recorded_picture_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the widths of the font that the pictures ask for."""
    from matplotlib.figure import Figure

    save, outside = Figure.savefig, []

    def look(figure: Figure, *args: object, **kwargs: object) -> None:
        box, (wide, high) = figure.get_tightbbox(), figure.get_size_inches()
        if box.x0 < 0 or box.y0 < 0 or box.x1 > wide or box.y1 > high:
            outside.append((figure.axes[0].get_xlabel(), box.extents.round(2).tolist(), (wide, high)))
        save(figure, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", look)
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    found = [(task, records) for task in find_tasks() if (records := ledger.read(task.ledger))]
    models = ROOT / known_models.FOLDER
    with unchanged_files():
        drawn = [plots.plots(task, records) for task, records in found]
        assert any(drawn)
        latest = [(task, run) for task, records in found for run in report.published(task, records).values()]
        assert plots.overview_svg(latest)
        assert page.contents(record_log.read(log(models), StepRecord), models)
    assert outside == []


def test_no_run_to_publish_no_plot(task: Task, records: list[RunRecord]) -> None:
    assert plots.plots(task, []) == plots.plots(task, records[1:]) == {}


def test_every_row_is_named_and_the_axis_says_what_it_is(task: Task, records: list[RunRecord]) -> None:
    drawn = plots.plots(task, records)
    names = texts(drawn["speedup-h200.svg"])
    assert {*ROWS, "geometric mean", "against sglang 1.0"} <= set(names)
    assert {"1", "2"} <= set(names), "ticks at round ratios"
    assert "target above 64 MB: 0.8" in texts(drawn["attained-h200.svg"])
    assert [text for text in texts(drawn["history-h200.svg"]) if text.startswith("2026")] == [
        "2026-11-20",
        "2026-11-21",
    ]


def test_history_has_runs_of_all_rows_and_what_parts_make_of_them(task: Task, records: list[RunRecord]) -> None:
    """The geometric mean of a few rows is no point in a history of the task's."""
    parts = []
    for day, row in zip((22, 23), ROWS, strict=True):
        whole = make_record(task, seed=day, utc=f"2026-11-{day}T04:30:00Z")
        settings = whole.settings.model_copy(update={"rows": (row,)})
        only = tuple(one for one in whole.rows if one.id == row)
        parts.append(recompute(whole.model_copy(update={"settings": settings, "rows": only})))
    later = parts[0].model_copy(update={"utc": "2026-11-24T04:30:00Z", "run_id": "20261124T043000Z-000009"})
    for more, dates in (
        (parts[:1], []),
        (parts, ["2026-11-21", "2026-11-23"]),
        ([*parts, later], ["2026-11-21", "2026-11-24"]),
    ):
        drawn = plots.plots(task, [*records[1:], *more]).get("history-h200.svg", "<svg/>")
        assert [text for text in texts(drawn) if text.startswith("2026")] == dates


def test_a_point_is_where_its_number_says(task: Task, records: list[RunRecord]) -> None:
    """The markers of each upstream, in row order, read back through the ticks of the logarithmic axis."""
    root = ET.fromstring(plots.plots(task, records)["speedup-h200.svg"])
    ticks = {}
    for group in root.iter(f"{SVG}g"):
        if re.fullmatch(r"xtick_\d+", group.get("id", "")):
            (place,) = {float(use.get("x", "")) for use in group.iter(f"{SVG}use")}
            ticks[float(next(group.iter(f"{SVG}text")).text or "")] = place
    low, high = min(ticks), max(ticks)
    headline = records[0].headline
    assert headline is not None
    for arm, colour in (("baseline", "blue"), ("upstream_latest", "orange")):
        (points,) = (group for group in root.iter(f"{SVG}g") if group.get("id") == f"points-{colour}")
        places = [float(use.get("x", "")) for use in points.iter(f"{SVG}use")]
        read = [low * (high / low) ** ((place - ticks[low]) / (ticks[high] - ticks[low])) for place in places]
        stated = [of.speedup[Basis.DEVICE][arm].estimate for of in (*records[0].rows, headline)]
        assert read == pytest.approx(stated, rel=1e-5)


@pytest.mark.parametrize("highest", [2.0, 4.0, 16.0, 120.0])
def test_the_labels_of_a_ratio_keep_apart(highest: float) -> None:
    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        axes.plot([0.21, highest], [0, 1])
        figures.ratio_axis(axes)
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.xaxis.get_majorticklocs() if low <= tick <= high]
        assert 1 in ticks
        assert len(ticks) >= 4
        assert min(math.log(b / a) for a, b in pairwise(ticks)) > 0.05 * math.log(high / low)

    assert figures.figure_svg(draw, 2.0, 1.0)


def test_many_runs_keep_their_labels_apart(task: Task) -> None:
    many = [make_record(task, seed=n, utc=f"2026-11-{n + 1:02d}T04:30:00Z") for n in range(20)]
    labels = [text for text in texts(plots.plots(task, many)["history-h200.svg"]) if text.startswith("2026")]
    assert labels[0] == "2026-11-01"
    assert len(labels) <= plots.LABELS
    assert all(one < two for one, two in pairwise(labels))


@pytest.mark.parametrize("name", ["speedup", "attained", "history"])
def test_colours_follow_the_reader(task: Task, records: list[RunRecord], name: str) -> None:
    svg = plots.plots(task, records)[f"{name}-h200.svg"]
    style, rest = svg.split("</style>", 1)
    assert "@media (prefers-color-scheme:dark)" in style
    assert not re.search(r"#[0-9a-f]{6}", rest), "a fixed colour would vanish on some ground"
    used = set(re.findall(r"var\((--kda-\w+)\)", rest))
    assert used <= set(re.findall(r"(--kda-\w+):", style))
    assert {"--kda-text", "--kda-blue"} | ({"--kda-orange"} if name != "attained" else set()) <= used
