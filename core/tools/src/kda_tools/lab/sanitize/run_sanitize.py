"""`kda sanitize`: runs representative rows of an arm under compute-sanitizer.

Every tool gets one process for all rows, since starting one takes longer than most rows. If that run shows errors,
every row is checked again by itself, so that the record says which rows have errors.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from kda_judge.contract.errors import ArmFailed, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload
from kda_judge.evidence import gpu_state, provenance
from kda_judge.session import Request, Session, arm_spec, open_session
from kda_tools.lab.inspect import cuda_tools
from kda_tools.lab.inspect.arm_alone import Job
from kda_tools.lab.sanitize.sanitize_record import CheckedRow, Finding, SanitizeRecord, Tool, ToolRun

NAME = "compute-sanitizer"
INSTALL = f"Install the CUDA toolkit, which has it, and put the folder of `{NAME}` on PATH"
USUAL = (Tool.MEMCHECK, Tool.RACECHECK)
ORDER = (0, 0, 1)
"""Calls of a row: the first compiles and plans, the second comes from the plan, the third from the plan with tensors at
other addresses."""
FOUND = 66
"""Exit code that the tool is told to end with when it has reported an error."""
LAUNCH_TIMEOUT_S = 300
"""Seconds that the tool waits for the first CUDA call. By default it waits 10 s, which importing torch from a cold disk
can take, and then lets the program run on unchecked."""
PADDING = 4096
"""Bytes that memcheck keeps free after every allocation; without them an overrun may land in the next tensor."""
ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""One cudaMalloc for every tensor; from PyTorch's pool, an access outside a tensor would be inside an allocation."""
PREFIX = "========="
MOST_REPORTS = 20
"""Number of reports kept of a run; an overrun is reported once for every thread."""
SUMMARY = re.compile(rf"^{PREFIX} ERROR SUMMARY: (\d+) errors?$", re.MULTILINE)
RACES = re.compile(
    rf"^{PREFIX} RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)$", re.MULTILINE
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What the tool wrote about one process."""

    errors: int
    warnings: int
    reports: tuple[str, ...] = ()
    """The first `MOST_REPORTS` reports, without the prefix."""

    @property
    def first(self) -> str:
        """The first report; empty if there is none."""
        return next(iter(self.reports), "")


def open_sanitize(task: Task, rows: list[str], arm: str = "solution") -> Session:
    """An arm on this machine's GPU, with the frozen and grid rows that fit `rows`; if empty, the rule chooses them.

    Raises:
        MissingRequirement: no GPU.
    """
    if not gpu_state.has_gpu():
        raise MissingRequirement("sanitize needs an NVIDIA GPU, and none is visible here; `kda doctor` says more")
    return open_session(Request(task=task, rows=rows, subject=arm, device="cuda", allow_busy=True))


def tools_named(names: Sequence[str]) -> tuple[Tool, ...]:
    """The tools with these names, each once."""
    known = [tool.value for tool in Tool]
    for name in names:
        if name not in known:
            raise UsageError(f"--tool {name!r}: expected one of {', '.join(known)}")
    return tuple(Tool(name) for name in dict.fromkeys(names))


def sanitize(
    session: Session,
    rows: Sequence[tuple[Workload, CheckedRow]],
    wanted: Sequence[Tool],
    command: str,
    progress: Progress = lambda _: None,
) -> SanitizeRecord:
    """Check `rows` with every tool of `wanted`.

    Raises:
        MissingRequirement: no compute-sanitizer, or it cannot work here.
        ArmFailed: the arm raised without the tool having found anything.
    """
    task = session.request.task
    sanitizer = cuda_tools.find(NAME, INSTALL)
    started = datetime.now(timezone.utc)
    state = gpu_state.read_state(session.gpu or 0)
    source = provenance.collect(task, [session.settings.subject], state.driver)
    return SanitizeRecord(
        run_id=provenance.run_id(started),
        utc=provenance.utc(started),
        command=command,
        task=task.op,
        provenance=source,
        gpu=state,
        version=cuda_tools.version(sanitizer),
        rows=tuple(chosen for _, chosen in rows),
        runs=tuple(_run(session, sanitizer, [row for row, _ in rows], tool, progress) for tool in wanted),
    )


def _run(session: Session, sanitizer: Path, rows: Sequence[Workload], tool: Tool, progress: Progress) -> ToolRun:
    progress(f"{tool.value}: {len(rows)} rows")
    together = _check(session, sanitizer, rows, tool)
    findings = []
    if together.errors and len(rows) > 1:
        for row in rows:
            progress(f"{tool.value}: {together.errors} errors; {row.id} alone")
            alone = _check(session, sanitizer, [row], tool)
            if alone.errors:
                findings.append(_finding(row, alone))
    elif together.errors:
        findings.append(_finding(rows[0], together))
    return ToolRun(
        tool=tool,
        errors=together.errors,
        warnings=together.warnings,
        report=together.first,
        reports=together.reports,
        findings=tuple(findings),
    )


def _finding(row: Workload, report: Report) -> Finding:
    return Finding(row=row.id, errors=report.errors, warnings=report.warnings, report=report.first)


def _check(session: Session, sanitizer: Path, rows: Sequence[Workload], tool: Tool) -> Report:
    """One process of the tool over `rows`."""
    job = Job(
        arm=arm_spec(session, session.settings.subject),
        visits=cuda_tools.visits(session, rows),
        order=ORDER,
        draw_on="cpu",
    )
    with tempfile.TemporaryDirectory(prefix="kda-") as folder:
        file = Path(folder) / "log"
        ran = cuda_tools.run_below(command(sanitizer, tool, file), session, job, ALLOCATIONS)
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    report = parse(text)
    if report is None:
        message = "".join(f"\n    | {line}" for line in text.splitlines()[: cuda_tools.TAIL]) or ran.tail
        raise MissingRequirement(
            f"{NAME} --tool {tool.value}: ended with exit code {ran.code} and no summary; it has to run on a machine "
            f"whose driver lets it instrument kernels{message}"
        )
    missed = [row.id for row in rows if row.id not in ran.done]
    if missed and not report.errors:
        raise ArmFailed(
            f"arm {job.arm.name!r} failed on row {missed[0]!r} under {NAME} --tool {tool.value} "
            f"(exit code {ran.code}), which had found nothing until then{ran.tail}"
        )
    if ran.code not in (0, FOUND) and not report.errors:
        raise ArmFailed(f"{NAME} --tool {tool.value}: exit code {ran.code} after every row, without an error{ran.tail}")
    return report


def command(sanitizer: Path, tool: Tool, log_file: Path) -> list[str]:
    """The tool's command line, before the program to check. Compilers that the arm starts are not followed."""
    words = [
        str(sanitizer), "--tool", tool.value, "--log-file", str(log_file), "--error-exitcode", str(FOUND),
        "--target-processes", "application-only", "--launch-timeout", str(LAUNCH_TIMEOUT_S), "--show-backtrace", "no",
    ]  # fmt: skip
    if tool is Tool.MEMCHECK:
        # Errors of the CUDA API are PyTorch's and Triton's business: they try calls that may fail, and raise the rest.
        words += ["--padding", str(PADDING), "--report-api-errors", "no"]
    return words


def parse(text: str) -> Report | None:
    """What the tool's log says; None when it has no summary, so that nothing was checked."""
    races, errors = RACES.search(text), SUMMARY.search(text)
    if races is None and errors is None:
        return None
    reports: list[list[str]] = [[]]
    for line in text.splitlines():
        message = line.removeprefix(PREFIX)
        if message == line or message.strip() == "COMPUTE-SANITIZER":
            continue
        if " SUMMARY: " in message:
            break
        if message.strip():
            reports[-1].append(message.strip())
        elif reports[-1]:
            reports.append([])
    counts = (int(races[1]), int(races[2])) if races else (int(errors[1]) if errors else 0, 0)
    return Report(*counts, tuple("\n".join(report) for report in reports if report)[:MOST_REPORTS])
