"""Show a run's progress (row, phase, time left): a rich display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kda_tools.publish.report import ratio

if TYPE_CHECKING:
    from kda_judge.contract.workloads import Workload
    from kda_judge.evidence.run_record import RowResult
    from kda_judge.judge.judge import Progress as Report

PLAIN_EVERY_S = 2.0
"""Shortest time in seconds between two plain lines, so that a grid of thousands of rows does not flood a log."""


@dataclass(frozen=True)
class Shown:
    """Reports a run's progress to its user."""

    report: Report
    say: Callable[[str], None]

    def __call__(self, row: str, phase: str) -> None:
        """A row enters a phase."""
        self.report(row, phase)

    def timed(self, row: RowResult) -> None:
        """Report a row that has been timed; only the checks that follow all timing can still change its verdict."""
        self.say(f"{row.id}: {row.verdict.value}: {row.reason}; attained {ratio(row.attained)}")


@contextmanager
def row_progress(rows: Sequence[Workload], phases_per_row: int) -> Iterator[Shown]:
    """Show progress over `rows`, each of which enters about `phases_per_row` phases, until the block ends."""
    total = len(rows) * phases_per_row
    if sys.stderr.isatty():
        yield from _display(total)
    else:
        yield Shown(_plain(total), lambda line: print(line, file=sys.stderr, flush=True))


def _display(total: int) -> Iterator[Shown]:
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

        yield Shown(report, progress.console.print)


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
