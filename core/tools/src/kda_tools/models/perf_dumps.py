"""Read the perf dumps that SGLang writes for a request (`--perf-dump-path`), and the folders of recorded runs.

A run is a folder: `run.json` with what all repeats share, one dump for each repeat, the log, and one image or clip as
proof. `run.json` is written last and has the sha256 of every dump; a folder without it is no run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict
from kda_tools.models.denoise_presets import Choice, Preset

RECORD = "run.json"
SCHEMA = 1


class Stage(BaseModel):
    """One stage of the pipeline, host time."""

    name: str
    duration_ms: float = Field(ge=0, allow_inf_nan=False)


class Step(BaseModel):
    """One denoise step, host time; synchronised with the GPU only if SGLang was asked to."""

    step: int
    duration_ms: float = Field(ge=0, allow_inf_nan=False)


class Snapshot(BaseModel):
    """Memory after a stage."""

    peak_reserved_mb: float


class Dump(BaseModel):
    """A dump in SGLang's own format, as 0.5.12.post1 and 0.5.23 write it; its other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    commit_hash: str
    tag: str
    total_duration_ms: float = Field(gt=0, allow_inf_nan=False)
    steps: list[Stage] = Field(min_length=1)
    denoise_steps_ms: list[Step]
    memory_checkpoints: dict[str, Snapshot] = {}

    @property
    def denoise_ms(self) -> float:
        """Sum of the stages that denoise: those named `...DenoisingStage` or `...RefinementStage`.

        The stage `...BeforeDenoisingStage` has the same ending, but comes before the denoising and does not count.
        """
        return sum(stage.duration_ms for stage in self.steps if denoises(stage.name))


def denoises(stage: str) -> bool:
    """Whether a stage of this name is part of the denoising."""
    return stage.endswith(("DenoisingStage", "RefinementStage")) and not stage.endswith("BeforeDenoisingStage")


def read_dump(path: Path) -> Dump:
    """The dump in this file.

    Raises:
        UsageError: it is no dump, or one without a denoising stage.
    """
    try:
        dump = Dump.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path}: expected a perf dump of SGLang, got no file") from None
    except ValidationError as error:
        raise UsageError(f"{path}: expected a perf dump of SGLang: {_first(error)}") from None
    if dump.denoise_ms <= 0:
        raise UsageError(f"{path}: expected a stage that denoises, got {', '.join(s.name for s in dump.steps)}")
    return dump


def _first(error: ValidationError) -> str:
    """What is wrong first, with its key."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


class Settings(Strict):
    """What two runs must share to be compared."""

    preset: str
    values: Preset
    choice: Choice
    release: str
    commit: str
    """SGLang's commit: `wheel VERSION`, or the commit of the installed checkout, with `+dirty` if it has changes."""
    gpu: str
    """Names of the GPUs."""
    driver: str
    prompt_sha256: str | None
    image_sha256: str | None


class Run(Strict):
    """One recorded run."""

    schema_version: int = SCHEMA
    label: str
    time: str
    applied: str | None
    """Which functions `kda apply` had replaced, as its environment said; None without it."""
    settings: Settings
    dumps: dict[str, str]
    """File -> sha256, one for each repeat."""
    proof: str
    """The image or clip of the first repeat."""


def sha256(path: Path) -> str:
    """The sha256 of the file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_run(folder: Path) -> tuple[Run, list[Dump]]:
    """A run and its dumps, each checked to be the one that was written.

    Raises:
        UsageError: no run is there, or a dump is missing or was changed.
    """
    path = folder / RECORD
    try:
        run = Run.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder}: expected a folder that kda model denoise wrote, with {RECORD}, got none") from None
    except ValidationError as error:
        raise UsageError(f"{path}: expected what kda model denoise writes: {_first(error)}") from None
    for name, expected in run.dumps.items():
        got = sha256(folder / name) if (folder / name).is_file() else "no file"
        if got != expected:
            raise UsageError(f"{folder / name}: expected the dump with sha256 {expected}, got {got}")
    return run, [read_dump(folder / name) for name in run.dumps]
