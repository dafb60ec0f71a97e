"""Show all GPUs while a fleet works, and sum up its cost at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kda_tools.fleet.drive import Worker
from kda_tools.fleet.run_folder import Event, RunFolder
from kda_tools.fleet.schedule import Schedule

PLAIN = ("finished", "part", "interrupted", "lost", "given-up", "refused", "retired", "doubled", "resumed", "measured")
"""Events that are printed, one line each, if there is no terminal."""
WORKED = ("finished", "part", "interrupted", "lost", "refused", "doubled")
"""Events that end the work on a piece."""
Look = Callable[[Schedule], None]


@contextmanager
def progress_printer(folder: RunFolder, workers: Callable[[], Sequence[Worker]], total: int) -> Iterator[Look]:
    """The function to call after each change: on a terminal it shows a table, elsewhere it prints a line per event."""
    if not sys.stderr.isatty():
        yield _lines(folder, total)
        return
    begin = time.monotonic()
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def look(schedule: Schedule) -> None:
            seconds = time.monotonic() - begin
            live.update(
                table(folder.events, workers(), schedule, len(folder.complete_pieces), total, seconds), refresh=True
            )

        yield look


def _lines(folder: RunFolder, total: int) -> Look:
    seen = len(folder.events)

    def look(_: Schedule) -> None:
        nonlocal seen
        for event in folder.events[seen:]:
            if event.event in PLAIN:
                print(f"[{len(folder.complete_pieces)}/{total}] {event_line(event)}", file=sys.stderr, flush=True)
        seen = len(folder.events)

    return look


def event_line(event: Event) -> str:
    """An event in one line."""
    attempt = f", attempt {event.attempt}" if (event.attempt or 1) > 1 else ""
    seconds = f", {event.seconds:.0f} s" if event.seconds is not None else ""
    where = f" on {event.worker}" if event.worker else ""
    why = f": {event.why}" if event.why else ""
    return f"{event.piece or 'worker'} {event.event}{where}{attempt}{seconds}{why}"


def table(
    events: Sequence[Event], workers: Sequence[Worker], schedule: Schedule, done: int, total: int, seconds: float
) -> Group:
    """Every worker with its piece, and how far the run is."""
    made = Table(box=None, pad_edge=False)
    for column in ("worker", "GPU", "piece", "attempt", "done", "lost"):
        made.add_column(column, justify="right" if column in ("attempt", "done", "lost") else "left")
    for worker in workers:
        piece, attempt = schedule.running.get(worker.name, (None, None))
        mine = [event.event for event in events if event.worker == worker.name]
        made.add_row(
            worker.name,
            f"{worker.facts.gpu} {(worker.gpu or '')[:12]}" if worker.gpu else "CPU",
            piece.id if piece else "-",
            str(attempt or "-"),
            str(mine.count("finished")),
            str(mine.count("lost")),
        )
    lost = [event_line(event) for event in events if event.event in ("lost", "given-up", "retired", "refused")][-3:]
    bar = ProgressBar(total=max(total, 1), completed=done, width=40)
    progress = Text(f"{done} of {total} pieces, {len(schedule.waiting)} wait, {seconds:.0f} s")
    return Group(made, bar, progress, *(Text(words, style="yellow") for words in lost))


def busy_s(events: Sequence[Event]) -> float:
    """GPU-seconds: time in which workers had a piece, summed over the workers, lost attempts included."""
    return sum(event.seconds or 0.0 for event in events if event.event in WORKED)


def summary(events: Sequence[Event], workers: int, seconds: float, kind: str) -> str:
    """What the run cost, in one line."""
    busy, held = busy_s(events), workers * seconds
    unit = "GPU" if kind == "cuda" else "CPU worker"
    lost = sum(event.event == "lost" for event in events)
    return (
        f"{workers} {unit}{'s'[: workers != 1]}, {seconds:.0f} s: {busy:.0f} {unit}-seconds of work, "
        f"{busy / held if held else 0:.0%} of {held:.0f}; {lost} attempt{'s'[: lost != 1]} lost"
    )
