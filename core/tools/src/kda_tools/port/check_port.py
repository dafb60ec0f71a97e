"""Checks a port before it is written: syntax, imports, and the task's grid through the ported functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.bench import run
from kda_judge.contract.errors import UsageError
from kda_judge.evidence.run_record import RowResult, RunRecord, Verdict
from kda_judge.session import Request, Session, open_session
from kda_tools.lab.grid.grid_record import agrees
from kda_tools.lab.grid.grid_rows import grid_rows, grid_session
from kda_tools.port.port_task import Port
from kda_tools.port.ported_arm import NAME, write_arm
from kda_tools.port.tree_files import LEFT, REFUSED

REFUSALS = tuple(f"arm 'baseline' raised {kind}: " for kind in ("AssertionError", "RuntimeError", "ValueError"))
"""How the reason of a row begins whose call SGLang's own function refuses."""


@dataclass(frozen=True)
class Grid:
    """Results of a run of the grid through a port."""

    device: str
    taken: tuple[RowResult, ...]
    """Rows whose calls the port's kernels did correctly."""
    left: tuple[RowResult, ...]
    """Rows whose calls go to SGLang's own code, which does not run without a GPU."""
    refused: tuple[RowResult, ...]
    """Rows that SGLang's own function refuses, which a gate or the judge calls: nobody can make such a call."""
    failed: tuple[RowResult, ...]
    asked: int
    """Number of the grid's other rows; a time limit may have left some of them unchecked."""

    def lines(self) -> list[str]:
        """A summary for the terminal."""
        told = [f"grid on the {self.device}: {len(self.taken)} of {self.asked} rows right, done by the port's kernels"]
        if self.left:
            told.append(f"  {len(self.left)} rows go to SGLang's own code, which was not run without a GPU")
        if self.refused:
            told.append(f"  {len(self.refused)} more rows are left out: SGLang's own function refuses their calls")
        return told + [f"  {row.id}: {row.verdict.value}: {row.reason}" for row in self.failed]


def check_syntax(port: Port) -> None:
    """Check that every Python file of the patch parses.

    Raises:
        UsageError: one does not; names file and line.
    """
    for path, text in port.patch.texts().items():
        if path.endswith(".py"):
            try:
                ast.parse(text, path)
            except SyntaxError as error:
                raise UsageError(f"{path}:{error.lineno}: the patch does not parse: {error.msg}") from None


@contextmanager
def arm(port: Port) -> Iterator[Path]:
    """The port as an arm, in a temporary folder."""
    with TemporaryDirectory(prefix="kda-port-") as folder:
        yield write_arm(port, Path(folder) / f"ported_{port.task.op}")


def run_grid(
    port: Port,
    folder: Path,
    rows: list[str],
    device: str,
    thin: bool = False,
    limit_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Grid:
    """Run the grid through the ported functions of the arm in `folder`.

    On a CPU the grid has fewer and smaller rows; `thin` leaves out rows on a GPU as well. No row begins after
    `limit_s` seconds. `say` gets a line at the start.
    """
    request = Request(task=port.task, rows=rows, subject=NAME, device=device, allow_busy=True, ports={NAME: folder})
    session = grid_session(open_session(request))
    chosen = tuple(row for row in grid_rows(session, full=False, thin=thin) if row.op not in port.unported_ops)
    absent = {row.id: port.lacking.get(row.op, frozenset()) & {*row.inputs, *row.scalars} for row in chosen}
    if names := sorted(frozenset().union(*absent.values())):
        count = sum(map(bool, absent.values()))
        say(f"{count} rows are left out: their calls have {', '.join(names)}, which the tree's function does not")
        chosen = tuple(row for row in chosen if not absent[row.id])
    most = f", {limit_s:g} s at most" if limit_s is not None else ""
    say(f"grid: {len(chosen)} rows on the {_place(session)}{most} ...")
    return _sorted(session, run(session, chosen, measure=False, limit_s=limit_s), len(chosen))


def _sorted(session: Session, record: RunRecord, asked: int) -> Grid:
    left = tuple(row for row in record.rows if row.verdict is Verdict.ERROR and LEFT in row.reason)
    refused = tuple(row for row in record.rows if row.verdict is Verdict.ERROR and _is_refused(row.reason))
    bad = (Verdict.INCORRECT, Verdict.INVALID, Verdict.ERROR, Verdict.TIMEOUT)
    failed = tuple(
        row for row in record.rows if row.verdict in bad and row not in (*left, *refused) and not agrees(row, record)
    )
    taken = tuple(row for row in record.rows if row not in (*left, *refused, *failed))
    return Grid(_place(session), taken, left, refused, failed, asked - len(refused))


def _is_refused(reason: str) -> bool:
    """Whether SGLang's own function refused the call: before a gate compares bits, or as the baseline of the grid.

    A baseline that lacks a package, or ends with an error of CUDA, refuses nothing.
    """
    return REFUSED in reason or (reason.startswith(REFUSALS) and "CUDA" not in reason)


def _place(session: Session) -> str:
    return "GPU" if session.kind == "cuda" else "CPU, in Triton's interpreter"
