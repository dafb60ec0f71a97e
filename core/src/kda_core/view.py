"""A run on the terminal: one table, the headline, and what went wrong in words."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kda_core.derive import MEASURED
from kda_core.records import Metric, RowResult, RunRecord, Verdict
from kda_core.report import NONE, arm_name, interval, median, microseconds, noise_floor, ratio

COLOUR = {
    Verdict.FASTER: "green",
    Verdict.NOT_FASTER: "yellow",
    Verdict.UNVERIFIED: "cyan",
}
GPU_ADDS = (
    "Checked against the oracle on shrunken rows, not measured: an NVIDIA GPU would add the frozen shapes, "
    "every time and speedup, and the verdicts FASTER and NOT_FASTER."
)


def print_run(console: Console, record: RunRecord) -> None:
    """Print the run. Without a GPU no time of any kind is printed."""
    measured = record.machine.kind == "cuda"
    table = _measured(record) if measured else _checked(record)
    needed = _width(console, table)
    if measured and needed > console.width:
        table = _measured(record, intervals_below=True)
        needed = _width(console, table)
    # Where even that is too narrow (80 columns, a CI log) the line gets longer: a number is never cut.
    table.width = needed
    console.print(table, soft_wrap=True)
    for row in record.rows:
        if row.verdict not in MEASURED and row.verdict is not Verdict.UNVERIFIED:
            console.print(Text(f"{row.id}: {row.verdict.value}: {row.reason}", style="red"))
        for name, arm in row.arms.items():
            if not arm.correctness.passed and str(arm.correctness.failure) not in row.reason:
                console.print(Text(f"{row.id}: {name}: {arm.correctness.failure}", style="red"))
    if measured:
        _print_headline(console, record)
    else:
        console.print(Text(GPU_ADDS))
    for reason in record.noisy:
        console.print(Text(f"noisy, cannot be published: {reason}", style="yellow"))
    if record.partial:
        console.print(Text("interrupted: rows that were not reached are absent", style="yellow"))


def _width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(width=1000), table).maximum


def _measured(record: RunRecord, intervals_below: bool = False) -> Table:
    """One line per row; with `intervals_below` the interval stands under the speedup, which saves 12 columns each."""
    subject, against = record.settings.subject, record.settings.against
    first, others = against[0], against[1:]
    table = Table(title=f"{record.task}: median us per call", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("row", no_wrap=True)
    for head in (first, subject, *others, f"vs {first}", *(f"vs {arm}" for arm in others), "device", "attained"):
        table.add_column(head.replace(" ", "\n", 1).replace("_", "\n"), justify="right")
    table.add_column("verdict", no_wrap=True)
    for row in record.rows:
        cells = [microseconds(median(row, arm, Metric.WALL)) for arm in (first, subject, *others)]
        speedups = [interval(row.speedup.get(arm)) for arm in against]
        cells += [text.replace(" ", "\n", 1) for text in speedups] if intervals_below else speedups
        cells += [microseconds(median(row, subject, Metric.DEVICE)), ratio(row.attained)]
        table.add_row(Text(row.id), *cells, _verdict(row))
    return table


def _checked(record: RunRecord) -> Table:
    subject = record.settings.subject
    table = Table(title=f"{record.task}: without a GPU", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("row", no_wrap=True)
    table.add_column("checks", justify="right")
    table.add_column("tolerance used")
    table.add_column("verdict", no_wrap=True)
    for row in record.rows:
        correctness = row.arms[subject].correctness if subject in row.arms else None
        outputs = correctness.outputs if correctness else ()
        worst = max(outputs, key=lambda output: output.used or 0.0, default=None)
        table.add_row(
            Text(row.id),
            str(correctness.checks) if correctness else NONE,
            Text(f"{worst.output}: {worst.used:.0%}" if worst and worst.used is not None else NONE),
            _verdict(row),
        )
    return table


def _print_headline(console: Console, record: RunRecord) -> None:
    headline = record.headline
    if headline is None:
        console.print(Text("no production row was measured, so there is no headline"))
        return
    rows = f"{headline.rows} production row{'s'[: headline.rows != 1]}"
    for arm, speedup in headline.speedup.items():
        console.print(Text(f"speedup against {arm_name(record, arm)}: {interval(speedup)}, {rows}", style="bold"))
    console.print(Text(f"attained (limit / {record.settings.subject}): {interval(headline.attained)}"))
    console.print(Text(f"noise floor (A/A): {noise_floor(record)}"))


def _verdict(row: RowResult) -> Text:
    return Text(row.verdict.value, style=COLOUR.get(row.verdict, "red"))
