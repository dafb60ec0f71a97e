"""Make the screen of `kda why TASK ROW`: times and limit, what limits the row, what was tried, what is not recorded."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
from kda_tools.publish.read_once import unchanged_files
from kda_tools.publish.staleness import is_outdated
from kda_tools.publish.tables import host_bound
from kda_tools.publish.tried_page import row_lines

WIDTH, LINES = 100, 40
"""Columns and lines of the screen. Longer lines are wrapped; what does not fit is counted, with its page."""
LEAST = 3
"""Lines that a section leaves for each less important one: the heading, and where to find what is not shown."""
LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
SIZES = re.compile(r"\d+(?:x\d+)+")
SHOWN_CONFIGURATIONS, SHOWN_PARTS, SHOWN_ROWS = 3, 3, 3
NOTES = "docs/dispatch.md"
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
Entry = tuple[str, str]
"""What a section says, never shown in part, and the page that has it; without words it is counted only."""


def find_row(task: Task, row: str) -> Workload:
    """The frozen row with that id; if there is none, a UsageError names similar ids."""
    found = next((one for one in task.workloads if one.id == row), None)
    if found is None:
        close = ", ".join(nearest(row, [one.id for one in task.workloads]))
        raise UsageError(f"ROW {row!r}: no such row of {task.op}; nearest: {close}; all: kda list {task.op}")
    return found


@unchanged_files()
def why(task: Task, row: str, tried: Tried = ()) -> str:
    """The text of the screen. `tried` comes from campaigns; everything else is read from the task's own records."""
    frozen = find_row(task, row)
    shapes = ", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in frozen.inputs.items())
    models = ", ".join(frozen.models) or "no serving model"
    head = [
        f"{task.op} {row}",
        *_wrapped(f"  {frozen.op}({shapes}); {models}{'' if frozen.production else '; not of production'}"),
    ]
    record, result = _latest(task, row)
    times = [*_times(task, record, result)] if record and result else [_unmeasured(task, row)]
    attempts = [
        *((line, "docs/tuning.md") for line in _sweeps(task, row)),
        *((f"{what}: {end}", "docs/iterations.md") for what, end in tried),
        *((line, "docs/tried.md") for line in row_lines(task, row)),
        *_notes(task, frozen),
    ]
    by_importance: dict[str, list[Entry]] = {
        "times": [(line, "docs/results.md") for line in times],
        "what holds it": [(line, "docs/profile.md") for line in _profile(task, row)],
        "no record shows": [(line, "docs/results.md") for line in _gaps(task, row, record, result, bool(tried))],
        "tried": attempts,
    }
    room, shown, later = LINES - len(head), dict[str, list[str]](), len(by_importance)
    for name, entries in by_importance.items():
        later -= 1
        shown[name] = [f"{name}:", *_fitted(entries, room - 1 - LEAST * later)]
        room -= len(shown[name])
    return "\n".join([*head, *shown["times"], *shown["what holds it"], *shown["tried"], *shown["no record shows"]])


def _fitted(entries: Sequence[Entry], room: int) -> list[str]:
    """The lines of the entries that fit whole, the first ones first, and a count of the others by their page."""
    more: list[str] = []
    while True:
        lines, left = list[str](), Counter[str]()
        for text, page in entries:
            own = _wrapped(f"  {text}")
            if text and len(lines) + len(own) + len(more) <= room:
                lines += own
            else:
                left[page] += 1
        named = _wrapped(f"  not shown: {'; '.join(f'{count} in {page}' for page, count in left.items())}")
        if not left or len(named) <= len(more):
            return [*lines, *named * bool(left)]
        more = named


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
    yield from _elsewhere(task, record, row.id)
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


def _elsewhere(task: Task, shown: RunRecord, row: str) -> Iterator[str]:
    """For each published run on another GPU, in one line: its device times of the row."""
    for target, record in report.published_runs(task).items():
        if target == report.target_of(task, shown):
            continue
        for result in (one for one in record.rows if one.id == row):
            times = [
                f"{arm} {report.microseconds(us)} us"
                for arm in (record.settings.subject, *record.settings.against)
                if (us := report.median(result, arm, Metric.DEVICE)) is not None
            ]
            old = ", STALE" if report.stale(task, record) else ""
            yield f"also published on {report.gpu_of(record.machine)}{old}: device {', '.join(times)}"


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
        others = list(dict.fromkeys(record.row for record in records))
        more = f" and {len(others) - SHOWN_ROWS} more" if len(others) > SHOWN_ROWS else ""
        return [
            f"unknown: this row was never profiled: kda profile {task.op} --row {row}",
            f"profiled: {', '.join(others[:SHOWN_ROWS]) or 'none'}{more}",
        ]
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


def _notes(task: Task, row: Workload) -> list[Entry]:
    """Sentences of `docs/dispatch.md` that name the row or its sizes, without those about other ops of the task.

    If there are none: what the file says about all rows, namely what bounds the task and what was tried in vain.
    """
    path = task.path / NOTES
    text = LINK.sub(r"\1", path.read_text(encoding="utf-8")) if path.is_file() else ""
    names = [rf"{re.escape(row.id)}(?![\w-])"]
    if sizes := SIZES.findall(row.id):
        names.append(rf"(?<![\w.]){sizes[-1].replace('x', '[ ]?x[ ]?')}(?![\w.])")
    wanted = re.compile("|".join(names))
    named, general = list[Entry](), list[Entry]()
    for section in f"\n{text}".split("\n## "):
        title, _, under = section.partition("\n")
        page, lead = f"{NOTES}, {title.strip()!r}" if title.strip() else NOTES, ""
        for block in _blocks(under):
            if block.startswith("|"):  # a line says too little without the head of its table
                named += [("", page)] if wanted.search(block) else []
                continue
            sentences = _of_op(task, row.op, block)
            named += [(f"note: {one}", page) for one in sentences if wanted.search(one)]
            if title in ABOUT_ALL and block.endswith(":"):
                lead = f"{block} "  # stands before a list; its first shown point takes it along
            elif title in ABOUT_ALL and sentences:
                general.append((f"note: {lead}{' '.join(sentences)}", page))
                lead = ""
    return named or general or [(f"{NOTES} does not name it", NOTES)]


def _of_op(task: Task, op: str, block: str) -> list[str]:
    """The block's sentences without those about other ops, in the words with which the ids of their rows begin.

    `top-k` and `alignment` stand for rows `topk-...` and `align-...`. A sentence without such a word is about what the
    one before it is about.
    """
    begins: dict[str, set[str]] = {}
    for one in task.workloads:
        begins.setdefault(one.id.partition("-")[0], set()).add(one.op)
    kept, about = list[str](), set[str]()
    for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`])", block):
        words = re.findall(r"[a-z0-9]+", sentence.lower().replace("-", ""))
        found = [ops for begin, ops in begins.items() if any(word.startswith(begin) for word in words)]
        about = set().union(*found) or about
        if not about or op in about:
            kept.append(sentence)
    return kept


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
    if absent := [name for name in task.config.targets if not any(name in device.lower() for device in devices)]:
        yield f"a sweep of this row on {', '.join(absent)}"
    if not in_campaign:
        yield "an iteration of a campaign that is about this row"


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
