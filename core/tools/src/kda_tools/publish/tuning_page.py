"""Make `docs/tuning.md` and its CSV files from the recorded sweeps, losing candidates included."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from kda_judge.contract.errors import UsageError
from kda_tools.lab.tune.choose_lines import DEFAULTS, Decided, Scored, decide, label, latest, over_copy, relative_noise
from kda_tools.lab.tune.tuning_files import deciding_sweeps, log, recorded, replace_text
from kda_tools.publish.report import microseconds, ratio, table_md

if TYPE_CHECKING:
    from kda_judge.contract.tasks import Task
    from kda_tools.lab.tune.sweep import Sweep
    from kda_tools.lab.tune.sweep_record import SweepRecord, TableTimes

INTRODUCTION = """Device time of every candidate on every row, microseconds per call: a CUDA graph of calls, replayed,
the median over the rounds. `copy` is a streaming copy of as many bytes as the row moves. These times choose the lines
of [`tuned.toml`](../solution/tuned.toml). Results are in [results.md](results.md). """
TABLES = """Every row is in
[tuning.csv](tuning.csv), the cost of every other choice in [tuning_choices.csv](tuning_choices.csv), every candidate
in [tuning.jsonl](tuning.jsonl).

`paid` is the time that decides: the device's, or the host's where the host takes longer. The host counts only if the
sweep took wall times and the op's callers use no CUDA graphs. The cost of a choice is the device time with it over the
time of the chosen configuration: the geometric mean over a line's rows, and the least and the most of a row. `alone`:
with nothing else changed (empty: not tried). `at_best`: the best candidate with that choice.

*Settings that no line uses* has the device time of a line's best candidate with the setting, over that of the chosen
configuration: the geometric mean over the rows of all lines that tried it, and the least and the most of a row.
"""
NO_TABLES = "Every candidate is in\n[tuning.jsonl](tuning.jsonl).\n"
SEVERAL_ROWS = re.compile(r"(?: --rows \S+){2,}")
"""Repeated `--rows` of a command, shortened on the page."""
VERSIONS = ("torch", "triton", "cutlass-dsl", "cuda", "driver")
"""The versions that can change a kernel's time."""


def page(task: Task) -> Path:
    """Path of the page that shows the log of sweeps."""
    return task.path / "docs" / "tuning.md"


def table(task: Task) -> Path:
    """Path of the CSV file with the choice on every row."""
    return task.path / "docs" / "tuning.csv"


def choices(task: Task) -> Path:
    """Path of the CSV file with the cost of other choices."""
    return task.path / "docs" / "tuning_choices.csv"


def write_page(task: Task, sweeps: Sequence[Sweep[Any]]) -> bool:
    """Write the page and the CSV files if a sweep is recorded; False if all are unchanged."""
    written = [replace_text(path, text) for path, text in contents(task, sweeps).items() if text is not None]
    return any(written)


def page_problems(task: Task, sweeps: Sequence[Sweep[Any]]) -> list[str]:
    """What is wrong with the page and the CSV files, at most one line for each."""
    found = []
    for path, wanted in contents(task, sweeps).items():
        if wanted is None:
            found += [f"{path}: no sweep is recorded that it follows from"] if path.exists() else []
        elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            found.append(f"{path}: not what {log(task)} gives; run `kda tune {task.op} --derive`")
    return found


def contents(task: Task, sweeps: Sequence[Sweep[Any]]) -> dict[Path, str | None]:
    """Path -> required text of the page and the CSV files; None for a file that must not exist."""
    records = deciding_sweeps(task)
    return {
        page(task): digest_md(task, sweeps, records, recorded(task)),
        table(task): rows_csv(sweeps, records),
        choices(task): choices_csv(sweeps, records),
    }


def rows_csv(sweeps: Sequence[Sweep[Any]], records: Sequence[SweepRecord]) -> str | None:
    """Every row of the sweeps in use: the copy, the chosen configuration and the fastest; None without a sweep."""
    return _csv(sweeps, records, _times)


def choices_csv(sweeps: Sequence[Sweep[Any]], records: Sequence[SweepRecord]) -> str | None:
    """The cost of every other choice on each line's rows, over the chosen configuration; None without a sweep.

    Each factor is a geometric mean over the rows, with the least and the most of a row. `alone`: nothing else changed
    (empty: not tried). `at_best`: the best candidate with that choice; `which` is its configuration.
    """
    return _csv(sweeps, records, _choices)


def _csv(
    sweeps: Sequence[Sweep[Any]],
    records: Sequence[SweepRecord],
    cells_of: Callable[[Decided], Iterable[dict[str, Any]]],
) -> str | None:
    lines = [
        {"table": sweep.table.name, "gpu": record.device, "sweep": record.utc, "line": number, **cells}
        for sweep in sweeps
        for record, measured in latest(sweep.table.name, records).values()
        for number, one in enumerate(_decided(sweep, record, measured), start=1)
        for cells in cells_of(one)
    ]
    if not lines:
        return None
    out = StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _decided(sweep: Sweep[Any], record: SweepRecord, measured: TableTimes) -> list[Decided]:
    """The sweep's decisions; empty if the solution's configurations have changed since (the page says so)."""
    try:
        return list(decide(sweep, record, measured))
    except UsageError:
        return []


def digest_md(
    task: Task, sweeps: Sequence[Sweep[Any]], records: Sequence[SweepRecord], every: Sequence[SweepRecord]
) -> str | None:
    """The whole text of `docs/tuning.md`; None for a task without a recorded sweep.

    `records`: those that the tables follow; `every`: all.
    """
    if not records:
        return None
    header = (
        f"<!-- Generated by `kda tune {task.op} --derive`. Do not edit: `kda validate` compares it with the log. -->\n"
    )
    tables = NO_TABLES if rows_csv(sweeps, records) is None else TABLES
    parts = [f"{header}\n# Sweeps of {task.folder}\n", INTRODUCTION + tables]
    used = set[str]()
    for sweep in sweeps:
        for record, table in latest(sweep.table.name, records).values():
            parts.append(f"## `{sweep.table.name}` on {record.device}\n")
            try:
                parts.append(_table_section(sweep, record, table))
                parts += filter(None, [_elsewhere(sweep, record, table, every)])
            except UsageError as error:  # the solution has other configurations now: only a new sweep says more
                parts.append(f"{error}.\n")
            used.add(record.utc)
    parts.append(_history(every, used, {record.utc for record in records}))
    return "\n".join(parts)


def _table_section(sweep: Sweep[Any], record: SweepRecord, table: TableTimes) -> str:
    """The section of one table on one kind of GPU."""
    head, lines = ("line", "at most", "rows", "configuration", "over each row's best", "over the copy", "spread"), []
    decided = decide(sweep, record, table)
    for number, one in enumerate(decided, start=1):
        at_most = ", ".join(f"{name} {bound}" for name, bound in one.at_most.items()) or "any"
        copy = over_copy(one.chosen, one.rows)
        own = (str(number), at_most, str(len(one.rows)), _code(one.chosen.config))
        lines.append((*own, ratio(one.chosen.score), ratio(copy), f"{relative_noise(one.scored):.1%}"))
    versions = ", ".join(f"{name} {record.versions[name]}" for name in VERSIONS if name in record.versions)
    where = (
        f"{len(table.candidates)} candidates, each on those of {len(table.rows)} rows where it applies, "
        f"{record.rounds} rounds; sweep of {record.utc}, commit `{record.commit[:10]}`, {versions}."
    )
    return "\n".join([f"{where}\n", table_md(head, lines), *filter(None, [_unused(decided), _wrong(table)])])


def _elsewhere(sweep: Sweep[Any], record: SweepRecord, table: TableTimes, every: Sequence[SweepRecord]) -> str:
    """What the lines cost on other kinds of GPU, by the latest sweep on each."""
    own, lines = decide(sweep, record, table), []
    for device in sorted({one.device for one in every} - {record.device}):
        there = latest(table.table, [one for one in every if one.device == device]).get(record.capability)
        over = [
            factor
            for line, other in zip(own, _decided(sweep, *there) if there else (), strict=False)
            for used in other.scored
            if used.config == line.chosen.config
            for factor in _ratios(used, other.chosen)
        ]
        if there and over:
            numbers = (ratio(geometric_mean(over)), ratio(min(over)), ratio(max(over)))
            lines.append((device, there[0].utc, str(len(over)), *numbers))
    head = ("GPU", "sweep", "rows", "time", "least", "most")
    says = "**On another GPU** these lines take, over the lines that the sweep there would give:"
    return f"{says}\n\n{table_md(head, lines)}" if lines else ""


def _unused(decided: Sequence[Decided]) -> str:
    """The cost of every value that no line's configuration has, over the rows of all lines that tried it."""
    used = {value for one in decided for value in dataclasses.asdict(one.chosen.config).items()}
    over: dict[tuple[str, Any], list[float]] = {}
    for one in decided:
        for name, other, having in _others(one):
            if (name, other) not in used:
                over.setdefault((name, other), []).extend(_ratios(_best(having), one.chosen))
    lines = [
        (f"`{_setting(*value)}`", str(len(found)), ratio(geometric_mean(found)), ratio(min(found)), ratio(max(found)))
        for value, found in sorted(over.items(), key=lambda item: (item[0][0], isinstance(item[0][1], str), item[0][1]))
    ]
    head = ("setting", "rows", "time with it", "least", "most")
    return f"**Settings that no line uses**\n\n{table_md(head, lines)}" if lines else ""


def _others(decided: Decided) -> Iterable[tuple[str, Any, list[Scored]]]:
    """Every value of every field that the chosen configuration does not have, with the candidates that have it."""
    own = dataclasses.asdict(decided.chosen.config)
    fields = [dataclasses.asdict(one.config) for one in decided.scored]
    for name, value in own.items():
        others = dict.fromkeys(given[name] for given in fields if given[name] != value)
        for other in sorted(others, key=lambda given: (isinstance(given, str), given)):
            yield name, other, [one for one, given in zip(decided.scored, fields, strict=True) if given[name] == other]


def _best(having: Iterable[Scored]) -> Scored:
    return min(having, key=lambda one: (one.score, one.device_score))


def _setting(name: str, value: Any) -> str:
    return f"{name}={value or repr(value)}"


def _choices(decided: Decided) -> Iterable[dict[str, Any]]:
    """One line for every value of every field that the chosen configuration does not have."""
    chosen = decided.chosen
    own = dataclasses.asdict(chosen.config)
    for name, other, having in _others(decided):
        alone = [one for one in having if dataclasses.asdict(one.config) == own | {name: other}]
        best = _best(having)
        yield {
            "instead": _setting(name, other),
            **_factors("alone", alone[0] if alone else None, chosen),
            **_factors("at_best", best, chosen),
            "paid": ratio(best.score / chosen.score),
            "which": label(best.config),
        }


def _times(decided: Decided) -> Iterable[dict[str, Any]]:
    """One line for every row."""
    chosen = decided.chosen
    for place, row in enumerate(decided.rows):
        fastest = min(decided.scored, key=lambda one: one.times[place])
        best = chosen if fastest.times[place] == chosen.times[place] else fastest
        yield {
            "row": row.row,
            "bytes_moved": row.bytes_moved,
            "copy_us": microseconds(row.copy_us),
            "chosen": label(chosen.config),
            "chosen_us": microseconds(chosen.times[place]),
            "chosen_over_copy": ratio(chosen.times[place] / row.copy_us),
            "paid_us": microseconds(chosen.paid[place]),
            "fastest": label(best.config),
            "fastest_us": microseconds(best.times[place]),
        }


def _wrong(table: TableTimes) -> str:
    """Candidates that failed on a row, and how."""
    failures = {failure.candidate: failure.reason for row in reversed(table.rows) for failure in reversed(row.wrong)}
    return "".join(
        f"- never chosen: `{' '.join(f'{k}={v}' for k, v in table.candidates[candidate].items())}`: {reason}\n"
        for candidate, reason in sorted(failures.items())
    )


def _history(records: Sequence[SweepRecord], used: set[str], counted: set[str]) -> str:
    lines = []
    for record in reversed(records):
        why = ["rows are missing"] * record.partial + list(record.noisy)
        other = "superseded" if record.utc in counted else "the tables follow another kind of GPU"
        state = f"no table follows: {'; '.join(why)}" if why else "used above" if record.utc in used else other
        commit = f"`{record.commit[:10]}`{' and changes' if record.dirty else ''}"
        rows, command = sum(len(table.rows) for table in record.tables), SEVERAL_ROWS.sub(" --rows ...", record.command)
        lines.append((record.utc, record.device, commit, str(rows), f"{record.seconds:.0f}", f"`{command}`", state))
    head = ("sweep", "GPU", "commit", "rows", "seconds", "command", "state")
    return f"## Recorded sweeps\n\n{table_md(head, lines)}"


def _code(config: Any) -> str:
    """A configuration, written as the values that differ from the defaults."""
    text = label(config)
    return text if text == DEFAULTS else f"`{text}`"


def _factors(name: str, one: Scored | None, chosen: Scored) -> dict[str, str]:
    """Device times over the chosen configuration's: geometric mean, least and most over the rows."""
    if one is None:
        return dict.fromkeys((name, f"{name}_least", f"{name}_most"), "")
    over = _ratios(one, chosen)
    return {name: ratio(geometric_mean(over)), f"{name}_least": ratio(min(over)), f"{name}_most": ratio(max(over))}


def _ratios(one: Scored, chosen: Scored) -> list[float]:
    return [time / base for time, base in zip(one.times, chosen.times, strict=True)]
