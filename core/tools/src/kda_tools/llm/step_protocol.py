"""Messages between `kda llm step` and its workers, and the record of a run: a line of `llm/docs/steps.jsonl`.

The record holds the samples, so intervals can be computed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence.run_record import Machine
from kda_tools.llm.served_phase import Phase as Phase  # noqa: PLC0414  # exported: the worker takes it from here
from kda_tools.models.calls import Call, Fallback
from kda_tools.models.protocol import Timed
from kda_tools.models.step_record import Mode, Profile
from kda_tools.models.worker_process import WorkerAnswer, WorkerRequest

SCHEMA_VERSION: Final = 1


class StepRequest(WorkerRequest):
    """What one worker shall do, in a fresh process."""

    tree: str | None
    """Folder of the wheel's verified files; None without a GPU."""
    release: str
    layers: Count
    seed: Count
    phases: tuple[Phase, ...]
    check: bool
    """Also look at calls, outputs and the profile: the first worker's work."""
    modes: tuple[str, ...]
    """What to time; empty without a GPU."""
    samples: Count


class Checked(Strict):
    """The calls of a step, and how far the arms' outputs are apart."""

    calls: tuple[Call, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    difference: Amount | None = None
    """Relative error of the solution's probabilities to upstream's."""
    same_token: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the sequences whose likeliest token is the same with both arms."""
    plain_difference: Amount | None = None
    """As `difference`, of the same step with PyTorch's own norms, activations and rope: what roundings alone do."""
    plain_same_token: Annotated[float, Field(ge=0, le=1)] | None = None
    profile: Profile | None = None
    """GPU time of a step, by the step's operations; None without a GPU."""


class PhaseAnswer(Strict):
    """One phase in one process."""

    left_out: str | None = None
    """Why it was not run."""
    checked: Checked | None = None
    timed: dict[str, Timed] = {}


class StepAnswer(WorkerAnswer):
    """What a worker found: one answer for each phase."""

    phases: tuple[PhaseAnswer, ...] = ()


class PhaseStep(Phase):
    """One phase of a run."""

    left_out: str | None = None
    checked: Checked
    modes: dict[str, Mode]
    """`graph` or `eager` -> its times; empty if nothing was timed."""


class LlmStepRecord(Strict):
    """One run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    utc: str
    seconds: Amount
    command: str
    model: str
    layers: Annotated[int, Field(gt=0)]
    layers_of_model: Annotated[int, Field(gt=0)]
    dtype: str
    seed: Count
    kernels: str
    """Source of upstream's operations: package, version and sha256 of its wheel, or `PyTorch`."""
    files: Digest | None
    """sha256 of the list of upstream files."""
    stand_ins: tuple[str, ...]
    """Operations that no server runs like this; both arms run them."""
    hashes: dict[str, Digest]
    """Task folder -> hash of its solution and the parts of kda_runtime it imports; `step` -> hash of the files that run
    the step and of the model's entry."""
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool
    versions: dict[str, str]
    machine: Machine
    noisy: tuple[str, ...]
    phases: tuple[PhaseStep, ...]


def log(folder: Path) -> Path:
    """Every run; the models' pages are generated from it."""
    return folder / "docs" / "steps.jsonl"
