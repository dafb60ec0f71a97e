"""Check what a record claims: its numbers against its samples, and all else against what can be true.

`kda ledger merge`, `kda publish` and `kda validate` refuse a record for which `mismatches` finds anything. Nothing here
shows that samples were measured: docs/method_evidence.md lists by field what can still be forged.
"""

import math
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import chain
from statistics import median
from typing import Any

from kda_judge.evidence import gpu_state, gpu_watch
from kda_judge.evidence.derive import MEASURED, recompute
from kda_judge.evidence.gpu_state import GpuState, Throttle
from kda_judge.evidence.neighbours import disturbed
from kda_judge.evidence.physics import unphysical
from kda_judge.evidence.run_record import (
    LIMIT_ARM,
    ArmRow,
    Basis,
    MachineWatch,
    Metric,
    RowResult,
    RunRecord,
    SharedHost,
    Verdict,
)

RELATIVE = 1e-7
"""Largest difference that counts as equal: ten units of the last digit kept."""
RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
CLOCK_READS_S = 10
"""Most seconds between a run's id and its date, which are two readings of one clock."""
UNWATCHED_S = 30.0
"""Seconds of a run that are unwatched, while the watcher starts and ends; below 4 s in all recorded runs."""
FIXED = ("name", "uuid", "driver", "cuda", "sm_max_mhz", "memory_max_mhz", "memory_total_mb", "ecc", "mig")
"""Fields of a GPU's reading that are the same before and after a run."""
HOTTEST_C = 150
NEVER_EQUAL = 5
"""Two generations of this many samples, kept to 0.1 ns, are not the same by chance."""
MOST_CLOCK_RATIO = 2.0
"""The judge's clock over what a worker claims: 1.1, and what the protocol adds to short samples on a slow host."""
PEAK_POWER = 2.0
"""Largest reading of power over the power limit; single readings exceed the limit by a per cent."""


def mismatches(record: RunRecord) -> list[str]:
    """What cannot be true of the record: one line for each, with row, field, and what was expected and found."""
    ids = [row.id for row in record.rows]
    found = [f"row {row}: listed {ids.count(row)} times" for row in sorted(set(ids)) if ids.count(row) > 1]
    found += [*_run(record), *_machine(record)]
    found += [f"row {row.id}: {line}" for row in record.rows for line in _row(row, record)]
    try:
        again = recompute(record)
    except (ValueError, ArithmeticError) as error:
        return [*found, f"samples: {error}"]
    for path, claimed, given in _differences(record.model_dump(), again.model_dump()):
        found.append(f"{_where(path, record)}: the record says {claimed}, its samples give {given}")
    return found


def misdated(run_id: str, utc: str) -> str | None:
    """Why a run with this id cannot have begun at `utc`; None where it can."""
    if not RUN_ID.fullmatch(run_id):
        return f"run_id: expected a date and six hex digits, like 20261120T043000Z-0a1b2c, got {run_id!r}"
    try:
        named = datetime.strptime(f"{run_id[:15]}+0000", "%Y%m%dT%H%M%S%z")
        began = datetime.strptime(f"{utc.removesuffix('Z')}+0000", "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        began = None
    if began is None or not utc.endswith("Z") or abs((began - named).total_seconds()) > CLOCK_READS_S:
        return f"utc: expected the date of run {run_id}, like 2026-11-20T04:30:00Z, got {utc!r}"
    if began > datetime.now(timezone.utc) + timedelta(days=1):
        return f"utc: expected a date that has come, got {utc}"
    return None


def _run(record: RunRecord) -> Iterator[str]:
    """The run as a whole: dates, code and settings."""
    settings, source, repeats = record.settings, record.provenance, record.rerun_of
    yield from filter(None, [misdated(record.run_id, record.utc)])
    if repeats is not None and not (RUN_ID.fullmatch(repeats) and repeats < record.run_id):
        yield f"rerun_of: expected a run from before {record.run_id}, got {repeats!r}"
    arms = {settings.subject, *settings.against, *settings.beside}
    if record.parts:
        yield f"parts: expected none in a line of a ledger, got {', '.join(record.parts)}"
    if odd := sorted(source.pins.keys() - arms):
        yield f"provenance.pins: expected pins of {', '.join(sorted(arms))}, got one of {', '.join(odd)}"
    for name in ("against", "beside", "seeds", "families"):
        several = getattr(settings, name)
        if (not several and name != "beside") or len(set(several)) < len(several):
            yield f"settings.{name}: expected one or more, each once, got {several}"
    verdicts = {row.id: row.verdict for row in record.rows}
    for row, repeat in record.noise_floor.items():
        if row not in verdicts:
            yield f"noise_floor.{row}: expected a row of this run"
        whole = verdicts.get(row) in MEASURED  # another may have ended early
        for parts in (repeat.first, repeat.second) if whole else ():
            yield from (f"noise_floor.{row}: {line}" for line in _taken(parts, record))


def _machine(record: RunRecord) -> Iterator[str]:
    """The GPU's readings by themselves, against each other, and against what the run says of them."""
    before, after, watch = record.machine.before, record.machine.after, record.machine_watch
    if (record.machine.kind == "cuda") != (before is not None) or (before is None) != (after is None):
        yield f"machine.kind: expected two readings of a GPU with cuda and none with cpu, got {record.machine.kind}"
    if before is None or after is None:
        return
    yield from (f"machine.before.{line}" for line in _reading(before))
    yield from (f"machine.after.{line}" for line in _reading(after))
    for name in FIXED:
        if (was := getattr(before, name)) != (got := getattr(after, name)):
            yield f"machine.after.{name}: expected {was!r} as before the run, got {got!r}"
    if (after.thermal_us or 0) < (before.thermal_us or 0):
        yield f"machine.after.thermal_us: expected {before.thermal_us} or more, got {after.thermal_us}"
    noise = gpu_state.noise(before, after)
    if watch is not None:
        yield from (f"machine_watch.{line}" for line in _watch(watch, before, record.seconds))
        noise += gpu_watch.noise(watch, before)
    if noise and not record.noisy:
        yield f"noisy: expected {noise[0]!r}, which the readings show, got nothing"
    if record.shared_host is not None:
        yield from _shared_host(record.shared_host, record)


def _shared_host(shared: SharedHost, record: RunRecord) -> Iterator[str]:
    """The samples beside idle neighbours are one set, and what they show is noted. `recompute` compares the ratios."""
    for row, found in shared.rows.items():
        if found.alone.first != found.beside.first:
            yield f"shared_host.rows.{row}.beside.first: expected the samples of alone.first, got others"
    try:
        why = disturbed(shared)
    except (ValueError, ArithmeticError) as error:
        yield f"shared_host: {error}"
    else:
        if why is not None and why not in record.noisy:
            yield f"noisy: expected {why!r}, which shared_host shows, got {list(record.noisy)}"


def _reading(state: GpuState) -> Iterator[str]:
    power = None if state.power_limit_w is None else state.power_limit_w * PEAK_POWER
    yield from _at_most("sm_mhz", state.sm_mhz, state.sm_max_mhz)
    yield from _at_most("memory_mhz", state.memory_mhz, state.memory_max_mhz)
    yield from _at_most("memory_used_mb", state.memory_used_mb, state.memory_total_mb)
    yield from _at_most("utilisation", state.utilisation, 100)
    yield from _at_most("temperature_c", state.temperature_c, HOTTEST_C)
    yield from _at_most("power_w", state.power_w, power)
    yield from _reasons("throttle", state.throttle)


def _watch(watch: MachineWatch, gpu: GpuState, seconds: float) -> Iterator[str]:
    power = None if gpu.power_limit_w is None else gpu.power_limit_w * PEAK_POWER
    bounds = {"sm_mhz": gpu.sm_max_mhz, "memory_mhz": gpu.memory_max_mhz, "power_w": power, "temperature_c": HOTTEST_C}
    for name, most in bounds.items():
        if (spread := getattr(watch, name)) is not None:
            yield from _at_most(f"{name}.low", spread.low, spread.median)
            yield from _at_most(f"{name}.median", spread.median, spread.high)
            yield from _at_most(f"{name}.high", spread.high, most)
    if not abs(watch.seconds - seconds) <= UNWATCHED_S:
        yield f"seconds: expected the run's {seconds} within {UNWATCHED_S:g}, got {watch.seconds}"
    yield from _at_most("busy", watch.busy, watch.readings)
    yield from _at_most("longest_gap_s", watch.longest_gap_s, watch.seconds)
    yield from _at_most("cpu_s", watch.cpu_s, watch.seconds)
    yield from _reasons("throttle_s", watch.throttle_s)
    for reason, lasted in watch.throttle_s.items():
        yield from _at_most(f"throttle_s.{reason}", lasted, watch.seconds)
    for process in watch.foreign:
        yield from _at_most("foreign.readings", process.readings, watch.readings)


def _row(row: RowResult, record: RunRecord) -> Iterator[str]:
    """One row: its arms, and whether its verdict fits what was found of them."""
    settings, ended_well = record.settings, row.verdict in (*MEASURED, Verdict.CORRECT)
    named = {settings.subject, *settings.against, *settings.beside}
    if odd := sorted(row.arms.keys() - named - {LIMIT_ARM}):
        yield f"arms: expected {', '.join(sorted(named))}, got {', '.join(odd)} too"
    if ended_well and (lacking := sorted(named - row.arms.keys())):
        yield f"arms: expected {', '.join(sorted(named))}, got none of {', '.join(lacking)}"
    deciding = [row.arms[name] for name in (settings.subject, settings.against[0]) if name in row.arms]
    if row.verdict is Verdict.INCORRECT and all(arm.correctness.passed for arm in deciding):
        yield "verdict: expected an arm that failed, got INCORRECT"
    if row.limit is not None and row.limit.bytes_moved <= 0:
        yield f"limit.bytes_moved: expected more than 0, got {row.limit.bytes_moved}"
    floors = row.arms[LIMIT_ARM].samples if LIMIT_ARM in row.arms else {}
    if row.limit is not None and not (any(floors.get(Metric.WALL, ())) and any(floors.get(Metric.DEVICE, ()))):
        yield f"limit: expected wall and device samples of {LIMIT_ARM!r}, from which it follows, got none"
    outputs = {error.output for arm in row.arms.values() for error in arm.correctness.outputs}
    for name, arm in row.arms.items():
        lines = [*_correctness(arm)]
        if ended_well and arm.correctness.passed:
            lines += [] if name == LIMIT_ARM else _compared(arm, outputs)
            lines += _timed(name, arm, row, record) if row.verdict in MEASURED else []
        yield from (f"arms.{name}.{line}" for line in lines)


def _correctness(arm: ArmRow) -> Iterator[str]:
    found = arm.correctness
    if found.passed != (found.failure is None):
        yield f"correctness.failure: expected {'none' if found.passed else 'words'}, got {found.failure!r}"
    for error in found.outputs:
        for key in ("max_abs", "max_rel", "rel_l2", "allowed", "used"):
            value = getattr(error, key)
            most = (1 if key == "used" else sys.float_info.max) if found.passed else math.inf
            if value is not None and not 0 <= value <= most and (found.passed or value == value):
                yield f"correctness.outputs.{error.output}.{key}: expected 0 to {most:g}, got {value}"
        if any(place < 0 for place in error.worst_index):
            yield f"correctness.outputs.{error.output}.worst_index: expected an index, got {error.worst_index}"


def _compared(arm: ArmRow, outputs: set[str]) -> Iterator[str]:
    """What cannot be true of an arm that passed every check of its row."""
    if arm.distance and sorted(one.output for one in arm.distance) != sorted(outputs):
        yield f"distance: expected one entry for each of {', '.join(sorted(outputs))}, got {arm.distance}"
    if arm.correctness.checks == 0:
        yield "correctness.checks: expected 1 or more, got 0"
    names = [error.output for error in arm.correctness.outputs]
    if not names or sorted(names) != sorted(outputs):
        yield f"correctness.outputs: expected one entry for each of {', '.join(sorted(outputs))}, got {names}"


def _timed(name: str, arm: ArmRow, row: RowResult, record: RunRecord) -> Iterator[str]:
    """What cannot be true of an arm whose row was measured to the end."""
    if name in record.settings.untimed:
        if any(found := [arm.samples, arm.clock_ratio, arm.kernels_per_call, arm.calls_per_sample, arm.no_graph]):
            yield f"samples: expected nothing of times, since only its outputs are compared, got {found}"
        return
    for metric, parts in arm.samples.items():
        yield from (f"samples.{metric.value}: {line}" for line in _taken(parts, record))
        if record.settings.samples >= NEVER_EQUAL and len(set(parts)) < len(parts):
            yield f"samples.{metric.value}: expected generations that differ, got one of them twice"
    medians = {metric: median(chain(*parts)) for metric, parts in arm.samples.items() if any(parts)}
    # The limits' worker launches nothing but empty kernels in `wall`, and a copy in `device`.
    if name != LIMIT_ARM and (impossible := unphysical(medians, row.limit, share=0.0)) is not None:
        yield f"samples: {impossible}"
    whole = Metric.LATENCY in arm.samples  # of a portable arm the wall alone is timed
    if (arm.no_graph is None) != (Metric.DEVICE in arm.samples or not whole):
        yield f"no_graph: expected a reason exactly where device samples are lacking, got {arm.no_graph!r}"
    for metric, ratio in arm.clock_ratio.items():
        if not 1 <= ratio <= MOST_CLOCK_RATIO:
            yield f"clock_ratio.{metric.value}: expected 1 to {MOST_CLOCK_RATIO:g}, got {ratio}"
    for key in ("kernels_per_call", "calls_per_sample"):
        if (value := getattr(arm, key)) is not None and not 0 < value < math.inf:
            yield f"{key}: expected more than 0, got {value}"


def _taken(parts: tuple[tuple[float, ...], ...], record: RunRecord) -> Iterator[str]:
    generations, samples, got = record.settings.generations, record.settings.samples, [len(part) for part in parts]
    if len(got) != generations or set(got) != {samples}:
        yield f"expected {generations} generations of {samples} samples, as the settings say, got {got}"


def _at_most(key: str, value: float | None, most: float | None) -> Iterator[str]:
    if value is not None and most is not None and not value <= most:
        yield f"{key}: expected {most:g} or less, got {value:g}"


def _reasons(key: str, names: Any) -> Iterator[str]:
    known = [reason.name.lower() for reason in Throttle if reason.name]
    if odd := [name for name in names if name not in known]:
        yield f"{key}: expected reasons out of {', '.join(known)}, got {', '.join(map(repr, odd))}"


def _differences(one: Any, two: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys((*one, *two)):
            yield from _differences(one.get(key), two.get(key), (*path, key))
    elif isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from _differences(left, right, (*path, index))
    elif isinstance(one, float) and isinstance(two, float):
        if not (one == two or abs(one - two) <= RELATIVE * abs(two) or (one != one and two != two)):
            yield path, one, two
    elif one != two:
        yield path, one, two


def _where(path: tuple[Any, ...], record: RunRecord) -> str:
    names = [part.value if isinstance(part, (Basis, Metric)) else str(part) for part in path]
    if names[0] == "rows":
        return f"row {record.rows[path[1]].id}: {'.'.join(names[2:])}"
    return ".".join(names)
