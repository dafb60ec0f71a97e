"""Describe published runs in Markdown: the overview of all tasks, geometric means, and what bounds the rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kda_judge.contract.config import Target
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import Basis, Metric, RunRecord
from kda_tools.publish.plots import OVERVIEW, OVERVIEW_SAYS
from kda_tools.publish.report import (
    LARGE_BYTES,
    MARKS,
    NONE,
    UPSTREAM,
    WORDS,
    arm_name,
    bases,
    interval,
    median,
    microseconds,
    misses,
    pin_name,
    ratio,
    speedup,
    table_md,
)

Ledgers = Sequence[tuple[Task, Sequence[RunRecord]]]
"""Tasks with every record of their ledgers."""
Runs = Sequence[tuple[Task, Mapping[str, RunRecord]]]
"""Tasks with their published runs, by target."""
StepNames = Mapping[str, Sequence[str]]
"""A serving model -> the names of its parts whose step is timed, if it has others than its own."""
OWN = "own baseline"
"""Heads the column of tasks that stand on no upstream release."""
HOST_BOUND = 0.8
"""Share of wall time. If the device takes less than this, the host bounds the call."""
BOUNDS = f"""What bounds the solution's calls; a cell is the range over the rows of its group. The host bounds a row
where the device takes less than {HOST_BOUND:g} of the wall time, else the device does. The host's floor is a launch
from C through the driver with the outputs allocated. The device's floor is the limit, the fastest stream of as many
bytes.
Both are measured in the same run.
"""


SHOWN_BASES = (Basis.DEVICE, Basis.PORTABLE, Basis.WALL)
SHOWN = " / ".join(WORDS[basis] for basis in SHOWN_BASES)
"""The bases of a cell that shows estimates without intervals, in words."""


def overview_md(runs: Runs) -> str:
    """The picture of every published run, what it shows, and where its numbers are."""
    families = dict.fromkeys(task.family for task, latest in runs if latest)
    if not families:
        return "No task has a published run yet.\n"
    numbers = ", ".join(f"[{family}]({family}/README.md)" for family in families)
    return f"![{OVERVIEW_SAYS}]({OVERVIEW.as_posix()})\n\n{MARKS} The same in numbers: {numbers}.\n"


def details_block(title: str, body: str) -> str:
    """A part of a page that opens on a click; GitHub and the site both show it so."""
    return f"\n<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"


def all_pins(records: Iterable[RunRecord]) -> list[str]:
    """`sglang 0.5.12.post1` and so on: every upstream release that one of the runs is against."""
    known = (record.provenance.pins.get(arm) for record in records for arm in UPSTREAM)
    return list(dict.fromkeys(pin_name(pin) for pin in known if pin))


def shown_pins(records: Sequence[RunRecord]) -> list[str]:
    """As `all_pins`; the pin "" follows if a run is against no release: it stands for that run's first opponent."""
    return all_pins(records) + [""] * any(not all_pins([record]) for record in records)


def arm_of_pin(record: RunRecord) -> dict[str, str]:
    """A pin of `shown_pins` -> the arm of this run that the speedups against it are of."""
    arms = {pin_name(record.provenance.pins.get(arm)): arm for arm in reversed(record.settings.against)}
    if any(arms):
        arms.pop("", None)
    return arms


def against_pins(record: RunRecord, pins: Sequence[str]) -> list[str]:
    """The headline's speedups against `pins`, as `SHOWN` says; `-` for a release that the run is not against."""
    arms = arm_of_pin(record)
    found = [[speedup(record.headline, basis, arms.get(pin, "")) for basis in SHOWN_BASES] for pin in pins]
    return [" / ".join(ratio(v.estimate if v else None) for v in values) if any(values) else NONE for values in found]


def replace_block(text: str, name: str, content: str) -> str:
    """`text` with what stands between the lines `<!-- kda:NAME:begin -->` and `<!-- kda:NAME:end -->` replaced.

    Raises:
        ValueError: a marker is missing, doubled, or the two stand in the wrong order.
    """
    begin, end = f"<!-- kda:{name}:begin -->\n", f"<!-- kda:{name}:end -->"
    for marker in (begin, end):
        if text.count(marker) != 1:
            raise ValueError(f"expected the line {marker.strip()!r} once, got it {text.count(marker)} times")
    start, stop = text.index(begin) + len(begin), text.index(end)
    if stop < start:
        raise ValueError(f"expected {begin.strip()!r} before {end!r}, got them the other way round")
    return f"{text[:start]}{content.rstrip()}\n{text[stop:]}"


def target_words(record: RunRecord, goal: Target) -> str:
    """The target in words, and on how many rows it is met and missed; empty if there is no target."""
    if not goal.stated:
        return ""
    missed, rows = misses(record, goal), len(record.rows)
    large = f"at {goal.attained:g} of its limit or better" if goal.attained else "anywhere"
    small = f"within {goal.within_us:g} us of it" if goal.within_us else "anywhere"
    small += "".join(f", {op} within {us:g} us" for op, us in goal.ops_within_us.items())
    small += "".join(f", {names} {times:g} times as fast as upstream" for names, times in goal.times_as_fast.items())
    return (
        f"the target (a row that moves more than {LARGE_BYTES // 10**6} MB {large}, any other {small}) is met on "
        f"{rows - len(missed)} of {rows} rows{f', missed on {len(missed)}' if missed else ''}"
    )


def geometric_means_md(record: RunRecord) -> str:
    """The geometric means: a line for each opponent, a column for each measured basis in the order of `Basis`."""
    shown = [basis for basis in Basis if basis in bases(record)]
    lines = (
        (f"over {arm_name(record, arm)}", *(interval(speedup(record.headline, basis, arm)) for basis in shown))
        for arm in record.settings.against
    )
    return table_md(("speedup", *(WORDS[basis] for basis in shown)), lines)


def host_bound(wall: float, device: float) -> bool:
    """Whether the host bounds a call whose medians, in microseconds, are `wall` and `device`."""
    return device < HOST_BOUND * wall


@dataclass(frozen=True)
class Bound:
    """A group of rows bound by the host or by the device. Its texts are ranges from the least to the most."""

    name: str
    rows: int
    wall: str
    device: str
    over: str
    """Time over its floor: wall time over the host's floor, or device time over the device's limit."""


def bound_groups(record: RunRecord) -> list[Bound]:
    """The subject's rows grouped by what bounds them (host or device), and how far above that floor they are."""
    groups: dict[str, list[tuple[float, float, float]]] = {"host": [], "device": []}
    for row in record.rows:
        wall, device = (median(row, record.settings.subject, metric) for metric in (Metric.WALL, Metric.DEVICE))
        if wall and device and row.limit:
            host = host_bound(wall, device)
            over = wall / row.limit.host_us if host else device / row.limit.device_us
            groups["host" if host else "device"].append((wall, device, over))
    found = []
    for name, rows in groups.items():
        if rows:
            walls, devices, overs = zip(*rows, strict=True)
            times = (_range(walls, microseconds), _range(devices, microseconds))
            found.append(Bound(name, len(rows), *times, _range(overs, ratio)))
    return found


def bounds_md(record: RunRecord) -> str:
    """`bound_groups` as a Markdown table."""
    lines = ((one.name, str(one.rows), one.wall, one.device, one.over) for one in bound_groups(record))
    return f"{BOUNDS}\n{table_md(('bound by', 'rows', 'wall us', 'device us', 'times its floor'), lines)}"


def _range(several: Sequence[float], written: Callable[[float], str]) -> str:
    """`5.42 to 5.90`, or one number if both ends are written alike."""
    return " to ".join(dict.fromkeys((written(min(several)), written(max(several)))))
