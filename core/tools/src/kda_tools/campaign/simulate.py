"""Simulate how often a campaign keeps a candidate that is no better, with the noise of recorded runs.

A simulated try compares a kernel with itself. For each arm and generation of workers, the levels of all rows are drawn
together from one recorded generation of either arm: rows that are slow together stay so. The samples around the levels
come from that generation, too. A recorded level is the deviation of a generation's median from the mean over its run,
widened by `sqrt(K / (K - 1))`, since the generation itself is part of that mean. The two arms are drawn independently.
In a run they take turns and share the drift, so real tries are quieter.

Models that are worse than the recorded noise are simulated, too: one level for all rows at once, and levels with heavy
tails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log1p, sqrt
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kda_judge.contract.strict_models import Digest, Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence import ledger, provenance
from kda_judge.evidence.run_record import Metric, RunRecord
from kda_tools.campaign import decision
from kda_tools.campaign.rules import Rules

FILE = "campaign_noise.jsonl"
"""The file in `docs/` of all recorded simulations."""
SEED = 20_261_123
GAINS = (0.005, 0.01, 0.02)
"""True gains on all rows; for each, the share of tries that are kept is simulated, too."""
AT_ONCE = 20
"""Campaigns in one array: 48 rows need 25 MB each."""
SUBJECTS = ("baseline", "solution")
Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]
"""(generator, tries) -> log times [tries, K, rows] of one arm."""


@dataclass(frozen=True)
class Noise:
    """A source of an arm's times."""

    name: str
    rows: int
    runs: tuple[str, ...]
    """Recorded runs; empty for a model."""
    draw: Draw


class Simulated(Strict):
    """One line of the table."""

    noise: str
    rows: int
    runs: tuple[str, ...]
    campaigns: int
    false_keeps: int
    """Campaigns that kept a candidate, although none was better."""
    false_keeps_alone: int
    """The same if every try has the whole risk, as if it were the only one."""
    kept: dict[str, float]
    """True gain -> share of single tries that are kept."""


class Simulation(Strict):
    """One recorded simulation."""

    schema_version: Literal[1] = 1
    utc: str
    alpha: float
    rules: Rules
    decision: Digest
    """sha256 of the `decision.py` that was simulated."""
    results: tuple[Simulated, ...]


def simulate(tasks: Sequence[Task], rules: Rules, campaigns: int) -> Simulation:
    """Simulate campaigns on the noise of every task that has clean recorded runs, and on the models."""
    noises = [found for task in tasks if (found := recorded(task, rules)) is not None]
    results = tuple(_simulated(noise, rules, campaigns) for noise in (*noises, *models(rules)))
    return Simulation(
        utc=provenance.utc(), alpha=decision.ALPHA, rules=rules, decision=decision_hash(), results=results
    )


def decision_hash() -> str:
    """sha256 of `decision.py`, comments included."""
    return hashlib.sha256(Path(decision.__file__).read_bytes()).hexdigest()


def recorded(task: Task, rules: Rules) -> Noise | None:
    """Noise of the device times of a task's recorded runs; None if no clean run has them."""
    levels, within, runs = [], [], []
    for record in ledger.read(task.ledger):
        if record.machine.kind != "cuda" or record.noisy or record.partial:
            continue
        for arm in SUBJECTS:
            if (found := _deviations(record, task, arm)) is not None:
                levels.append(found[0])
                within.append(found[1])
                runs.append(record.run_id)
    if not levels:
        return None
    fewest = min(one.shape[2] for one in within)  # runs differ in their number of samples
    level: Floats = np.concatenate(levels)  # [generations, rows]
    spread: Floats = np.concatenate([one[:, :, :fewest] for one in within])  # [generations, rows, samples]

    def draw(rng: np.random.Generator, tries: int) -> Floats:
        which = rng.integers(len(level), size=(tries, rules.generations))
        picks = rng.integers(spread.shape[2], size=(rules.samples, tries, rules.generations, level.shape[1]))
        rows = np.arange(level.shape[1])
        return level[which] + np.median(spread[which[None, :, :, None], rows, picks], axis=0)

    return Noise(f"device times of {task.op}", level.shape[1], tuple(dict.fromkeys(runs)), draw)


def models(rules: Rules) -> tuple[Noise, ...]:
    """Noise models that are worse than the recorded noise."""

    def together(rng: np.random.Generator, tries: int) -> Floats:
        return np.repeat(rng.normal(0, 0.01, (tries, rules.generations, 1)), 10, axis=2)

    def heavy(rng: np.random.Generator, tries: int) -> Floats:
        return rng.standard_t(2, (tries, rules.generations, 10)) * 0.002

    def late(rng: np.random.Generator, tries: int) -> Floats:
        return rng.exponential(0.01, (tries, rules.generations, 1))

    return (
        Noise("model: all rows share a normal level of 1%", 10, (), together),
        Noise("model: each row's level from Student's t with 2 degrees of freedom, 0.2%", 10, (), heavy),
        Noise("model: one row, exponential level of 1%", 1, (), late),
    )


def _deviations(record: RunRecord, task: Task, arm: str) -> tuple[Floats, Floats] | None:
    """Levels [generations, rows] and samples around them [generations, rows, samples], of production rows."""
    wanted = {row.id for row in task.workloads if row.production}
    times = []
    for row in record.rows:
        if row.id in wanted:
            samples = row.arms[arm].samples.get(Metric.DEVICE, ()) if arm in row.arms else ()
            if len({len(part) for part in samples}) != 1 or len(samples) < 2:
                return None
            times.append(samples)
    shape: tuple[int, ...] = np.shape(times)
    if len(times) != len(wanted) or 0 in shape:
        return None
    logs: Floats = np.log(np.asarray(times)).transpose(1, 0, 2)
    medians = np.median(logs, axis=2)
    count = medians.shape[0]
    return (medians - medians.mean(axis=0)) * sqrt(count / (count - 1)), logs - medians[:, :, None]


def _simulated(noise: Noise, rules: Rules, campaigns: int) -> Simulated:
    rng = np.random.Generator(np.random.PCG64(SEED))
    share, least = decision.ALPHA / rules.tries, log1p(rules.least_gain)
    kept = alone = 0
    for start in range(0, campaigns, AT_ONCE):
        count = min(AT_ONCE, campaigns - start)
        means = _tries(noise, rng, count * rules.tries)
        large = means.mean(axis=1) > least
        for place, level in enumerate((share, decision.ALPHA)):
            hits = ((decision.bound(means, level) > 0) & large).reshape(count, rules.tries).any(axis=1).sum()
            kept, alone = (kept + int(hits), alone) if place == 0 else (kept, alone + int(hits))
    single = _tries(noise, rng, 2_000)
    found = {}
    for gain in GAINS:
        better = single + log1p(gain)
        found[f"{gain:g}"] = float(((decision.bound(better, share) > 0) & (better.mean(axis=1) > least)).mean())
    return Simulated(
        noise=noise.name,
        rows=noise.rows,
        runs=noise.runs,
        campaigns=campaigns,
        false_keeps=kept,
        false_keeps_alone=alone,
        kept=found,
    )


def _tries(noise: Noise, rng: np.random.Generator, tries: int) -> Floats:
    """[tries, K] mean log ratios of two arms that are the same."""
    found: Floats = (noise.draw(rng, tries) - noise.draw(rng, tries)).mean(axis=2)
    return found
