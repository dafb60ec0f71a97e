"""The record that `kda model flow --record` writes: one JSON line in `diffusion/models/docs/flows.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Count, Strict
from kda_tools.models.known_models import Sizes


class StepFacts(Strict):
    """Which step a record is of."""

    schema_version: Literal[1] = 1
    run_id: str
    utc: str
    model: str
    release: str
    layers: int
    layers_of_model: int
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool


class StepFlow(StepFacts):
    """What one step has to move, fused as far as its dataflow allows; found without a GPU."""

    command: str
    sizes: Sizes
    kernels: tuple[Count, ...]
    """Bytes of every kernel that `dataflow.fused_bytes` leaves."""


def log(folder: Path) -> Path:
    """Every finding; `docs/ceilings.md` uses them."""
    return folder / "docs" / "flows.jsonl"
