"""Make `docs/rows.csv` and `docs/rows.json`: every row of a task's published runs, as data to download."""

import csv
import json
from collections.abc import Mapping
from io import StringIO

from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import Interval, Metric, RowResult, RunRecord
from kda_tools.publish.report import bases, median, row_ratio, speedup

CSV_NAME, JSON_NAME = "rows.csv", "rows.json"
Value = str | float | int | bool | None
Flat = dict[str, Value]
DIGITS = 4


def rows_csv(task: Task, latest: Mapping[str, RunRecord]) -> str:
    """One line for each row and GPU; times in microseconds; `_low` and `_high` are the ends of 95% intervals."""
    rows = flat_rows(task, latest)
    out = StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def rows_json(task: Task, latest: Mapping[str, RunRecord]) -> str:
    """The same data as a JSON list, one object per line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in flat_rows(task, latest)) + "\n]\n"


def flat_rows(task: Task, latest: Mapping[str, RunRecord]) -> list[Flat]:
    """Every row of every published run: what it is, its speedups, times and limits."""
    frozen = {row.id: row for row in task.workloads}
    return [
        _flat(task, target, record, row, frozen.get(row.id)) for target, record in latest.items() for row in record.rows
    ]


def dtype_of(row: Workload | None) -> str:
    """The dtype of a row's first input; empty for a row that the task no longer has."""
    return next(iter(row.inputs.values())).dtype if row else ""


def _flat(task: Task, target: str, record: RunRecord, row: RowResult, frozen: Workload | None) -> Flat:
    found: Flat = {
        "task": task.folder,
        "target": target,
        "gpu": record.machine.before.name if record.machine.before else "",
        "run": record.run_id,
        "row": row.id,
        "op": row.op,
        "dtype": dtype_of(frozen),
        "models": " ".join(frozen.models) if frozen else "",
        "production": row.production,
        "verdict": row.verdict.value,
    }
    for basis in bases(record):
        for arm in record.settings.against:
            name = f"{basis.value}_speedup_vs_{arm}"
            found |= _interval(name, speedup(row, basis, arm))
            found[name] = _rounded(row_ratio(record, row, basis, arm))
    for arm in (record.settings.subject, *record.settings.against, *record.settings.beside):
        for metric in (Metric.DEVICE, Metric.WALL):
            found[f"{metric.value}_us_{arm}"] = _rounded(median(row, arm, metric))
    repeat = record.noise_floor.get(row.id)
    found["bytes_moved"] = row.limit.bytes_moved if row.limit else None
    found["limit_us"] = _rounded(row.limit.device_us if row.limit else None)
    found["host_floor_us"] = _rounded(row.limit.host_us if row.limit else None)
    found["attained"] = _rounded(row.attained)
    return found | _interval("baseline_against_itself", repeat.ratio if repeat else None)


def _interval(name: str, value: Interval | None) -> Flat:
    numbers = (value.estimate, value.low, value.high) if value else (None, None, None)
    return {name + end: _rounded(number) for end, number in zip(("", "_low", "_high"), numbers, strict=True)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
