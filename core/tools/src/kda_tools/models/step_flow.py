"""What `kda model flow --record` leaves behind: one JSON line in `diffusion/models/docs/flows.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Count, Strict
from kda_tools.models.known_models import Sizes


class StepFlow(Strict):
    """What one step has to move at least, fused as far as its dataflow allows; found without a GPU."""

    schema_version: Literal[1] = 1
    run_id: str
    utc: str
    command: str
    model: str
    release: str
    sizes: Sizes
    layers: int
    layers_of_model: int
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool
    kernels: tuple[Count, ...]
    """Bytes of every kernel that `dataflow.fused` leaves."""


def log(folder: Path) -> Path:
    """Every finding; `docs/ceilings.md` uses them."""
    return folder / "docs" / "flows.jsonl"
