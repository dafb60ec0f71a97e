"""What Nsight Compute counted: one JSON line in a task's `docs/profile.jsonl` per profiled row."""

from pathlib import Path
from typing import Literal

from kda_core.gpu import GpuState
from kda_core.records import Provenance
from kda_core.tasks import Task
from kda_core.toml import Strict


def log(task: Task) -> Path:
    """Every profile of the task; `docs/profile.md` is generated from it."""
    return task.path / "docs" / "profile.jsonl"


class Kernel(Strict):
    """One kernel of the profiled call. None: this GPU or ncu release does not count it.

    `nsight.METRICS` says which counter each number comes from.
    """

    name: str
    """Demangled, as ncu prints it."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    duration_us: float
    memory_pct: float | None = None
    """The busiest part of the memory system, per cent of its peak."""
    dram_pct: float | None = None
    l2_pct: float | None = None
    l1_pct: float | None = None
    compute_pct: float | None = None
    """The busiest pipeline of the multiprocessors, per cent of its peak."""
    occupancy_pct: float | None = None
    """Warps that were resident, per cent of what a multiprocessor can hold."""
    theoretical_occupancy_pct: float | None = None
    """Warps that could be resident with this block size, registers and shared memory."""
    blocks_per_sm: dict[str, int] = {}
    """Limiter of the occupancy -> blocks that it lets a multiprocessor hold."""
    waves: float | None = None
    """Grid size over the blocks that the GPU holds at once."""
    registers: int | None = None
    """Per thread."""
    shared_bytes: int | None = None
    """Per block, static and dynamic."""
    local_bytes: float | None = None
    """Loads and stores of local memory, where spilled registers go."""
    l2_hit_pct: float | None = None
    dram_read_bytes: float | None = None
    dram_written_bytes: float | None = None
    stalls: dict[str, float] = {}
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
    bytes_moved: int
    """What the op must move, as in a benchmark."""
    provenance: Provenance
    gpu: GpuState
    """Before the first arm ran."""
    ncu: str
    """Version of Nsight Compute."""
    arms: dict[str, tuple[Kernel, ...]]
    """Arm -> the kernels of one call in launch order; the opponent first, the subject last."""
