"""What compute-sanitizer found: one JSON line in a task's `docs/sanitize.jsonl` per run of `kda sanitize`."""

from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from kda_judge.contract.strict_models import Count, Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence.gpu_state import GpuState
from kda_judge.evidence.run_record import Provenance


def log(task: Task) -> Path:
    """Every sanitizer run of the task; `docs/sanitize.md` is generated from it."""
    return task.path / "docs" / "sanitize.jsonl"


class Tool(str, Enum):
    """The tools of compute-sanitizer."""

    MEMCHECK = "memcheck"
    """Accesses outside an allocation, or misaligned, in global, local and shared memory."""
    RACECHECK = "racecheck"
    """Hazards between threads of a block in shared memory. It does not look at global memory."""
    INITCHECK = "initcheck"
    """Reads of global memory that nothing has written."""
    SYNCCHECK = "synccheck"
    """Barriers that not all threads reach."""


class CheckedRow(Strict):
    """One row, and why it was chosen."""

    id: str
    op: str
    why: str


class Finding(Strict):
    """A row on which a tool reported errors, checked alone after the run over all rows had shown some."""

    row: str
    errors: Count
    warnings: Count = 0
    report: str
    """The first one."""


class ToolRun(Strict):
    """One tool over all rows, in one process."""

    tool: Tool
    errors: Count
    warnings: Count
    """Hazards that racecheck takes to be intended; they do not fail the run."""
    report: str = ""
    """The first report, of an error or a warning."""
    reports: tuple[str, ...] = ()
    """The first twenty reports; empty in runs from before they were kept."""
    findings: tuple[Finding, ...] = ()
    """Empty when the run was clean, or when only all rows together show the errors."""


class SanitizeRecord(Strict):
    """One run."""

    schema_version: Literal[1] = 1
    run_id: str
    utc: str
    command: str
    task: str
    provenance: Provenance
    gpu: GpuState
    version: str
    """Version of compute-sanitizer."""
    rows: tuple[CheckedRow, ...]
    runs: tuple[ToolRun, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "SanitizeRecord":
        rows = {row.id for row in self.rows}
        if not rows or len(rows) < len(self.rows) or len({run.tool for run in self.runs}) < len(self.runs):
            raise ValueError("rows, runs: expected at least one row, and each row and each tool once")
        for run in self.runs:
            where = f"runs: {run.tool.value}:"
            if bool(run.errors + run.warnings) != bool(run.report):
                raise ValueError(f"{where} {run.errors} errors and {run.warnings} warnings, expected a report of them")
            if run.reports and (run.report != run.reports[0] or len(run.reports) > run.errors + run.warnings):
                raise ValueError(f"{where} expected the first of {len(run.reports)} reports as `report`")
            if any(one.row not in rows for one in run.findings) or (run.findings and not run.errors):
                raise ValueError(f"{where} expected findings on rows of this run, and errors with them")
        return self

    @property
    def errors(self) -> int:
        """Number of errors over all tools."""
        return sum(run.errors for run in self.runs)
