"""Record how long a run over many GPUs took: a JSON line of `docs/fleet.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence import record_log
from kda_judge.evidence.run_record import SharedHost
from kda_tools.fleet.live_view import WORKED, busy_s
from kda_tools.fleet.pieces import Job, NodeFacts
from kda_tools.fleet.run_folder import Plan, RunFolder

LOG = Path("docs") / "fleet.jsonl"


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
    if not folder.complete_pieces or any(event.event == "resumed" for event in folder.events):
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
        left=len(plan.pieces) - len(folder.complete_pieces),
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
