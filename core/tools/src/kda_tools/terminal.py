"""The terminal that commands print to."""

import os

from rich.console import Console
from rich.text import Text

PLAIN_WIDTH = 200
"""Columns when output is not a terminal and COLUMNS says nothing: tables must not wrap in a log."""


def console() -> Console:
    """The console of standard output."""
    plain = Console()
    return plain if plain.is_terminal or os.environ.get("COLUMNS") else Console(width=PLAIN_WIDTH)


def say(text: str) -> None:
    """One line."""
    console().print(Text(text))
