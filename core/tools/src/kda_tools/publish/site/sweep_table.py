"""The rows of a task's sweeps as a table, from the file that `kda tune` writes for downloading."""

import csv
from pathlib import Path

from kda_tools.publish.site.html_tables import NUMBER, Cell, Line, raw, table

WORDS = {"sweep"}
"""Columns that are left out: the page names them already."""


def sweep_table(path: Path) -> str:
    """A part of the sweeps' page; empty without the file."""
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", newline="") as source:
        rows = list(csv.DictReader(source))
    head = [name for name in rows[0] if name not in WORDS] if rows else []
    lines = [Line(tuple(_cell(row[name]) for name in head)) for row in rows]
    titles = [name.replace("_", " ") for name in head]
    return f"\n## Rows of the sweeps\n{raw(table('Rows of the sweeps', titles, lines))}"


def _cell(text: str) -> Cell:
    try:
        return Cell(text, key=float(text), mark=NUMBER)
    except ValueError:
        return Cell(text)
