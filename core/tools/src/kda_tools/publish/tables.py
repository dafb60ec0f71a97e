"""The Markdown of published runs: a task's `docs/results.md`, and the table of all tasks. Pure functions."""

from collections.abc import Callable, Iterable, Sequence

from kda_judge.contract.config import Target
from kda_judge.contract.tasks import Task
from kda_judge.evidence.gpu_state import GpuState
from kda_judge.evidence.run_record import PORTABLE_ARM, REPLAYED_ARM, Basis, MachineWatch, Metric, RunRecord, Verdict
from kda_tools.publish.plots import ATTAINED, FOLDER, HISTORY, SPEEDUP, Plot, file_name
from kda_tools.publish.report import (
    COMMAND,
    HEADER,
    LARGE_BYTES,
    NONE,
    STALE,
    UPSTREAM,
    WHOSE,
    WORDS,
    arm_name,
    bases,
    by_age,
    interval,
    line,
    median,
    microseconds,
    misses,
    noise_floor,
    pin_name,
    publishable,
    published,
    ratio,
    shown_ids,
    slower,
    speedup,
    stale,
)

Ledgers = Sequence[tuple[Task, Sequence[RunRecord]]]
"""Tasks with every record of their ledgers."""
HOST_BOUND = 0.8
"""Of wall: where the device takes less, the host decides."""
BOUNDS = f"""What bounds the solution's calls, each group's least and most: the host where the device takes less than
{HOST_BOUND:g} of wall, else the device. The `host floor` is a launch through the driver from C with the op's outputs
allocated. The `limit` is the fastest stream of as many bytes as the op must move. Both are measured in this run, and
`attained` is the limit over the device's time.
"""


SHOWN_BASES = (Basis.DEVICE, Basis.PORTABLE, Basis.WALL)
SHOWN = " / ".join(WORDS[basis] for basis in SHOWN_BASES)
"""What a cell that has room for estimates alone holds."""
RERECORD = "What is here is what was measured; `kda validate` says which parts changed."


def results_md(task: Task, records: Sequence[RunRecord]) -> str:
    """The whole text of `docs/results.md`."""
    latest = published(task, records)
    parts = [f"{HEADER}\n# Results of {task.folder}\n\n{task.config.task.title}\n"]
    for target, goal in task.config.targets.items():
        if target in latest:
            parts.append(_target_section(target, goal, latest[target], task.config.task.numerics))
            if stale(task, latest[target]):
                parts.append(f"**Stale**: since this run the code has changed that it measured. {RERECORD}\n")
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
                    *against_pins(record, pins),
                    interval(record.headline.attained),
                    record.utc[:10] + STALE * bool(stale(task, record)),
                    f"`{record.provenance.commit[:10]}`",
                )
            )
    return f"Speedups are {SHOWN}. {WHOSE}\n\n{''.join(lines)}"


def all_pins(records: Iterable[RunRecord]) -> list[str]:
    """`sglang 0.5.12.post1` and so on: every upstream release that one of the runs is against."""
    known = (record.provenance.pins.get(arm) for record in records for arm in UPSTREAM)
    return list(dict.fromkeys(pin_name(pin) for pin in known if pin))


def against_pins(record: RunRecord, pins: Sequence[str]) -> list[str]:
    """The headline's speedups against `pins`, as `SHOWN` says; `-` for a release that the run is not against."""
    arms = {pin_name(record.provenance.pins.get(arm)): arm for arm in record.settings.against}
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


def _target_section(target: str, goal: Target, record: RunRecord, goal_numerics: str) -> str:
    gpu = record.machine.before
    assert record.headline is not None
    assert gpu is not None
    faster = sum(row.verdict is Verdict.FASTER for row in record.rows)
    return (
        f"## {target}\n\n{gpu.name}, {record.utc[:10]}: {record.headline.rows} production rows, {faster} of "
        f"{len(record.rows)} FASTER than {record.settings.against[0]}. {slower(record)} Brackets hold 95% confidence "
        f"intervals; times are medians in us per call; `wall` is what a caller pays, `device` the GPU's share. `A/A`: "
        f"{record.settings.against[0]} against itself in the same run, 1 but for noise. {WHOSE}\n\n"
        f"{headline_md(record)}\n{numerics_md(record, goal_numerics)}{bounds_md(record)}{targets_md(record, goal)}\n"
        f"{_row_table(record)}\n"
        f"{_picture(SPEEDUP, target)}\n"
        f"{_picture(ATTAINED, target)}\n{_circumstances(record)}"
    )


def targets_md(record: RunRecord, goal: Target) -> str:
    """On how many rows the targets are met, and where they are not; nothing where there are none."""
    if goal.attained is None and goal.within_us is None:
        return ""
    missed, rows = misses(record, goal), len(record.rows)
    named = f"; missed on {', '.join(missed)}" if missed else ""
    large = f"at {goal.attained:g} of their limit or better" if goal.attained else "anywhere"
    small = f"within {goal.within_us:g} us of it" if goal.within_us else "anywhere"
    return (
        f"\nTarget on the device (rows that move more than {LARGE_BYTES // 10**6} MB {large}, the others {small}): met "
        f"on {rows - len(missed)} of {rows} rows{named}.\n"
    )


def headline_md(record: RunRecord) -> str:
    """The geometric means: a line for each opponent, a column for each basis, and what is attained."""
    shown = bases(record)
    table = [line("geometric mean", *(WORDS[basis] for basis in shown)), "|---" * (1 + len(shown)) + "|\n"]
    for arm in record.settings.against:
        cells = (interval(speedup(record.headline, basis, arm)) for basis in shown)
        table.append(line(f"speedup against {arm_name(record, arm)}", *cells))
    attained = interval(record.headline.attained if record.headline else None)
    return f"{''.join(table)}\nAttained (limit / {record.settings.subject}, on the device): {attained}.\n"


def numerics_md(record: RunRecord, contract: str) -> str:
    """What the solution promises, and how far its outputs were from each other arm's, over all rows."""
    lines = []
    for name in dict.fromkeys(
        arm for row in record.rows for arm in row.arms if arm not in (PORTABLE_ARM, REPLAYED_ARM)
    ):
        found = [one for row in record.rows if name in row.arms for one in row.arms[name].distance]
        if found:
            mean, least = sum(one.equal for one in found) / len(found), min(one.equal for one in found)
            near, most = min(one.near for one in found), max(one.ulps for one in found)
            lines.append(line(arm_name(record, name), *(f"{share:.2%}" for share in (mean, least, near)), str(most)))
    if not lines:
        return ""
    head = line("outputs beside those of", "equal bits, mean of rows", "least", "within 1 ulp, least", "furthest, ulp")
    return f"Numerics contract: *{contract}*.\n\n{head}{'|---' * 5}|\n{''.join(lines)}\n"


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
    floors = {"host": "wall over host floor", "device": "device over its limit"}
    for name, rows in groups.items():
        if rows:
            walls, devices, overs = zip(*rows, strict=True)
            times = (_range(walls, microseconds), _range(devices, microseconds))
            lines.append(line(name, str(len(rows)), *times, f"{floors[name]} {_range(overs, ratio)}"))
    return f"{BOUNDS}\n{''.join(lines)}"


def _row_table(record: RunRecord) -> str:
    subject, against, shown = record.settings.subject, record.settings.against, bases(record)
    arms = (against[0], subject, *against[1:])
    head = ["row", *(f"{WORDS[basis]} vs {arm}" for basis in shown for arm in against)]
    head += [f"device {arm}" for arm in arms] + [f"wall {arm}" for arm in arms]
    head += ["limit", "attained", "host floor", "above it", "A/A", "verdict"]
    lines = [line(*head), "|---" * len(head) + "|\n"]
    for row in record.rows:
        cells = [row.id if row.production else f"{row.id} (not in the mean)"]
        cells += [interval(speedup(row, basis, arm)) for basis in shown for arm in against]
        cells += [microseconds(median(row, arm, metric)) for metric in (Metric.DEVICE, Metric.WALL) for arm in arms]
        wall, repeat = median(row, subject, Metric.WALL), record.noise_floor.get(row.id)
        above = wall - row.limit.host_us if wall and row.limit else None
        cells += [microseconds(row.limit.device_us if row.limit else None), ratio(row.attained)]
        cells += [microseconds(row.limit.host_us if row.limit else None), microseconds(above)]
        lines.append(line(*cells, interval(repeat.ratio if repeat else None), row.verdict.value))
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
        "run": f"`{record.run_id}`, {record.seconds:.0f} s: `{record.command}`{_joined(record)}",
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


def _joined(record: RunRecord) -> str:
    return f", joined from the parts {', '.join(record.parts)}" if record.parts else ""


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
    means = [(basis, arm) for basis in (Basis.DEVICE, Basis.WALL) for arm in UPSTREAM]
    head = ["run", "GPU", "commit", "rows", *(f"{WORDS[basis]} vs {arm}" for basis, arm in means), "attained", "state"]
    lines = [line(*head), "|---" * len(head) + "|\n"]
    shown = shown_ids(latest)
    for record in sorted(records, key=by_age, reverse=True):
        headline = record.headline
        lines.append(
            line(
                f"`{record.run_id}`",
                record.machine.before.name if record.machine.before else "none",
                f"`{record.provenance.commit[:10]}`",
                str(len(record.rows)),
                *(interval(speedup(headline, basis, arm)) for basis, arm in means),
                interval(headline.attained if headline else None),
                state(task, record, shown),
            )
        )
    pictures = "".join(f"\n{_picture(HISTORY, target)}" for target in latest)
    return f"## Runs\n\n{''.join(lines)}{pictures}"


def state(task: Task, record: RunRecord, shown: set[str]) -> str:
    """Whether the run is the published one or a part of it, one that was, or why it cannot be; `shown`: `shown_ids`."""
    if record.run_id in shown:
        return "published above"
    problems = publishable(task, record)
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        return f"not published: {'; '.join(problems[:3])}{more}"
    return "superseded"
