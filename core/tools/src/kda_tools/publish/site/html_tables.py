"""HTML inside a Markdown page: tables that sort and filter, templates, and pictures."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from kda_judge.evidence.run_record import Interval
from kda_tools.publish import plots
from kda_tools.publish.report import NONE, interval, microseconds, ratio

TEMPLATES = Path(__file__).parent / "templates"
NUMBER = "number"
"""Mark of a cell that holds one."""
BREAKS = "breaks"
"""Mark of a cell whose words may break at any letter: ids of rows and settings are longer than a column."""
WIDE = "kda-wide"
"""Name of the meta tag that makes a page wide. It is in the head, so nothing moves when the rest arrives."""


@dataclass(frozen=True)
class Cell:
    """One cell: what it says, what it is sorted by where that is another thing, and where it leads."""

    text: str
    key: float | str | None = None
    href: str | None = None
    hint: str = ""
    """What the pointer shows: an interval."""
    mark: str = ""
    """Class of its looks."""

    @property
    def order(self) -> str:
        """What the page's script sorts by: numbers as numbers, all else as text."""
        return str(self.text if self.key is None else self.key)


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    cells: tuple[Cell, ...]
    anchor: str = ""
    filters: Mapping[str, str] = field(default_factory=dict)
    """Name of a filter -> the values of this line, one word each."""


def table(title: str, head: Iterable[str], lines: Sequence[Line]) -> str:
    """`head` names the columns; one that holds numbers is aligned like them. Each filter of the lines is a choice."""
    numbers = {place for line in lines for place, cell in enumerate(line.cells) if cell.mark == NUMBER}
    filters: dict[str, set[str]] = {}
    for line in lines:
        for name, values in line.filters.items():
            filters.setdefault(name, set()).update(values.split())
    choices = {name: sorted(values) for name, values in filters.items()}
    return str(
        template("table.html").render(title=title, head=list(head), lines=lines, numbers=numbers, filters=choices)
    )


def speedup_cell(value: float | None, found: Interval | None) -> Cell:
    """A ratio, its interval for the pointer."""
    return Cell(ratio(value), key=value, hint=f"95% interval {interval(found)}" if found else "", mark=NUMBER)


def time_cell(value: float | None) -> Cell:
    """Microseconds."""
    return number_cell(microseconds(value), value)


def number_cell(text: str, value: float | None) -> Cell:
    """A number that is written in its own way."""
    return Cell(text if value is not None else NONE, key=value, mark=NUMBER)


def raw(html: str) -> str:
    """HTML inside a Markdown page."""
    return f"\n````````{{raw}} html\n{html.strip()}\n````````\n"


def inlined(svg: str, name: str, says: str) -> str:
    """A plot as part of the page: without its own colours, and with ids that no other plot has."""
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<= id=")', f"{name}-", svg)
    svg = re.sub(r'(?<=href="#)|(?<=url\(#)', f"{name}-", svg)
    # A phone scrolls it, and its text stays large enough to read.
    scroll = f'<div tabindex="0" role="region" aria-label="{escape(says)}">{svg}</div>'
    return f'<figure class="kda-figure">{scroll}<figcaption>{says}.</figcaption></figure>'


def plot(drawn: Mapping[str, str], kind: plots.Plot, target: str) -> str:
    """One of a task's plots in the page."""
    return inlined(drawn[plots.file_name(kind, target)], f"{kind.name}-{target}", kind.says)


def wide(text: str, keywords: str = "", above: str = "") -> str:
    """A page with wide tables, without furo's list of headings beside it; a search finds it by its keywords, too.

    A page with a link to the page `above` it is not in the navigation.
    """
    meta = f"myst:\n  html_meta:\n    {WIDE}: 'yes'\n"
    meta += f"    keywords: {keywords}\n" if keywords else ""
    meta += "orphan: true\n" if above else ""
    return f"---\nhide-toc: true\n{meta}---\n{above}\n\n{text}"


@lru_cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"interval": interval, "us": microseconds, "ratio": ratio}
    return environment


def template(name: str) -> Any:
    """A template of this package."""
    return _environment().get_template(name)
