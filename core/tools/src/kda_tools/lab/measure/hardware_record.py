"""What `kda doctor --measure` found: one JSON line of `docs/hardware.jsonl` for each run."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Strict
from kda_judge.evidence.gpu_state import GpuState

LOG = Path("docs") / "hardware.jsonl"


class Copy(Strict):
    """A stream of so many bytes, half read and half written, the fastest of many forms."""

    bytes: Annotated[Count, Field(gt=0)]
    us: Annotated[Amount, Field(gt=0)]
    bulk_us: Annotated[Amount, Field(gt=0)] | None = None
    """Time of the fastest form that uses the copy engine (`cp.async.bulk`); None if none was tried."""

    @property
    def terabytes_a_second(self) -> float:
        """Read and written together."""
        return self.bytes / self.us / 1e6


class Cluster(Strict):
    """Times of kernels with one block for every multiprocessor, launched in clusters."""

    blocks: Annotated[Count, Field(gt=0)]
    """Blocks of a cluster; 1 means without clusters."""
    kernel_us: Amount
    """Microseconds of a kernel with one barrier of its cluster, launched after another kernel."""
    barrier_us: float
    """Microseconds of one more such barrier; below 0 if it is too short to measure."""


class HardwareRecord(Strict):
    """One run on one GPU. Device times are those of one kernel, from CUDA graphs with many."""

    schema_version: Literal[1] = 1
    utc: str
    command: str
    commit: str
    dirty: bool
    versions: dict[str, str]
    """python, torch, triton, cuda."""
    gpu: GpuState
    noise: tuple[str, ...]
    """Why the times may be wrong: a busy or throttled GPU."""
    capability: Annotated[str, Field(pattern=r"^\d+\.\d$")]
    multiprocessors: Count
    l2_bytes: Count
    registers_per_sm: Count
    warps_per_sm: Count
    shared_bytes_per_sm: Count
    shared_bytes_per_block: Count
    """Most shared memory of a block, with the opt-in for large blocks."""
    copies: tuple[Copy, ...]
    empty_us: Amount
    """Microseconds of a kernel that does nothing, launched after another one."""
    empty_pdl_us: Amount | None
    """The same with programmatic dependent launch; None below sm_90."""
    next_grid_us: dict[str, Amount] = {}
    """When a kernel lets the next grid start -> microseconds of a copy of 1 MB in a chain of them, with programmatic
    dependent launch. Empty below sm_90, and in lines from before this was measured."""
    clusters: tuple[Cluster, ...] = ()
    """Empty below sm_90, and in lines from before clusters were measured."""
    host_launch_us: Amount
    """The host's cheapest launch of an empty kernel, in a C loop through the driver."""
    host_output_us: Amount
    """The same with one output allocated."""
    widths_us: dict[str, Amount]
    """Bytes of a thread's loads and stores -> microseconds of a copy of 256 MB by such accesses."""
