"""Tuning as a recorded sweep: `bench/tune.py` says what may be chosen, `docs/tuning.jsonl` what was measured.

A task's `bench/tune.py` exports `SWEEPS`, one `Sweep` per table of its solution:

    SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"width": 512}, {})),)

`kda tune` measures every candidate on every row, appends the times to `docs/tuning.jsonl`, and derives `tuned.toml`
from them by the rule in `derive`. The dispatch of the solution reads that file through `kda_core.tuning`. What was
measured, losers included, is shown in `docs/tuning.md`, which `digest` makes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from kda_core import jsonl, tuning
from kda_core.errors import KdaError, MissingRequirement, UsageError
from kda_core.oracle import load_reference
from kda_core.tasks import Task
from kda_core.tune.derive import DECLARED, expected, unfounded
from kda_core.tune.digest import digest_md
from kda_core.tune.records import SweepRecord
from kda_core.tuning import C, Features, Line, Table
from kda_core.workloads import Workload

CHECK_TIMEOUT_S = 300


def everywhere(_config: object, _features: Features) -> bool:
    """Every candidate on every row."""
    return True


@dataclass(frozen=True)
class Sweep(Generic[C]):
    """What may be chosen for one table."""

    table: Table[C]
    candidates: Sequence[C]
    """The grid, without what makes no sense. Where times are equal the earlier one is taken."""
    lines: Sequence[Mapping[str, float]]
    """Bounds (`at_most`) of the table's lines in the order in which they are tried; the last one has none."""
    rows: Sequence[Workload] = ()
    """Rows to measure beside the frozen ones, for lines that none of those falls into."""
    applies: Callable[[C, Features], bool] = everywhere
    """Whether a candidate is tried on a row with these features: not where another method would take the call, nor
    where it cannot win. A line takes a candidate only if it was tried on all of the line's rows."""

    def __post_init__(self) -> None:
        where = f"Sweep of table {self.table.name!r}"
        if not self.lines or self.lines[-1]:
            raise UsageError(f"{where}: lines: expected the last one to have no bound, got {list(self.lines)}")
        if not self.candidates or len(set(map(repr, self.candidates))) < len(self.candidates):
            raise UsageError(f"{where}: candidates: expected one or more, each once, got {len(self.candidates)}")

    def line_of(self, features: Features) -> int:
        """Place of the first line whose every bound holds."""
        for place, bounds in enumerate(self.lines):
            missing = sorted(bounds.keys() - features.keys())
            if missing:
                raise UsageError(
                    f"Sweep of table {self.table.name!r}: lines: expected features that the solution asks with, "
                    f"{sorted(features)}, got {missing}"
                )
            if all(features[name] <= bound for name, bound in bounds.items()):
                return place
        raise AssertionError("the last line has no bound")


def log(task: Task) -> Path:
    """The machine-written record of every sweep."""
    return task.path / "docs" / "tuning.jsonl"


def recorded(task: Task) -> list[SweepRecord]:
    """Every sweep of the task, in the order of the log."""
    return jsonl.read(log(task), SweepRecord)


def tuned(task: Task) -> Path:
    """The tables that the solution reads."""
    return task.path / "solution" / tuning.FILE


def page(task: Task) -> Path:
    """The log as people read it."""
    return task.path / "docs" / "tuning.md"


def has_sweeps(task: Task) -> bool:
    """Whether the task says how it is tuned."""
    return (task.path / "bench" / "tune.py").is_file()


def load(task: Task) -> tuple[Sweep[Any], ...]:
    """The task's sweeps; imports its solution."""
    path = task.path / "bench" / "tune.py"
    if not has_sweeps(task):
        raise UsageError(f"{path}: file not found; it says which configurations `kda tune {task.op}` may choose")
    load_reference(task)  # makes the task importable
    sweeps: tuple[Sweep[Any], ...] = importlib.import_module(f"{task.package}.bench.tune").SWEEPS
    for sweep in sweeps:
        for row in sweep.rows:
            task.check_row(row, path)
    return sweeps


def derived(task: Task, sweeps: Sequence[Sweep[Any]]) -> dict[str, tuple[Line, ...]]:
    """What the task's `tuned.toml` has to hold."""
    path = tuned(task)
    current = tuning.read(path) if path.is_file() else {}
    try:
        return expected(sweeps, recorded(task), current)
    except UsageError as error:
        raise UsageError(f"{log(task)}: {error}") from None


def write(task: Task, tables: Mapping[str, Sequence[Line]]) -> bool:
    """Write `tuned.toml`; False when it held that already."""
    return _write(tuned(task), text_of(task.op, tables))


def write_page(task: Task, sweeps: Sequence[Sweep[Any]]) -> bool:
    """Write the page of the log, once there is one; False when it is unchanged."""
    text = digest_md(task, sweeps, recorded(task))
    return text is not None and _write(page(task), text)


def _write(path: Path, text: str) -> bool:
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
            f"no tomlkit to write tables with: `pip install tomlkit`, then `kda tune {op} --derive`"
        ) from None

    document = tomlkit.document()
    document.add(
        tomlkit.comment(f"Written by `kda tune {op}`; `kda tune {op} --derive` makes it again from docs/tuning.jsonl.")
    )
    for name, lines in tables.items():
        array = tomlkit.aot()
        for line in lines:
            table = tomlkit.table()
            for key, value in line.model_dump().items():
                if not isinstance(value, dict):
                    table[key] = value
                elif value:
                    table[key] = tomlkit.inline_table()
                    table[key].update(value)
            array.append(table)
        document[name] = array
    return tomlkit.dumps(document)


def disown(path: Path, op: str, source: str) -> None:
    """Let the lines of a copied `tuned.toml` say that they were not measured for the copy, whose op is `op`."""
    reason = f"{DECLARED[0]}: as in {source}, of which this task is a copy"
    tables = tuning.read(path)
    disowned = {name: [line.model_copy(update={"reason": reason}) for line in lines] for name, lines in tables.items()}
    path.write_text(text_of(op, disowned), encoding="utf-8")


def problems(task: Task) -> list[str]:
    """What is wrong with the task's tuning tables, one line each; no sweep and no table are fine.

    The sweeps name configurations of the solution, so checking imports it. That is done in a process of its own,
    because this one may judge it afterwards.
    """
    if not has_sweeps(task):
        return [
            f"{path}: there is no bench/tune.py that it follows from"
            for path in (tuned(task), log(task), page(task))
            if path.exists()
        ]
    code = "import sys; from kda_core.tune import sweep; sweep.answer(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(task.path), task.package]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=CHECK_TIMEOUT_S)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [f"{task.path / 'bench' / 'tune.py'}: cannot be checked: {why}"]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(path: str, package: str) -> None:
    """The other side of `problems`: print them as JSON."""
    task = Task(path=Path(path), package=package)
    try:
        found = check(task)
    except KdaError as error:
        found = [str(error)]
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def check(task: Task) -> list[str]:
    """As `problems`, in this process."""
    sweeps, path = load(task), tuned(task)
    current = tuning.read(path)
    found = [f"{path}: {problem}" for problem in unfounded(sweeps, recorded(task), current)]
    if found:
        return found
    tables = derived(task, sweeps)
    for name in [*tables, *(current.keys() - tables.keys())]:
        if list(tables.get(name, ())) != list(current.get(name, ())):
            found.append(f"{path}: [[{name}]]: not what {log(task)} gives; run `kda tune {task.op} --derive`")
    if not found and path.read_text(encoding="utf-8") != text_of(task.op, tables):
        found.append(f"{path}: not as `kda tune {task.op} --derive` writes it; run that")
    return found or _page_problems(task, sweeps)


def _page_problems(task: Task, sweeps: Sequence[Sweep[Any]]) -> list[str]:
    path, wanted = page(task), digest_md(task, sweeps, recorded(task))
    if wanted is None:
        return [f"{path}: no sweep is recorded that it follows from"] if path.exists() else []
    if path.is_file() and path.read_text(encoding="utf-8") == wanted:
        return []
    return [f"{path}: not what {log(task)} gives; run `kda tune {task.op} --derive`"]
