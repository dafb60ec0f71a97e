"""The record of a run of `kda llm bench`: one JSON line in `llm/docs/loads.jsonl`.

It holds the times of single requests; all shown figures are computed from them. The times are the client's. If the load
generator and the server run on one machine, they share its processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence.run_record import Interval

SCHEMA_VERSION: Final = 1
RESAMPLES, SEED = 2000, 20_261_123
WINDOWS = 20
"""Parts of equal length into which a run is cut for the interval of its throughput."""


class RequestTimes(Strict):
    """One request that succeeded; seconds since the first one was sent."""

    sent_s: Amount
    first_token_s: Amount | None
    """Time of the first token; None: the server sent all tokens at once."""
    done_s: Amount
    output_tokens: Count


class LoadRecord(Strict):
    """One run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    utc: str
    seconds: Amount
    command: str
    model: str
    engine: str
    """The owner of the models, as the server reports it; "unknown" if it does not."""
    load: str
    concurrency: Count
    requests: Count
    """Number of requests asked for."""
    data: str
    """`random INPUT/OUTPUT`, with numbers of tokens, or the name of the data file."""
    data_sha256: Digest | None = None
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool
    generator: str
    """Load generator and version."""
    cpu: str
    gpu: str | None
    """GPU of the machine that the load came from; the server should run on the same machine."""
    errored: Count
    incomplete: Count
    errors: dict[str, Count]
    """Error text -> number of failed requests with this text."""
    died: bool
    """Whether the server answered no more when the load had ended."""
    succeeded: tuple[RequestTimes, ...]

    @property
    def partial(self) -> bool:
        """Whether the server died or fewer requests ended than were asked for."""
        return self.died or self.incomplete > 0 or len(self.succeeded) + self.errored < self.requests


def log(folder: Path) -> Path:
    """Every recorded run."""
    return folder / "docs" / "loads.jsonl"


def first_token_ms(record: LoadRecord) -> Interval | None:
    """Median time from the request to its first token, milliseconds."""
    times = [(one.first_token_s - one.sent_s) * 1e3 for one in record.succeeded if one.first_token_s is not None]
    return median(times)


def inter_token_ms(record: LoadRecord) -> Interval | None:
    """Median over requests of (last token - first token) / (tokens - 1), milliseconds."""
    return median(
        [
            (one.done_s - one.first_token_s) * 1e3 / (one.output_tokens - 1)
            for one in record.succeeded
            if one.first_token_s is not None and one.output_tokens > 1
        ]
    )


def tokens_per_s(record: LoadRecord) -> Interval | None:
    """Output tokens a second: the mean over `WINDOWS` parts of the run, its interval from drawing parts anew.

    A request's tokens count as spread evenly over the time from its first token to its end.
    """
    if not record.succeeded:
        return None
    end = max(one.done_s for one in record.succeeded)
    if end <= 0:
        return None
    edges = np.linspace(0.0, end, WINDOWS + 1)
    tokens = np.zeros(WINDOWS)
    for one in record.succeeded:
        begin = one.sent_s if one.first_token_s is None else one.first_token_s
        length = max(one.done_s - begin, 1e-9)
        inside = np.minimum(edges[1:], begin + length) - np.maximum(edges[:-1], begin)
        tokens += one.output_tokens * np.clip(inside, 0.0, None) / length
    rates = tokens / (end / WINDOWS)
    return _interval(rates, np.mean)


def median(values: Sequence[float]) -> Interval | None:
    """The median with a 95% bootstrap interval; None without values."""
    return _interval(np.asarray(values), np.median) if values else None


def _interval(values: np.ndarray, statistic: object) -> Interval:
    assert callable(statistic)
    raw = np.random.PCG64(SEED).random_raw(RESAMPLES * len(values)) % len(values)
    drawn = statistic(values[raw.reshape(RESAMPLES, len(values)).astype(np.intp)], axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(estimate=float(statistic(values)), low=float(low), high=float(high))


def interval_text(interval: Interval | None) -> str:
    """Estimate and interval as text; a dash if there is none."""
    if interval is None:
        return "-"
    first, low, high = (
        f"{one:.4g}" if one < 1000 else f"{one:.0f}" for one in (interval.estimate, interval.low, interval.high)
    )
    return f"{first} [{low}, {high}]"
