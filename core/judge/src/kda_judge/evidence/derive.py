"""From samples to verdicts: everything in a record that its samples decide, in one place.

The judge fills a record's samples, correctness and limits, and calls `recompute`; `claims` calls it again and
compares. Numbers are rounded first (samples to 0.1 ns, others to 8 digits), so what is printed, written and computed
again later is the same to the digit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kda_judge.evidence import stats
from kda_judge.evidence.run_record import (
    LIMIT_ARM,
    Basis,
    Headline,
    Interval,
    Metric,
    Neighbours,
    Repeat,
    RowResult,
    RunRecord,
    SharedHost,
    Verdict,
)
from kda_judge.evidence.stats import Generations

SAMPLE_DECIMALS = 4
"""Samples in us: 0.1 ns, a hundredth of a percent of the shortest call a host can make (1.5 us)."""
DIGITS = 8
"""Significant digits of derived numbers."""
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
    noise = {row: _compared(part) for row, part in record.noise_floor.items()}
    update = {"rows": rows, "headline": _headline(rows, record), "noise_floor": noise, "shared_host": _shared(record)}
    return rounded(record.model_copy(update=update))


def with_rows(record: RunRecord, rows: Sequence[RowResult]) -> RunRecord:
    """The record with these rows, each as some run's record has it; the headline is made from their samples."""
    return rounded(record.model_copy(update={"rows": tuple(rows), "headline": _headline(rows, record)}))


def _compared(part: Repeat) -> Repeat:
    return part.model_copy(update={"ratio": stats.speedup(part.first, part.second)})


def _shared(record: RunRecord) -> SharedHost | None:
    if (shared := record.shared_host) is None:
        return None
    rows = {
        name: Neighbours(alone=_compared(found.alone), beside=_compared(found.beside))
        for name, found in shared.rows.items()
    }
    return shared.model_copy(update={"rows": rows})


def rounded(record: RunRecord) -> RunRecord:
    """The record as the ledger keeps it; rounding twice changes nothing."""
    return RunRecord.model_validate(_rounded(record.model_dump(), lambda x: float(f"{x:.{DIGITS}g}")))


def measured_verdict(interval: Interval, generations: int) -> tuple[Verdict, str]:
    """FASTER when the whole interval lies above 1 and there are generations enough to say so; and why."""
    text = f"speedup {interval.estimate:.3f}, {interval.level:.0%} interval [{interval.low:.3f}, {interval.high:.3f}]"
    if generations < MIN_GENERATIONS:
        return Verdict.NOT_FASTER, f"{text} from {generations} generation; FASTER needs {MIN_GENERATIONS}"
    return (Verdict.FASTER if interval.low > 1 else Verdict.NOT_FASTER), text


def _row(row: RowResult, record: RunRecord) -> RowResult:
    settings = record.settings
    arms = {
        name: arm.model_copy(update={"summary": {m: stats.summarise(s) for m, s in arm.samples.items() if any(s)}})
        for name, arm in row.arms.items()
    }
    speedup: dict[Basis, dict[str, Interval]] = {}
    for basis in Basis if settings.decides is Basis.DEVICE else (settings.decides,):
        ours = samples_of(row, basis.arm(settings.subject), basis.metric)
        theirs = {name: samples_of(row, name, basis.metric) for name in settings.against}
        if found := {name: _interval(samples, ours) for name, samples in theirs.items() if samples and ours}:
            speedup[basis] = found
    update: dict[str, Any] = {"arms": arms, "speedup": speedup, "attained": None}
    if row.limit is not None:
        measured = arms[LIMIT_ARM].summary if LIMIT_ARM in arms else {}
        floors = {"host_us": measured.get(Metric.WALL), "device_us": measured.get(Metric.DEVICE)}
        limit = row.limit.model_copy(update={key: floor.median for key, floor in floors.items() if floor})
        update["limit"] = limit
        if samples_of(row, settings.subject, Metric.DEVICE):
            update["attained"] = limit.device_us / arms[settings.subject].summary[Metric.DEVICE].median
    if row.verdict in MEASURED:
        update["verdict"], update["reason"] = _verdict(row, record, speedup)
    return row.model_copy(update=update)


def _verdict(row: RowResult, record: RunRecord, speedup: Mapping[Basis, Mapping[str, Interval]]) -> tuple[Verdict, str]:
    """A measured verdict stands only on a correct subject, a GPU, and samples of both arms.

    What cannot be captured into a CUDA graph has no device time. There the wall decides, and the reason says so; but
    where the opponent can be captured, a subject that cannot is not faster, for it could choose not to be.
    """
    subject, opponent, basis = record.settings.subject, record.settings.against[0], record.settings.decides
    if record.machine.kind != "cuda":
        return Verdict.CORRECT, "ran without a GPU"
    if subject not in row.arms:
        return Verdict.ERROR, f"{subject}: no result"
    correctness = row.arms[subject].correctness
    if not correctness.passed:
        return Verdict.INCORRECT, correctness.failure or f"{subject}: a correctness check failed"
    note = ""
    pair = [name for name in (subject, opponent) if name in row.arms]
    if basis is Basis.DEVICE and (graphless := [name for name in pair if row.arms[name].no_graph]):
        why = f"no CUDA graph of {graphless[0]}: {row.arms[graphless[0]].no_graph}"
        if graphless == [subject] and opponent in row.arms:
            return Verdict.NOT_FASTER, f"{why}; {opponent} has one"
        basis, note = Basis.WALL, f" (of wall: {why})"
    if opponent not in speedup.get(basis, {}):
        return Verdict.ERROR, f"no {basis.value} samples of {subject} and {opponent} to compare"
    pairs = zip(samples_of(row, opponent, basis.metric), samples_of(row, subject, basis.metric), strict=False)
    verdict, words = measured_verdict(speedup[basis][opponent], sum(bool(theirs and ours) for theirs, ours in pairs))
    return verdict, words + note


def _headline(rows: Sequence[RowResult], record: RunRecord) -> Headline | None:
    """Geometric means over the measured production rows; a mean that lacks a row's samples is left out."""
    rows = [row for row in rows if row.production and row.verdict in MEASURED]
    if not rows:
        return None
    settings, device = record.settings, [samples_of(row, record.settings.subject, Metric.DEVICE) for row in rows]

    def mean(theirs: Sequence[Generations], ours: Sequence[Generations]) -> Interval | None:
        return stats.geomean(list(zip(theirs, ours, strict=True))) if all(theirs) and all(ours) else None

    def versus(opponent: str, basis: Basis) -> Interval | None:
        ours = [samples_of(row, basis.arm(settings.subject), basis.metric) for row in rows]
        return mean([samples_of(row, opponent, basis.metric) for row in rows], ours)

    speedup = {
        basis: found
        for basis in Basis
        if (found := {name: value for name in settings.against if (value := versus(name, basis))})
    }
    floors = [_floor(row, samples) for row, samples in zip(rows, device, strict=True)]
    return Headline(rows=len(rows), speedup=speedup, attained=mean(floors, device))


def _floor(row: RowResult, like: Generations) -> Generations:
    """The device's limit as an arm to compare with: its samples, or without them the constant in the record."""
    if row.limit is None or not like:
        return ()
    return samples_of(row, LIMIT_ARM, Metric.DEVICE) or stats.constant_like(row.limit.device_us, like)


def _interval(opponent: Generations, subject: Generations) -> Interval:
    """Rounded before anything is decided by it, so that the digits on paper and the verdict agree."""
    interval = stats.speedup(opponent, subject)
    return Interval(**{key: float(f"{value:.{DIGITS}g}") for key, value in interval.model_dump().items()})


def samples_of(row: RowResult, arm: str, metric: Metric) -> Generations:
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
