"""What a task's `bench/tune.py` exports: `SWEEPS`, one `Sweep` per table of its solution.

SWEEPS = (Sweep(table=TUNED, candidates=tuple(grid()), lines=({"width": 512}, {})),)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from kda_judge.contract.errors import UsageError
from kda_judge.contract.workloads import Workload
from kda_runtime.tuned_table import C, Features, Table


def everywhere(_config: object, _features: Features) -> bool:
    """Try every candidate on every row."""
    return True


@dataclass(frozen=True)
class Sweep(Generic[C]):
    """The configurations that may be chosen for one table, and the table's lines."""

    table: Table[C]
    candidates: Sequence[C]
    """The configurations to try. Of equally fast ones the earlier may be chosen, see `choose_lines`."""
    lines: Sequence[Mapping[str, float]]
    """Bounds (`at_most`) of the table's lines in the order in which they are tried; the last one has none."""
    rows: Sequence[Workload] = ()
    """Rows to measure beside the frozen ones, for lines into which no frozen row falls."""
    applies: Callable[[C, Features], bool] = everywhere
    """Whether a candidate is tried on a row with these features. It is not if another method would take the call, or if
    it cannot win. A line takes a candidate only if it was tried on all of the line's rows."""
    in_graphs: bool = False
    """Whether callers use CUDA graphs, as servers of language models do; then device time alone decides."""

    def __post_init__(self) -> None:
        where = f"Sweep of table {self.table.name!r}"
        if not self.lines or self.lines[-1]:
            raise UsageError(f"{where}: lines: expected the last one to have no bound, got {list(self.lines)}")
        if not self.candidates or len(set(map(repr, self.candidates))) < len(self.candidates):
            raise UsageError(f"{where}: candidates: expected one or more, each once, got {len(self.candidates)}")

    def line_of(self, features: Features) -> int:
        """Index of the first line all of whose bounds hold."""
        for place, bounds in enumerate(self.lines):
            missing = sorted(bounds.keys() - features.keys())
            if missing:
                raise UsageError(
                    f"Sweep of table {self.table.name!r}: lines: expected features that the solution asks with, "
                    f"{sorted(features)}, got {missing}"
                )
            if all(features[name] <= bound for name, bound in bounds.items()):
                return place
        raise AssertionError("the last line has no bound")
