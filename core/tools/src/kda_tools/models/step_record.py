"""What a run of `kda model step` leaves behind: one JSON line in `diffusion/models/docs/steps.jsonl`.

Samples and per-step errors are kept; intervals and the verdict on the numerics can be computed again from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Digest, Strict
from kda_judge.evidence import stats
from kda_judge.evidence.run_record import Interval, Machine
from kda_tools.models.calls import Call, Fallback
from kda_tools.models.known_models import Sizes

SCHEMA_VERSION: Final = 1
StepArm = Literal["upstream", "solution", "portable", "exact"]
BOUND: Final = 1.5
"""How much further from eager the solution may end than the larger of upstream and one rounding of each output."""
Samples = tuple[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], ...]
"""One tuple for each process: microseconds of one step."""
Errors = tuple[float | None, ...]
"""One number for each denoising step; None where it is not finite."""


class Mode(Strict):
    """One way to run a step: `eager`, `graph` (a CUDA graph, replayed) or `compile` (torch.compile)."""

    refused: str | None = None
    """Why the class does not run this way; the other fields are then empty."""
    upstream: Samples = ()
    subject: Samples = ()
    """Sample i of a process was taken right beside sample i of `upstream`."""
    again: Samples = ()
    """Upstream a second time: A/A."""
    speedup: Interval | None = None
    noise: Interval | None = None
    """A/A: upstream over upstream, 1 but for noise."""

    def wrong(self) -> str | None:
        """That the intervals do not follow from the samples; None where they do."""
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
    """Steps of either arm under torch.profiler, eager, in turn: of each kind the median."""

    upstream: Share
    subject: Share


class Curve(Strict):
    """How far the latents of two arms are apart after each denoising step."""

    relative: Errors
    """Norm of the difference over the norm of the second arm's latent."""
    psnr_db: Errors
    """Peak signal to noise; the peak is the second arm's range. None where the latents are equal."""


class Drift(Strict):
    """Denoising with every arm from one seed, by Euler's method from pure noise to none."""

    steps: Count
    solution_upstream: Curve
    upstream_eager: Curve
    solution_eager: Curve
    rounding: Curve
    """What one more rounding of each output of the tasks' ops does: `rounded` against `plain`."""
    ratio: Amount | None
    """Last step: solution to eager over the larger of upstream to eager and `rounding`. None: nothing to divide by."""
    within: bool
    """Whether that is at most `BOUND`; also where the solution ends where eager does."""


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
    """What stands against upstream; `upstream`: nothing, the run shows what upstream's step is made of."""
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
    """Task folder -> its solution with what it imports of kda_runtime; `models` -> this room and the model's entry."""
    wheel: str
    """Package, version and sha256."""
    files: Digest
    """Of the lock file that lists what was read of it."""
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
    """Empty where nothing was timed: there was no GPU."""
    profile: Profile | None
    peak_bytes: dict[str, Count]
    """Arm -> most memory that PyTorch held during an eager step."""
    noisy: tuple[str, ...]
    """Why these times cannot be published."""
    node: str | None = None
    """Name of the machine within a fleet."""
    attempt: Annotated[int, Field(gt=0)] | None = None
    """Which try this is, where a fleet repeats what was lost."""


def log(folder: Path) -> Path:
    """Every run; `docs/steps.md` is generated from it."""
    return folder / "docs" / "steps.jsonl"
