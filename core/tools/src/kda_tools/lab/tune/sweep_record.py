"""What a sweep measured: one JSON line in a task's `docs/tuning.jsonl`, only ever appended to."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_judge.contract.strict_models import Strict
from kda_runtime.tuned_table import Value

Microseconds = Annotated[float, Field(gt=0)]


class Wrong(Strict):
    """A candidate that failed on a row, and how; it is never chosen."""

    candidate: Annotated[int, Field(ge=0)]
    """Place in the table's candidates."""
    reason: str


class Walls(Strict):
    """Calls of every candidate on one row by the host's clock; the tuples are in the candidates' order."""

    op: str
    kinds: tuple[str | None, ...]
    """What the host launches, such as `2 Launch`: calls of an op that are of one kind cost it the same."""
    median_us: tuple[Microseconds | None, ...]
    """Per call, back to back through a remembered plan; None where there is no device time either."""


class RowTimes(Strict):
    """Device time of every candidate on one row, and wall time; the tuples are in the candidates' order."""

    row: str
    features: dict[str, int | float]
    """What the solution gave `Table.select`."""
    bytes_moved: int
    copy_us: Microseconds
    """Streaming copy of as many bytes, timed in the same rounds."""
    median_us: tuple[Microseconds | None, ...]
    """Per call, over the rounds; None where the candidate is wrong or was not tried. Candidates with equal launches
    share one timing."""
    spread: tuple[float | None, ...]
    """Interquartile range of the rounds over their median."""
    wrong: tuple[Wrong, ...] = ()
    walls: Walls | None = None
    """None in sweeps from before wall times were taken."""


class TableTimes(Strict):
    """Every row that asks one table."""

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
    """Its uuid."""
    attempt: Annotated[int, Field(gt=0)]
    """Which try this is, where the fleet repeats what was lost."""
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
    """Rows are missing: chosen away, out of time, or interrupted."""
    noisy: tuple[str, ...]
    """Why the GPU's times may not be the kernels' own."""
    tables: tuple[TableTimes, ...]
    parts: tuple[SweepPart, ...] = ()
    """Of a sweep that a fleet measured on several GPUs; all candidates of a row are from one."""

    @property
    def usable(self) -> bool:
        """Whether it may become a table."""
        return not self.partial and not self.noisy
