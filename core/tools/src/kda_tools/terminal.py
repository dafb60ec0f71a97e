"""The terminal that commands print to."""

import os
import re
import sys

from rich.console import Console
from rich.text import Text

PLAIN_WIDTH = 200
"""Columns if output is not a terminal and COLUMNS is not set: tables must not wrap in a log."""


class _Bare:
    """Standard output for a file or a pipe: without the spaces that pad a table's lines."""

    @property
    def encoding(self) -> str:
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(" +\n", "\n", text))

    def flush(self) -> None:
        sys.stdout.flush()


def console() -> Console:
    """The console of standard output."""
    width = os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"])
    if not width:  # not for 0 either: rich would print nothing
        os.environ.pop("COLUMNS", None)
    plain = Console()
    if plain.is_terminal or sys.stdout is None:
        return plain
    return Console(file=_Bare(), width=None if width else PLAIN_WIDTH)  # type: ignore[arg-type]


def say(text: str) -> None:
    """Print one line."""
    console().print(Text(text))
