"""What a campaign records: one JSON line per event in a task's `docs/iterations.jsonl`."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence.run_record import Interval, RunRecord, Verdict
from kda_tools.campaign.decision import Test
from kda_tools.campaign.rules import Rules
from kda_tools.lab.grid.grid_record import GridRecord

SCHEMA_VERSION: Final = 1


def parse_utc(text: str) -> datetime:
    """Parse a time in the form of `provenance.utc`; a ValueError if it has another form."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)


def _dated(text: str) -> str:
    parse_utc(text)
    return text


Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
Samples = tuple[tuple[float, ...], ...]
"""One tuple for each generation of workers, microseconds per call."""


class Decision(str, Enum):
    """How an iteration ended."""

    KEEP = "keep"
    """Better than the best so far: it is the new best."""
    REVERT = "revert"
    """Correct, but not clearly better, or slower on a row: the files from before are restored."""
    FAILED = "failed"
    """Does not compile, wrong, crashed, INVALID, or interrupted twice: the files from before are restored."""
    CHECKED = "checked"
    """Verified and compiled without a GPU, not measured: it stays on the branch, and the best does not change."""


class Launched(Strict):
    """The first line of a campaign."""

    kind: Literal["launched"] = "launched"
    target: str
    agent: str
    base: Commit
    base_branch: str
    rules: Rules
    hashes: dict[str, Digest]
    """sha256 of the parts that must not change, the judge included."""
    warnings: tuple[str, ...]
    """What the machine lacked at the launch."""
    confined: bool
    """Whether bwrap kept the agent to its worktree."""


class Continued(Strict):
    """Another agent went on with the campaign."""

    kind: Literal["continued"] = "continued"
    agent: str
    confined: bool
    """Whether bwrap kept the agent to its worktree."""


class Change(Strict):
    """What an iteration changes against the commit that it started from."""

    files: tuple[str, ...]
    added: Count
    removed: Count
    """`added` and `removed` count lines in `solution/`."""
    patch: str
    """The diff of `solution/`, as git shows it."""


class Begun(Strict):
    """An iteration, recorded before it is measured so that none is lost."""

    kind: Literal["begun"] = "begun"
    iteration: Annotated[int, Field(gt=0)]
    attempt: Annotated[int, Field(gt=0)]
    """2 if the first attempt was interrupted."""
    hypothesis: str
    rows: tuple[str, ...]
    """Patterns of the rows that the hypothesis is about; empty: all measured rows."""
    direction: str | None
    """The change of direction, in words, if one was due."""
    profile: str | None
    """Id of the newest profile of the task at that time."""
    parent: Commit
    commit: Commit
    """The candidate; kept under `refs/kda/` however the iteration ends."""
    change: Change


class RowOutcome(Strict):
    """One row of an iteration. Its samples are `device` times, or `wall` times if no CUDA graph could be captured."""

    id: str
    verdict: Verdict
    reason: str
    metric: str | None = None
    """Which times decide, `device` or `wall`; None: not timed."""
    samples: dict[str, Samples] = {}
    """Arm -> samples: `solution` is the candidate, `best` the best so far."""
    medians: dict[str, Amount] = {}
    limit_us: Amount | None = None
    used: Amount | None = None
    """Largest share of the tolerance that an output element used."""
    ulps: dict[str, Count] = {}
    """Arm -> largest distance of the candidate's outputs from that arm's, in units in the last place."""


class Done(Strict):
    """The end of an iteration."""

    kind: Literal["done"] = "done"
    iteration: int
    attempt: int
    decision: Decision
    reason: str
    run_id: str | None
    gpu: str | None
    seconds: Amount
    rows: tuple[RowOutcome, ...] = ()
    test: Test | None = None
    wins: tuple[str, ...] = ()
    """Rows that are faster than with the best so far, each by its own 95% interval."""
    losses: tuple[str, ...] = ()
    against_baseline: Interval | None = None
    """Speedup over the baseline, geometric mean over all measured rows."""
    noisy: tuple[str, ...] = ()


class Claimed(Strict):
    """An iteration of another harness, as its agent wrote it down. Nothing of it was measured here."""

    kind: Literal["claimed"] = "claimed"
    iteration: Annotated[int, Field(gt=0)]
    title: str
    status: str
    """In that harness's words: `improved`, `regression`, `failed`."""
    speedup: float | None
    runtime_ms: float | None
    hypothesis: str = ""
    changes: str = ""
    analysis: str = ""
    commit: Commit | None = None
    """Its commit in that harness's repository; None if it has none."""
    patch: str = ""
    """The diff of the task's own files, as git shows it there."""
    taken: bool = False
    """Whether this version was brought into `solution/`."""


class Refused(Strict):
    """An iteration that was not begun, because a change is not allowed by the card."""

    kind: Literal["refused"] = "refused"
    hypothesis: str
    reason: str


class Ended(Strict):
    """A budget is spent: nothing begins any more."""

    kind: Literal["ended"] = "ended"
    reason: str


class Finding(Strict):
    """Something about the best version that has to be answered before it is promoted."""

    kind: Literal["finding"] = "finding"
    number: Annotated[int, Field(gt=0)]
    commit: Commit
    by: str
    """`program`, an agent's name, or a person's."""
    check: str
    where: str
    text: str


class Reviewed(Strict):
    """A review of the best version was finished."""

    kind: Literal["reviewed"] = "reviewed"
    commit: Commit
    by: str
    findings: Count


class Answered(Strict):
    """The answer to a finding."""

    kind: Literal["answered"] = "answered"
    finding: int
    by: str
    text: str


class Promoted(Strict):
    """The best version, verified afresh: recorded, or refused."""

    kind: Literal["promoted"] = "promoted"
    commit: Commit
    seeds: tuple[int, ...]
    """Fresh seeds, which nobody knew before."""
    grid_rows: Count
    verified_rows: Count
    run_id: str | None
    """Id of the run in the ledger; None if the promotion was refused."""
    reason: str
    wins: tuple[str, ...]
    losses: tuple[str, ...]
    models: tuple[str, ...]
    """Models whose rows are faster on the whole."""
    run: RunRecord | None = None
    """What was measured, on a GPU. If the promotion was refused, there is no other copy."""
    grid: GridRecord | None = None
    rows: tuple[RowOutcome, ...] = ()
    """The best version against the solution at the launch; `wins`, `losses` and `models` follow from these rows."""


Event = Annotated[
    Launched | Continued | Begun | Done | Claimed | Refused | Ended | Finding | Reviewed | Answered | Promoted,
    Field(discriminator="kind"),
]


class Entry(Strict):
    """One line of the record."""

    schema_version: Literal[1] = SCHEMA_VERSION
    campaign: str
    """Name of the campaign, such as `k03_h200_qknorm_rope`."""
    task: str
    utc: Annotated[str, AfterValidator(_dated)]
    previous: Digest
    """sha256 of the line before, so that an edited line shows."""
    event: Event
