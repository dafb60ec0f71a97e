"""Measure an iteration by the judge: the candidate, the baseline and the best so far, in turns in one session."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.bench import run
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload, select
from kda_judge.evidence import gpu_state
from kda_judge.evidence.run_record import Interval, Metric, RowResult, RunRecord, Verdict
from kda_judge.evidence.stats import geomean
from kda_judge.session import Request, Session, arm_spec, frozen_rows, open_session
from kda_tools.campaign.decision import Pair
from kda_tools.campaign.events import RowOutcome
from kda_tools.campaign.repository import Repository
from kda_tools.campaign.rules import Rules
from kda_tools.lab.inspect.aot import compile_task

BEST = "best"
"""Name of the arm that holds the best so far."""
SUBJECT, BASELINE = "solution", "baseline"
GOOD = (Verdict.FASTER, Verdict.NOT_FASTER, Verdict.CORRECT)
BY_TOOL = "kda campaign iterate"


@dataclass(frozen=True)
class Measured:
    """What a campaign uses of a run of the judge."""

    run_id: str
    gpu: str | None
    """None: verified and compiled, not timed."""
    rows: tuple[RowOutcome, ...]
    noisy: tuple[str, ...] = ()

    @property
    def failure(self) -> str | None:
        """The first row that is wrong, in words; None if none is."""
        wrong = [row for row in self.rows if row.verdict not in GOOD]
        more = f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""
        return f"{wrong[0].id}: {wrong[0].verdict.value}: {wrong[0].reason}{more}" if wrong else None

    @property
    def pairs(self) -> dict[str, Pair]:
        """Row -> samples of the best and of the candidate."""
        return {row.id: (row.samples[BEST], row.samples[SUBJECT]) for row in self.rows if row.metric is not None}

    def against_baseline(self) -> Interval | None:
        """Speedup over the baseline, geometric mean over all rows; None if a row lacks the baseline."""
        if not self.rows or any(BASELINE not in row.samples for row in self.rows):
            return None
        return geomean([(row.samples[BASELINE], row.samples[SUBJECT]) for row in self.rows])


def chosen_rows(task: Task, rules: Rules) -> list[str]:
    """Ids of the rows that an iteration measures."""
    if rules.rows:
        return [row.id for row in select(task.workloads, list(rules.rows))]
    return [row.id for row in task.workloads if row.production] or [row.id for row in task.workloads]


def demand_idle_gpu() -> bool:
    """Whether there is a GPU.

    Raises:
        MissingRequirement: the GPU is busy. That is not the candidate's fault, so nothing is begun.
    """
    if not gpu_state.has_gpu():
        return False
    if (why := gpu_state.busy(gpu_state.read_state(0, gpu_state.holding()))) is not None:
        raise MissingRequirement(f"the GPU is busy: {why}. Wait, then repeat the command: nothing was recorded")
    return True


@contextmanager
def best_arm(repository: Repository, folder: str, best: str) -> Iterator[dict[str, Path]]:
    """The best so far as a further arm: its `solution/`, taken from its commit."""
    with TemporaryDirectory(prefix="kda-best-") as place:
        repository.extract(best, f"{folder}/solution", Path(place))
        yield {BEST: Path(place) / folder / "solution"}


def demand_upstream(task: Task) -> None:
    """Bring the upstream files that a measurement needs into the cache.

    Raises:
        MissingRequirement: a file cannot be had. That is not the candidate's fault, so nothing is begun.
    """
    session = open_session(Request(task=task, against=[BASELINE] if gpu_state.has_gpu() else []))
    for name in (*session.settings.against, session.settings.subject):
        arm_spec(session, name)


def measure(task: Task, rules: Rules, repository: Repository, best: str, target: str) -> Measured:
    """Verify the candidate in the worktree, and on a GPU measure it; without one, compile it for the target.

    A row on which another arm's times are INVALID says nothing of the candidate, and is measured once more.

    Raises:
        ArmFailed: a kernel does not compile.
        MissingRequirement: an upstream file cannot be had, the GPU is busy.
        KeyboardInterrupt: the run was interrupted and decides nothing about the candidate.
    """
    rows = chosen_rows(task, rules)
    with best_arm(repository, task.path.relative_to(repository.root).as_posix(), best) as ports:
        on_gpu = gpu_state.has_gpu()
        session = _session(task, rules, rows, ports if on_gpu else {})
        record = _run(session, frozen_rows(session))
        found = measured(record)
        disturbed = [row.id for row in record.rows if is_others_fault(row)]
        if disturbed:
            second = measured(_run(session, tuple(row for row in frozen_rows(session) if row.id in disturbed)))
            again = {row.id: row for row in second.rows}
            found = replace(
                found,
                rows=tuple(again.get(row.id, row) for row in found.rows),
                noisy=tuple(dict.fromkeys((*found.noisy, *second.noisy))),
            )
    if not on_gpu and all(row.verdict in GOOD for row in record.rows):
        compile_task(task, select(task.workloads, rows), [task.config.targets[target].capability])
    return found


def is_others_fault(row: RowResult) -> bool:
    """Whether the row is INVALID by the times of the baseline or of the best so far."""
    return row.verdict is Verdict.INVALID and row.reason.startswith((f"{BEST}: ", f"{BASELINE}: "))


def _run(session: Session, rows: tuple[Workload, ...]) -> RunRecord:
    record = run(session, rows, progress=_print_phase, command=BY_TOOL)
    if record.partial:
        raise KeyboardInterrupt
    return record


def measured(record: RunRecord) -> Measured:
    """What an iteration keeps of a run: deciding samples, medians, limits, and how much of the tolerance was used."""
    gpu = record.machine.before.name if record.machine.kind == "cuda" and record.machine.before else None
    return Measured(record.run_id, gpu, tuple(_outcome(row) for row in record.rows), record.noisy)


def _session(task: Task, rules: Rules, rows: list[str], ports: Mapping[str, Path]) -> Session:
    request = Request(
        task=task,
        rows=rows,
        against=[BASELINE, BEST] if ports else [],
        ports=ports,
        generations=rules.generations if ports else 1,
        samples=rules.samples if ports else None,
    )
    session = open_session(request)
    few = {"beside": (), "target_sample_us": rules.sample_us} if ports else {}
    return replace(session, settings=session.settings.model_copy(update=few))


def _outcome(row: RowResult) -> RowOutcome:
    arms = {name: arm for name, arm in row.arms.items() if name in (BASELINE, BEST, SUBJECT)}
    timed = [metric for metric in (Metric.DEVICE, Metric.WALL) if _all_have(row, metric)]
    metric = timed[0] if timed and row.verdict in GOOD else None
    outputs = row.arms[SUBJECT].correctness.outputs if SUBJECT in row.arms else ()
    verdict, reason = row.verdict, row.reason
    if metric is Metric.WALL and any(arms[BEST].samples.get(Metric.DEVICE, ())):
        # Wall time would decide, which a launch path can win. If the best can be captured, the candidate must be, too.
        verdict, reason, metric = Verdict.ERROR, f"no CUDA graph: {arms[SUBJECT].no_graph}; the best has one", None
    return RowOutcome(
        id=row.id,
        verdict=verdict,
        reason=reason,
        metric=metric.value if metric else None,
        samples={name: arm.samples[metric] for name, arm in arms.items() if arm.samples.get(metric)} if metric else {},
        medians={name: arm.summary[metric].median for name, arm in arms.items() if metric in arm.summary}
        if metric
        else {},
        limit_us=row.limit.device_us if row.limit and metric is Metric.DEVICE else None,
        used=max((one.used for one in outputs if one.used is not None), default=None),
        ulps={name: max(one.ulps for one in arm.distance) for name, arm in arms.items() if arm.distance},
    )


def _all_have(row: RowResult, metric: Metric) -> bool:
    return all(name in row.arms and any(row.arms[name].samples.get(metric, ())) for name in (BEST, SUBJECT))


def _print_phase(row: str, phase: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{row}: {phase}")
        sys.stderr.flush()
