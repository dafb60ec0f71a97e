"""What compute-sanitizer found: one JSON line in a task's `docs/sanitize.jsonl` per run of `kda sanitize`."""

from enum import Enum
from pathlib import Path
from typing import Literal

from kda_core.gpu import GpuState
from kda_core.records import Provenance
from kda_core.tasks import Task
from kda_core.toml import Strict


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
    errors: int
    warnings: int = 0
    report: str
    """The first one."""


class ToolRun(Strict):
    """One tool over all rows, in one process."""

    tool: Tool
    errors: int
    warnings: int
    """Hazards that racecheck takes to be intended; they do not fail the run."""
    report: str = ""
    """The first one, errors and warnings alike."""
    reports: tuple[str, ...] = ()
    """The first twenty; none in runs from before they were kept."""
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
    """Of compute-sanitizer."""
    rows: tuple[CheckedRow, ...]
    runs: tuple[ToolRun, ...]

    @property
    def errors(self) -> int:
        """Over all tools."""
        return sum(run.errors for run in self.runs)
