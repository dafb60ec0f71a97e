"""The file `capture.json` that `kda llm capture` writes beside its traces: every phase with its calls and times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Amount, Count, Digest, Strict, read_json
from kda_tools.llm.served_phase import Phase

SCHEMA_VERSION: Final = 1
FILE = "capture.json"


class TensorOf(Strict):
    """One tensor that an operation was called with."""

    dtype: str
    shape: tuple[Count, ...]
    strides: tuple[Count, ...]


class OperationCall(Strict):
    """Calls of one operation with the same tensors."""

    name: str
    """Name of the operation's range in the trace, without the prefix."""
    tensors: tuple[TensorOf, ...]
    calls_a_step: Amount


class CapturedPhase(Phase):
    """What was captured of one kind of step."""

    steps: Count
    calls: tuple[OperationCall, ...]
    trace: str | None
    """File name of the trace, in the same folder; None without a GPU, or if the phase was left out."""
    eager_us: tuple[Amount, ...] = ()
    """Microseconds of a step whose kernels are launched one after the other; empty if nothing was timed."""
    graph_us: tuple[Amount, ...] = ()
    """The same step as a CUDA graph, replayed."""
    graph_refused: str | None = None
    """Why the step is no CUDA graph."""
    left_out: str | None = None
    """Why the phase was not captured."""


class CaptureRecord(Strict):
    """One capture."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    utc: str
    command: str
    model: str
    layers: Annotated[int, Field(gt=0)]
    layers_of_model: Annotated[int, Field(gt=0)]
    device: Literal["cpu", "cuda"]
    """`cpu`: the operations were PyTorch's, and nothing was timed."""
    gpu: str | None
    dtype: str
    seed: Count
    kernels: str
    """Whose operations ran: package, version and sha256 of its wheel, or `PyTorch`."""
    files: Digest | None
    """sha256 of the list of upstream files."""
    stand_ins: tuple[str, ...]
    """Operations that no server runs like this; never carded."""
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool
    versions: dict[str, str]
    noisy: tuple[str, ...]
    phases: tuple[CapturedPhase, ...]


def read(path: Path) -> CaptureRecord:
    """The record of a file or of the folder that holds it; a broken one is a UsageError that names file and key."""
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"{file}: file not found; `kda llm capture` writes one")
    return read_json(CaptureRecord, file)
