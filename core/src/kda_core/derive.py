"""From samples to verdicts: everything in a record that its samples decide, in one place.

The judge fills a record's samples, correctness and limits, and calls `recompute`; `validate` calls it again and
compares. Numbers are rounded first (samples to 0.1 ns, others to 8 digits), so what is printed, written and computed
again later is the same to the digit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kda_core import stats
from kda_core.records import LIMIT_ARM, Headline, Interval, Metric, RowResult, RunRecord, Verdict
from kda_core.stats import Generations

SAMPLE_DECIMALS = 4
"""Samples in us: 0.1 ns, a hundredth of a percent of the shortest call a host can make (1.5 us)."""
DIGITS = 8
"""Significant digits of derived numbers."""
RELATIVE = 1e-7
"""Largest difference that counts as equal: ten units of the last digit kept."""
MIN_GENERATIONS = 2
"""Fewer show nothing about the spread between processes."""
MEASURED = (Verdict.FASTER, Verdict.NOT_FASTER)
"""Verdicts that the samples decide; all others are the judge's findings and stay."""


def recompute(record: RunRecord) -> RunRecord:
    """The same record with every summary, interval, measured verdict and headline made from its samples.

    A row may arrive with either measured verdict and an empty reason: both are decided here.
    """
    record = rounded(record)
    rows = tuple(_row(row, record) for row in record.rows)
    noise = {
        row: part.model_copy(update={"ratio": stats.speedup(part.first, part.second)})
        for row, part in record.noise_floor.items()
    }
    return rounded(record.model_copy(update={"rows": rows, "headline": _headline(rows, record), "noise_floor": noise}))


def rounded(record: RunRecord) -> RunRecord:
    """The record as the ledger keeps it; rounding twice changes nothing."""
    return RunRecord.model_validate(_rounded(record.model_dump(), lambda x: float(f"{x:.{DIGITS}g}")))


def mismatches(record: RunRecord) -> list[str]:
    """What the record claims against what its samples give: one line for each, with row, field and both numbers."""
    found = []
    ids = [row.id for row in record.rows]
    found += [f"row {row}: listed {ids.count(row)} times" for row in sorted(set(ids)) if ids.count(row) > 1]
    try:
        again = recompute(record)
    except ValueError as error:
        return [*found, f"samples: {error}"]
    for path, claimed, given in _differences(record.model_dump(), again.model_dump()):
        found.append(f"{_where(path, record)}: the record says {claimed}, its samples give {given}")
    return found


def measured_verdict(interval: Interval, generations: int) -> tuple[Verdict, str]:
    """FASTER when the whole interval lies above 1 and there are generations enough to say so; and why."""
    text = f"speedup {interval.estimate:.3f}, {interval.level:.0%} interval [{interval.low:.3f}, {interval.high:.3f}]"
    if generations < MIN_GENERATIONS:
        return Verdict.NOT_FASTER, f"{text} from {generations} generation; FASTER needs {MIN_GENERATIONS}"
    return (Verdict.FASTER if interval.low > 1 else Verdict.NOT_FASTER), text


def _row(row: RowResult, record: RunRecord) -> RowResult:
    subject, against = record.settings.subject, record.settings.against
    arms = {
        name: arm.model_copy(update={"summary": {m: stats.summarise(s) for m, s in arm.samples.items() if any(s)}})
        for name, arm in row.arms.items()
    }
    walls = {name: _samples(row, name, Metric.WALL) for name in (subject, *against)}
    ours = walls[subject]
    speedup = {name: _interval(theirs, ours) for name in against if ours and (theirs := walls[name])}
    update: dict[str, Any] = {"arms": arms, "speedup": speedup, "attained": None, "attained_device": None}
    if row.limit is not None:
        measured = arms[LIMIT_ARM].summary if LIMIT_ARM in arms else {}
        floors = {"host_us": measured.get(Metric.WALL), "device_us": measured.get(Metric.DEVICE)}
        limit = row.limit.model_copy(update={key: floor.median for key, floor in floors.items() if floor})
        update["limit"] = limit
        if ours:
            update["attained"] = limit.wall_us / arms[subject].summary[Metric.WALL].median
        if _samples(row, subject, Metric.DEVICE):
            update["attained_device"] = limit.device_us / arms[subject].summary[Metric.DEVICE].median
    if row.verdict in MEASURED:
        update["verdict"], update["reason"] = _verdict(row, record, speedup)
    return row.model_copy(update=update)


def _verdict(row: RowResult, record: RunRecord, speedup: dict[str, Interval]) -> tuple[Verdict, str]:
    """A measured verdict stands only on a correct subject, a GPU, and samples of both arms."""
    subject, opponent = record.settings.subject, record.settings.against[0]
    if record.machine.kind != "cuda":
        return Verdict.UNVERIFIED, "ran without a GPU"
    if subject not in row.arms:
        return Verdict.ERROR, f"{subject}: no result"
    correctness = row.arms[subject].correctness
    if not correctness.passed:
        return Verdict.INCORRECT, correctness.failure or f"{subject}: a correctness check failed"
    if opponent not in speedup:
        return Verdict.ERROR, f"no wall samples of {subject} and {opponent} to compare"
    pairs = zip(_samples(row, opponent, Metric.WALL), _samples(row, subject, Metric.WALL), strict=False)
    return measured_verdict(speedup[opponent], sum(bool(theirs and ours) for theirs, ours in pairs))


def _headline(rows: Sequence[RowResult], record: RunRecord) -> Headline | None:
    """Geometric means over the measured production rows; one that a row has no samples for is left out."""
    rows = [row for row in rows if row.production and row.verdict in MEASURED]
    if not rows:
        return None
    subject = record.settings.subject

    def versus(opponent: Callable[[RowResult], Generations], metric: Metric) -> Interval | None:
        pairs = [(opponent(row), _samples(row, subject, metric)) for row in rows]
        return stats.geomean(pairs) if all(theirs and ours for theirs, ours in pairs) else None

    def arm(name: str, metric: Metric) -> Interval | None:
        return versus(lambda row: _samples(row, name, metric), metric)

    def limit(metric: Metric) -> Interval | None:
        return versus(lambda row: _floor(row, metric, _samples(row, subject, metric)), metric)

    against = record.settings.against
    return Headline(
        rows=len(rows),
        speedup={name: value for name in against if (value := arm(name, Metric.WALL))},
        speedup_device={name: value for name in against if (value := arm(name, Metric.DEVICE))},
        attained=limit(Metric.WALL),
        attained_device=limit(Metric.DEVICE),
    )


def _floor(row: RowResult, metric: Metric, like: Generations) -> Generations:
    """The limit as an arm to compare with: its own samples, or the constant that a record without them states."""
    if row.limit is None:
        return ()
    device = metric is Metric.DEVICE or row.limit.device_us >= row.limit.host_us
    samples = _samples(row, LIMIT_ARM, Metric.DEVICE if device else Metric.WALL)
    return samples or stats.constant_like(row.limit.device_us if device else row.limit.host_us, like)


def _interval(opponent: Generations, subject: Generations) -> Interval:
    """Rounded before anything is decided by it, so that the digits on paper and the verdict agree."""
    interval = stats.speedup(opponent, subject)
    return Interval(**{key: float(f"{value:.{DIGITS}g}") for key, value in interval.model_dump().items()})


def _samples(row: RowResult, arm: str, metric: Metric) -> Generations:
    """The arm's samples, or () when it has none at all or was not correct: a wrong arm has no speed."""
    if arm not in row.arms or not row.arms[arm].correctness.passed:
        return ()
    samples: Generations = row.arms[arm].samples.get(metric, ())
    return samples if any(samples) else ()


def _rounded(value: Any, digits: Callable[[float], float]) -> Any:
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, dict):
        return {
            key: _rounded(part, _sample if key in ("samples", "first", "second") else digits)
            for key, part in value.items()
        }
    if isinstance(value, tuple):
        return tuple(_rounded(part, digits) for part in value)
    return value


def _sample(value: float) -> float:
    return round(value, SAMPLE_DECIMALS)


def _differences(one: Any, two: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    if isinstance(one, dict) and isinstance(two, dict):
        for key in [*one, *(key for key in two if key not in one)]:
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
    names = [part.value if isinstance(part, Metric) else str(part) for part in path]
    if names[0] == "rows":
        return f"row {record.rows[path[1]].id}: {'.'.join(names[2:])}"
    return ".".join(names)
