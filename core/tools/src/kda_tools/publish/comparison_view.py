"""Print two runs side by side on the terminal: which rows changed, by how much, and what else differs."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kda_judge.evidence.run_record import Interval
from kda_tools.lab.compare_runs import MARGIN, Comparison
from kda_tools.publish.report import interval


def print_comparison(console: Console, comparison: Comparison, notes: Sequence[str]) -> None:
    """Print every change, then what could not be compared, what differs between the runs, and the outcome."""
    title = f"speedups: {comparison.new} over {comparison.old}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for head in ("row", "against"):
        table.add_column(head, no_wrap=True)
    for head in ("was", "is", "change"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for change in (*comparison.changes, *comparison.headline):
        moved = Text("changed", style="red") if change.outside_margin else Text("agrees", style="green")
        table.add_row(
            Text(change.row), change.opponent, interval(change.old), interval(change.new), percent(change.ratio), moved
        )
    # As for a run's table: on a narrow terminal the line gets longer; no number is cut.
    table.width = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.print(table, soft_wrap=True)
    for line in comparison.lost:
        console.print(Text(f"cannot be compared: {line}", style="red"), soft_wrap=True)
    for line in notes:
        console.print(Text(f"note: {line}", style="yellow"), soft_wrap=True)
    console.print(Text(outcome(comparison), style="bold"), soft_wrap=True)


def outcome(comparison: Comparison) -> str:
    """Whether the runs agree, in one sentence."""
    changes, lost = comparison.changes, len(comparison.lost)
    moved = list(dict.fromkeys(change.row for change in changes if change.outside_margin))
    rows = len({change.row for change in changes})
    named = f" ({', '.join(moved)})" if moved else ""
    words = f"the speedup of {len(moved)} of {rows} rows changed by more than {MARGIN:.0%}{named}"
    if lost:
        words += f"; {lost} thing{'s'[: lost != 1]} could not be compared"
    return f"{'the runs agree' if comparison.agree else 'the runs do not agree'}: {words}"


def percent(ratio: Interval) -> str:
    """A ratio as a change in per cent: `+4.1% [+2.0%, +6.3%]`."""
    estimate, low, high = (f"{value - 1:+.1%}" for value in (ratio.estimate, ratio.low, ratio.high))
    return f"{estimate} [{low}, {high}]"
