"""Messages between `kda model step` and its workers: one JSON file as request and one as answer."""

from __future__ import annotations

from enum import Enum

from kda_judge.contract.strict_models import Amount, Count, Strict
from kda_tools.models.calls import Call, Fallback
from kda_tools.models.known_models import Sizes
from kda_tools.models.step_record import Drift, Profile, StepArm
from kda_tools.models.worker_process import WorkerAnswer, WorkerRequest


class Census(str, Enum):
    """What tensors answer that are asked whether they are on a GPU."""

    AS_ON_GPU = "as on a GPU"
    AS_ON_CPU = "as on a CPU"


class Request(WorkerRequest):
    """What one worker shall do, in a fresh process."""

    release: str
    tree: str
    """Folder of the wheel's verified files."""
    sizes: Sizes
    layers: dict[str, Count]
    seed: Count
    arm: StepArm
    exports: dict[str, str]
    """Task folder -> folder of its export, a package; only for the arm `portable`."""
    check: bool
    """Whether to record calls, outputs, memory and the profile too; only the first worker does."""
    denoise: Count
    """Steps of the denoising; 0: none."""
    modes: tuple[str, ...]
    """What to time; empty without a GPU."""
    samples: Count
    trace: str | None = None
    """File for a profile of upstream's step, made after all timing."""
    flow: bool = False
    """Only find what a step has to move, at any size and without computing it."""
    census: Census | None = None
    """Only find the calls of a step, at any size and without computing it."""


class Timed(Strict):
    """Times of one mode in one process; a reason instead of samples if the mode does not run."""

    refused: str | None = None
    samples: dict[str, tuple[float, ...]] = {}
    """`upstream`, `subject` and `again` -> microseconds of a step."""


class Answer(WorkerAnswer):
    """What a worker found."""

    parameters: Count = 0
    calls: tuple[Call, ...] = ()
    flow: tuple[Count, ...] = ()
    """Bytes of every kernel that `dataflow.fused_bytes` leaves."""
    as_on_gpu: bool = False
    """Whether the calls of a census are those for tensors on a GPU."""
    fallbacks: tuple[Fallback, ...] = ()
    difference: dict[str, Amount] = {}
    drift: Drift | None = None
    profile: Profile | None = None
    peak_bytes: dict[str, Count] = {}
    standins: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()
    mounted: tuple[str, ...] = ()
    timed: dict[str, Timed] = {}
    seconds: dict[str, Amount] = {}
    """Part of the work -> seconds that it took."""
