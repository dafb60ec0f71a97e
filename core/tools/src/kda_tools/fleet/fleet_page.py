"""The table of runs over many GPUs in `docs/fleet.md`, made from `docs/fleet.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kda_judge.evidence import record_log
from kda_tools.fleet.fleet_record import LOG, FleetRecord
from kda_tools.fleet.pieces import Job
from kda_tools.fleet.same_verdicts import count_agreeing_rows
from kda_tools.publish.report import NONE, table_md
from kda_tools.publish.tables import replace_block
from kda_tools.publish.write_pages import write_pages

PAGE, BLOCK = Path("docs") / "fleet.md", "runs"
HEAD = (
    *("what", "GPUs", "ready after, s", "work, s", "GPU-seconds of work", "of one GPU's speed"),
    *("rows that agree", "walls beside neighbours", "run"),
)
FEW = 3
"""The most names or patterns that the table lists. Of more it gives the number; the log has them all."""
NAMED = {Job.MODEL: "models", Job.ADVERSARIES: "adversaries"}
"""Job -> what its names are; those of all other jobs are tasks."""
NOTHING = "\nNothing is recorded yet: `kda fleet run ... --record` on GPUs adds a line to `docs/fleet.jsonl`.\n"


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
    lines = []
    for (work, workers), one in sorted(latest.items(), key=lambda item: (item[1].job.value, item[1].names, item[0][1])):
        alone = latest.get((work, 1))
        beside = alone if workers > 1 else None
        speed = f"{beside.work_s / one.work_s:.2f} of {workers}" if beside and one.work_s else NONE
        held = one.work_s * one.workers
        busy = f"{one.busy_s:.0f}" + (f", {one.busy_s / held:.0%}" if held else "")
        lines.append((_what(one), _where(one), f"{one.ready_s:.0f}", f"{one.work_s:.0f}", busy,
                      speed, _same(beside, one), _walls(one), _run(one)))  # fmt: skip
    return "\n" + table_md(HEAD, lines)


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


def _same(alone: FleetRecord | None, one: FleetRecord) -> str:
    """Of a bench beside the one on a single GPU: how many rows say the same, of how many."""
    agree, rows = count_agreeing_rows(alone, one) if alone and one.job is Job.BENCH else (0, 0)
    return f"{agree} of {rows}" if rows else NONE


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
