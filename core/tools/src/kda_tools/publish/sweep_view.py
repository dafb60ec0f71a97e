"""Print the results of `kda tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from kda_tools.lab.tune.choose_lines import label
from kda_tools.terminal import console

if TYPE_CHECKING:
    from kda_runtime.tuned_table import Line
    from kda_tools.lab.tune.sweep_record import RowTimes
    from kda_tools.lab.tune.trials import Compiled, Trial

BEST = 4
WRONG = 3
"""Wrong candidates that are shown per row."""


def print_row(trial: Trial, times: RowTimes) -> None:
    """Print a row's copy time, its best candidates with device and wall time, and its wrong candidates."""
    twins = trial.twins
    ranked = sorted((us, place) for place in twins if (us := times.median_us[place]) is not None)
    best = " | ".join(
        f"{us:.2f}{_wall(times, place)} {label(trial.sweep.candidates[place])}" for us, place in ranked[:BEST]
    )
    out = console()
    out.print(Text(f"{trial.sweep.table.name}, {times.row}: copy {times.copy_us:.2f} us | {best}"))
    failed = [failure for failure in times.wrong if failure.candidate in twins]
    for failure in failed[:WRONG]:
        out.print(Text(f"  wrong: {label(trial.sweep.candidates[failure.candidate])}: {failure.reason}", style="red"))
    if len(failed) > WRONG:
        out.print(Text(f"  ... and {len(failed) - WRONG} more wrong candidates", style="red"))


def _wall(times: RowTimes, place: int) -> str:
    wall = times.walls.median_us[place] if times.walls else None
    return "" if wall is None else f" (wall {wall:.2f})"


def print_tables(tables: Mapping[str, Sequence[Line]]) -> None:
    """Print the lines of the tuned tables, which dispatch reads."""
    shown = Table(box=box.SIMPLE_HEAD)
    for column in ("table", "capability", "at most", "configuration", "device", "reason"):
        shown.add_column(column)
    for name, lines in tables.items():
        for line in lines:
            bounds, config = (" ".join(f"{k}={v}" for k, v in part.items()) for part in (line.at_most, line.config))
            shown.add_row(name, str(line.capability), bounds or "any", config, line.device, line.reason)
    console().print(shown)


def print_compiled(trials: Sequence[Trial], used: Mapping[tuple[str, str, str], Compiled], target: str) -> None:
    """Print the resources that each candidate uses on one target, over all rows. Nothing was run."""
    shown = Table(title=f"{target}: compiled ahead of time, not run", title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("table")
    shown.add_column("candidate")
    for column in ("rows", "registers", "shared\nbytes", "spill\nbytes"):
        shown.add_column(column, justify="right")
    for name in dict.fromkeys(trial.sweep.table.name for trial in trials):
        own = [trial for trial in trials if trial.sweep.table.name == name]
        for place, config in enumerate(own[0].sweep.candidates):
            variants = [used[target, one.name, one.variant] for trial in own for one in trial.launches[place] or ()]
            tried = sum(trial.launches[place] is not None for trial in own)
            failure = next((one.failure for one in variants if one.failure), None)
            if not tried:
                shown.add_row(name, label(config), "0")
                continue
            if failure is not None or not variants:
                shown.add_row(name, label(config), str(tried), Text(failure or "launches nothing", style="red"))
                continue
            spill = max(one.spill_bytes for one in variants)
            numbers = [_range([one.registers for one in variants]), _range([one.shared_bytes for one in variants])]
            style = "red" if spill else ""
            shown.add_row(name, Text(label(config), style=style), str(tried), *numbers, Text(str(spill), style=style))
    out = console()
    out.print(shown)
    different = {key for key in used if key[0] == target}
    spilling = sum(used[key].spill_bytes > 0 for key in different)
    failed = sum(used[key].failure is not None for key in different)
    out.print(f"{len(different)} variants, {spilling} spill, {failed} do not compile")


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
