"""Nsight Compute: its command line, its complaints, and its CSV as typed numbers."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from kda_judge.contract.errors import ArmFailed, MissingRequirement
from kda_tools.lab.inspect.cuda_tools import Ran
from kda_tools.lab.profile.profile_record import Kernel

Units = Mapping[str, float]
"""Unit that ncu may print -> factor to the unit in the record."""
MICROSECONDS: Units = {
    **dict.fromkeys(("ns", "nsecond"), 1e-3),
    **dict.fromkeys(("us", "usecond"), 1.0),
    **dict.fromkeys(("ms", "msecond"), 1e3),
    **dict.fromkeys(("s", "second"), 1e6),
}
BYTES: Units = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
PERCENT: Units = {"%": 1.0, "": 1.0}
COUNT: Units = {}
"""For plain counts and ratios: the number is kept as printed."""


@dataclass(frozen=True)
class Metric:
    """One counter."""

    name: str
    """As ncu calls it; `ncu --query-metrics` explains its parts."""
    units: Units
    fields: tuple[str, ...]
    """Fields of `Kernel` that it is added to."""


METRICS = (
    Metric("gpu__time_duration.sum", MICROSECONDS, ("duration_us",)),
    Metric("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", PERCENT, ("memory_pct",)),
    Metric("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", PERCENT, ("dram_pct",)),
    Metric("lts__throughput.avg.pct_of_peak_sustained_elapsed", PERCENT, ("l2_pct",)),
    Metric("l1tex__throughput.avg.pct_of_peak_sustained_active", PERCENT, ("l1_pct",)),
    Metric("sm__throughput.avg.pct_of_peak_sustained_elapsed", PERCENT, ("compute_pct",)),
    Metric("sm__warps_active.avg.pct_of_peak_sustained_active", PERCENT, ("occupancy_pct",)),
    Metric("lts__t_sector_hit_rate.pct", PERCENT, ("l2_hit_pct",)),
    Metric("dram__bytes_read.sum", BYTES, ("dram_read_bytes",)),
    Metric("dram__bytes_write.sum", BYTES, ("dram_written_bytes",)),
    Metric("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", BYTES, ("local_bytes",)),
    Metric("l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum", BYTES, ("local_bytes",)),
)
"""Asked for by name. Every name is one of NVIDIA's list for Hopper (GH100) and for Blackwell (GB100)."""
SECTIONS = ("LaunchStats", "Occupancy", "WarpStateStats")
"""Requested whole, because their contents differ between GPUs and ncu releases; `FROM_SECTIONS` are read from them."""
FROM_SECTIONS = (
    Metric("launch__registers_per_thread", COUNT, ("registers",)),
    Metric("launch__shared_mem_per_block_static", BYTES, ("shared_bytes",)),
    Metric("launch__shared_mem_per_block_dynamic", BYTES, ("shared_bytes",)),
    Metric("launch__waves_per_multiprocessor", COUNT, ("waves",)),
    Metric("sm__maximum_warps_per_active_cycle_pct", PERCENT, ("theoretical_occupancy_pct",)),
)
WHOLE = frozenset({"registers", "shared_bytes"})
"""Fields that are whole numbers."""
LIMITER = re.compile(r"launch__occupancy_limit_(\w+)")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)(?<!_not_issued)_per_issue_active\.ratio")
DIGITS = 9
"""Significant digits in the record; counters have fewer meaningful ones."""
NO_DATA = frozenset({"", "n/a", "(!) n/a", "nan", "-nan", "inf", "no data"})

INSTALL = "Install Nsight Compute (the CUDA toolkit has it) and put the folder of `ncu` on PATH"
COMPLAINTS: Mapping[str, str] = {
    "ERR_NVGPUCTRPERM": "the driver lets only administrators read the GPU's counters. Run as root (in a container: "
    "with --cap-add=SYS_ADMIN), or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    "Failed to find metric": f"this release or GPU lacks a counter that is asked for. {INSTALL} in its newest release",
    "driver resource was unavailable": "another tool (DCGM, a second profiler) holds the GPU's counters; end it",
    "Failed to initialize the profiler": "the GPU's counters cannot be reached from this machine or container; "
    "use one with the driver's full interface",
}
"""Text in ncu's output -> the cause and the remedy."""


def capture_command(ncu: Path, report: Path) -> list[str]:
    """Command that profiles the calls between cudaProfilerStart and cudaProfilerStop into `report`.

    Clocks stay as they are and caches are not flushed, as in the hot benchmark. Compilers that the arm starts are
    not profiled.
    """
    sections = [word for section in SECTIONS for word in ("--section", section)]
    return [
        str(ncu), "--export", str(report), "--force-overwrite", "--target-processes", "application-only",
        "--profile-from-start", "off", "--replay-mode", "kernel", "--clock-control", "none", "--cache-control", "none",
        *sections, "--metrics", ",".join(metric.name for metric in METRICS),
    ]  # fmt: skip


def import_command(ncu: Path, report: Path) -> list[str]:
    """Command that prints `report` as CSV."""
    return [str(ncu), "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]


def check(ran: Ran, arm: str, wanted: str, report: Path) -> None:
    """Raise for a capture that failed, with the cause and the remedy; `wanted` is the row."""
    complaints = "".join(f"\n    | {line}" for line in ran.output.splitlines() if line.startswith("==ERROR=="))
    for words, meaning in COMPLAINTS.items():
        if words in ran.output:
            raise MissingRequirement(f"ncu: {meaning}{complaints}")
    if wanted not in ran.done:
        raise ArmFailed(f"arm {arm!r} failed on row {wanted!r} under ncu (exit code {ran.code}){ran.tail}")
    if "No kernels were profiled" in ran.output:
        raise ArmFailed(f"arm {arm!r} launched no kernel in the profiled call of row {wanted!r}")
    if ran.code or not report.is_file():
        raise MissingRequirement(f"ncu: ended with exit code {ran.code} and no report{complaints or ran.tail}")


def kernels(text: str) -> tuple[Kernel, ...]:
    """The kernels of ncu's raw CSV page: names, then units, then one line per launch.

    Raises:
        MissingRequirement: no such table, or a number in a unit that is not known; names the column.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    table = list(csv.reader(StringIO("\n".join(lines[start:])))) if start is not None else []
    if len(table) < 3:
        raise MissingRequirement(f'ncu --import: expected a CSV table that starts with "ID", got {text[:200]!r}')
    names, units, *launches = table
    return tuple(_kernel(names, units, launch) for launch in launches if len(launch) == len(names))


def _kernel(names: Sequence[str], units: Sequence[str], launch: Sequence[str]) -> Kernel:
    cells = dict(zip(names, zip(launch, units, strict=True), strict=True))
    found: dict[str, float] = {}
    for metric in (*METRICS, *FROM_SECTIONS):
        value = _number(cells, metric.name, metric.units)
        for field in metric.fields if value is not None else ():
            found[field] = found.get(field, 0.0) + (value or 0.0)
    if "duration_us" not in found:
        raise MissingRequirement(
            "ncu --import: expected a duration for every kernel (gpu__time_duration.sum), got none"
        )
    return Kernel(
        name=cells["Kernel Name"][0],
        grid=_triple(cells, "Grid Size"),
        block=_triple(cells, "Block Size"),
        blocks_per_sm={name: int(value) for name, value in _matching(cells, LIMITER).items()},
        stalls=_matching(cells, STALL),
        **{field: round(value) if field in WHOLE else value for field, value in found.items()},  # type: ignore[arg-type]
    )


def _matching(cells: Mapping[str, tuple[str, str]], pattern: re.Pattern[str]) -> dict[str, float]:
    values = {match[1]: _number(cells, name, COUNT) for name in cells if (match := pattern.fullmatch(name))}
    return {name: value for name, value in values.items() if value is not None}


def _number(cells: Mapping[str, tuple[str, str]], name: str, known: Units) -> float | None:
    text, printed = cells.get(name, ("", ""))
    if text.strip().lower() in NO_DATA:
        return None
    factor = known.get(printed.partition("/")[0].lower()) if known else 1.0  # "byte/block" is bytes
    if factor is None:
        expected = ", ".join(filter(None, known))
        raise MissingRequirement(f"ncu --import: column {name!r}: expected a unit of {expected}, got {printed!r}")
    try:
        return float(f"{float(text.replace(',', '')) * factor:.{DIGITS}g}")
    except ValueError:
        raise MissingRequirement(f"ncu --import: column {name!r}: expected a number, got {text!r}") from None


def _triple(cells: Mapping[str, tuple[str, str]], name: str) -> tuple[int, int, int]:
    numbers = [int(number) for number in re.findall(r"\d+", cells.get(name, ("", ""))[0])]
    if len(numbers) != 3:
        raise MissingRequirement(
            f"ncu --import: column {name!r}: expected three sizes, got {cells.get(name, ('nothing',))[0]!r}"
        )
    return numbers[0], numbers[1], numbers[2]
