"""What Nsight Compute counted: one JSON line in a task's `docs/profile.jsonl` per profiled row."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kda_judge.contract.strict_models import Amount, Count, Strict
from kda_judge.contract.tasks import Task
from kda_judge.evidence.gpu_state import GpuState
from kda_judge.evidence.run_record import Provenance


def log(task: Task) -> Path:
    """Every profile of the task; `docs/profile.md` is generated from it."""
    return task.path / "docs" / "profile.jsonl"


class Kernel(Strict):
    """One kernel of the profiled call. A value is None if this GPU or ncu release does not count it.

    `nsight.METRICS` says which counter each number comes from.
    """

    name: str
    """Demangled, as ncu prints it."""
    grid: tuple[Count, Count, Count]
    block: tuple[Count, Count, Count]
    duration_us: Annotated[Amount, Field(gt=0)]
    memory_pct: Amount | None = None
    """The busiest part of the memory system, per cent of its peak."""
    dram_pct: Amount | None = None
    l2_pct: Amount | None = None
    l1_pct: Amount | None = None
    compute_pct: Amount | None = None
    """The busiest pipeline of the multiprocessors, per cent of its peak."""
    occupancy_pct: Amount | None = None
    """Warps that were resident, per cent of what a multiprocessor can hold."""
    theoretical_occupancy_pct: Amount | None = None
    """Warps that could be resident with this block size, registers and shared memory."""
    blocks_per_sm: dict[str, Count] = {}
    """Limiter of the occupancy -> blocks that it lets a multiprocessor hold."""
    waves: Amount | None = None
    """Grid size over the blocks that the GPU holds at once."""
    registers: Count | None = None
    """Per thread."""
    shared_bytes: Count | None = None
    """Per block, static and dynamic."""
    local_bytes: Amount | None = None
    """Loads and stores of local memory, where spilled registers go."""
    l2_hit_pct: Amount | None = None
    dram_read_bytes: Amount | None = None
    dram_written_bytes: Amount | None = None
    stalls: dict[str, Amount] = {}
    """What a warp's time went into -> cycles per issued instruction; `selected` is the cycle in which it issues."""


class ProfileRecord(Strict):
    """One row, profiled in one call of each arm."""

    schema_version: Literal[1] = 1
    run_id: str
    utc: str
    command: str
    task: str
    row: str
    op: str
    bytes_moved: Annotated[Count, Field(gt=0)]
    """Bytes that the op must move, as in a benchmark."""
    provenance: Provenance
    gpu: GpuState
    """State of the GPU before the first arm ran."""
    ncu: str
    """Version of Nsight Compute."""
    arms: dict[str, tuple[Kernel, ...]]
    """Arm -> the kernels of one call in launch order; the opponent first, the subject last."""
