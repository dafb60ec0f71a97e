"""Print a run on the terminal: one table, the headline, and what went wrong in words."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.run_record import MachineWatch, RowResult, RunRecord, Verdict
from kda_tools.publish.report import (
    NONE,
    WHOSE,
    WORDS,
    arm_name,
    bases,
    interval,
    median,
    microseconds,
    noise_floor,
    ratio,
    speedup,
)

COLOUR = {Verdict.FASTER: "green", Verdict.NOT_FASTER: "yellow", Verdict.CORRECT: "cyan"}
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
    # If the console is too narrow even for that (80 columns, a CI log), the line gets longer; no number is cut.
    table.width = needed
    console.print(table, soft_wrap=True)
    for row in record.rows:
        if row.verdict not in MEASURED and row.verdict is not Verdict.CORRECT:
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


def gpu_seen(watch: MachineWatch) -> str:
    """Readings of the GPU during a run, in one line: medians, and in brackets the lowest and the highest."""
    parts = [
        f"{name} {spread.median:.0f} {unit} [{spread.low:.0f}, {spread.high:.0f}]"
        for name, spread, unit in (
            ("SM clock", watch.sm_mhz, "MHz"),
            ("memory clock", watch.memory_mhz, "MHz"),
            ("power", watch.power_w, "W"),
            ("temperature", watch.temperature_c, "C"),
        )
        if spread
    ]
    lowered = {reason: seconds for reason, seconds in watch.throttle_s.items() if reason != "gpu_idle"}
    parts += [f"{reason} for {seconds:.1f} s" for reason, seconds in sorted(lowered.items())]
    return f"{', '.join([*parts, ''])}{watch.readings} readings in {watch.seconds:.0f} s, {watch.busy} of them busy"


def _width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(width=1000), table).maximum


def _measured(record: RunRecord, intervals_below: bool = False) -> Table:
    """One line per row; with `intervals_below` the interval stands under the speedup, which saves 12 columns each."""
    subject, against = record.settings.subject, record.settings.against
    first, others, decides, more = against[0], against[1:], record.settings.decides, bases(record)[1:]
    clock = decides.metric
    title = f"{record.task}: median us per call, {WORDS[decides]}; behind the intervals other speedups vs {first}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("row", no_wrap=True)
    heads = [first, subject, *others, f"vs {first}", *(f"vs {arm}" for arm in others), *(basis.value for basis in more)]
    for head in (*heads, "equal, 1 ulp", "attained"):
        table.add_column(head.replace(" ", "\n", 1).replace("_", "\n"), justify="right")
    table.add_column("verdict", no_wrap=True)
    for row in record.rows:
        cells = [microseconds(median(row, arm, clock)) for arm in (first, subject, *others)]
        speedups = [interval(speedup(row, decides, arm)) for arm in against]
        cells += [text.replace(" ", "\n", 1) for text in speedups] if intervals_below else speedups
        found = [speedup(row, basis, first) for basis in more]
        cells += [ratio(value.estimate if value else None) for value in found]
        table.add_row(Text(row.id), *cells, _equal(row, first), ratio(row.attained), _verdict(row))
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
    for basis in bases(record):
        for arm, value in headline.speedup[basis].items():
            words = f"{WORDS[basis]}: speedup against {arm_name(record, arm)}: {interval(value)}, {rows}"
            console.print(Text(words, style="bold" if basis is record.settings.decides else ""))
    console.print(Text(WHOSE))
    console.print(Text(f"attained (limit / {record.settings.subject}, on the device): {interval(headline.attained)}"))
    console.print(Text(f"noise floor (A/A): {noise_floor(record)}"))


def _equal(row: RowResult, arm: str) -> str:
    """Least share of elements with the arm's bits, and of elements at most one unit in the last place from it."""
    found = row.arms[arm].distance if arm in row.arms else ()
    return f"{min(one.equal for one in found):.1%}, {min(one.near for one in found):.1%}" if found else NONE


def _verdict(row: RowResult) -> Text:
    return Text(row.verdict.value, style=COLOUR.get(row.verdict, "red"))
