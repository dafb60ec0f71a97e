"""The record of a run of `kda model step`: one JSON line in `diffusion/models/docs/steps.jsonl`.

It holds samples and per-step errors, so intervals and the verdict on the numerics can be computed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence import stats
from kda_judge.evidence.run_record import Interval, Machine, MachineWatch
from kda_tools.models.calls import Call, Fallback
from kda_tools.models.known_models import Sizes

SCHEMA_VERSION: Final = 1
StepArm = Literal["upstream", "solution", "portable", "exact"]
MOST_NOISE: Final = 0.1
"""How far upstream's step may be from itself: beyond, the times of that mode say nothing."""
BOUND: Final = 1.5
"""Largest allowed ratio of the solution's error to eager to the larger of upstream's and of one rounding per output."""
Samples = tuple[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], ...]
"""One tuple for each process: microseconds of one step."""
Errors = tuple[float | None, ...]
"""One error for each denoising step; None if it is not finite."""


class Mode(Strict):
    """One way to run a step: `eager`, `graph` (a CUDA graph, replayed) or `compile` (torch.compile)."""

    refused: str | None = None
    """Why the class does not run this way; the other fields are then empty."""
    upstream: Samples = ()
    subject: Samples = ()
    """The arm's samples; sample i of a process was measured next to sample i of `upstream`."""
    again: Samples = ()
    """Upstream a second time: A/A."""
    speedup: Interval | None = None
    noise: Interval | None = None
    """The A/A ratio, upstream over upstream; it differs from 1 only by noise."""

    @property
    def too_noisy(self) -> bool:
        """Whether upstream's step differs from itself by more than `MOST_NOISE`."""
        return self.noise is not None and max(1 - self.noise.low, self.noise.high - 1) > MOST_NOISE

    def wrong(self) -> str | None:
        """An error text if the intervals do not follow from the samples; None if they do."""
        if self.refused is not None:
            return None
        expected = (stats.speedup(self.upstream, self.subject), stats.speedup(self.upstream, self.again))
        return None if (self.speedup, self.noise) == expected else "its intervals are not those of its samples"


class Share(Strict):
    """Time on the GPU in one step, by what the kernels were launched for."""

    total_us: Amount
    by_kind: dict[str, Amount]
    """Task folder, `attention`, `gemm` (with convolutions), `copy` or `other` -> microseconds."""
    launches: Count


class Profile(Strict):
    """Medians by kind over several eager steps of both arms, profiled in turn by torch.profiler."""

    upstream: Share
    subject: Share


class Curve(Strict):
    """How far the latents of two arms are apart after each denoising step."""

    relative: Errors
    """Norm of the difference over the norm of the second arm's latent."""
    psnr_db: Errors
    """Peak signal to noise in dB; the peak is the range of the second arm's latent. None if the latents are equal."""


class Drift(Strict):
    """Denoising with every arm from one seed, by Euler's method from pure noise to none."""

    steps: Count
    solution_upstream: Curve
    upstream_eager: Curve
    solution_eager: Curve
    rounding: Curve
    """What one more rounding of each output of the tasks' ops does: `rounded` against `plain`."""
    ratio: Amount | None
    """At the last step: the error of solution to eager over the larger of upstream to eager and `rounding`. None if the
    divisor is 0 or an error is not finite."""
    within: bool
    """Whether `ratio` is at most `BOUND`; also true if the divisor is 0 and the solution ends exactly at eager."""


class StepRecord(Strict):
    """One run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    utc: str
    seconds: Amount
    command: str
    model: str
    release: str
    arm: StepArm
    """The arm that is compared with upstream; `upstream`: none, the run only shows the parts of upstream's step."""
    sizes: Sizes
    tiny: bool
    """Whether the sizes are not those of production."""
    layers: Count
    layers_of_model: Count
    parameters: Count
    seed: Count
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40}|unknown)$")]
    dirty: bool
    hashes: dict[str, Digest]
    """Task folder -> hash of its solution and the parts of kda_runtime it imports; `models` -> hash of the files of the
    tools that run the step, and of the model's entry."""
    wheel: str
    """Package, version and sha256."""
    files: Digest
    """sha256 of the lock file that lists the wheel's files that may be read."""
    versions: dict[str, str]
    machine: Machine
    standins: tuple[str, ...]
    """Compiled packages that stand-ins replaced."""
    placeholders: tuple[str, ...]
    """Names that were imported and never called."""
    mounted: tuple[str, ...]
    """Fusions that the release's default quality mounts."""
    calls: tuple[Call, ...]
    fallbacks: tuple[Fallback, ...]
    difference: dict[str, Amount]
    """Relative error of one step's output, by pair of arms."""
    drift: Drift | None
    modes: dict[str, Mode]
    """Name of a mode -> its times; empty without a GPU, as nothing is timed."""
    profile: Profile | None
    peak_bytes: dict[str, Count]
    """Arm -> most memory that PyTorch held during an eager step."""
    noisy: tuple[str, ...]
    """Why these times cannot be published."""
    node: str | None = None
    """Name of the machine within a fleet."""
    attempt: Annotated[int, Field(gt=0)] | None = None
    """Number of the attempt, if a fleet repeats lost runs."""
    machine_watch: MachineWatch | None = None
    """The GPU during the run: a step at the power limit gains less than its kernels' times say."""


def log(folder: Path) -> Path:
    """Every run; `docs/steps.md` is generated from it."""
    return folder / "docs" / "steps.jsonl"
