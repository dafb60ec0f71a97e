"""Make HTML for Markdown pages: tables that sort and filter, templates, and pictures."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape, unescape
from pathlib import Path
from typing import Any

from kda_judge.evidence.run_record import Interval
from kda_tools.publish import plots
from kda_tools.publish.report import NONE, interval, microseconds, ratio

TEMPLATES = Path(__file__).parent / "templates"
NUMBER = "number"
"""Mark of a cell that holds a number."""
CLOCKS = "*Device* is time on the GPU alone; *wall* is host time with kda-runtime, *portable* without it."
"""Explains the heads of columns to a reader."""
BREAKS = "breaks"
"""Mark of a cell whose words may break at any letter: row ids and settings may be longer than a column is wide."""
HEAD = re.compile(r'<table class="(docutils[^"]*)">(?=\s*<thead>(.*?)</thead>)', re.DOTALL)
"""The tag of a Markdown table, and its head."""
WIDE = "kda-wide"
"""Name of the meta tag that makes a page wide. It is in the head, so the layout does not change while loading."""


@dataclass(frozen=True)
class Cell:
    """One cell: its text, its sort key if that is not the text, and its link."""

    text: str
    key: float | str | None = None
    href: str | None = None
    hint: str = ""
    """Text that the pointer shows, such as an interval."""
    mark: str = ""
    """CSS class without its prefix `kda-`."""

    @property
    def order(self) -> str:
        """The key that the page's script sorts by: numbers as numbers, all else as text."""
        return str(self.text if self.key is None else self.key)


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    cells: tuple[Cell, ...]
    anchor: str = ""
    filters: Mapping[str, str] = field(default_factory=dict)
    """Name of a filter -> this line's values, separated by spaces."""


def table(title: str, head: Iterable[str], lines: Sequence[Line]) -> str:
    """An HTML table. `head` names the columns. Each filter of the lines becomes a drop-down list above the table."""
    numbers = {place for line in lines for place, cell in enumerate(line.cells) if cell.mark == NUMBER}
    filters: dict[str, set[str]] = {}
    for line in lines:
        for name, values in line.filters.items():
            filters.setdefault(name, set()).update(values.split())
    choices = {name: sorted(values) for name, values in filters.items()}
    return str(
        template("table.html").render(title=title, head=list(head), lines=lines, numbers=numbers, filters=choices)
    )


def breaking(text: str) -> str:
    """HTML of names that are wider than a column: they break behind underscores, and releases before `.post`."""
    return escape(text).replace("_", "_<wbr>").replace(".post", "<wbr>.post")


def labels(head: Iterable[str]) -> str:
    """CSS properties of a table that label its cells on a phone: a label in each would make large pages far larger."""
    quoted = (name.replace("\\", "\\\\").replace("'", "\\'") for name in head)
    return "".join(f"--h{place}:'{name}';" for place, name in enumerate(quoted, 1))


def stacked(html: str) -> str:
    """A page whose Markdown tables become cards on a phone, as `table`'s do; two columns fit there and stay."""

    def with_labels(found: re.Match[str]) -> str:
        head = [" ".join(unescape(re.sub("<[^>]*>", "", one)).split()) for one in found[2].split("</th>")[:-1]]
        return f'<table class="{found[1]} kda-stack" style="{escape(labels(head))}">' if len(head) > 2 else found[0]

    return HEAD.sub(with_labels, html)


def speedup_cell(value: float | None, found: Interval | None) -> Cell:
    """A cell with a ratio; the pointer shows its interval."""
    return Cell(ratio(value), key=value, hint=f"95% interval {interval(found)}" if found else "", mark=NUMBER)


def time_cell(value: float | None) -> Cell:
    """A cell with a time in microseconds."""
    return number_cell(microseconds(value), value)


def number_cell(text: str, value: float | None) -> Cell:
    """A cell with a number: shown as `text`, sorted by `value`; None is shown as `-`."""
    return Cell(text if value is not None else NONE, key=value, mark=NUMBER)


def raw(html: str) -> str:
    """HTML inside a Markdown page."""
    return f"\n````````{{raw}} html\n{html.strip()}\n````````\n"


def inlined(svg: str, name: str, says: str) -> str:
    """A plot inside the page: without its own colours, and with ids made unique by `name`."""
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<= id=")', f"{name}-", svg)
    svg = re.sub(r'(?<=href="#)|(?<=url\(#)', f"{name}-", svg)
    # It scrolls where it is so narrow that its text could not be read.
    scroll = f'<div tabindex="0" role="region" aria-label="{escape(says)}">{svg}</div>'
    return f'<figure class="kda-figure">{scroll}<figcaption>{says}.</figcaption></figure>'


def plot(drawn: Mapping[str, str], kind: plots.Plot, target: str) -> str:
    """One of a task's plots as HTML for the page."""
    return inlined(drawn[plots.file_name(kind, target)], f"{kind.name}-{target}", kind.says)


def wide(text: str, keywords: str = "", above: str = "") -> str:
    """A page with wide tables, without furo's list of headings beside it; a search also finds it by `keywords`.

    `above` is a link to the page above this one; a page with it is not in the navigation.
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
    environment.filters |= {"breaking": breaking, "labels": labels}
    return environment


def template(name: str) -> Any:
    """A template of this package."""
    return _environment().get_template(name)
