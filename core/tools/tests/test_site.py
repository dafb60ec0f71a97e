"""The static site: built from a ledger, driven in a headless browser, without a server and without a network."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from core.judge.tests.records_factory import ROWS, make_checkout, make_record
from core.tools.tests.test_contrast import Colour, contrast, needed
from kda_judge.contract.errors import KdaError, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, find_task, find_tasks
from kda_judge.evidence.ledger import append, read
from kda_judge.evidence.run_record import Basis, Metric, RunRecord
from kda_tools.publish import plots, report
from kda_tools.publish.generate import publish
from kda_tools.publish.report import by_age, interval, microseconds, ratio
from kda_tools.publish.site import build
from kda_tools.publish.site.overview_pages import step_tables
from kda_tools.publish.site.row_pages import row_html
from kda_tools.publish.site.strips import strips
from kda_tools.publish.site.task_page import task_page
from kda_tools.publish.tables import SHOWN_BASES, all_pins, bounds_md

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ROOT = Path(__file__).resolve().parents[3]
BROWSERS = ("google-chrome", "google-chrome-stable", "chromium", "chromium-browser")
"""Chrome first: Ubuntu's chromium is a snap, which may not read temporary folders."""
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
LOCAL = ("file:", "data:")
WIDTHS = (320, 390, 1280, 1920)
"""CSS pixels of the narrowest phone that a page has to fit, a usual phone, a small laptop and a large screen."""
ALIKE = ("row", "baseline_source.html", "grid.html", "profile.html", "sanitize.html", "tuning.html")
PAGE = "fam/k99_fake/docs/results.html"
BLOCKS = ("tasks", "models")
WHITE = Colour(255, 255, 255)
PAINTED = """() => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = css => {  // a canvas knows every notation of a colour
    probe.clearRect(0, 0, 1, 1); probe.fillStyle = css; probe.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const found = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walk.nextNode();) {
    const words = node.data.trim(), one = node.parentElement;
    if (!words || ["SCRIPT", "STYLE", "TITLE", "OPTION"].includes(one.tagName) || !one.checkVisibility()) continue;
    const look = getComputedStyle(one), svg = one instanceof SVGElement;
    const colour = rgba(svg ? look.fill : look.color), behind = [];
    for (let up = one; up; up = up.parentElement) {
      const style = getComputedStyle(up);
      colour[3] *= Number(style.opacity);
      behind.push(rgba(style.backgroundColor));
    }
    if (colour[3] === 0) continue;
    const kind = [parseFloat(look.fontSize), Number(look.fontWeight), colour, behind];
    found.set(JSON.stringify(kind), [words.slice(0, 40), ...kind]);
  }
  return [...found.values()];
}"""
"""Every look of text once: its words, size in px, weight, colour, and the grounds behind it from the nearest on."""
ARRIVING = """async text => {
  const last = one => one.sources.every(({node}) => node?.nodeName === "FOOTER");  // it grows at the window's bottom
  const shifts = [];
  const seen = list => shifts.push(...list.getEntries().filter(one => !last(one)).map(one => one.value));
  const observer = new PerformanceObserver(seen);
  observer.observe({type: "layout-shift"});
  document.open();
  for (let from = 0, size = Math.ceil(text.length / 20); from < text.length; from += size) {
    document.write(text.slice(from, from + size));
    for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);  // it is painted
  }
  document.close();
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  seen({getEntries: () => observer.takeRecords()});
  return shifts;
}"""
"""Writes the page again, a twentieth at a time. Returns the score of each layout shift, footers left out."""
TABLES = """() => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  return [...document.querySelectorAll(".kda-table, .kda-scroll, .table-wrapper, .kda-figure > div")].map(
    one => [(one.querySelector("tr") ?? one).textContent, one.scrollWidth - one.clientWidth]);
}"""
"""The head of each table and the texts of each plot, and how many pixels of it are out of sight."""
LABELLED = """() => [...document.querySelectorAll("table")]
  .map(one => [one.tHead.rows[0].cells, one.tBodies[0].rows[0].cells])
  .filter(([heads]) => heads.length > 2).map(([heads, cells]) => [
    [...heads].slice(1).map(one => one.textContent.trim()),
    [...cells].slice(1).map(one => getComputedStyle(one, "::before").content)])"""
"""The heads of each table of three columns or more, and what a phone shows before the cells of its first row."""
CUT = """() => {
  const all = document.documentElement.getBoundingClientRect(), out = one => {
    const box = one.getBoundingClientRect();
    return box.left < all.left || box.right > all.right || box.top < all.top || box.bottom > all.bottom;
  };
  return [...document.querySelectorAll("text")].filter(out).map(one => one.textContent);
}"""
"""The texts of a picture that do not lie inside it."""
LATER = "2026-11-21T04:30:00Z"


def lacking() -> str | None:
    """What this machine lacks for a test of the site, with the remedy."""
    if problem := plots.missing():
        return problem
    try:
        import playwright  # noqa: F401
        import sphinx  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install -e 'core/tools[plots,site]' playwright"
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser, looked for {', '.join(BROWSERS)}: apt-get install chromium"
    return None


# In CI nothing is skipped: what is missing there fails.
pytestmark = pytest.mark.skipif(not os.environ.get("CI") and lacking() is not None, reason=str(lacking()))


def fill(root: Path, task: Task) -> None:
    """The documents of a small checkout, and two runs: one published, a later one that cannot be."""
    blocks = (f"## About {name}\n\n<!-- kda:{name}:begin -->\n<!-- kda:{name}:end -->\n" for name in BLOCKS)
    (root / "fam" / "README.md").write_text("\n".join(["# Family\n", *blocks]))
    (root / "README.md").write_text((root / "README.md").read_text() + "\n[Method](docs/method.md#a-heading)\n")
    (root / "docs").mkdir()
    (root / "docs" / "method.md").write_text(
        "# Method\n\n[start](../README.md), [code](../fam/k99_fake/solution), "
        "[contract](../fam/k99_fake/config.toml)\n\n"
        "## A heading\n\n```mermaid\nflowchart TD\n  rows --> judge\n```\n"
    )
    (task.path / "prompt.md").write_text("# fake: Card\n\n[results](docs/results.md)\n")
    append(task.ledger, make_record(task))
    append(task.ledger, make_record(task, seed=1, utc=LATER).model_copy(update={"partial": True}))
    publish([task], check=False)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    fill(tmp_path, make_checkout(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    """A site, and the run that it publishes."""
    root = tmp_path_factory.mktemp("checkout")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_ROOT", str(root))
        task = make_checkout(root)
        fill(root, task)
        build(root / "_site", {})
    return root / "_site", read(task.ledger)[0]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this repository."""
    out = tmp_path_factory.mktemp("real") / "_site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_ROOT", str(ROOT))
        build(out, {})
    return out


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    assert lacking() is None, lacking()
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


def opened(browser: "Browser", page: Path, hash: str = "", **options: Any) -> "Page":
    """The page in a browser of its own, offline; what it complains of, or asks of a network, is in its `complaints`."""
    context = browser.new_context(offline=True, **options)
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(LOCAL) else None)
    tab.on("requestfailed", lambda asked: complaints.append(f"failed: {asked.url}"))
    tab.goto(page.as_uri() + hash)
    tab.complaints = complaints
    return tab


def followed(tab: "Page", link: "Locator") -> None:
    """Clicks the link; returns once the page behind it is all there, since a title comes before what it stands over."""
    with tab.expect_navigation(wait_until="load"):
        link.click()


def column(tab: "Page", label: str) -> list[str]:
    sorts = tab.locator("table[data-kda-sortable]").first
    heads = [head.removesuffix("\n") for head in sorts.locator("thead th").all_inner_texts()]
    return sorts.locator(f"tbody tr > :nth-child({heads.index(label) + 1})").all_inner_texts()


def shown_rows(tab: "Page") -> list[str]:
    return tab.locator("table[data-kda-sortable] >> nth=0 >> tbody tr:visible th").all_inner_texts()


# ---- what a visitor does -------------------------------------------------------------------------


def test_a_click_sorts_the_rows_and_another_one_turns_them(made: tuple[Path, RunRecord], browser: "Browser") -> None:
    site, record = made
    tab = opened(browser, site / PAGE)
    assert column(tab, "device us") == [
        microseconds(row.arms["solution"].summary[Metric.DEVICE].median) for row in record.rows
    ]
    label = "device speedup over sglang 1.0"
    speedups = sorted(row.speedup[Basis.DEVICE]["baseline"].estimate for row in record.rows)
    head = tab.locator("table[data-kda-sortable]").first.get_by_role("columnheader", name=label).first
    for turn, expected in (("ascending", speedups), ("descending", speedups[::-1])):
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == turn
        assert column(tab, label)[: len(expected)] == [ratio(value) for value in expected]
    tab.locator("table[data-kda-sortable]").first.get_by_role("columnheader", name="row").get_by_role("button").click()
    assert column(tab, "row") == sorted(ROWS)
    assert head.get_attribute("aria-sort") is None
    assert tab.complaints == []


def test_the_page_says_what_bounds_the_rows(made: tuple[Path, RunRecord], browser: "Browser") -> None:
    site, record = made
    words = " ".join(opened(browser, site / PAGE).locator("body").inner_text().split())
    table = [line.strip(" |\n").split(" | ") for line in bounds_md(record).splitlines() if line.startswith("| ")]
    assert len(table) > 1
    for cells in table:
        assert " ".join(cells) in words


def test_a_rows_page_has_its_samples_and_its_history(made: tuple[Path, RunRecord], browser: "Browser") -> None:
    site, record = made
    tab = opened(browser, site / PAGE)
    row = record.rows[1]
    followed(tab, tab.get_by_role("link", name=row.id).first)
    assert tab.title() == f"{row.id} on h200"
    solution = row.arms["solution"]
    ticks = tab.locator('svg[aria-label^="wall samples of solution"] path:not(.kda-median)')
    assert [path.count("v") for path in ticks.evaluate_all("all => all.map(one => one.getAttribute('d'))")] == [12] * 3
    words = tab.locator("article").inner_text()
    assert f"FASTER, {row.reason}" in words
    assert f"device over baseline (sglang 1.0): {interval(row.speedup[Basis.DEVICE]['baseline'])}" in words
    assert "256 bytes moved, device floor 28.00 us, host floor 4.30 us" in words
    assert "5.0% of the tolerance used" in words
    wall = solution.summary[Metric.WALL]
    numbers = [wall.median, wall.mean, wall.std, wall.min, wall.p10, wall.p90]
    assert "\t".join(["solution", "wall", *map(microseconds, numbers), "36"]) in words
    assert len(column(tab, "run (UTC)")) == 2, "the published run, and the later one that cannot be"
    followed(tab, tab.get_by_role("link", name="k99_fake").last)
    assert tab.locator("h1").inner_text().startswith("k99_fake")
    assert tab.complaints == []


def test_filters_leave_the_rows_that_were_asked_for(real: Path, browser: "Browser") -> None:
    """By model, dtype, GPU, verdict and task; the address keeps the choice."""
    runs = [(task, run) for task in find_tasks() for run in report.published(task, read(task.ledger)).values()]
    frozen = {row.id: row for task, _ in runs for row in task.workloads}
    tab = opened(browser, real / "rows.html")
    form = tab.locator(".kda-filters")
    every = shown_rows(tab)
    assert every == [row.id for _, run in runs for row in run.rows]
    form.get_by_label("model").select_option("qwen-edit")
    asked = [row for row in every if "qwen-edit" in frozen[row].models]
    assert 0 < len(asked) < len(every)
    assert shown_rows(tab) == asked
    assert tab.locator("output").inner_text() == f"{len(asked)} of {len(every)}"
    assert tab.url.endswith("?model=qwen-edit")
    form.get_by_label("task").select_option("k03_qknorm_rope")
    both = shown_rows(tab)
    assert 0 < len(both) < len(asked)
    tab.reload()
    assert shown_rows(tab) == both
    for name in ("dtype", "gpu", "verdict"):
        assert len(form.get_by_label(name).locator("option").all()) > 1
    assert tab.complaints == []


def test_the_page_of_every_row_has_the_portable_wall(real: Path, browser: "Browser") -> None:
    runs = [run for task in find_tasks() for run in report.published(task, read(task.ledger)).values()]
    expected = [ratio(report.row_ratio(run, row, Basis.PORTABLE, report.LATEST)) for run in runs for row in run.rows]
    assert any(float(text) < 1 for text in expected if text != report.NONE)
    assert column(opened(browser, real / "rows.html"), "portable speedup over the latest") == expected


def test_rows_of_two_gpus_can_be_told_apart(real: Path, browser: "Browser") -> None:
    tab = opened(browser, real / "rows.html")
    both = list(zip(shown_rows(tab), column(tab, "task"), column(tab, "GPU"), strict=True))
    assert len(set(both)) == len(both)
    stale = {f"{target}{report.STALE}" for task in find_tasks() for target, run in report.published_runs(task).items()
             if report.stale(task, run)}  # fmt: skip
    assert {gpu for gpu in column(tab, "GPU") if gpu.endswith(report.STALE)} == stale


def test_what_is_no_number_stays_last_and_the_address_keeps_the_order(real: Path, browser: "Browser") -> None:
    label = "device speedup over sglang 0.5.12.post1"
    tab = opened(browser, real / "index.html")
    head = tab.locator("table[data-kda-sortable]").first.get_by_role("columnheader", name=label).get_by_role("button")
    for turn in (1, -1):
        head.click()
        shown = column(tab, label)
        numbers = [float(text) for text in shown if text != report.NONE]
        assert shown[len(numbers) :] == [report.NONE] * (len(shown) - len(numbers))
        assert numbers == sorted(numbers)[::turn]
    tab.reload()
    assert column(tab, label) == shown


def test_the_runs_compared_at_first_share_rows_and_the_address_keeps_a_choice(real: Path, browser: "Browser") -> None:
    tab = opened(browser, real / "index.html")
    tool = tab.locator(".kda-compare")
    for task in find_tasks():
        tab.goto((real / task.family / task.folder / "docs" / "results.html").as_uri())
        assert {one.split("\t")[3] for one in tool.locator("tbody tr").all_inner_texts()} != {report.NONE}, task.folder
    tool.get_by_label("times of").select_option("solution wall")
    tool.get_by_label("run A").select_option(index=0)
    shown = tool.locator("tbody").inner_text()
    tab.goto(tab.url)
    assert tool.locator("tbody").inner_text() == shown
    assert tab.complaints == []


def test_the_published_results_of_two_gpus_are_compared_at_first(real: Path, browser: "Browser") -> None:
    tab = opened(browser, real / "index.html")
    tool = tab.locator(".kda-compare")
    found = [(task, list(runs.values())) for task in find_tasks() if len(runs := report.published_runs(task)) > 1]
    assert any(len(record.parts) > 1 for _, runs in found for record in runs)
    for task, runs in found:
        tab.goto((real / task.family / task.folder / "docs" / "results.html").as_uri())
        names = [tool.get_by_label(f"run {side}").locator("option:checked").inner_text() for side in "AB"]
        assert all("(published" in name for name in names), names
        assert {name.split(", ")[1] for name in names} == {report.gpu_of(record.machine) for record in runs}
        cells = [line.split("\t") for line in tool.locator("tbody tr").all_inner_texts()]
        assert {row.id for row in runs[0].rows} <= {name for name, *_ in cells}
        assert report.NONE not in {change for *_, change in cells}, task.folder


def test_two_runs_stand_side_by_side(real: Path, browser: "Browser") -> None:
    def whole(task: Task) -> list[RunRecord]:
        runs = sorted(read(task.ledger), key=by_age, reverse=True)
        return [run for run in runs if len(run.rows) == len(task.workloads) and not run.partial and run.machine.before]

    each = ((task, whole(task)) for task in find_tasks())
    task, (newest, before, *_) = next(
        (task, runs) for task, runs in each if len(runs) > 1 and "upstream_latest" in runs[1].rows[0].arms
    )
    tab = opened(browser, real / task.family / task.folder / "docs" / "results.html")
    tool = tab.locator(".kda-compare")
    for label, run in (("run A", before), ("run B", newest)):
        chosen = tool.get_by_label(label)
        words = (run.utc[:16].replace("T", " "), run.provenance.commit[:7])
        names = chosen.locator("option").all_inner_texts()
        at = next(number for number, name in enumerate(names) if all(word in name for word in words))
        chosen.select_option(index=at)
    tool.get_by_label("times of").select_option("upstream_latest wall")

    def medians(run: RunRecord) -> dict[str, float]:
        return {row.id: row.arms["upstream_latest"].summary[Metric.WALL].median for row in run.rows}

    cells = [line.split("\t") for line in tool.locator("tbody tr").all_inner_texts()]
    earlier, later = medians(before), medians(newest)
    assert [name for name, *_ in cells] == list(later)
    for name, *times, change in cells:
        b = later[name]
        if (a := earlier.get(name)) is None:
            assert (times[0], change) == ("-", "-")
            continue
        assert [float(time) for time in times] == pytest.approx([a, b], abs=0.006)
        assert float(change) == pytest.approx(b / a, abs=1e-3)
    tool.get_by_label("run A").select_option(index=at)
    assert {line.split("\t")[3] for line in tool.locator("tbody tr").all_inner_texts()} == {"1.000"}
    assert tab.complaints == []


SEARCHES = {
    "rope": "diffusion/k03_qknorm_rope/docs/results.html",
    "flux": "models/flux.html",
    "add a kernel": "docs/add_a_kernel.html",
    "how do I add a kernel": "docs/add_a_kernel.html",
    "tune my kernel": "docs/tune_a_kernel.html",
    "port to sglang": "docs/port.html",
    "launch an agent": "docs/campaigns.html#launch-an-agent",
    "run on many GPUs": "docs/fleet.html",
    "tutorial": "docs/tutorial.html",
    "what is attained": "docs/glossary.html",
}


def test_a_search_finds_the_guide_the_model_or_the_task_first(real: Path, browser: "Browser") -> None:
    pages = {task: f"{task.family}/{task.folder}/docs/results.html" for task in find_tasks()}
    names = {name: page for task, page in pages.items() for name in (task.folder, *task.config.ops)}
    # What several tasks' names hold leads to one of them.
    names = {name: page for name, page in names.items() if sum(name in task.folder for task in pages) < 2}
    for asked, page in (SEARCHES | names).items():
        tab = opened(browser, real / "search.html", hash=f"?q={asked}")
        tab.wait_for_function("/finished/.test(document.querySelector('#search-results').innerText)")
        first = tab.locator("#search-results li a").first.get_attribute("href")
        assert str(first).startswith(page), asked
        tab.context.close()


def test_a_models_page_names_its_tasks(real: Path, browser: "Browser") -> None:
    tab = opened(browser, real / "models" / "qwen-edit.html")
    expected = [
        row.id for task in find_tasks() for row in task.workloads if row.production and "qwen-edit" in row.models
    ]
    # A task that is published on two kinds of GPU shows its rows once for each.
    assert list(dict.fromkeys(shown_rows(tab))) == expected
    words = tab.locator("article").inner_text()
    assert "step is made of" in words
    assert "→" in words, "milliseconds before and after"


def test_the_start_page_answers_three_questions_at_once(real: Path, browser: "Browser") -> None:
    tab = opened(browser, real / "index.html", viewport={"width": 1280, "height": 900})
    for question in ("Is my model faster?", "Can I trust it?", "What do I type?"):
        link = tab.locator("article").get_by_role("link", name=question).first
        assert link.bounding_box()["y"] < 300
        tab.locator(link.get_attribute("href")).wait_for()
    picture = tab.get_by_role("region", name="Speedup of a step of each diffusion model").bounding_box()
    assert picture["y"] + picture["height"] < 900, "the first screen has every model"
    assert tab.get_by_role("heading", name="What do I type?").bounding_box()["y"] < 1650
    own = {task.folder for task in find_tasks() for run in report.published_runs(task).values() if not all_pins([run])}
    cells = dict(zip(shown_rows(tab), column(tab, "device speedup over own baseline"), strict=True))
    assert {task for task, text in cells.items() if text != report.NONE} == own


def test_pictures_load_when_they_come_near_and_their_place_is_kept(real: Path) -> None:
    pages = (real / "diffusion" / "models" / "docs").glob("*.html")
    images = [image for page in pages for image in re.findall(r"<img[^>]*>", page.read_text())]
    assert len(images) > 5
    assert all('loading="lazy"' in one and "width=" in one and "height=" in one for one in images)


def test_the_numbers_are_the_ledgers(made: tuple[Path, RunRecord], browser: "Browser") -> None:
    site, record = made
    headline = record.headline
    assert headline is not None
    device = headline.speedup[Basis.DEVICE]["baseline"]
    stated = [interval(device), interval(headline.attained)]
    start = opened(browser, site / "index.html")
    assert start.locator("svg.kda-plot").count() == 1
    for basis in SHOWN_BASES:
        mean = headline.speedup[basis]["baseline"]
        assert column(start, f"{basis.value} speedup over sglang 1.0") == [ratio(mean.estimate)]
    followed(start, start.get_by_role("link", name="k99_fake").last)
    cards = " ".join(start.locator(".kda-cards").inner_text().split())
    assert all(number in cards for number in stated)
    assert "portable wall over sglang 1.0" in cards
    words = start.locator("article").inner_text()
    assert record.command in words
    assert record.provenance.commit in words
    assert "not published: interrupted" in words
    assert start.locator("svg.kda-plot").count() == 3
    assert start.complaints == []


def test_a_phone_labels_every_cell_with_its_head(real: Path, browser: "Browser") -> None:
    """Of tables that sort, of Markdown's, and of those that the page's script fills; nothing lies beyond the page."""
    task = real / find_tasks()[0].family / find_tasks()[0].folder / "docs"
    step = real / "diffusion" / "models" / "docs"
    row = min(task.glob("row-*.html"))
    pages = [real / "index.html", real / "rows.html", step / "steps.html", step / "flux.html"]
    for page in (*pages, task / "tuning.html", task / "results.html", row):
        tab = opened(browser, page, viewport={"width": 390, "height": 800})
        assert [one for one in tab.evaluate(TABLES) if one[1] > 1] == [], page
        tables = tab.evaluate(LABELLED)
        assert len(tables) > 0
        for heads, labels in tables:
            assert labels == [f'"{head}"' for head in heads], page


@pytest.mark.parametrize("which", ["made", "real"])
def test_no_page_scrolls_sideways_or_complains(which: str, request: pytest.FixtureRequest, browser: "Browser") -> None:
    """Nor is any of a megabyte or more. Of pages that are alike, of rows, grids and so on, the largest is opened."""
    value = request.getfixturevalue(which)
    site = value if which == "real" else value[0]
    every = sorted(site.rglob("*.html"))
    assert max(page.stat().st_size for page in every) < 1_000_000
    kinds: dict[str, list[Path]] = {}
    for page in every:
        kinds.setdefault("row" if page.name.startswith("row-") else page.name, []).append(page)
    largest = {max(pages, key=lambda one: one.stat().st_size) for kind, pages in kinds.items() if kind in ALIKE}
    found = [page for kind, pages in kinds.items() for page in pages if kind not in ALIKE or page in largest]
    assert len(found) > 5
    tab = opened(browser, found[0])
    for page in found:
        tab.goto(page.as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 800})
            beyond = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert (page.name, width, beyond, tab.complaints) == (page.name, width, 0, [])


def test_tables_of_results_fit_1280_pixels_and_move_nothing(real: Path, browser: "Browser") -> None:
    """Without a scroll bar of their own; and what is there stays where it is while the page loads."""
    pages = ["index.html", "rows.html", "models/qwen-edit.html"]
    pages += [f"{task.family}/{task.folder}/docs/results.html" for task in find_tasks()]
    tab = opened(browser, real / pages[0], viewport={"width": 1280, "height": 900})
    for name in pages:
        tab.goto((real / name).as_uri())
        wide = tab.locator(".kda-table").evaluate_all(
            "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.ariaLabel)"
        )
        assert (name, wide) == (name, [])
        shift = tab.evaluate(ARRIVING, (real / name).read_text())
        assert sum(shift) < 0.02, (name, shift)


def test_every_table_fits_1280_pixels(real: Path, browser: "Browser") -> None:
    """In every document, folded parts, too, without a scroll bar. Pages of rows are left out: they are all alike."""
    pages = [page for page in sorted(real.rglob("*.html")) if not page.name.startswith("row-")]
    tab = opened(browser, pages[0], viewport={"width": 1280, "height": 900})
    seen, beyond = 0, []
    for page in pages:
        tab.goto(page.as_uri())
        found = tab.evaluate(TABLES)
        seen += len(found)
        beyond += [(page.relative_to(real).as_posix(), *table) for table in found if table[1] > 1]
    assert seen > 50
    assert beyond == []


def test_every_text_of_a_picture_lies_inside_it(browser: "Browser") -> None:
    """Of every picture in this repository; the browser's own font decides how wide a text is."""
    pictures = [path for folder in ("docs", "diffusion", "llm") for path in sorted((ROOT / folder).rglob("*.svg"))]
    assert len(pictures) > 5
    tab = browser.new_page()
    for path in pictures:
        tab.goto(path.as_uri())
        assert (path.relative_to(ROOT).as_posix(), tab.evaluate(CUT)) == (path.relative_to(ROOT).as_posix(), [])


def test_light_and_dark(made: tuple[Path, RunRecord], browser: "Browser") -> None:
    """Brightness, 0 to 765, of the ground, of a plot's text on it, and of a table's."""
    looks = {}
    for scheme in ("light", "dark"):
        tab = opened(browser, made[0] / PAGE, color_scheme=scheme)
        text = tab.locator("svg.kda-plot text").first.evaluate("one => getComputedStyle(one).fill")
        cell = tab.locator(".kda-table td.kda-number").first.evaluate("one => getComputedStyle(one).color")
        colours = (tab.evaluate("getComputedStyle(document.body).backgroundColor"), text, cell)
        looks[scheme] = tuple(sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    (light_paper, *light_text), (dark_paper, *dark_text) = looks.values()
    assert light_paper > 600 > 200 > max(light_text), looks
    assert dark_paper < 200 < 600 < min(dark_text), looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(real: Path, browser: "Browser", scheme: str) -> None:
    """Its contrast to what is painted behind it is what WCAG asks at its size, on a page of every kind."""
    task = "diffusion/k03_qknorm_rope"
    row = min(path.name for path in (real / task / "docs").glob("row-*.html"))
    pages = [
        "index.html",
        "rows.html",
        "search.html",
        "CONTRIBUTING.html",
        "docs/add_a_kernel_example.html",
        "docs/method.html",
    ]
    pages += ["docs/architecture.html", "models/qwen-edit.html", f"{task}/prompt.html", f"{task}/docs/{row}"]
    pages += [f"{task}/docs/{name}.html" for name in ("results", "dispatch", "tuning", "profile")]
    tab = opened(browser, real / pages[0], color_scheme=scheme, viewport={"width": 1280, "height": 900})
    for name in pages:
        tab.goto((real / name).as_uri())
        texts = tab.evaluate(PAINTED)
        assert len(texts) > 5
        faint = {}
        for words, size, weight, colour, behind in texts:
            ground = WHITE
            for layer in reversed(behind):
                ground = Colour(*layer).over(ground)
            ratio_ = contrast(Colour(*colour).over(ground), ground)
            if ratio_ < needed(size, weight):
                faint[words] = (round(ratio_, 2), colour, tuple(ground))
        assert (name, faint) == (name, {})


def test_this_repositorys_pages_show_their_ledgers(real: Path, browser: "Browser") -> None:
    published = 0
    tab = opened(browser, real / "index.html")
    for task in find_tasks():
        tab.goto((real / task.family / task.folder / "docs" / "results.html").as_uri())
        latest = report.published(task, read(task.ledger))
        unmeasured = tab.locator("text=The ledger holds no run on this GPU").count()
        assert tab.locator("svg.kda-plot").count() == 3 * len(latest)
        assert unmeasured == len(task.config.targets) - len(latest)
        for record in list(latest.values())[:1]:
            pins = record.provenance.pins
            arm = next((arm for arm in record.settings.against if arm in pins), record.settings.against[0])
            wall = column(tab, f"wall speedup over {report.pin_name(pins.get(arm)) or arm}")
            assert wall == [ratio(row.speedup[Basis.WALL][arm].estimate) for row in record.rows]
            published += 1
    assert published


# ---- how it is built -------------------------------------------------------------------------------


def test_links_between_documents_hold(made: tuple[Path, RunRecord]) -> None:
    site, _ = made
    method = (site / "docs" / "method.html").read_text()
    assert 'href="../index.html"' in method
    assert re.search(r'href="\.\./_downloads/[^"]+/config\.toml"', method)
    assert "<svg" in method, "the diagram is in the page"
    assert not re.search(r"<a[^>]*>code</a>", method), "a folder has no page"
    assert 'href="docs/method.html#a-heading"' in (site / "index.html").read_text()
    assert "cdn" not in "".join(page.read_text() for page in site.rglob("*.html"))


def test_a_stale_run_says_so_and_a_task_without_a_run_shows_no_plot(checkout: Path) -> None:
    task = find_task("fake")
    assert "has changed since run" not in task_page(task, read(task.ledger))
    (task.path / "solution" / "__init__.py").write_text("def fake(x):\n    return x + 0\n")
    assert "<li>solution has changed since run" in task_page(task, read(task.ledger))
    run = read(task.ledger)[-1]
    there = row_html(task, [run], run, run.rows[0], "a row")
    assert f"run: {run.run_id}, {run.utc[:10]}, H200, commit {run.provenance.commit[:10]} (stale)" in there
    empty = task_page(task, [])
    assert "svg" not in empty
    assert "The ledger holds no run on this GPU" in empty
    assert "The ledger is empty." in empty


def test_what_a_record_says_is_text_not_markup(checkout: Path) -> None:
    task = find_task("fake")
    record = read(task.ledger)[0]
    row = record.rows[0].model_copy(update={"reason": "<script>alert(1)</script>"})
    changed = record.model_copy(update={"rows": (row, *record.rows[1:])})
    page = row_html(task, [changed], changed, row, "<b>")
    assert "<b>" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_chart_has_every_sample_in_its_place() -> None:
    chart = strips(Metric.WALL, {"a": ((1.0, 3.0), (2.0,)), "b": ((5.0,),), "absent": ()})
    assert chart is not None
    assert [strip.arm for strip in chart.arms] == ["a", "b"]
    first, second = chart.arms[0].lanes
    assert (first.title, second.title) == (
        "generation 1: 2 samples, 1.00 to 3.00 us, median 2.00",
        "generation 2: 1 samples, 2.00 to 2.00 us, median 2.00",
    )
    places = [float(x) for x in re.findall(r"M([\d.]+) ", first.path + second.path + chart.arms[1].lanes[0].path)]
    assert places == pytest.approx([28.3, 500.0, 264.2, 971.7], abs=0.1)
    ticks = {text: place for place, text in chart.ticks}
    assert ticks["3"] == pytest.approx(50.0, abs=0.1)
    assert strips(Metric.WALL, {"a": ((), ())}) is None
    alike = strips(Metric.DEVICE, {"a": ((2.0, 2.0),)})
    assert alike is not None
    assert alike.arms[0].place == pytest.approx(500)


def test_a_link_to_nothing_is_named(checkout: Path) -> None:
    (checkout / "docs" / "method.md").write_text("# Method\n\n[gone](gone.md)\n")
    with pytest.raises(KdaError, match=r"docs/method.md:3: .*'gone.md'"):
        build(checkout / "_site", {})
    assert not (checkout / "_site").exists()


def test_only_an_earlier_site_is_replaced(checkout: Path) -> None:
    out = checkout / "_site"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="_site: expected an earlier site or nothing there"):
        build(out, {})
    assert (out / "mine.txt").read_text() == "mine"
    shutil.rmtree(out)
    out.mkdir()
    for name in ("searchindex.js", "old.html"):
        (out / name).touch()
    build(out, {})
    assert not (out / "old.html").exists()
    assert (out / ".nojekyll").exists()


def test_what_is_missing_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tools.publish.site.builder.MODULES", ("sphinx", "no_such_module"))
    with pytest.raises(MissingRequirement, match=r"needs no_such_module: pip install -e 'core/tools\[plots,site\]'"):
        build(checkout / "_site", {})
    monkeypatch.undo()
    monkeypatch.setenv("KDA_ROOT", str(checkout))
    monkeypatch.setattr(plots, "MATPLOTLIB", "0.1")
    with pytest.raises(MissingRequirement, match=r"kda site: plots need matplotlib 0\.1,"):
        build(checkout / "_site", {})


def test_a_models_page_has_the_step_of_each_of_its_parts() -> None:
    head = "| model | GPU |\n|---|---|\n"
    clip, sound, other = (f"| [{name}](page.md#{name}) | H200 |\n" for name in ("clip", "sound", "other"))
    found = step_tables(
        f"{head}{clip}{other}\nwords\n\n{head}{sound}{clip}", {"film": ("clip", "sound"), "none": ("gone",)}
    )
    there = [line.replace("](", "](../") for line in (clip, sound, other)]
    assert found["film"] == head + there[0] * 2 + there[1]
    assert found["other"] == head + there[2]
    assert "none" not in found
