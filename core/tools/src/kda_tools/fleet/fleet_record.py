"""Record how long a run over many GPUs took: a JSON line of `docs/fleet.jsonl`, and a table in `docs/fleet.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence import record_log
from kda_judge.evidence.run_record import SharedHost
from kda_tools.fleet.live_view import WORKED, busy_s
from kda_tools.fleet.pieces import Job, NodeFacts
from kda_tools.fleet.run_folder import Plan, RunFolder
from kda_tools.publish.report import NONE, line
from kda_tools.publish.tables import replace_block
from kda_tools.publish.write_pages import write_pages

LOG, PAGE, BLOCK = Path("docs") / "fleet.jsonl", Path("docs") / "fleet.md", "runs"
HEAD = (
    "what",
    "GPUs",
    "ready after, s",
    "work, s",
    "GPU-seconds of work",
    "of one GPU's speed",
    "walls beside neighbours",
    "run",
)
FEW = 3
"""The most names or patterns that the table lists. Of more it gives the number; the log has them all."""
NAMED = {Job.MODEL: "models", Job.ADVERSARIES: "adversaries"}
"""Job -> what its names are; those of all other jobs are tasks."""
NOTHING = "\nNothing is recorded yet: `kda fleet run ... --record` on GPUs adds a line to `docs/fleet.jsonl`.\n"


class FleetRecord(Strict):
    """One run from its plan to its last piece, without an interruption. Its time limit may have left pieces."""

    schema_version: Literal[1] = 1
    utc: str
    """When the run was planned."""
    command: str
    job: Job
    names: tuple[str, ...]
    rows: tuple[str, ...] = ()
    parts: Annotated[int, Field(gt=0)] = 1
    missing: Count = 0
    """As in `Order`."""
    commit: str
    dirty: bool
    files: dict[str, Digest]
    """Op -> digest of all that decides its numbers."""
    gpu: str
    versions: dict[str, str]
    workers: Annotated[Count, Field(gt=0)]
    """Workers that had a piece."""
    nodes: Annotated[Count, Field(gt=0)]
    pieces: Annotated[Count, Field(gt=0)]
    left: Count = 0
    """Pieces that were not begun, since they would have ended after the time limit."""
    lost: Count
    """Attempts that were lost."""
    ready_s: Amount
    """Seconds from the plan to the first piece: workers come up, and a bench measures the neighbours' influence."""
    work_s: Amount
    """Seconds from the start of the first piece to the end of the work on the last one."""
    busy_s: Amount
    """Seconds in which workers had a piece, summed over the workers."""
    shared: dict[str, SharedHost] = {}
    """Node -> what its neighbours do to walls."""

    @property
    def same_work(self) -> tuple[object, ...]:
        """Key: times of runs with equal keys may be compared. Missing rows vary, and so does what a limit left."""
        once = self.utc if self.missing or self.left else ""
        return (self.job, self.names, self.rows, self.gpu, tuple(sorted(self.files.items())), once)


def recorded(folder: RunFolder, plan: Plan, facts: NodeFacts) -> FleetRecord | None:
    """The record of a run; None if it was resumed, since its seconds then mean nothing, or if no piece finished."""
    named = {name: [event for event in folder.events if event.event == name] for name in ("started", "lost")}
    if not folder.done or any(event.event == "resumed" for event in folder.events):
        return None
    begun, first, last = (
        next(event.moment for event in some if event.event in of)
        for of, some in ((("planned",), folder.events), (("started",), folder.events), (WORKED, folder.events[::-1]))
    )
    order = plan.order
    return FleetRecord(
        utc=folder.events[0].utc,
        command=order.command,
        job=order.job,
        names=order.names,
        rows=order.rows,
        parts=order.parts,
        missing=order.missing,
        commit=plan.commit,
        dirty=facts.dirty,
        files=plan.files,
        gpu=facts.gpu or "",
        versions=facts.versions,
        workers=len({event.worker for event in named["started"]}),
        nodes=len({event.node for event in named["started"]}),
        pieces=len(plan.pieces),
        left=len(plan.pieces) - len(folder.done),
        lost=len(named["lost"]),
        ready_s=round((first - begun).total_seconds(), 1),
        work_s=round((last - first).total_seconds(), 1),
        busy_s=round(busy_s(folder.events), 1),
        shared={event.node: event.shared for event in folder.events if event.shared is not None and event.node},
    )


def append(root: Path, record: FleetRecord) -> None:
    """Append the record, unless the log has it."""
    if record not in record_log.read(root / LOG, FleetRecord):
        record_log.append(root / LOG, record)


# ---- the page -----------------------------------------------------------------------------------


def publish(root: Path, check: bool) -> list[str]:
    """Make the table anew; returns the page if it changed, or with `check` if it differs."""
    path = root / PAGE
    if not path.is_file():
        return []
    old = path.read_text(encoding="utf-8")
    return write_pages({path: replace_block(old, BLOCK, table(record_log.read(root / LOG, FleetRecord)))}, check)


def table(records: Sequence[FleetRecord]) -> str:
    """A line for the latest run of each work on each number of GPUs, compared with the latest on one GPU.

    A line of an older version ends with the last whole piece, even if others were interrupted later: it is left out if
    its GPUs were busy for longer than its seconds.
    """
    latest = {(one.same_work, one.workers): one for one in records if one.busy_s <= one.work_s * one.workers + 1}
    if not latest:
        return NOTHING
    lines = [line(*HEAD), "|---" * len(HEAD) + "|\n"]
    for (work, workers), one in sorted(latest.items(), key=lambda item: (item[1].job.value, item[1].names, item[0][1])):
        alone = latest.get((work, 1))
        speed = f"{alone.work_s / one.work_s:.2f} of {workers}" if alone and workers > 1 and one.work_s else NONE
        held = one.work_s * one.workers
        busy = f"{one.busy_s:.0f}" + (f", {one.busy_s / held:.0%}" if held else "")
        lines.append(line(_what(one), _where(one), f"{one.ready_s:.0f}", f"{one.work_s:.0f}", busy,
                          speed, _walls(one), _run(one)))  # fmt: skip
    return "\n" + "".join(lines)


def _what(one: FleetRecord) -> str:
    some = f", rows {_few(one.rows, 'patterns')}" * bool(one.rows) + ", missing rows" * bool(one.missing)
    pieces = f"{one.pieces - one.left} of {one.pieces}" if one.left else str(one.pieces)
    names = _few(one.names, NAMED.get(one.job, "tasks"))
    return f"{one.job.value} {names}{some}; {pieces} piece{'s'[: one.pieces != 1]}"


def _few(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) <= FEW else f"of {len(names)} {what}"


def _where(one: FleetRecord) -> str:
    hosts = f" on {one.nodes} hosts" * (one.nodes > 1)
    return f"{one.workers} {one.gpu}{hosts}"


def _walls(one: FleetRecord) -> str:
    """Per row: how much longer walls are beside loaded neighbours, and how much they vary without any (A/A)."""
    found = []
    for shared in one.shared.values():
        for row, seen in shared.rows.items():
            if seen.beside.ratio is not None and seen.alone.ratio is not None:
                alone = seen.alone.ratio
                found.append(f"{row}: {1 / seen.beside.ratio.estimate:.3f}, A/A {alone.low:.3f} to {alone.high:.3f}")
    return "; ".join(found) or NONE


def _run(one: FleetRecord) -> str:
    marks = "; uncommitted changes" * one.dirty + f"; {one.lost} attempts lost" * bool(one.lost)
    return f"{one.utc}, commit {one.commit[:10]}; {one.versions.get('driver', '')}{marks}"
