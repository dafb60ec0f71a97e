"""Records a run over a regression grid in `docs/grid.jsonl`: refuses a CPU, finds unchecked rows, makes the line."""

from __future__ import annotations

from collections.abc import Sequence

from kda_judge.bench import CHANGED
from kda_judge.contract.config import Config
from kda_judge.contract.errors import LedgerError, MissingRequirement
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import gpu_state, provenance
from kda_judge.evidence.run_record import RunRecord
from kda_judge.judge.open_row import output_spec
from kda_judge.session import Session
from kda_tools.lab.grid.grid_record import (
    FailedRow,
    GridRecord,
    Worst,
    failures,
    fingerprint,
    log,
    opponents_outside,
    ranges,
    runs,
    worse_of,
)
from kda_tools.lab.grid.grid_rows import whole_grid
from kda_tools.lab.grid.join_runs import Coverage, join, state


def demand_gpu(session: Session) -> None:
    """Refuse to record without a GPU.

    Raises:
        MissingRequirement: the session is on the CPU.
    """
    if session.kind == "cpu":
        raise MissingRequirement(
            "--record: needs a GPU; on the CPU the grid is thinned, its rows are shrunken and kernels are interpreted, "
            "which says nothing of the rows themselves"
        )


def coverage(session: Session) -> Coverage | None:
    """The joined recorded runs of this state of the files on this kind of GPU; None if there are none."""
    task, settings = session.request.task, session.settings
    here = gpu_state.read_state(session.gpu or 0)
    source = provenance.collect(task, [settings.subject, *settings.against], here.driver)
    ids = [row.id for row in whole_grid(session, full=True)]
    now = state(source, settings, here.name, len(ids), fingerprint(ids))
    return next((one for one in join(runs(task)) if one.state == now), None)


def unchecked_rows(session: Session, chosen: Sequence[Workload]) -> tuple[Workload, ...]:
    """Those of `chosen` that no recorded run has checked to an end in this state of the files, on this kind of GPU."""
    joined = coverage(session)
    done = joined.settled_positions if joined else frozenset()
    checked = {row.id for number, row in enumerate(whole_grid(session, full=True)) if number in done}
    return tuple(row for row in chosen if row.id not in checked)


def record_of(session: Session, run: RunRecord, asked: int) -> GridRecord:
    """The line of a run that was to check `asked` rows of the grid.

    Raises:
        LedgerError: files changed during the run, so that it describes no single state of them.
    """
    if changed := [reason for reason in run.noisy if reason.endswith(CHANGED)]:
        raise LedgerError(
            f"{log(session.request.task)}: run {run.run_id} is not recorded: {'; '.join(changed)}; run it again"
        )
    whole = whole_grid(session, full=True)
    place = {row.id: number for number, row in enumerate(whole)}
    return GridRecord(
        run_id=run.run_id,
        utc=run.utc,
        seconds=run.seconds,
        command=run.command,
        task=run.task,
        provenance=run.provenance,
        machine=run.machine,
        settings=run.settings,
        total=len(whole),
        grid=fingerprint(row.id for row in whole),
        asked=asked,
        checked=ranges(place[row.id] for row in run.rows),
        calls=sum(arm.correctness.checks for row in run.rows for arm in row.arms.values()),
        failed=tuple(
            FailedRow(id=row.id, position=place[row.id], verdict=row.verdict, reason=row.reason)
            for row in failures(run)
        ),
        opponents=opponents_outside(run),
        worst=_worst(session.config, run, {row.id: row for row in whole}),
        interrupted=run.partial,
        node=run.node,
        attempt=run.attempt,
    )


def _worst(config: Config, run: RunRecord, rows: dict[str, Workload]) -> dict[str, Worst]:
    found: dict[str, Worst] = {}
    failed = {row.id for row in failures(run)}
    for result in run.rows:
        if result.id in failed:
            continue
        for error in result.arms[run.settings.subject].correctness.outputs:
            dtype = output_spec(config.ops[result.op], rows[result.id], error.output).dtype
            new = Worst(used=error.used or 0.0, row=result.id, output=error.output, rel_l2=error.rel_l2)
            found[dtype] = worse_of(found.get(dtype), new)
    return found
