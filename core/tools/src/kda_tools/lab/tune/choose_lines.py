"""Derives the lines of `tuned.toml` from recorded sweeps. Pure functions; nothing is chosen anywhere else.

The rule, for each line of a table:

1. A candidate is out when it was wrong on any row of the table, or was not tried on every row of the line.
2. Its time on a row is what a caller pays: its device time, or the host time of its kind of call (`host_time.py`)
   if that is longer. In sweeps without wall times, or with `in_graphs`, it is the device time.
3. Its score is the geometric mean, over the line's rows, of its time over the row's best time.
4. Candidates whose score is within the noise of the lowest are equal. The noise is the mean, over the rows, of the
   median spread of their candidates.
5. Of equal candidates, those with the lowest device-time score stay, again within the noise. Of these the configuration
   with the fewest departures from the defaults is chosen, then the first in the sweep. So noise does not choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean, median
from typing import TYPE_CHECKING, Any

from kda_judge.contract.errors import UsageError
from kda_runtime.tuned_table import Line, Value
from kda_tools.lab.tune.host_time import host_times

if TYPE_CHECKING:
    from kda_tools.lab.tune.sweep import Sweep
    from kda_tools.lab.tune.sweep_record import RowTimes, SweepRecord, TableTimes

DECLARED = ("not measured", "an unrecorded sweep")
"""How the reason begins in a line that comes from no recorded sweep."""


@dataclass(frozen=True)
class Scored:
    """A candidate on the rows of one line."""

    place: int
    """Index in the sweep's candidates."""
    config: Any
    times: tuple[float, ...]
    """Median device microseconds per row."""
    spreads: tuple[float, ...]
    paid: tuple[float, ...]
    """Microseconds per row that a caller pays for a call: the larger of host and device time."""
    score: float = 1.0
    """Geometric mean over the rows of `paid` over the row's least; 1 means best on every row."""
    device_score: float = 1.0
    """The same with device times."""


def expected(
    sweeps: Sequence[Sweep[Any]], records: Sequence[SweepRecord], current: Mapping[str, Sequence[Line]]
) -> dict[str, tuple[Line, ...]]:
    """The lines that `tuned.toml` has to hold: those of the latest usable sweep per table and capability.

    Lines in `current` of a table and capability without such a sweep stay as they are.
    """
    tables: dict[str, tuple[Line, ...]] = {}
    for sweep in sweeps:
        name = sweep.table.name
        measured = latest(name, records)
        kept = [line for line in current.get(name, ()) if line.capability not in measured]
        derived = [line for record, table in measured.values() for line in derive(sweep, record, table)]
        tables[name] = tuple(sorted((*kept, *derived), key=lambda line: line.capability))
    return tables


def latest(table: str, records: Sequence[SweepRecord]) -> dict[int, tuple[SweepRecord, TableTimes]]:
    """Capability -> the last usable sweep of the table with this name, and its times."""
    return {
        record.capability: (record, times)
        for record in records
        if record.usable
        for times in record.tables
        if times.table == table
    }


def unrecorded_lines(
    sweeps: Sequence[Sweep[Any]], records: Sequence[SweepRecord], current: Mapping[str, Sequence[Line]]
) -> list[str]:
    """Faults in lines from no recorded sweep: they have to say so, and to have bounds and candidates of the sweep."""
    found = []
    for sweep in sweeps:
        name = sweep.table.name
        measured = latest(name, records)
        lines = [line for line in current.get(name, ()) if line.capability not in measured]
        if not measured and not lines:
            found.append(f"[[{name}]]: missing, and no sweep is recorded that gives it")
        found += [f"[[{name}]]: {problem}" for problem in _unfounded(sweep, lines)]
    return found


def _unfounded(sweep: Sweep[Any], lines: Sequence[Line]) -> list[str]:
    found = []
    for capability in sorted({line.capability for line in lines}):
        bounds = [line.at_most for line in lines if line.capability == capability]
        if bounds != [dict(line) for line in sweep.lines]:
            found.append(f"capability {capability}: key 'at_most': expected {list(sweep.lines)}, got {bounds}")
    for line in lines:
        if sweep.table.parse(line.config, line.at_most) not in sweep.candidates:
            found.append(f"at_most {line.at_most}: key 'config': {line.config} is no candidate of the sweep")
        if not line.reason.startswith(DECLARED):
            begin = " or ".join(map(repr, DECLARED))
            found.append(f"at_most {line.at_most}: key 'reason': no sweep is recorded, so it has to begin with {begin}")
    return found


@dataclass(frozen=True)
class Decided:
    """One line of a table, and the data that decided it."""

    at_most: dict[str, float]
    rows: tuple[RowTimes, ...]
    scored: tuple[Scored, ...]
    """Best first."""
    chosen: Scored
    reason: str


def decide(sweep: Sweep[Any], record: SweepRecord, table: TableTimes) -> list[Decided]:
    """The lines of one table in their order; a UsageError names a line without a row or a candidate."""
    lines = []
    for number, bounds in enumerate(sweep.lines):
        rows = [row for row in table.rows if sweep.line_of(row.features) == number]
        where = f"[[{table.table}]]: line {number + 1}, at_most {dict(bounds)}: the sweep of {record.utc}"
        if not rows:
            raise UsageError(f"{where} has no row for it; add one to the sweep's rows and run `kda tune` again")
        scored = score(sweep, table, rows)
        if not scored:
            raise UsageError(f"{where} has no candidate that was tried on every row and right there")
        chosen, reason = choose(scored, rows)
        lines.append(Decided(dict(bounds), tuple(rows), tuple(scored), chosen, reason))
    return lines


def derive(sweep: Sweep[Any], record: SweepRecord, table: TableTimes) -> list[Line]:
    """The lines of one table for the record's capability, as `decide` chooses them."""
    return [
        Line(
            capability=record.capability,
            at_most=line.at_most,
            config=non_defaults(line.chosen.config),
            device=record.device,
            date=record.utc[:10],
            reason=line.reason,
        )
        for line in decide(sweep, record, table)
    ]


def score(sweep: Sweep[Any], table: TableTimes, rows: Sequence[RowTimes]) -> list[Scored]:
    """The sweep's candidates that were right and timed on all these rows, best first."""
    wrong = {failure.candidate for row in table.rows for failure in row.wrong}
    measured = {index: dict(fields) for index, fields in enumerate(table.candidates) if index not in wrong}
    host = {} if sweep.in_graphs else host_times(table.rows)
    right = []
    for place, config in enumerate(sweep.candidates):
        # A field that was added to the dataclass after the record counts with its default.
        defaults, own = _defaults(config), dataclasses.asdict(config)
        index = next((i for i, fields in measured.items() if defaults | fields == own), None)
        if index is None:
            continue
        times, spreads = [row.median_us[index] for row in rows], [row.spread[index] for row in rows]
        if None not in times and None not in spreads:
            device = tuple(filter(None, times))
            host_us = [host.get((row.walls.op, row.walls.kinds[index]), 0.0) if row.walls else 0.0 for row in rows]
            paid = tuple(map(max, device, host_us))
            right.append(Scored(place, config, device, tuple(s or 0.0 for s in spreads), paid))
    scores = zip(_scores([one.paid for one in right]), _scores([one.times for one in right]), strict=True)
    scored = [
        replace(one, score=score, device_score=device) for one, (score, device) in zip(right, scores, strict=True)
    ]
    return sorted(scored, key=lambda one: (one.score, one.device_score, one.place))


def _scores(several: Sequence[Sequence[float]]) -> list[float]:
    """For each candidate, the geometric mean of its times over the least time of each row."""
    best = [min(times) for times in zip(*several, strict=True)]
    return [geometric_mean(time / least for time, least in zip(times, best, strict=True)) for times in several]


def choose(scored: Sequence[Scored], rows: Sequence[RowTimes]) -> tuple[Scored, str]:
    """The candidate to choose, and the reason in words."""
    noise = relative_noise(scored)
    near, equal = _equal(scored, noise)
    chosen = _plainest(equal)
    # Candidates with the same launches on a row share one timing; those with equal times on all rows count as one.
    other = next((one for one in scored if one.times != chosen.times), None)
    copy = over_copy(chosen, rows)
    # In old sweeps, without wall times, one row stays `1 rows`: the table is part of the hash that recorded runs name.
    plural = "s" * (len(rows) > 1 or any(row.walls is None for row in rows))
    parts = [f"{len(rows)} row{plural}, {len(scored)} candidates: {chosen.score:.3f} of each row's best"]
    if other is not None:
        better = ""
        if other in equal and (other.score, other.device_score) < (chosen.score, chosen.device_score):
            better = "; equal within the spread, and plainer"
        elif other in near and other not in equal:
            better = "; equal within the spread, and faster on the device"
        parts.append(f"next {label(other.config)} {other.score:.3f}{better}")
    by_device = _plainest(_equal([replace(one, score=one.device_score) for one in scored], noise)[1])
    if by_device.place != chosen.place:
        costs = next(one.score for one in scored if one.place == by_device.place)
        parts.append(f"the host decides: device time alone would take {label(by_device.config)}, {costs:.3f}")
    host = [us for us, time in zip(chosen.paid, chosen.times, strict=True) if us > time]
    if host:
        parts.append(f"{median(host):.2f} us of the host a call, longer than the device on {len(host)} of {len(rows)}")
    return chosen, "; ".join([*parts, f"spread {noise:.1%}", f"{copy:.3f} of the streaming copy's time"])


def over_copy(one: Scored, rows: Sequence[RowTimes]) -> float:
    """Geometric mean of a candidate's time over the streaming copy's."""
    return geometric_mean(time / row.copy_us for time, row in zip(one.times, rows, strict=True))


def relative_noise(scored: Sequence[Scored]) -> float:
    """The relative noise of these candidates' device times; closer times count as equal."""
    return fmean(median(spreads) for spreads in zip(*(one.spreads for one in scored), strict=True))


def _equal(scored: Sequence[Scored], noise: float) -> tuple[list[Scored], list[Scored]]:
    """The candidates that are as good as the best, and those of them that are equal in device time too."""
    near = [one for one in scored if one.score <= min(one.score for one in scored) * (1 + noise)]
    return near, [one for one in near if one.device_score <= min(one.device_score for one in near) * (1 + noise)]


def _plainest(equal: Sequence[Scored]) -> Scored:
    return min(equal, key=lambda one: (departures(one.config), one.place))


def departures(config: Any) -> int:
    """How many fields differ from the dataclass's defaults."""
    return sum(getattr(config, name) != value for name, value in _defaults(config).items())


def non_defaults(config: Any) -> dict[str, Value]:
    """The fields that a configuration has to name: those without a default or with another value."""
    defaults = _defaults(config)
    return {
        key: value for key, value in dataclasses.asdict(config).items() if key not in defaults or value != defaults[key]
    }


DEFAULTS = "defaults"
"""What `label` says where nothing differs."""


def label(config: Any) -> str:
    """A configuration in a few words."""
    return " ".join(f"{key}={value}" for key, value in non_defaults(config).items()) or DEFAULTS


def _defaults(config: Any) -> dict[str, Value]:
    fields = dataclasses.fields(config)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
