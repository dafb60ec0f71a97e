"""Show the files that `kda tune` writes as tables: the rows of a task's sweeps, and what other choices cost."""

import csv
from pathlib import Path

from kda_tools.publish.site.html_tables import BREAKS, NUMBER, Cell, Line, raw, table

TABLES = {"Rows of the sweeps": "tuning.csv", "What other choices cost": "tuning_choices.csv"}
WORDS = {"sweep"}
"""Columns that are left out: the page names them already."""


def sweep_tables(page: Path) -> str:
    """The tables at the end of the page on sweeps; empty without the CSV files beside the page."""
    return "".join(_table(title, page.with_name(name)) for title, name in TABLES.items())


def _table(title: str, path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", newline="") as source:
        rows = list(csv.DictReader(source))
    head = [name for name in rows[0] if name not in WORDS] if rows else []
    lines = [Line(tuple(_cell(row[name]) for name in head)) for row in rows]
    titles = [name.replace("_", " ") for name in head]
    return f"\n## {title}\n{raw(table(title, titles, lines))}"


def _cell(text: str) -> Cell:
    try:
        return Cell(text, key=float(text), mark=NUMBER)
    except ValueError:
        return Cell(text, mark=BREAKS)
