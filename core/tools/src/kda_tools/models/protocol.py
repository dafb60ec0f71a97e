"""What `kda model step` and its workers say to each other: one JSON file each way."""

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
    """Task folder -> package of its export, of the arm `portable`."""
    check: bool
    """Also look at calls, outputs, memory and the profile: the first worker's work."""
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
    """One mode, timed in one process; a reason instead of samples where it does not run."""

    refused: str | None = None
    samples: dict[str, tuple[float, ...]] = {}
    """`upstream`, `subject` and `again` -> microseconds of a step."""


class Answer(WorkerAnswer):
    """What a worker found."""

    parameters: Count = 0
    calls: tuple[Call, ...] = ()
    flow: tuple[Count, ...] = ()
    """Bytes of every kernel that `dataflow.fused` leaves."""
    as_on_gpu: bool = False
    """Of a census: what the model calls for tensors on a GPU is among the calls."""
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
    """What the process did, and how long that took."""
