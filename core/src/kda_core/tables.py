"""The Markdown of published runs: a task's `docs/results.md`, and the table of all tasks. Pure functions."""

from collections.abc import Callable, Iterable, Sequence

from kda_core.config import Target
from kda_core.gpu import GpuState
from kda_core.plots import ATTAINED, FOLDER, HISTORY, SPEEDUP, Plot, file_name
from kda_core.records import Interval, MachineWatch, Metric, RunRecord, Verdict
from kda_core.report import (
    BASELINE,
    COMMAND,
    HEADER,
    LARGE_BYTES,
    LATEST,
    NONE,
    SMALL_ROW_RATIO,
    SMALL_ROW_US,
    UPSTREAM,
    arm_name,
    by_age,
    device_misses,
    interval,
    line,
    median,
    met,
    microseconds,
    noise_floor,
    pin_name,
    publishable,
    published,
    ratio,
    slower,
)
from kda_core.tasks import Task

Ledgers = Sequence[tuple[Task, Sequence[RunRecord]]]
"""Tasks with every record of their ledgers."""
HOST_BOUND = 0.8
"""Of wall: where the device takes less, the host decides."""
BOUNDS = f"""What bounds the solution's rows, each group's least and most: the host where the device takes less than
{HOST_BOUND:g} of wall, else the device. The `host floor` is the cheapest launch with the op's outputs allocated, `copy`
a streaming copy of as many bytes as the op must move, both measured in this run; the larger is the limit of `attained`.
"""


def results_md(task: Task, records: Sequence[RunRecord]) -> str:
    """The whole text of `docs/results.md`."""
    latest = published(task, records)
    parts = [f"{HEADER}\n# Results of {task.folder}\n\n{task.config.task.title}\n"]
    for target, goal in task.config.targets.items():
        if target in latest:
            parts.append(_target_section(target, goal, latest[target]))
        else:
            parts.append(
                f"## {target}\n\nCompiled ({goal.capability}), not measured: the ledger holds no run on this GPU that "
                f"can be published. On such a machine, from a clean checkout, `kda bench {task.op} --record` adds one "
                f"and `{COMMAND}` makes this page from it.\n"
            )
    parts.append(_history(task, records, latest))
    return "\n".join(parts)


def top_table_md(ledgers: Ledgers) -> str:
    """One line per task and GPU with a published run: geometric means over the production rows, against every pin.

    A task without one is not listed, so that adding a task changes no other file.
    """
    found = [(task, latest) for task, records in ledgers if (latest := published(task, records))]
    if not found:
        return "No task has a published run yet.\n"
    pins = all_pins(record for _, latest in found for record in latest.values())
    lines = [line("task", "GPU", "rows", *(f"vs {pin}" for pin in pins), "attained", "measured", "commit")]
    lines.append("|---" * (6 + len(pins)) + "|\n")
    for task, latest in found:
        for record in latest.values():
            assert record.machine.before is not None
            assert record.headline is not None
            lines.append(
                line(
                    f"[{task.folder}]({task.family}/{task.folder}/docs/results.md)",
                    record.machine.before.name,
                    str(record.headline.rows),
                    *(interval(speedup) for speedup in against_pins(record, pins)),
                    interval(record.headline.attained),
                    record.utc[:10],
                    f"`{record.provenance.commit[:10]}`",
                )
            )
    return "".join(lines)


def all_pins(records: Iterable[RunRecord]) -> list[str]:
    """`sglang 0.5.12.post1` and so on: every upstream release that one of the runs is against."""
    known = (record.provenance.pins.get(arm) for record in records for arm in UPSTREAM)
    return list(dict.fromkeys(pin_name(pin) for pin in known if pin))


def against_pins(record: RunRecord, pins: Sequence[str]) -> list[Interval | None]:
    """The headline's speedups against `pins`; None for a release that the run is not against."""
    assert record.headline is not None
    arms = {pin_name(record.provenance.pins.get(arm)): arm for arm in record.settings.against}
    return [record.headline.speedup.get(arms.get(pin, "")) for pin in pins]


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


def _target_section(target: str, goal: Target, record: RunRecord) -> str:
    gpu = record.machine.before
    assert record.headline is not None
    assert gpu is not None
    faster = sum(row.verdict is Verdict.FASTER for row in record.rows)
    return (
        f"## {target}\n\n{gpu.name}, {record.utc[:10]}: {record.headline.rows} production rows, {faster} of "
        f"{len(record.rows)} FASTER than {record.settings.against[0]}. {slower(record)} Brackets hold 95% confidence "
        f"intervals; times are medians in us per call; `wall` is what a caller pays, `device` the GPU's share. `A/A`: "
        f"{record.settings.against[0]} against itself in the same run, 1 but for noise.\n\n"
        f"{headline_md(record, goal)}\n{bounds_md(record)}{_device_md(record, goal)}\n{_row_table(record)}\n"
        f"{_picture(SPEEDUP, target)}\n"
        f"{_picture(ATTAINED, target)}\n{_circumstances(record)}"
    )


def _device_md(record: RunRecord, goal: Target) -> str:
    """On how many rows the device target is met, and where it is not; nothing where there is none."""
    if goal.device is None:
        return ""
    missed, rows = device_misses(record, goal.device), len(record.rows)
    named = f"; missed on {', '.join(missed)}" if missed else ""
    return (
        f"\nDevice target (rows that move more than {LARGE_BYTES // 10**6} MB at {goal.device:g} of the copy's rate or "
        f"better, the others within {SMALL_ROW_US:g} us or {SMALL_ROW_RATIO:g} times of its time): met on "
        f"{rows - len(missed)} of {rows} rows{named}.\n"
    )


def headline_md(record: RunRecord, goal: Target) -> str:
    """The geometric means beside what `config.toml` aims at."""
    headline = record.headline
    assert headline is not None
    goals = {BASELINE: goal.wall_vs_baseline, LATEST: goal.wall_vs_latest}
    table = [line("geometric mean", "wall", "target", "device"), "|---|---|---|---|\n"]
    for arm in record.settings.against:
        wall = headline.speedup.get(arm)
        cells = (interval(wall), _met(wall, goals.get(arm)), interval(headline.speedup_device.get(arm)))
        table.append(line(f"speedup against {arm_name(record, arm)}", *cells))
    attained = _met(headline.attained, goal.attained)
    cells = (interval(headline.attained), attained, interval(headline.attained_device))
    table.append(line(f"attained: limit / {record.settings.subject}", *cells))
    return "".join(table)


def host_bound(wall: float, device: float) -> bool:
    """Whether the host decides a call's time, by these medians in microseconds."""
    return device < HOST_BOUND * wall


def bounds_md(record: RunRecord) -> str:
    """The subject's rows by what decides their time, and how far above that floor they are."""
    groups: dict[str, list[tuple[float, float, float]]] = {"host": [], "device": []}
    for row in record.rows:
        wall, device = (median(row, record.settings.subject, metric) for metric in (Metric.WALL, Metric.DEVICE))
        if wall and device and row.limit:
            host = host_bound(wall, device)
            over = wall / row.limit.host_us if host else device / row.limit.device_us
            groups["host" if host else "device"].append((wall, device, over))
    lines = [line("bound by", "rows", "wall", "device", "over that floor"), "|---" * 5 + "|\n"]
    floors = {"host": "wall over host floor", "device": "device over copy"}
    for name, rows in groups.items():
        if rows:
            walls, devices, overs = zip(*rows, strict=True)
            times = (_range(walls, microseconds), _range(devices, microseconds))
            lines.append(line(name, str(len(rows)), *times, f"{floors[name]} {_range(overs, ratio)}"))
    return f"{BOUNDS}\n{''.join(lines)}"


def _row_table(record: RunRecord) -> str:
    subject, against = record.settings.subject, record.settings.against
    first, others = against[0], against[1:]
    head = ["row", first, subject, *others, f"vs {first}", *(f"vs {arm}" for arm in others)]
    head += [
        *(f"device {arm}" for arm in (first, subject, *others)),
        "host floor",
        "copy",
        "attained",
        "A/A",
        "verdict",
    ]
    lines = [line(*head), "|---" * len(head) + "|\n"]
    for row in record.rows:
        cells = [row.id if row.production else f"{row.id} (not in the mean)"]
        cells += [microseconds(median(row, arm, Metric.WALL)) for arm in (first, subject, *others)]
        cells += [interval(row.speedup.get(arm)) for arm in against]
        cells += [microseconds(median(row, arm, Metric.DEVICE)) for arm in (first, subject, *others)]
        floors = (row.limit.host_us, row.limit.device_us) if row.limit else (None, None)
        repeat = record.noise_floor.get(row.id)
        cells += [*map(microseconds, floors), ratio(row.attained), interval(repeat.ratio if repeat else None)]
        cells += [row.verdict.value]
        lines.append(line(*cells))
    return "".join(lines)


def _range(several: Sequence[float], written: Callable[[float], str]) -> str:
    """`5.42 to 5.90`, or the one number."""
    return " to ".join(dict.fromkeys((written(min(several)), written(max(several)))))


def _picture(kind: Plot, target: str) -> str:
    return f"![{kind.says}]({FOLDER}/{file_name(kind, target)})\n"


def facts(record: RunRecord) -> dict[str, str]:
    """What exactly ran, where and how, in Markdown: name -> words."""
    host, settings, source = record.machine, record.settings, record.provenance
    gpu = host.before
    assert gpu is not None
    pins = (f"{arm} {' '.join(pin.split()[:2])} (wheel `{pin.split()[-1][:12]}`)" for arm, pin in source.pins.items())
    during = {"GPU during the run": _watched(record.machine_watch)} if record.machine_watch else {}
    return {
        "run": f"`{record.run_id}`, {record.seconds:.0f} s: `{record.command}`",
        "commit": f"`{source.commit}`",
        "sha256": ", ".join(f"{part} `{digest[:12]}`" for part, digest in source.hashes.items()),
        "upstream": ", ".join(pins),
        "GPU": f"{gpu.name}, driver {gpu.driver}; before {_state(gpu)}; after {_state(host.after)}",
        **during,
        "host": f"{host.cpu}, {host.cores} cores, workers on core {host.pinned_core}, {host.platform}",
        "versions": ", ".join(f"{name} {number}" for name, number in sorted(source.versions.items())),
        "settings": f"{settings.generations} generations of {settings.samples} samples of at least "
        f"{settings.target_sample_us} us, seeds {', '.join(map(str, settings.seeds))}, inputs "
        f"{', '.join(settings.families)}, isolate {settings.isolate}",
        "noise floor (A/A)": noise_floor(record),
    }


def _state(gpu: GpuState | None) -> str:
    """Clock, temperature and power of one reading, and why its clock was lowered."""
    if gpu is None:
        return "not read"
    read = {"MHz": gpu.sm_mhz, "C": gpu.temperature_c, "W": gpu.power_w}
    shown = [f"{value:.0f} {unit}" for unit, value in read.items() if value is not None]
    return ", ".join([*shown, *gpu.throttle])


def _watched(watch: MachineWatch) -> str:
    """The same over the readings that were taken all through the run: lowest, median and highest."""
    spreads = {"MHz": watch.sm_mhz, "C": watch.temperature_c, "W": watch.power_w}
    shown = [f"{s.low:.0f}, {s.median:.0f}, {s.high:.0f} {unit}" for unit, s in spreads.items() if s]
    shown += [f"{reason} {seconds:.1f} s" for reason, seconds in watch.throttle_s.items()]
    return (
        f"{watch.readings} readings in {watch.seconds:.0f} s (lowest, median, highest): {'; '.join(shown)}; "
        f"foreign processes: {len(watch.foreign)}"
    )


def _circumstances(record: RunRecord) -> str:
    return "".join(f"- {name}: {fact}\n" for name, fact in facts(record).items())


def _history(task: Task, records: Sequence[RunRecord], latest: dict[str, RunRecord]) -> str:
    if not records:
        return "## Runs\n\nThe ledger is empty.\n"
    head = ("run", "GPU", "commit", "rows", f"vs {BASELINE}", f"vs {LATEST}", "attained", "state")
    lines = [line(*head), "|---" * len(head) + "|\n"]
    shown = {record.run_id for record in latest.values()}
    for record in sorted(records, key=by_age, reverse=True):
        headline = record.headline
        speedup = headline.speedup if headline else {}
        lines.append(
            line(
                f"`{record.run_id}`",
                record.machine.before.name if record.machine.before else "none",
                f"`{record.provenance.commit[:10]}`",
                str(len(record.rows)),
                *(interval(speedup.get(arm)) for arm in UPSTREAM),
                interval(headline.attained if headline else None),
                state(task, record, shown),
            )
        )
    pictures = "".join(f"\n{_picture(HISTORY, target)}" for target in latest)
    return f"## Runs\n\n{''.join(lines)}{pictures}"


def state(task: Task, record: RunRecord, shown: set[str]) -> str:
    """Whether the run is the published one, one that was, or why it cannot be; `shown` holds published run ids."""
    problems = publishable(task, record)
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        return f"not published: {'; '.join(problems[:3])}{more}"
    return "published above" if record.run_id in shown else "superseded"


def _met(value: Interval | None, goal: float | None) -> str:
    return NONE if goal is None else f">= {goal:g}: {met(value, goal)}"
