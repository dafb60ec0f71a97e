"""Make the screen of `kda why TASK ROW`: times and limit, what limits the row, what was tried, what is not recorded."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import record_log
from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.run_record import Basis, Metric, RowResult, RunRecord
from kda_tools.lab.profile.profile_record import ProfileRecord
from kda_tools.lab.profile.profile_record import log as profiles
from kda_tools.lab.tune.sweep_record import RowTimes, SweepRecord, TableTimes
from kda_tools.publish import report
from kda_tools.publish.profile_page import bound, mean, top_stalls
from kda_tools.publish.staleness import is_outdated
from kda_tools.publish.tables import host_bound

WIDTH = 110
"""Columns of the screen; longer lines are wrapped."""
LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
LONGEST_NOTE = 260
SHOWN_NOTES, SHOWN_CONFIGURATIONS, SHOWN_PARTS = 4, 3, 3
TIMED = (("device", Metric.DEVICE), ("cold", Metric.COLD), ("wall", Metric.WALL))
ABOUT_ALL = ("What bounds it", "Tried in vain")
"""Headings of `docs/dispatch.md` whose text concerns all rows."""
LACKS = (
    (Basis.COLD, "device times with cold inputs"),
    (Basis.PORTABLE, "wall of the plain export"),
    (Basis.REPLAYED, "wall under SGLang's cached launcher"),
)
Tried = Sequence[tuple[str, str]]
"""Iterations of campaigns that concern the row: pairs of change and outcome."""


def find_row(task: Task, row: str) -> Workload:
    """The frozen row with that id; if there is none, a UsageError names similar ids."""
    found = next((one for one in task.workloads if one.id == row), None)
    if found is None:
        close = ", ".join(nearest(row, [one.id for one in task.workloads]))
        raise UsageError(f"ROW {row!r}: no such row of {task.op}; nearest: {close}; all: kda list {task.op}")
    return found


def why(task: Task, row: str, tried: Tried = ()) -> str:
    """The text of the screen. `tried` comes from campaigns; everything else is read from the task's own records."""
    frozen = find_row(task, row)
    shapes = ", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in frozen.inputs.items())
    models = ", ".join(frozen.models) or "no serving model"
    head = [
        f"{task.op} {row}",
        f"  {frozen.op}({shapes}); {models}{'' if frozen.production else '; not of production'}",
    ]
    record, result = _latest(task, row)
    sections = [
        ("times", _times(task, record, result) if record and result else [_unmeasured(task, row)]),
        ("what holds it", _profile(task, row)),
        ("tried", [*_sweeps(task, row), *(f"{what}: {end}" for what, end in tried), *_notes(task, row)]),
        ("no record shows", _gaps(task, row, record, result, bool(tried))),
    ]
    lines = [*head, *(line for name, found in sections for line in (f"{name}:", *(f"  {one}" for one in found)))]
    return "\n".join(map(_wrapped, lines))


def missing_rows(task: Task) -> list[str]:
    """Production rows that miss their target in a published run; the row furthest from its limit (in us) first."""
    runs = report.published_runs(task)
    found: dict[str, float] = {}
    for target, record in runs.items():
        misses = set(report.misses(record, task.config.targets[target]))
        for row in record.rows:
            if row.id in misses and row.production:
                found[row.id] = max(found.get(row.id, 0.0), _gap(record, row) or 0.0)
    return sorted(found, key=lambda row: -found[row])


def _latest(task: Task, row: str) -> tuple[RunRecord | None, RowResult | None]:
    """The newest measured run with that row: a published one if there is one, else any."""
    records = report.recorded(task)
    shown = list(report.published(task, records).values())
    for record in (*sorted(shown, key=report.by_age, reverse=True), *sorted(records, key=report.by_age, reverse=True)):
        for result in record.rows:
            if result.id == row and result.verdict in MEASURED and record.machine.kind == "cuda":
                return record, result
    return None, None


def _unmeasured(task: Task, row: str) -> str:
    return f"never measured on a GPU: kda bench {task.op} --rows '{row}'"


def _times(task: Task, record: RunRecord, row: RowResult) -> Iterator[str]:
    gpu = record.machine.before.name if record.machine.before else "unknown GPU"
    parts = [part.split(" since ")[0] for part in report.stale(task, record)]
    more = f"; and {len(parts) - SHOWN_PARTS} more" if len(parts) > SHOWN_PARTS else ""
    stale = f"; STALE: {'; '.join(parts[:SHOWN_PARTS])}{more}" if parts else ""
    yield f"run {record.run_id}, {gpu}, {record.utc[:10]}{stale}"
    subject, limit = record.settings.subject, row.limit
    for name in (*record.settings.against, subject, "portable"):
        parts = [
            f"{word} {report.microseconds(us)} us"
            for word, metric in TIMED
            if (us := report.median(row, name, metric)) is not None
        ]
        if parts:
            yield f"{report.arm_name(record, name):<34} {', '.join(parts)}"
    device = report.median(row, subject, Metric.DEVICE)
    if limit is None or device is None:
        yield "limit: none was measured with it"
        return
    yield (
        f"limit: {limit.bytes_moved / 1e6:.3f} MB take {report.microseconds(limit.device_us)} us on the device; "
        f"attained {report.ratio(row.attained)}"
    )
    yield f"GAP: {device - limit.device_us:+.2f} us to the device's limit{_target(task, record, row)}"
    if device * report.LEAST_LIMIT < limit.device_us:
        yield "the row is faster than its limit: that copy was no limit, and this gap says nothing"
    wall = report.median(row, subject, Metric.WALL)
    if wall is not None:
        words = "the host decides its wall" if host_bound(wall, device) else "the device decides its wall"
        yield f"host: floor {limit.host_us:.2f} us, {wall - limit.host_us:+.2f} us to it; {words}"
    for basis in report.bases(record):
        speedups = [
            f"{arm} {ratio}"
            for arm in record.settings.against
            if (ratio := report.ratio_words(record, row, basis, arm)) is not None
        ]
        if speedups and basis in (Basis.DEVICE, record.settings.decides):
            yield f"speedup, {report.WORDS[basis]}: {'; '.join(speedups)}"


def _gap(record: RunRecord, row: RowResult) -> float | None:
    device = report.median(row, record.settings.subject, Metric.DEVICE)
    return device - row.limit.device_us if device is not None and row.limit is not None else None


def _target(task: Task, record: RunRecord, row: RowResult) -> str:
    name = report.target_of(task, record)
    goal = task.config.targets.get(name or "")
    if goal is None or row.limit is None or not row.production:
        return ""
    large = row.limit.bytes_moved > report.LARGE_BYTES
    wanted = goal.attained if large else goal.distance_us(row.op)
    words = [] if wanted is None else [f"attained {wanted:g}" if large else f"within {wanted:g} us"]
    words += [f"{faster:g} times as fast as upstream"] if (faster := goal.speedup(row.id)) else []
    if not words:
        return f"; {name} states no target"
    one = record.model_copy(update={"rows": (row,)})
    return f"; target {', '.join(words)}: {'MISSED' if report.misses(one, goal) else 'met'}"


def _profile(task: Task, row: str) -> list[str]:
    records = record_log.read(profiles(task), ProfileRecord)
    of_row = [record for record in records if record.row == row]
    if not of_row:
        others = ", ".join(dict.fromkeys(record.row for record in records)) or "none"
        return [f"unknown: this row was never profiled: kda profile {task.op} --row {row}", f"profiled: {others}"]
    record = of_row[-1]
    old = "; THE SOLUTION HAS CHANGED SINCE" if is_outdated(task, record.provenance) else ""
    lines = [f"profile {record.run_id}, {record.gpu.name}, ncu {record.ncu}{old}"]
    for arm, kernels in record.arms.items():
        occupancy = mean(kernels, "occupancy_pct")
        registers = max((kernel.registers for kernel in kernels if kernel.registers is not None), default=None)
        facts = [
            f"{len(kernels)} kernel{'s'[: len(kernels) != 1]}",
            *([f"occupancy {occupancy:.0f}%"] if occupancy is not None else []),
            *([f"{registers} registers"] if registers is not None else []),
        ]
        lines.append(f"{arm}: {bound(kernels)}; {', '.join(facts)}")
    stalls = ", ".join(f"{reason} {share:.0%}" for reason, share in top_stalls(list(record.arms.values())[-1]))
    return [*lines, f"stalls: {stalls or 'none counted'}"]


def _sweeps(task: Task, row: str) -> list[str]:
    lines = []
    for record, table, times in _swept(task, row):
        ranked = sorted((us, place) for place, us in enumerate(times.median_us) if us is not None)
        shown = [(us, table.candidates[place]) for us, place in ranked[:SHOWN_CONFIGURATIONS]]
        first = [f"{us:.2f} us {_config(one, {})}" for us, one in shown[:1]]
        best = [*first, *(f"{us:.2f} us with {_config(one, shown[0][1])}" for us, one in shown[1:])]
        lines.append(
            f"sweep {record.utc} of {table.table}, {record.device}: {len(ranked)} of {len(table.candidates)} "
            f"configurations timed, {len(times.wrong)} wrong; copy {times.copy_us:.2f} us; best: {' | '.join(best)}"
        )
    return lines[-2:] or ["no sweep has this row"]


def _swept(task: Task, row: str) -> list[tuple[SweepRecord, TableTimes, RowTimes]]:
    records = record_log.read(task.path / "docs" / "tuning.jsonl", SweepRecord)
    found = [
        (record, table, times)
        for record in records
        for table in record.tables
        for times in table.rows
        if times.row == row
    ]
    latest = {(record.device, table.table): (record, table, times) for record, table, times in found}
    return list(latest.values())


def _config(candidate: Mapping[str, object], other: Mapping[str, object]) -> str:
    """The candidate's values, without those that it shares with `other`."""
    unlike = {key: value for key, value in candidate.items() if key not in other or other[key] != value}
    return " ".join(f"{key}={value or repr(value)}" for key, value in unlike.items())


def _notes(task: Task, row: str) -> list[str]:
    """Sentences of `docs/dispatch.md` that name the row or its sizes.

    If there are none: what the file says about all rows, namely what bounds the task and what was tried in vain.
    """
    path = task.path / "docs" / "dispatch.md"
    text = LINK.sub(r"\1", path.read_text(encoding="utf-8")) if path.is_file() else ""
    sizes = re.escape(row.rpartition("-")[2]).replace("x", r"\s?x\s?")
    wanted = re.compile(rf"{re.escape(row)}(?![\w-])|(?<![\w.]){sizes}(?![\w.])")
    found = [sentence for sentence in _sentences(text) if wanted.search(sentence)]
    more = [f"... and {len(found) - SHOWN_NOTES} more in docs/dispatch.md"] if len(found) > SHOWN_NOTES else []
    if found:
        return [*(f"note: {textwrap.shorten(sentence, LONGEST_NOTE)}" for sentence in found[:SHOWN_NOTES]), *more]
    blocks = [block for title in ABOUT_ALL for block in _blocks(_section(text, title))]
    # Tables are left out: they are larger than the screen.
    return [f"note: {block}" for block in blocks if not block.startswith("|")] or ["docs/dispatch.md does not name it"]


def _section(text: str, title: str) -> str:
    """The text under a second-level heading; empty if there is no such heading."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _sentences(text: str) -> Iterable[str]:
    for block in _blocks(text):
        yield from re.split(r"(?<=[.:])\s+(?=[A-Z])", block)


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, points of lists and lines of tables, each as one line."""
    for block in re.split(r"\n\s*\n|\n(?=[-|])", text):
        if not block.lstrip().startswith(("#", "|--", "| --", "```")) and (line := " ".join(block.split()).strip("- ")):
            yield line


def _gaps(task: Task, row: str, record: RunRecord | None, result: RowResult | None, in_campaign: bool) -> Iterator[str]:
    """What, by the records, was not tried or not measured."""
    if record is not None and result is not None:
        absent = [words for basis, words in LACKS if basis not in result.speedup]
        absent += [] if any(arm.distance for arm in result.arms.values()) else ["distance from the other arms' bits"]
        absent += [] if record.machine_watch is not None else ["the GPU's state during the run"]
        if absent:
            yield f"in run {record.run_id}: {', '.join(absent)}"
    swept = _swept(task, row)
    untimed = [
        f"{count} of {len(table.candidates)} configurations of {table.table} on this row"
        for _, table, times in swept
        if (count := sum(us is None for us in times.median_us) - len(times.wrong)) > 0
    ]
    yield from dict.fromkeys(untimed)  # sweeps on several kinds of GPU leave out the same ones
    devices = {record.device for record, _, _ in swept}
    for name in task.config.targets:
        if not any(name in device.lower() for device in devices):
            yield f"a sweep of this row on {name}"
    if not in_campaign:
        yield "an iteration of a campaign that is about this row"


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
