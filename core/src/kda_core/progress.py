"""The row, the phase and the time left: a rich display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from kda_core.judge import Progress as Report
    from kda_core.workloads import Workload

PLAIN_EVERY_S = 2.0
"""Shortest time between two plain lines, so that a grid of thousands of rows does not flood a log."""


@contextmanager
def showing(rows: Sequence[Workload], phases_per_row: int) -> Iterator[Report]:
    """Show progress over `rows`, each of which enters about `phases_per_row` phases, until the block ends."""
    total = len(rows) * phases_per_row
    if sys.stderr.isatty():
        yield from _display(total)
    else:
        yield _plain(total)


def _display(total: int) -> Iterator[Report]:
    from rich.console import Console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting workers", total=total)

        def report(row: str, phase: str) -> None:
            progress.update(bar, description=f"{row}: {phase}")
            progress.advance(bar)

        yield report


def _plain(total: int) -> Report:
    start = last = time.monotonic()
    done = 0

    def report(row: str, phase: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= PLAIN_EVERY_S or done == 1:
            last = now
            left = (now - start) / done * max(total - done, 0)
            sys.stderr.write(f"[{done}/{total}] {row}: {phase}, about {left:.0f} s left\n")
            sys.stderr.flush()

    return report
