"""Run a request and make its record: start the judge on a session's rows and arms, and gather the results."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kda_judge.arms import fork_server
from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.protocol import ArmSpec
from kda_judge.arms.upstream import is_intact
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import gpu_state, provenance
from kda_judge.evidence.derive import recompute
from kda_judge.evidence.gpu_watch import Watcher, completed
from kda_judge.evidence.run_record import AGAIN, LIMIT_ARM, ArmRow, Metric, Provenance, Repeat, RowResult, RunRecord
from kda_judge.judge.judge import Judge, Progress
from kda_judge.judge.oracle import load_reference
from kda_judge.judge.quiet_core import QuietCore
from kda_judge.judge.row_notes import RowNotes
from kda_judge.judge.run_setup import Setup
from kda_judge.judge.spent import Spent
from kda_judge.judge.verdict import result
from kda_judge.session import Kind, Request, Session, arm_spec, frozen_rows, open_session

CHANGED = "changed on disk during the run"
"""Follows the name of a part of the sources in a reason why a run is noisy."""


def begin(device: str) -> None:
    """Start the process that forks workers, so that it imports torch meanwhile; `device` is as in a `Request`."""
    fork_server.begin(_environment("cuda" if device != "cpu" and gpu_state.has_gpu() else "cpu"))


def run(
    request: Request | Session,
    rows: tuple[Workload, ...] | None = None,
    *,
    measure: bool = True,
    progress: Progress = lambda _row, _phase: None,
    command: str = "",
    limit_s: float | None = None,
    timed: Callable[[RowResult], None] = lambda _: None,
    spent: Callable[[str], None] = lambda _: None,
) -> RunRecord:
    """Verify (and with `measure` time) the rows; always returns a record, a partial one after Ctrl-C.

    Args:
        request: the user's request, or the session opened for it.
        rows: rows to run in place of the frozen ones that the request names.
        measure: on a GPU, also time the correct rows; the GPU is then watched during the whole run.
        progress: called with every row and the phase that it enters.
        command: the command line, for the record.
        limit_s: without `measure`, the seconds after which no further row begins. Rows that did not begin, or did not
            finish before Ctrl-C, are absent.
        timed: called with every row after its last sample. The checks that follow all timing are still to come.
        spent: called at the end with a line that says where the seconds went.

    Raises:
        UsageError: a wrong name, or a request that cannot be met.
        MissingRequirement: no GPU, or a busy one without `allow_busy`; an upstream file that cannot be had.
    """
    session = open_session(request) if isinstance(request, Request) else request
    rows = frozen_rows(session) if rows is None else rows
    if session.gpu is None or not measure:
        return _run(session, rows, measure, progress, command, limit_s, timed, spent)
    with Watcher(session.gpu) as watcher:
        record = _run(session, rows, measure, progress, command, limit_s, timed, spent)
        return completed(record, watcher.finish())


def _run(
    session: Session,
    rows: tuple[Workload, ...],
    measure: bool,
    progress: Progress,
    command: str,
    limit_s: float | None,
    timed: Callable[[RowResult], None],
    spent: Callable[[str], None],
) -> RunRecord:
    task, settings = session.request.task, session.settings
    started, begin = datetime.now(timezone.utc), time.monotonic()
    before = _gpu_before(session)
    ports, source = _hashes(session), source_of(session, before.driver if before else None)
    reference = load_reference(task)
    provenance.drop_bytecode(task, *provenance.ARMS)
    on_disk = provenance.on_disk(task)
    l2 = _l2_bytes(session.device)

    def record(notes: Iterable[RowNotes], counted: bool = True, **more: Any) -> RunRecord:
        results = [result(one, settings, session.kind, l2, measure, counted) for one in notes]
        made = RunRecord(
            run_id=provenance.run_id(started),
            utc=provenance.utc(started),
            seconds=(datetime.now(timezone.utc) - started).total_seconds(),
            command=command,
            task=task.op,
            provenance=source,
            machine=host.model_copy(update={"kind": session.kind, "before": before}),
            settings=settings,
            rows=tuple(_without_again(row) for row in results),
            headline=None,
            noise_floor={row.id: part for row in results if (part := _repeat(row, settings.against[0]))},
            node=session.request.node,
            attempt=session.request.attempt,
        ).model_copy(update=more)
        return recompute(made) if session.kind == "cuda" and measure else made

    def finished(notes: RowNotes) -> None:
        timed(record([dataclasses.replace(notes, complete=True)], counted=False).rows[0])

    partial = False
    host = provenance.host()
    with _cores(session) as cores:
        where = Spent(_until_idle if session.kind == "cuda" else lambda: None)
        arms = _processes(session, measure, where.answered)
        setup = Setup(session.config, reference, arms, settings, session.device, cores, where, l2)
        judge = Judge(setup, progress, finished)
        try:
            judge.run(rows, measure, until=None if limit_s is None else begin + limit_s)
        except KeyboardInterrupt:
            partial = True
        finally:
            try:
                after = gpu_state.read_state(session.gpu or 0, judge.pids()) if before else None
            finally:
                judge.stop()
                spent(where.line(len(rows), len(arms)))
    noted = [notes for notes in judge.notes.values() if measure or notes.complete or notes.failed]
    noisy = (
        *(gpu_state.noise(before, after) if before and after else ()),
        *(f"{part} {CHANGED}" for part in provenance.changed(task, on_disk)),
        *(f"upstream of {name} {CHANGED}" for name in _changed_upstream(session, arms)),
        *(f"{part} {CHANGED}" for part, digest in _hashes(session).items() if digest != ports[part]),
    )
    seen = {"kind": session.kind, "pinned_core": cores.usual, "before": before, "after": after}
    machine = host.model_copy(update=seen)
    return record(noted, machine=machine, noisy=noisy, partial=partial)


def source_of(session: Session, driver: str | None) -> Provenance:
    """Commit, hashes and versions of the files that a run of this session would use, read now."""
    source = provenance.collect(session.request.task, session.arms, driver)
    return source.model_copy(update={"hashes": source.hashes | _hashes(session)})


def _hashes(session: Session) -> dict[str, str]:
    """Content hashes of the arms that the request brings, by part."""
    return {
        f"{provenance.PORT}{name}": provenance.content_hash(path, ["**/*"], without=["README.md", "provenance.json"])
        for name, path in session.request.ports.items()
    }


def _changed_upstream(session: Session, arms: Mapping[str, ArmProcess]) -> list[str]:
    """The arms that ran on upstream files which are no longer what the lock file says."""
    config, folder = session.config, session.request.task.path
    roots = {name: arms[name].spec.upstream_root for name in session.arms if name in arms}
    pins = {name: config.upstream[config.arms[name].upstream or ""] for name, root in roots.items() if root}
    return [name for name, pin in pins.items() if not is_intact(Path(roots[name] or ""), folder / pin.files)]


# ---- preparing ------------------------------------------------------------------------------


def _until_idle() -> None:
    import torch

    torch.cuda.synchronize()


def _processes(session: Session, measure: bool, answered: Callable[[str, float], None]) -> dict[str, ArmProcess]:
    """One worker per arm, and with `measure` on a GPU the A/A twin and the limits."""
    settings = session.settings
    # The arms `beside` only add to a measured row: where only correctness is asked for, the others are enough.
    specs = {name: arm_spec(session, name) for name in session.arms if measure or name not in settings.beside}
    if measure and session.kind == "cuda":
        if session.request.again:
            specs[AGAIN] = arm_spec(session, settings.against[0]).model_copy(update={"name": AGAIN})
        if session.request.limits:
            specs[LIMIT_ARM] = ArmSpec(
                name=LIMIT_ARM, folder=str(session.request.task.path), module="", device=session.device, limit=True
            )
    timeout = float(session.config.bench.timeout_s)
    return {name: ArmProcess(spec, timeout, _environment(session.kind), answered) for name, spec in specs.items()}


def _environment(kind: Kind) -> dict[str, str]:
    """Environment variables that workers get in addition: on a CPU, Triton kernels run in Triton's interpreter."""
    return {} if kind == "cuda" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def _gpu_before(session: Session) -> gpu_state.GpuState | None:
    if session.gpu is None:
        return None
    state = gpu_state.read_state(session.gpu, gpu_state.holding())
    reason = gpu_state.busy(state)
    if reason is not None and not session.request.allow_busy:
        raise MissingRequirement(f"the GPU is busy: {reason}. Wait, or measure anyway with --allow-busy (marked noisy)")
    return state


@contextmanager
def _cores(session: Session) -> Iterator[QuietCore]:
    """The cores that workers are pinned to while timing, none on a CPU; make the GPU current."""
    cores = QuietCore(list(os.sched_getaffinity(0)) if session.gpu is not None else [])
    if session.gpu is not None:
        import torch

        torch.cuda.set_device(session.gpu)
    try:
        yield cores
    finally:
        cores.release()


def _l2_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return int(torch.cuda.get_device_properties(device).L2_cache_size)


# ---- the A/A twin ---------------------------------------------------------------------------


def _repeat(row: RowResult, first: str) -> Repeat | None:
    """The wall samples of the first opponent from two workers of the same generation."""
    walls = [row.arms[name].samples.get(Metric.WALL) for name in (first, AGAIN) if name in row.arms]
    if len(walls) != 2 or not all(walls):
        return None
    return Repeat(first=walls[0] or (), second=walls[1] or ())


def _without_again(row: RowResult) -> RowResult:
    arms: dict[str, ArmRow] = {name: arm for name, arm in row.arms.items() if name != AGAIN}
    return row.model_copy(update={"arms": arms})
