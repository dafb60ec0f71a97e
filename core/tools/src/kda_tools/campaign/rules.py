"""The rules of a campaign: `campaign.toml` beside a task's contract, or these defaults."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import select

FILE = "campaign.toml"
Number = Annotated[int, Field(gt=0, le=10_000)]


class Rules(Strict):
    """What a campaign may spend and what an iteration has to show. They are fixed when the campaign is launched."""

    tries: Annotated[int, Field(gt=0, le=500)] = 40
    """Measurements, repeated ones included. They share the chance of a false keep: see `decision`."""
    hours: Annotated[float, Field(gt=0, le=10_000)] = 24.0
    """Hours from the launch, after which nothing begins."""
    stall: Number = 3
    """Iterations without improvement after which the next one needs a new profile and a change of direction."""
    changed_lines: Number = 600
    """Most lines that one iteration may add and remove in `solution/`: one idea is smaller."""
    rows: tuple[str, ...] = ()
    """Patterns of the rows that an iteration measures; empty: every production row."""
    generations: Annotated[int, Field(ge=5, le=100)] = 5
    """Generations of workers. A process keeps its speed, so more generations help and more samples hardly do. With
    fewer than 5, more than 5% of campaigns may keep a candidate that is no better."""
    samples: Number = 4
    """Samples per generation, row and arm."""
    sample_us: Annotated[int, Field(gt=0, le=1_000_000)] = 2_500
    """Length of one sample, in microseconds."""
    least_gain: Annotated[float, Field(gt=0, lt=1)] = 0.002
    """A smaller gain is not kept, however sure it is."""
    row_loss: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """No row may be slower by more than this, by its whole 95% interval."""
    prompt_tokens: Annotated[int, Field(ge=2_000, le=1_000_000)] = 24_000
    """Budget of the prompt, in tokens."""


def read_rules(task: Task) -> Rules:
    """The task's own rules, or the defaults; a UsageError names file and key of what is wrong."""
    path = task.path / FILE
    rules = validate(Rules, read_toml(path), path) if path.is_file() else Rules()
    try:
        select(task.workloads, list(rules.rows))
    except UsageError as error:
        raise UsageError(f"{path}: key 'rows': {str(error).removeprefix('--rows ')}") from None
    return rules
