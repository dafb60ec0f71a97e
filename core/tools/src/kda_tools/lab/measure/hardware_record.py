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
    """The fastest of those that the copy engine moves (`cp.async.bulk`); None where none was tried."""

    @property
    def terabytes_a_second(self) -> float:
        """Read and written together."""
        return self.bytes / self.us / 1e6


class Cluster(Strict):
    """Kernels of one block for every multiprocessor, launched in clusters of so many blocks."""

    blocks: Annotated[Count, Field(gt=0)]
    """1: without clusters."""
    kernel_us: Amount
    """A kernel that makes one barrier of its cluster, behind another one."""
    barrier_us: float
    """One more such barrier; too little to measure may come out below 0."""


class HardwareRecord(Strict):
    """One run on one GPU. Times are of CUDA graphs, a kernel's share of many, but for those of the host."""

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
    """With the opt-in for large blocks."""
    copies: tuple[Copy, ...]
    empty_us: Amount
    """A kernel that does nothing, behind another one."""
    empty_pdl_us: Amount | None
    """The same with programmatic dependent launch; None below sm_90."""
    clusters: tuple[Cluster, ...] = ()
    """None below sm_90, and in lines from before they were measured."""
    host_launch_us: Amount
    """The host's cheapest launch of an empty kernel, in a C loop through the driver."""
    host_output_us: Amount
    """The same with one output allocated."""
    widths_us: dict[str, Amount]
    """Bytes of a thread's loads and stores -> a copy of 256 MB by such accesses."""
