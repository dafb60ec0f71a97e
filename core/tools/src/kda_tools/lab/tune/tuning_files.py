"""The files of tuning: `bench/tune.py` says what may be chosen, `docs/tuning.jsonl` what was measured.

`kda tune` measures every candidate on every row, appends the times to `docs/tuning.jsonl`, and derives `tuned.toml`
from them by the rule in `choose_lines`. The solution's dispatch reads that file through `kda_runtime.tuned_table`.
`docs/tuning.md` shows all times, also those of candidates that were not chosen.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import record_log
from kda_runtime import tuned_table
from kda_runtime.tuned_table import Line
from kda_tools.lab.tune.choose_lines import DECLARED, expected
from kda_tools.lab.tune.sweep import Sweep
from kda_tools.lab.tune.sweep_record import SweepRecord


def log(task: Task) -> Path:
    """The machine-written record of every sweep."""
    return task.path / "docs" / "tuning.jsonl"


def recorded(task: Task) -> list[SweepRecord]:
    """Every sweep of the task, in the order of the log."""
    return record_log.read(log(task), SweepRecord)


def deciding_sweeps(task: Task, gpu: str | None = None) -> list[SweepRecord]:
    """The sweeps that decide the tables: those on the kind of GPU that the present lines name, or on `gpu`.

    So a sweep on an H100 does not replace what was chosen on an H200: both have one capability, and one table. All
    sweeps of a capability count if no usable one ran on that kind.

    Raises:
        UsageError: no usable sweep ran on `gpu`.
    """
    records, path = recorded(task), tuned_path(task)
    present = read_tables(path) if path.is_file() else {}
    kinds = {line.capability: line.device for lines in present.values() for line in lines}
    swept = {(record.capability, record.device) for record in records if record.usable}
    if gpu is not None:
        if not (asked := {capability: device for capability, device in swept if device == gpu}):
            there = ", ".join(sorted({repr(device) for _, device in swept})) or "none"
            raise UsageError(f"--gpu {gpu!r}: expected a GPU of a usable sweep in {log(task)}: {there}")
        kinds |= asked
    held = {capability: device for capability, device in kinds.items() if (capability, device) in swept}
    return [one for one in records if held.get(one.capability, one.device) == one.device]


def tuned_path(task: Task) -> Path:
    """The tables that the solution reads."""
    return task.path / "solution" / tuned_table.FILE


def has_sweeps(task: Task) -> bool:
    """Whether the task has a `bench/tune.py`."""
    return (task.path / "bench" / "tune.py").is_file()


def load(task: Task) -> tuple[Sweep[Any], ...]:
    """The task's sweeps; imports its solution."""
    path = task.path / "bench" / "tune.py"
    if not has_sweeps(task):
        raise UsageError(f"{path}: file not found; it says which configurations `kda tune {task.op}` may choose")
    sweeps: Any = task.load("bench.tune").SWEEPS
    if not isinstance(sweeps, (tuple, list)) or not all(isinstance(sweep, Sweep) for sweep in sweeps):
        raise UsageError(f"{path}: SWEEPS: expected a tuple of Sweep, got {reprlib.repr(sweeps)}")
    for sweep in sweeps:
        for row in sweep.rows:
            task.check_row(row, path)
    return tuple(sweeps)


def derive_tables(task: Task, sweeps: Sequence[Sweep[Any]], gpu: str | None = None) -> dict[str, tuple[Line, ...]]:
    """The tables that the task's `tuned.toml` has to hold; `gpu` as in `deciding_sweeps`."""
    path = tuned_path(task)
    current = read_tables(path) if path.is_file() else {}
    try:
        return expected(sweeps, deciding_sweeps(task, gpu), current)
    except UsageError as error:
        raise UsageError(f"{log(task)}: {error}") from None


def read_tables(path: Path) -> dict[str, tuple[Line, ...]]:
    """The lines of every table in a `tuned.toml`; a UsageError names the file and the key."""
    try:
        return tuned_table.read(path)
    except tuned_table.TableError as error:
        raise UsageError(str(error)) from None


def write(task: Task, tables: Mapping[str, Sequence[Line]]) -> bool:
    """Write `tuned.toml`; False when it held that already."""
    return replace_text(tuned_path(task), text_of(task.op, tables))


def replace_text(path: Path, text: str) -> bool:
    """Write `text`; False when the file held that already."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def text_of(op: str, tables: Mapping[str, Iterable[Line]]) -> str:
    """The tables as TOML, one inline table for each line's bounds and configuration."""
    try:
        import tomlkit
    except ImportError:
        raise MissingRequirement(
            "no tomlkit to write tables with; recorded sweeps are kept. Where there is one (`pip install tomlkit`), on "
            f"any machine: `kda tune {op} --derive`"
        ) from None

    document = tomlkit.document()
    document.add(
        tomlkit.comment(f"Written by `kda tune {op}`; `kda tune {op} --derive` makes it again from docs/tuning.jsonl.")
    )
    for name, lines in tables.items():
        array = tomlkit.aot()
        for line in lines:
            table = tomlkit.table()
            for key, value in vars(line).items():
                if not isinstance(value, dict):
                    table[key] = value
                elif value:
                    table[key] = tomlkit.inline_table()
                    table[key].update(value)
            array.append(table)
        document[name] = array
    return tomlkit.dumps(document)


def disown(path: Path, op: str, source: str) -> None:
    """Rewrite a copied `tuned.toml` so that its lines say they were not measured for the copy, whose op is `op`."""
    reason = f"{DECLARED[0]}: as in {source}, of which this task is a copy"
    tables = read_tables(path)
    disowned = {name: [replace(line, reason=reason) for line in lines] for name, lines in tables.items()}
    path.write_text(text_of(op, disowned), encoding="utf-8")
