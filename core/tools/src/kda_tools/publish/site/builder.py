"""Write every page as Markdown, and let Sphinx make HTML that needs no network and no server."""

import re
import shutil
import tempfile
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import KdaError, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task, find_tasks
from kda_judge.evidence.ledger import read
from kda_tools import checkout_folder
from kda_tools.publish import report
from kda_tools.publish.figures import COLOURS
from kda_tools.publish.generate import DIGESTS
from kda_tools.publish.plots import missing as missing_matplotlib
from kda_tools.publish.read_once import unchanged_files
from kda_tools.publish.site import overview_pages
from kda_tools.publish.site.frames import write_row_pages
from kda_tools.publish.site.html_tables import inlined, raw, stacked, wide
from kda_tools.publish.site.row_pages import folder_of, row_pages
from kda_tools.publish.site.sweep_table import sweep_tables
from kda_tools.publish.site.task_page import task_page
from kda_tools.publish.tables import Ledgers, Runs, StepNames, replace_block
from kda_tools.publish.task_notes import LINK

NAME = "KDA-Pilot"
MODULES = ("furo", "mmdr", "myst_parser", "sphinx")
REMEDY = "pip install -e 'core/tools[plots,site]'"
START, INDEX = Path("README.md"), Path("index.md")
"""The repository's README becomes the start page."""
GUIDES = (
    *("docs/tutorial.md", "docs/glossary.md", "docs/method*.md", "docs/commands.md"),
    *("docs/work_on_a_task.md", "docs/add_a_kernel*.md", "docs/tune_a_kernel.md"),
    *("docs/*.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
"""Patterns of the guides, in the order in which a newcomer reads them."""
SKILLS = ("AGENTS.md", "docs/skills/*/SKILL.md", "docs/skills/*/references/*.md")
LLMS = "llm/docs/*.md"
"""The generated pages of language models."""
ROWS = Path("rows.md")
"""The page of every row."""
RESULTS = Path("docs/results.md")
"""Path in a task's folder of the file that the site replaces by the task's page."""
MERMAID = re.compile(r"^```mermaid\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE)
WIDE_TABLE = re.compile(r"^(\|[^|\n]*){6,}\|$", re.MULTILINE)
"""A line of a table so wide that it needs the space of furo's list of headings."""
SWEEPS = "tuning.md"
SIZE = re.compile(r'<svg[^>]* width="(?P<width>[\d.]+)pt" height="(?P<height>[\d.]+)pt"')
"""Of a picture, in points of 4/3 CSS pixels."""
PICTURE = re.compile(
    r"^!\[(?P<says>[^\]]*)\]\((?P<target>(?:[\w/]+/)?plots/(?:campaigns/)?(?P<name>[^/)]*)\.svg)\)$", re.MULTILINE
)
"""A plot in a Markdown page. Inside a page it follows the reader's choice of light or dark."""
STEPS = Path("diffusion/models/docs/steps.md")
CEILINGS = STEPS.with_name("ceilings.md")
NO_STEPS = "No step of a model is recorded on a GPU yet; `kda model step MODEL --record` adds the first."
STATIC = Path(__file__).parent / "static"
SETTINGS: dict[str, Any] = {
    "project": NAME,
    "html_title": NAME,
    "html_theme": "furo",
    "extensions": ["myst_parser"],
    "root_doc": INDEX.stem,
    "myst_heading_anchors": 4,
    "html_static_path": ["_static"],
    "html_css_files": ["colours.css", "kda.css"],
    "html_js_files": ["kda.js"],
    "html_search_scorer": str(STATIC / "scorer.js"),
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    # A summary makes the search page fetch each page found, which browsers refuse for local files.
    "html_show_search_summary": False,
}
Pages = dict[Path, str]
"""Place in the repository -> Markdown."""


def build(out: Path, step_names: StepNames) -> int:
    """Make the whole site in `out`, which it replaces; returns the number of pages.

    Raises:
        MissingRequirement: Sphinx, its theme, or the matplotlib release that makes the plots is not installed.
        UsageError: there is no checkout here, or `out` holds something that is not an earlier site.
        LedgerError: a ledger is broken.
        KdaError: Sphinx warns, for example of a link to a file that does not exist; names the place.
    """
    root = checkout_folder.root()
    if lacking := [module for module in MODULES if find_spec(module) is None]:
        raise MissingRequirement(f"kda site: needs {', '.join(lacking)}: {REMEDY}")
    if problem := missing_matplotlib():
        raise MissingRequirement(f"kda site: {problem}")
    if out.exists() and not (out / "searchindex.js").is_file():
        raise UsageError(f"kda site: {out}: expected an earlier site or nothing there, got something else")
    ledgers = [(task, read(task.ledger)) for task in find_tasks()]
    with unchanged_files(), tempfile.TemporaryDirectory(prefix="kda-site-") as scratch:
        source, html = Path(scratch) / "source", Path(scratch) / "html"
        runs = [(task, report.published(task, records)) for task, records in ledgers]
        staged = _staged(root, ledgers, runs, step_names)
        _write(root, source, staged)
        _sphinx(source, html, Path(scratch) / "doctrees")
        rows = 0
        for (task, records), (_, latest) in zip(ledgers, runs, strict=True):
            drawn = row_pages(task, records, latest)
            rows += write_row_pages(html / folder_of(task), drawn)
        (html / ".nojekyll").touch()  # GitHub Pages would leave out folders that begin with an underscore
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(html, out)
    return len(staged) + rows


def _staged(root: Path, ledgers: Ledgers, runs: Runs, step_names: StepNames) -> Pages:
    """Every page, at the path of its document in the repository so that links between documents hold."""
    guides, skills, llms = (
        list(dict.fromkeys(path.relative_to(root) for one in patterns for path in sorted(root.glob(one))))
        for patterns in (GUIDES, SKILLS, (LLMS,))
    )
    staged = {path: _text(root / path) for path in (*guides, *skills, *llms)}
    staged |= {path: wide(staged[path]) for path in (*guides, *llms) if WIDE_TABLE.search(staged[path])}
    shelves = {}
    for family in sorted({task.family for task, _ in ledgers}):
        members = [(task, records) for task, records in ledgers if task.family == family]
        places = []
        for task, records in members:
            folder = task.path.relative_to(root)
            own = [path.relative_to(root) for path in (task.path / "prompt.md", *sorted(task.path.glob("docs/*.md")))]
            children = [path for path in own if path != folder / RESULTS and (root / path).is_file()]
            staged |= {path: _document(task, root / path) for path in children}
            staged[folder / RESULTS] = task_page(task, records)
            places.append(folder / RESULTS)
        places += [path for path in llms if path.parts[0] == family]
        page = Path(family) / START
        if (root / page).is_file():
            measured = [(task, latest) for task, latest in runs if task.family == family]
            text = replace_block(_text(root / page), "tasks", overview_pages.headlines(measured, family))
            text = overview_pages.link_models(text, measured)
            staged[page], places = wide(text) + _contents("", places), [page]
        shelves[family.capitalize()] = places
    steps = f"[What a model's step is made of](../{STEPS})." if (root / STEPS).is_file() else NO_STEPS
    steps_pages = [path for path in (STEPS, CEILINGS) if (root / path).is_file()]
    staged |= {path: wide(_text(root / path)) for path in steps_pages}
    of_models = [path.relative_to(root) for path in (root / STEPS).parent.glob("*.md")]
    above = f"[Models' steps]({STEPS.name})"
    staged |= {path: wide(_text(root / path), above=above) for path in of_models if path not in staged}
    known = {path.stem: f"[What its step is made of](../{path})." for path in llms}
    found = overview_pages.model_pages(runs, steps, known, overview_pages.step_tables(_text(root / START), step_names))
    models = {Path("models") / f"{name}.md": text for name, text in found.items()}
    staged |= {**models, ROWS: overview_pages.rows_page(runs)}
    start = replace_block(_text(root / START), "results", overview_pages.TASKS_LINK)
    start = f"{overview_pages.with_links(_with_pictures(start, root))}\n{overview_pages.landing(runs)}"
    shelves = {
        "Results": [ROWS],
        **shelves,
        "Guides": guides,
        "Models": [*models, *steps_pages, *(path for path in llms if path.parts[0].capitalize() not in shelves)],
        "Skills": skills,
    }
    for caption, places in shelves.items():
        start += _contents(caption, places)
    return {INDEX: wide(start), **staged}


def _document(task: Task, path: Path) -> str:
    """A document of a task, in full even if the repository has only its conclusion.

    The task's page links to it. It is not in the navigation, which would get long and slow down every page.
    """
    full = DIGESTS[path.name](task, whole=True) if path.name in DIGESTS else None
    text = full or _text(path) + (sweep_tables(path) if path.name == SWEEPS else "")
    text = _with_pictures(text, path.parent)
    results = RESULTS.relative_to(path.parent.relative_to(task.path))
    return wide(text, above=f"[{task.folder}]({results.as_posix()})")


def _with_pictures(text: str, folder: Path) -> str:
    """The page of this folder with its pictures inside."""
    return PICTURE.sub(lambda one: raw(inlined(_text(folder / one["target"]), one["name"], one["says"])), text)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _contents(caption: str, places: list[Path]) -> str:
    """A hidden table of contents: the pages below a page, which show in the navigation only."""
    entries = "".join(f"/{place.with_suffix('').as_posix()}\n" for place in places)
    named = f":caption: {caption}\n" if caption else ""
    return f"\n\n```{{toctree}}\n:hidden:\n{named}\n{entries}```\n" if entries else ""


def _write(root: Path, source: Path, staged: Pages) -> None:
    """Write the pages, the files that they link to, and the static files."""
    for place, text in staged.items():

        def linked(match: re.Match[str], folder: Path = place.parent) -> str:
            target = (root / folder / match["target"]).resolve()
            if target == root / START:
                return f"[{match['text']}]({'../' * len(folder.parts)}{INDEX}{match['anchor'] or ''})"
            if target.is_dir():
                return match["text"]  # there is no page of a folder
            if target.is_file() and target.is_relative_to(root) and target.relative_to(root) not in staged:
                copy = source / target.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, copy)
            return match[0]

        (source / place).parent.mkdir(parents=True, exist_ok=True)
        (source / place).write_text(MERMAID.sub(_diagram, LINK.sub(linked, text)), encoding="utf-8")
    static = source / "_static"
    shutil.copytree(STATIC, static)
    (static / "colours.css").write_text(_colours(), encoding="utf-8")


def _diagram(match: re.Match[str]) -> str:
    """A Mermaid diagram as an SVG in the page: Mermaid's script would need a network or take megabytes."""
    import mmdr

    svg = mmdr.render('%%{init: {"theme": "neutral"}}%%\n' + match["source"]).svg()
    return raw(f'<figure class="kda-diagram">{svg}</figure>')


def _colours() -> str:
    """CSS of the plots' colours, which switches between light and dark with the theme."""
    light, dark = (";".join(f"--kda-{both[0]}:{both[which]}" for both in COLOURS.values()) for which in (1, 2))
    return (
        f"body{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{body:not([data-theme=light]){{{dark}}}}}\n"
        f"body[data-theme=dark]{{{dark}}}\n"
    )


def _lazy(app: Any, doctree: Any, _: str) -> None:
    """Have pictures loaded when they come near, in a space of their size: a page of all runs has dozens of them."""
    for image in doctree.findall(lambda node: node.tagname == "image"):
        size = SIZE.search((app.srcdir / image["uri"]).read_text(encoding="utf-8"))
        image["loading"] = "lazy"
        if size:
            for side in ("width", "height"):
                image[side] = str(round(float(size[side]) * 4 / 3))


def _stack(_: Any, __: str, ___: str, context: dict[str, Any], ____: Any) -> None:
    if "body" in context:
        context["body"] = stacked(context["body"])


def _sphinx(source: Path, html: Path, doctrees: Path) -> None:
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    warnings = StringIO()
    with patch_docutils(), docutils_namespace():
        app = Sphinx(source, None, html, doctrees, "html", SETTINGS, status=None, warning=warnings)
        app.connect("doctree-resolved", _lazy)
        app.connect("html-page-context", _stack)
        app.build()
    if found := re.sub(r"\x1b\[[0-9;]*m", "", warnings.getvalue()).replace(f"{source}/", "").strip():
        raise KdaError(f"kda site: {found}")
