"""What a sweep measured: one JSON line in a task's `docs/tuning.jsonl`, to which lines are only appended."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_judge.contract.strict_models import Strict
from kda_runtime.tuned_table import Value

Microseconds = Annotated[float, Field(gt=0)]


class Wrong(Strict):
    """A candidate that failed on a row, and how; it is never chosen."""

    candidate: Annotated[int, Field(ge=0)]
    """Index in the table's candidates."""
    reason: str


class Walls(Strict):
    """Wall time of every candidate on one row; the tuples are in the candidates' order."""

    op: str
    kinds: tuple[str | None, ...]
    """What a call launches, such as `2 Launch`. Calls of one op and one kind cost the host the same."""
    median_us: tuple[Microseconds | None, ...]
    """Wall time per call, back to back with a plan made before; None if there is no device time either."""


class RowTimes(Strict):
    """Device time of every candidate on one row, and wall time; the tuples are in the candidates' order."""

    row: str
    features: dict[str, int | float]
    """The features that the solution passed to `Table.select`."""
    bytes_moved: int
    copy_us: Microseconds
    """Time of a streaming copy of as many bytes, in the same rounds."""
    median_us: tuple[Microseconds | None, ...]
    """Device time per call, over the rounds; None if the candidate is wrong or was not tried. Candidates with equal
    launches share one timing."""
    spread: tuple[float | None, ...]
    """Interquartile range of the rounds over their median."""
    wrong: tuple[Wrong, ...] = ()
    walls: Walls | None = None
    """None in sweeps from before wall times were recorded."""


class TableTimes(Strict):
    """The times of every row for which the solution asks one table."""

    table: str
    candidates: tuple[dict[str, Value], ...]
    """Fields of each configuration."""
    rows: tuple[RowTimes, ...]

    @model_validator(mode="after")
    def _one_time_per_candidate(self) -> "TableTimes":
        for row in self.rows:
            several = [row.median_us, row.spread, *([row.walls.kinds, row.walls.median_us] if row.walls else [])]
            if any(len(values) != len(self.candidates) for values in several):
                raise ValueError(f"row {row.row!r}: expected {len(self.candidates)} times, one per candidate")
        return self


class SweepPart(Strict):
    """Rows of a sweep that one GPU of a fleet measured."""

    rows: tuple[str, ...]
    node: str
    """Name of the machine within the fleet."""
    gpu: str
    """The GPU's uuid."""
    attempt: Annotated[int, Field(gt=0)]
    """Number of this attempt, from 1; a fleet repeats lost ones."""
    utc: str


class SweepRecord(Strict):
    """One sweep of a task."""

    schema_version: Literal[1] = 1
    utc: str
    seconds: float
    command: str
    commit: str
    dirty: bool
    solution: str
    """Content hash of the solution without `tuned.toml`."""
    capability: int
    """Major number of the device's compute capability."""
    device: str
    versions: dict[str, str]
    rounds: int
    partial: bool
    """Whether rows are missing: not requested, out of time, or interrupted."""
    noisy: tuple[str, ...]
    """Why the GPU's times may not be the kernels' own."""
    tables: tuple[TableTimes, ...]
    parts: tuple[SweepPart, ...] = ()
    """Parts of a sweep that a fleet measured on several GPUs; all candidates of a row ran on one of them."""

    @property
    def usable(self) -> bool:
        """Whether a table may be derived from it."""
        return not self.partial and not self.noisy
